"""A Hugging Face Hub look-alike on loopback, enough of it for the real huggingface_hub to download models.

Two servers, as in reality: the Hub answers the API and small files itself and sends whoever asks for a weight file on
to the CDN, with a signed URL. The CDN refuses requests that carry a token, as object stores do.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

TOKEN = "hf_thisisthetokenoftests"
_LARGE = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_KEY = b"of the signatures"
_API = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)(?:/(?P<what>revision|tree)/(?P<revision>[^/]+))?")
_RESOLVE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True)
class Request:
    """One request as it came in. host: "hub" or "cdn"."""

    host: str
    method: str
    path: str
    authorization: str | None


@dataclass
class Repo:
    """A repository: a folder per revision, and who may read it."""

    revisions: dict[str, Path] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, revision: str) -> str:
        """Return the commit hash of a branch, made up from its folder's path."""
        return hashlib.sha1(str(self.revisions[revision]).encode()).hexdigest()

    def find(self, revision: str) -> tuple[str, Path] | None:
        """Return commit and folder of a branch or a commit."""
        for branch, folder in self.revisions.items():
            if revision in (branch, self.commit(branch)):
                return self.commit(branch), folder
        return None


class HubServer:
    """The two servers, running inside ``with``.

    log: every request. fault: called for each request; a status it returns is answered instead, with no body.
    accepted: tokens to which the terms of gated repositories are open. go_on: where set to an event, the CDN sends half
    of a file, sets `half_way`, and waits for it.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.log: list[Request] = []
        self.fault: Callable[[Request], int | None] = lambda request: None
        self.accepted = {TOKEN}
        self.half_way = threading.Event()
        self.go_on: threading.Event | None = None
        self._hub = ThreadingHTTPServer(("127.0.0.1", 0), _HubHandler)
        self._cdn = ThreadingHTTPServer(("127.0.0.1", 0), _CdnHandler)
        for server in (self._hub, self._cdn):
            server.owner = self  # type: ignore[attr-defined]
            server.daemon_threads = True
        self.url, self.cdn_url = (f"http://127.0.0.1:{s.server_address[1]}" for s in (self._hub, self._cdn))

    def add(
        self, name: str, folder: Path, *, revision: str = "main", private: bool = False, gated: bool = False
    ) -> str:
        """Serve `folder` as a revision of the repository `name`; return its commit hash."""
        repo = self.repos.setdefault(name, Repo(private=private, gated=gated))
        repo.revisions[revision] = folder
        return repo.commit(revision)

    def resolved(self) -> list[str]:
        """Return the paths of the files that were asked for, each once, sorted."""
        matches = (_RESOLVE.fullmatch(request.path) for request in self.log if request.host == "hub")
        return sorted({match["path"] for match in matches if match})

    def __enter__(self) -> Self:
        for server in (self._hub, self._cdn):
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for server in (self._hub, self._cdn):
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    host = ""

    @property
    def owner(self) -> HubServer:
        found: HubServer = self.server.owner  # type: ignore[attr-defined]
        return found

    @property
    def token(self) -> str | None:
        given = self.headers.get("Authorization")
        return given.removeprefix("Bearer ") if given else None

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path)
        request = Request(self.host, self.command, path, self.headers.get("Authorization"))
        self.owner.log.append(request)
        status = self.owner.fault(request)
        if status is not None:
            return self.reply(status)
        return self.answer(path, dict(urllib.parse.parse_qsl(url.query)))

    def do_HEAD(self) -> None:
        self.do_GET()

    def answer(self, path: str, query: Mapping[str, str]) -> None:
        raise NotImplementedError

    def reply(self, status: int, body: bytes = b"", headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.send_body(body)

    def send_body(self, body: bytes) -> None:
        self.wfile.write(body)

    def reply_json(self, value: Any) -> None:
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def reply_file(self, path: Path, headers: Mapping[str, str]) -> None:
        data = path.read_bytes()
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        if match is None:
            return self.reply(200, data, {"Accept-Ranges": "bytes", **headers})
        start, stop = int(match[1]), min(int(match[2]) + 1 if match[2] else len(data), len(data))
        if start >= len(data):
            return self.reply(416, headers={"Content-Range": f"bytes */{len(data)}"})
        return self.reply(206, data[start:stop], {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}", **headers})

    def refuse(self, status: int, code: str, text: str) -> None:
        self.reply(status, json.dumps({"error": text}).encode(), {"X-Error-Code": code, "X-Error-Message": text})

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the log is for tests to read."""


