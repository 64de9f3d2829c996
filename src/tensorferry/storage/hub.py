"""Brings files of a Hugging Face Hub repository into the Hub's own cache. Which files, a chooser that is given decides.

All transfer, caching and locking is huggingface_hub's, an extra that is imported when it is first needed.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import posixpath
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

from tensorferry.core.amounts import few
from tensorferry.errors import (
    AccessDenied,
    ConfigError,
    CorruptFile,
    LocateError,
    ReadError,
    TensorferryError,
    WriteError,
    shown,
)
from tensorferry.storage.base import File
from tensorferry.storage.full_disk import lacking

__all__ = ["Chooser", "Listing", "Snapshot", "fetch_snapshot", "is_offline"]

logger = logging.getLogger(__name__)

_COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
_REVISION = re.compile(r"[\w.-]+(?:/[\w.-]+)*")
_FOLDER = re.compile(r"[A-Za-z0-9][\w.-]*")
_SECRETS = re.compile(r"(?<=://)[^/]*@")


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one commit, nested ones too. where: the place, in words. read: the content of a small one."""

    where: str
    files: Sequence[File]
    read: Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A folder of the Hub's cache that holds what was chosen. `commit` is the 40-digit hash all of it is from."""

    path: Path
    name: str
    commit: str


Chooser = Callable[[Listing], Sequence[str]]
"""Returns the paths to bring; raises LocateError if they are not all in the listing. May read the index, first."""


def fetch_snapshot(
    name: str,
    choose: Chooser,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | None = None,
    local_files_only: bool | None = None,
) -> Snapshot:
    """Return a folder with the files of the repository `name` that `choose` wants, fetching those that are absent.

    The revision is resolved to one commit first, and that is used for everything. Offline (`local_files_only`, or
    HF_HUB_OFFLINE) and when the Hub cannot be reached the choice is made among what the cache holds, with no request;
    not where files that were chosen did not all come, as nobody might miss them in what the cache holds.
    HF_ENDPOINT, HF_HOME, HF_HUB_CACHE and HF_TOKEN are read at each call; `cache_dir` and `token` come before them.

    Raises AccessDenied (no or a wrong token, terms not accepted), LocateError (no such repository, revision or file;
    not in the cache while offline), CorruptFile (a cached file of the wrong size), ReadError (a transfer that failed),
    WriteError (the disk of the cache is full, or refuses), ConfigError (no huggingface_hub).
    """
    _check_names(name, revision)
    cache = _Cache.of(name, cache_dir)
    if is_offline() if local_files_only is None else local_files_only:
        return _from_cache(cache, revision, choose, "offline")
    hub = _Hub(name, revision, cache, token)
    try:
        with hub.errors_explained():
            return _from_hub(hub, cache, revision, choose)
    except _Unreachable as error:
        if cache.commit(revision) in (None, hub.fetching):
            raise
        logger.warning("%s; using what the cache holds", error)
        return _from_cache(cache, revision, choose, "the Hub cannot be reached")


