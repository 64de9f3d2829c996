"""What a relative path means in a folder of this machine, and which paths and links lead out of it.

Nothing is opened or read here; `local` does that with the real paths that come out.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
import stat as modes
from collections.abc import Sequence
from pathlib import Path

from tensorferry.errors import AccessDenied, LocateError, ReadError, UnsafeFile, shown
from tensorferry.storage.base import File

__all__ = ["Folder", "Identity", "identity_of", "refuse_irregular", "refuse_unplain"]

Identity = tuple[int, ...]
"""(device, inode, size, mtime_ns) of a file."""

_HUB_REPOSITORY = re.compile(r"(?:models|datasets|spaces)--[^/]+")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_DENIED = (errno.EACCES, errno.EPERM)
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


class Folder:
    """A folder that exists; it may be reached through links.

    Links in it are followed and must end inside it, or, where it is a snapshot in a cache of the Hugging Face hub
    (``models--x--y/snapshots/<revision>``), inside ``models--x--y``, where the cache keeps its blobs.

    given: the folder as the caller wrote it, for messages. inside: the folder that it must belong to, if it is a part
    of another one. links_to: other folders that links may end in, because the caller says so.

    Raises LocateError if one of them is not there or not a folder, AccessDenied if it may not be looked into,
    UnsafeFile if it is not inside.
    """

    __slots__ = ("_allowed", "_root", "_trusted", "given")

    def __init__(
        self,
        given: str | os.PathLike[str],
        *,
        inside: str | os.PathLike[str] | None = None,
        links_to: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        self.given = os.fspath(given)
        if "\0" in self.given:
            raise LocateError(f"{shown(self.given, 300)}: no file or folder has a NUL character in its name")
        self._root = os.path.realpath(self.given)
        self._allowed = _allowed_root(self._root)
        self._trusted = tuple(os.path.realpath(folder) for folder in links_to)
        whole = self._allowed if inside is None else _allowed_root(os.path.realpath(inside))
        for folder, name in (
            (self._root, self.given),
            *zip(self._trusted, [os.fspath(each) for each in links_to], strict=True),
        ):
            _refuse_no_folder(folder, shown(name, 300))
        if self._allowed != whole and not self._is_allowed(self._root, whole):
            raise _escape(shown(self.given, 300), self._root)

    def label(self, path: str) -> str:
        """Return what messages call the file at `path`."""
        return f"{shown(path)} ({shown(self.given, 300)})"

    def files(self) -> list[File]:
        """Return what lies directly in the folder and is no folder and no dot file, sorted."""
        try:
            with os.scandir(self._root) as found:
                names = sorted(entry.name for entry in found if not entry.name.startswith("."))
        except OSError as error:
            raise located(error, shown(self.given, 300)) from None
        return [file for name in names if (file := self._listed(name)) is not None]

    def nested(self) -> list[str]:
        """Return the paths of the files one level below, without looking behind links or dots."""
        try:
            inner = sorted(entry.name for entry in Path(self._root).iterdir() if _is_plain_folder(entry))
        except OSError as error:
            raise located(error, shown(self.given, 300)) from None
        return [f"{name}/{file}" for name in inner for file in _names_in(Path(self._root, name))]

    def resolve(self, path: str) -> tuple[str, os.stat_result]:
        """Return the real path of the regular file at `path`, free of links, and its stat.

        Raises UnsafeFile, LocateError, AccessDenied or ReadError, with the reason why it is not to be opened.
        """
        refuse_unplain(path, self.label(path))
        full = posixpath.join(self._root, path)
        try:
            real = os.path.realpath(full)
            info = Path(real).stat()
        except OSError as error:
            raise located(error, self.label(path), _link_target(full)) from None
        if not self._is_allowed(real, self._allowed):
            raise _escape(self.label(path), real)
        refuse_irregular(info, self.label(path))
        return real, info

    def refuse_outside(self, path: str, place: str) -> None:
        """Raise UnsafeFile unless `place`, where the file that was opened for `path` lies, is one that it may be in."""
        if not self._is_allowed(place, self._allowed):
            raise _escape(self.label(path), place)

    def now(self, path: str) -> Identity | None:
        """Return the identity of the file that `path`, which was resolved before, leads to by now."""
        try:
            return identity_of(Path(self._root, path).stat())
        except OSError:
            return None

    def _is_allowed(self, real: str, folder: str) -> bool:
        return any(_inside(real, root) for root in (folder, *self._trusted)) or real in self._trusted

    def _listed(self, name: str) -> File | None:
        full = posixpath.join(self._root, name)
        try:
            info = Path(full).stat()
        except OSError as error:
            if error.errno in _DENIED:
                return File(name, 0, ())  # `resolve` has the words for it
            target = _link_target(full)
            return None if target is None else File(name, 0, (), broken=target)
        if modes.S_ISDIR(info.st_mode):
            return None
        return File(name, info.st_size if modes.S_ISREG(info.st_mode) else 0, identity_of(info))


def refuse_unplain(path: str, label: str) -> None:
    """Raise UnsafeFile where `path` is not a relative path that any system takes for the same. label: in messages."""
    plain = path not in ("", ".") and posixpath.normpath(path) == path and path[0] != "/"
    odd = "\0" in path or "\\" in path or ".." in path.split("/") or _SCHEME.match(path)
    if not plain or odd or not _is_encodable(path):
        raise UnsafeFile(
            f"{label}: is not a plain relative path; it may not be absolute, nor hold '..', '.', "
            "empty parts, a backslash, NUL or a scheme"
        )


def identity_of(info: os.stat_result) -> Identity:
    """Return what tells a file from every other one, and from itself after a change."""
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def refuse_irregular(info: os.stat_result, label: str) -> None:
    """Raise LocateError for a folder and UnsafeFile for a pipe, a socket or a device."""
    if modes.S_ISDIR(info.st_mode):
        raise LocateError(f"{label}: is a folder, where a file is expected")
    if not modes.S_ISREG(info.st_mode):
        kinds = {modes.S_IFIFO: "a pipe (FIFO)", modes.S_IFSOCK: "a socket"}
        raise UnsafeFile(f"{label}: is {kinds.get(modes.S_IFMT(info.st_mode), 'a device')}, not a regular file")


def located(error: OSError, label: str, link: str | None = None) -> LocateError | ReadError:
    """Return `error`, met on the way to a file, as one of ours. link: where the file points, if it is a link."""
    if error.errno in _DENIED:
        return AccessDenied(f"{label}: {error.strerror}")
    if error.errno in _EXHAUSTED:
        return ReadError(f"{label}: {error.strerror}: this process may not open more, see `ulimit -n`")
    if error.errno in _ABSENT and link is not None:
        return LocateError(f"broken link {label} -> {shown(link, 300)}: what it points to is not there")
    return (
        LocateError(f"{label}: {error.strerror}") if error.errno in _ABSENT else ReadError(f"{label}: {error.strerror}")
    )


def _refuse_no_folder(real: str, label: str) -> None:
    try:
        info = Path(real).stat()
    except OSError as error:
        raise located(error, label) from None
    if not modes.S_ISDIR(info.st_mode):
        raise LocateError(f"{label}: is not a folder")


def _escape(label: str, real: str) -> UnsafeFile:
    return UnsafeFile(
        f"{label}: leads out of its folder, to {shown(real, 300)}; open the folder that it points to, put a copy in "
        "its place, or say that links may lead there with links_to"
    )


def _allowed_root(root: str) -> str:
    parts = root.split("/")
    for at in range(len(parts) - 2, 0, -1):
        if parts[at] == "snapshots" and _HUB_REPOSITORY.fullmatch(parts[at - 1]):
            return "/".join(parts[:at])
    return root


def _inside(real: str, folder: str) -> bool:
    return real.startswith(folder.rstrip("/") + "/")


def _link_target(full: str) -> str | None:
    """Return where the link `full` points, as it says, or None if it is no link."""
    try:
        return str(Path(full).readlink())
    except OSError:
        return None


def _is_plain_folder(entry: Path) -> bool:
    return not entry.name.startswith(".") and not entry.is_symlink() and entry.is_dir()


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.name[0] != "." and not entry.is_dir())
    except OSError:
        return []  # what we may not look into is no hint


def _is_encodable(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True