class _HubHandler(_Handler):
    host = "hub"

    def answer(self, path: str, query: Mapping[str, str]) -> None:
        if match := _API.fullmatch(path):
            return self._api(match["name"], match["what"], match["revision"] or "main", "blobs" in query)
        if match := _RESOLVE.fullmatch(path):
            return self._resolve(match["name"], match["revision"], match["path"])
        return self.refuse(404, "", "Not Found")

    def _repo(self, name: str) -> Repo | None:
        """Return the repository if this caller may know of it, or refuse."""
        if self.token is not None and self.token not in (TOKEN, *self.owner.accepted):
            self.refuse(401, "", "Invalid credentials in Authorization header")
            return None
        repo = self.owner.repos.get(name)
        if repo is None or (repo.private and self.token is None):
            self.refuse(401 if self.token is None else 404, "RepoNotFound", "Repository not found")
            return None
        return repo

    def _at(self, repo: Repo, revision: str) -> tuple[str, Path] | None:
        found = repo.find(revision)
        if found is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    def _api(self, name: str, what: str | None, revision: str, blobs: bool) -> None:
        repo = self._repo(name)
        found = repo and self._at(repo, revision)
        if repo is None or not found:
            return None
        commit, folder = found
        files = [_description(folder, path) for path in _paths(folder)]
        if what == "tree":
            return self.reply_json([{"type": "file", "path": f["rfilename"], "oid": f["blobId"], **f} for f in files])
        siblings = files if blobs else [{"rfilename": f["rfilename"]} for f in files]
        return self.reply_json(
            {"id": name, "modelId": name, "sha": commit, "private": repo.private, "siblings": siblings, "tags": []}
        )

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repo = self._repo(name)
        if repo is None:
            return None
        if repo.gated and self.token not in self.owner.accepted:
            return self.refuse(401 if self.token is None else 403, "GatedRepo", f"Access to {name} is restricted")
        found = self._at(repo, revision)
        if found is None:
            return None
        commit, folder = found
        if path not in _paths(folder):
            return self.refuse(404, "EntryNotFound", "Entry not found")
        about = _description(folder, path)
        if "lfs" not in about:
            return self.reply_file(folder / path, {"ETag": f'"{about["blobId"]}"', "X-Repo-Commit": commit})
        return self.reply(302, headers=self._to_the_cdn(folder / path, about, commit))

    def _to_the_cdn(self, file: Path, about: Mapping[str, Any], commit: str) -> dict[str, str]:
        place = urllib.parse.quote(str(file))
        return {
            "Location": f"{self.owner.cdn_url}{place}?Signature={_signature(file)}",
            "X-Repo-Commit": commit,
            "X-Linked-Etag": f'"{about["lfs"]["sha256"]}"',
            "X-Linked-Size": str(about["size"]),
        }


class _CdnHandler(_Handler):
    """Sends weight files, half of one and then the rest where the owner says so."""

    host = "cdn"

    def answer(self, path: str, query: Mapping[str, str]) -> None:
        if self.token is not None:
            return self.reply(400, b"Only one way of authentication is allowed")
        if query.get("Signature") != _signature(Path(path)):
            return self.reply(403, b"Access denied")
        return self.reply_file(Path(path), {"ETag": f'"{_digest(Path(path), "sha256")}"'})

    def send_body(self, body: bytes) -> None:
        go_on = self.owner.go_on
        if go_on is None:
            super().send_body(body)
            return
        self.wfile.write(body[: len(body) // 2])
        self.wfile.flush()
        self.owner.half_way.set()
        go_on.wait()
        with suppress(OSError):  # nobody may be left to take it
            self.wfile.write(body[len(body) // 2 :])


def _paths(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def _description(folder: Path, path: str) -> dict[str, Any]:
    """Return what the Hub says of a file; large ones have an LFS object."""
    file = folder / path
    size = file.stat().st_size
    about: dict[str, Any] = {"rfilename": path, "size": size, "blobId": _digest(file, "sha1")}
    if path.endswith(_LARGE):
        sha256 = _digest(file, "sha256")
        about["lfs"] = {"oid": sha256, "sha256": sha256, "size": size, "pointerSize": 135}
    return about


def _digest(file: Path, algorithm: str) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, algorithm).hexdigest()


def _signature(file: Path) -> str:
    return hmac.new(_KEY, str(file).encode(), "sha256").hexdigest()


@contextmanager
def hub_for_tests(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[HubServer]:
    """Run a Hub that the environment points to, with an empty cache in `home`, no token, and no way to other hosts."""
    from huggingface_hub import constants

    for variable in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    with HubServer() as server, monkeypatch.context() as guarded:
        guarded.setattr(socket.socket, "connect", _only_loopback(socket.socket.connect))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def _only_loopback(connect: Callable[..., None]) -> Callable[..., None]:
    def guarded(self: socket.socket, address: Any) -> None:
        assert address[0] == "127.0.0.1", f"a request went to {address[0]}"
        connect(self, address)

    return guarded


def download_without_locks(name: str) -> dict[str, bytes]:
    """Download a model where file locks do nothing, as on some network file systems; return its files' contents.

    Lives here, where importing it is quick, because a process of its own runs it.
    """
    import fcntl

    from tensorferry.formats.download import download

    fcntl.flock = lambda fd, operation: None
    top = download(name).path
    return {path.relative_to(top).as_posix(): path.read_bytes() for path in top.rglob("*") if path.is_file()}