def is_offline() -> bool:
    """Tell whether the environment forbids requests to the Hub, as it says now."""
    return any(
        os.environ.get(v, "").upper() in ("1", "ON", "YES", "TRUE") for v in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


class _Unreachable(LocateError):
    """The Hub did not answer, or only that it cannot at present."""


# -- what the Hub and its cache have ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Cache:
    """The folder of one repository in the Hub's cache: ``refs/<revision>`` and ``snapshots/<commit>/<path>``.

    ``.tensorferry/<commit>.json`` is ours: what was to be fetched, with its sizes, until all of it is there.
    """

    name: str
    root: Path
    folder: Path

    @classmethod
    def of(cls, name: str, cache_dir: str | os.PathLike[str] | None) -> _Cache:
        root = Path(cache_dir or _default_cache()).expanduser()
        return cls(name, root, root / f"models--{name.replace('/', '--')}")

    def commit(self, revision: str | None) -> str | None:
        """Return the commit that `revision` was when it was last seen, or None."""
        if revision is not None and _COMMIT.fullmatch(revision):
            return revision if self.snapshot(revision).is_dir() else None
        try:
            found = (self.folder / "refs" / (revision or "main")).read_text().strip()
        except OSError:
            return None
        return found if _COMMIT.fullmatch(found) and self.snapshot(found).is_dir() else None

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def remember(self, revision: str | None, commit: str) -> None:
        """Write what `revision` is now, for later calls that are offline; a cache that is read-only stays as it is."""
        ref = self.folder / "refs" / (revision or "main")
        with contextlib.suppress(OSError):
            if revision != commit and not (ref.is_file() and ref.read_text() == commit):
                _put(ref, commit)

    @contextlib.contextmanager
    def unfinished(self, commit: str, sizes: Mapping[str, int]) -> Iterator[None]:
        """Note that files of `commit` are to come, and take that back when they have; not where the block fails."""
        with contextlib.suppress(OSError):
            _put(self._note(commit), json.dumps({**self.awaited(commit), **sizes}))
        yield
        if not self.awaited(commit):
            with contextlib.suppress(OSError):
                self._note(commit).unlink()

    def awaited(self, commit: str) -> dict[str, int]:
        """Return the files of `commit` that were to be fetched and are not there, with their sizes."""
        try:
            noted = json.loads(self._note(commit).read_text())
            sizes = {str(path): int(size) for path, size in noted.items()}
        except (OSError, ValueError, AttributeError, TypeError, RecursionError):  # none, or not as it was written
            return {}
        top = self.snapshot(commit)
        return {path: size for path, size in sizes.items() if _is_plain(path) and not (top / path).is_file()}

    def _note(self, commit: str) -> Path:
        return self.folder / ".tensorferry" / f"{commit}.json"

    def files(self, commit: str) -> Iterator[File]:
        """Yield the files of a snapshot that are there in full."""
        top = self.snapshot(commit)
        for folder, _, names in os.walk(top):
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(OSError):
                    yield File(path.relative_to(top).as_posix(), path.stat().st_size, ())


class _Hub:
    """The Hub as huggingface_hub sees it, for one repository.

    endpoint: its address; place: the same without the name and the password that it may hold, for people.
    fetching: the commit of which files have been asked for that the cache did not have.
    """

    fetching: str | None = None

    def __init__(self, name: str, revision: str | None, cache: _Cache, token: str | None) -> None:
        self._lib = _library(name)
        self._errors: Any = import_module("huggingface_hub.errors")
        constants: Any = import_module("huggingface_hub.constants")
        self.endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        self.place = _SECRETS.sub("", self.endpoint)
        self._name, self._revision, self._cache = name, revision, cache
        self._has_token = bool(token or self._lib.get_token())
        self._api = self._lib.HfApi(endpoint=self.endpoint, token=token, library_name="tensorferry")

    def list(self) -> tuple[str, list[File], frozenset[str]]:
        """Return the commit that the revision is, its files, and those whose size is not told: one request."""
        with self._answer_understood():
            info = self._api.model_info(self._name, revision=self._revision, files_metadata=True)
            found = [(f.rfilename, f.size, f.blob_id or "") for f in info.siblings or ()]
        if not _FOLDER.fullmatch(info.sha or ""):
            raise LocateError(f"{self._name} at {self.place}: {shown(str(info.sha))!r} is no commit: is it a Hub?")
        files = [File(path, size or 0, blob) for path, size, blob in found if _is_plain(path)]
        return info.sha, files, frozenset(path for path, size, _ in found if size is None)

    def read(self, path: str, commit: str) -> bytes:
        """Return the content of one file, which is in the cache afterwards."""
        with self._transfers_told():
            return Path(
                self._api.hf_hub_download(self._name, path, revision=commit, cache_dir=self._cache.root)
            ).read_bytes()

    def fetch(self, paths: Sequence[str], commit: str, nbytes: int) -> None:
        """Bring `paths`, which have `nbytes` in all, into the snapshot of `commit`."""
        self.fetching = commit
        with self._transfers_told(nbytes):
            self._api.snapshot_download(
                self._name,
                revision=commit,
                cache_dir=self._cache.root,
                allow_patterns=[glob.escape(path) for path in paths],
                tqdm_class=None if sys.stderr.isatty() else _silent(self._lib),
            )

    @contextlib.contextmanager
    def _answer_understood(self) -> Iterator[None]:
        """Take an answer that is none of the Hub's, such as the page of a network to log in to, for none."""
        try:
            yield
        except (self._errors.HFValidationError, UnicodeEncodeError):  # of what was to be sent
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _Unreachable(
                f"{self._name} at {self.place}: what answered there is not the Hub ({type(error).__name__})"
            ) from error

    @contextlib.contextmanager
    def _transfers_told(self, nbytes: int = 0) -> Iterator[None]:
        """Turn into ours what is none of the library's own errors: of the disk, and of a transfer that went wrong.

        The latter come as whatever the code below the library raises, which is not Python in part.
        """
        errors = self._errors
        answers = (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.HTTPError)  # see `errors_explained`
        try:
            yield
        except (*answers, ConnectionError, TimeoutError):
            raise
        except OSError as error:
            if error.errno is None:
                raise self._failed(error) from error
            raise self._refused_by_disk(error, nbytes) from error
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> ReadError:
        said = f"{type(error).__name__}: {shown(str(error), 200)}"
        return ReadError(f"{self._name} at {self.place}: fetching it did not succeed ({said}): try again")

    def _refused_by_disk(self, error: OSError, nbytes: int) -> WriteError:
        root = self._cache.root
        room = lacking(error, root, nbytes) if root.is_dir() else ""
        return WriteError(f"{self._name}: the cache {shown(str(root), 300)}: {error.strerror}{room}", error.errno)

    @contextlib.contextmanager
    def errors_explained(self) -> Iterator[None]:
        """Turn errors of the library into ours. Their texts are left out: they are long, and not ours to vouch for."""
        errors = self._errors
        try:
            yield
        except TensorferryError:
            raise
        except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError) as error:
            raise self._explained(error) from error
        except errors.HFValidationError as error:
            raise LocateError(
                f"{shown(self._name)!r} is neither a folder here nor a name that the Hub takes"
            ) from error
        # The base of all transport errors; which HTTP library it is from depends on huggingface_hub's version.
        except (errors.HTTPError, ConnectionError, TimeoutError) as error:
            raise _Unreachable(f"{self._name}: cannot reach the Hub at {self.place}: {type(error).__name__}") from error

    def _explained(self, error: Any) -> LocateError:
        response = getattr(error, "response", None)
        status = 0 if response is None else int(response.status_code)
        where = f"{self._name} at {self.place}"
        if isinstance(error, self._errors.GatedRepoError):
            return self._gated(where, status)
        if isinstance(error, self._errors.RevisionNotFoundError):
            return LocateError(f"{where}: has no revision {self._revision or 'main'!r} ({status})")
        if isinstance(error, self._errors.EntryNotFoundError) and status:
            return LocateError(f"{where}: a file that was listed is not there ({status})")
        if isinstance(error, self._errors.DisabledRepoError):
            return AccessDenied(f"{where}: the Hub has disabled this repository ({status})")
        if status in (401, 403):
            return self._denied(where, status)
        if isinstance(error, self._errors.RepositoryNotFoundError):
            return LocateError(f"{where}: no such repository, or a private one that the token does not open ({status})")
        if not status or status == 429 or status >= 500:
            return _Unreachable(f"{where}: the Hub gave no answer that helps ({status or type(error).__name__})")
        return LocateError(f"{where}: the Hub answered {status}")

    def _gated(self, where: str, status: int) -> AccessDenied:
        page = f"accept its terms at {self.place}/{self._name}"
        if not self._has_token:
            return AccessDenied(f"{where}: is gated ({status}), and no token was sent: {page} and set HF_TOKEN")
        return AccessDenied(f"{where}: is gated ({status}), and this token may not read it: {page}")

    def _denied(self, where: str, status: int) -> AccessDenied:
        if status == 403 and self._has_token:
            return AccessDenied(
                f"{where}: the token has no right to read it, or the address of a file, which is good for a while, has"
                " expired (403): in that case try again"
            )
        if status == 403:
            return AccessDenied(
                f"{where}: forbidden (403), and no token was sent: set HF_TOKEN, or try again if files were coming"
            )
        if self._has_token:
            return AccessDenied(
                f"{where}: the token is not valid, or the repository does not exist (401): check HF_TOKEN"
            )
        return AccessDenied(
            f"{where}: private or not there, and no token was sent (401): set HF_TOKEN if it is private"
        )


# -- the two ways to a snapshot ---------------


def _from_hub(hub: _Hub, cache: _Cache, revision: str | None, choose: Chooser) -> Snapshot:
    commit, files, unsized = hub.list()
    where = f"{cache.name} at {commit[:12]} ({hub.place})"
    chosen = choose(Listing(where, files, lambda path: hub.read(path, commit)))
    sizes = {file.path: file.size for file in files if file.path in set(chosen)}
    folder = cache.snapshot(commit)
    absent = [path for path in sizes if not (folder / path).is_file()]
    if absent:
        logger.info("%s: fetching %d of %d files", where, len(absent), len(sizes))
        with cache.unfinished(commit, {path: sizes[path] for path in absent}):
            hub.fetch(absent, commit, sum(sizes[path] for path in absent))
    for path, size in sizes.items():
        _check_arrived(folder / path, None if path in unsized else size)
    cache.remember(revision, commit)  # not before: what came of it until now may look whole
    return Snapshot(folder, cache.name, commit)


def _from_cache(cache: _Cache, revision: str | None, choose: Chooser, why: str) -> Snapshot:
    commit = cache.commit(revision)
    if commit is None:
        raise LocateError(
            f"{cache.name}: revision {revision or 'main'!r} is not in the cache {cache.root} ({why}): load it once"
            " online, or say with HF_HOME or cache_dir where it lies"
        )
    where = f"{cache.name} at {commit[:12]} in the cache {cache.root} ({why})"
    awaited = cache.awaited(commit)

    def read(path: str) -> bytes:
        if path in awaited:
            raise _broken_off(where, [path])
        return (cache.snapshot(commit) / path).read_bytes()

    files = [*cache.files(commit), *(File(path, size, ()) for path, size in awaited.items())]
    chosen = choose(Listing(where, files, read))
    if absent := sorted(set(chosen) & awaited.keys()):
        raise _broken_off(where, absent)
    return Snapshot(cache.snapshot(commit), cache.name, commit)


def _broken_off(where: str, absent: Sequence[str]) -> LocateError:
    names = few((shown(path) for path in absent), 3)
    return LocateError(f"{where}: fetching it was broken off, and {names} did not come: load it once online")


def _check_arrived(file: Path, size: int | None) -> None:
    if not file.is_file():
        raise LocateError(f"{file}: did not arrive: the Hub listed it and no error was told; try again")
    found = file.stat().st_size
    if size is not None and found != size:
        raise CorruptFile(f"{file}: {found:,} bytes in the cache, {size:,} on the Hub: remove it and fetch it again")


# -- small things ---------------


def _put(file: Path, text: str) -> None:
    """Write a small file, whole or not at all, with the folders that it needs."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{file.name}.{uuid4().hex[:8]}.tmp")
    beside.write_text(text)
    beside.replace(file)


def _library(name: str) -> Any:
    # Any: it is an extra, and its types are not there for whoever checks without it.
    try:
        return import_module("huggingface_hub")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{shown(name)!r} is nothing that lies here, and names on the Hub are fetched by huggingface_hub, which is"
            " not installed: pip install 'tensorferry[hub]'"
        ) from error


def _silent(lib: Any) -> Any:
    class Silent(lib.utils.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    return Silent


def _default_cache() -> Path:
    environment = os.environ
    if "HF_HUB_CACHE" in environment:
        return Path(environment["HF_HUB_CACHE"])
    if "HF_HOME" in environment:
        return Path(environment["HF_HOME"], "hub")
    return Path(environment.get("XDG_CACHE_HOME", "~/.cache"), "huggingface", "hub")


def _check_names(name: str, revision: str | None) -> None:
    """Refuse what cannot be a name on the Hub before it becomes part of a path or a URL."""
    if not _NAME.fullmatch(name) or ".." in name or "--" in name:
        raise LocateError(f"{shown(name)!r} is neither a folder here nor a name on the Hub, such as 'owner/model'")
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise ConfigError(f"revision {shown(revision)!r}: a branch, a tag or a commit is expected")


def _is_plain(path: str) -> bool:
    return posixpath.normpath(path) == path and path[0] != "/" and ".." not in path.split("/") and "\\" not in path
