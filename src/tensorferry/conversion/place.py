"""Where a conversion is built, beside its destination, and how it gets there: at once, or not at all.

Everything that a conversion to ``DST`` leaves lies in ``.DST.tensorferry.part`` beside it: a lock that the system
takes back from a process that ends, what is being written (``new``), and what it replaces, for a moment (``old``).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tensorferry.errors import ConfigError, LocateError, UnsafeFile, WriteError, shown
from tensorferry.formats.writing import sync_folder
from tensorferry.storage.full_disk import lacking
from tensorferry.storage.object_uri import is_uri

__all__ = ["building", "real_destination", "refuse_taken", "telling_of_the_disk"]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def real_destination(given: str | os.PathLike[str]) -> Path:
    """Return the path that `given` means, free of links. Raises LocateError where its folder is not there."""
    if is_uri(given):
        raise ConfigError(f"{shown(os.fspath(given), 300)}: what is converted is written to this machine: give a path")
    path = Path(given)
    if not path.name:
        raise ConfigError(f"{shown(os.fspath(given), 300)}: a destination has a name")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise LocateError(f"{shown(os.fspath(given), 300)}: there is no folder {shown(str(parent), 300)}")
    real = Path(os.path.realpath(path))
    if not real.parent.is_dir():
        raise LocateError(
            f"{shown(os.fspath(given), 300)}: is a link to {shown(str(real), 300)}, and there is no folder for that"
        )
    return real


def refuse_taken(destination: Path, *, single: bool, overwrite: bool) -> None:
    """Raise ConfigError where something lies at `destination` that must not be replaced. single: it is to be a file."""
    where = shown(str(destination), 300)
    if single and destination.is_dir():
        raise ConfigError(f"{where} is a folder, and a file is to be written: give another name")
    if not single and destination.exists() and not destination.is_dir():
        raise ConfigError(f"{where} is a file, and a folder is to be written: give another name")
    if overwrite or not destination.exists() or (not single and not any(destination.iterdir())):
        return
    raise ConfigError(f"{where} is there already: give another name, or replace it with overwrite=True")


@contextmanager
def building(destination: Path, *, single: bool, overwrite: bool) -> Iterator[Path]:
    """Yield an empty folder whose contents are `destination` when the block ends well, and gone when it does not.

    single: the contents are one file, which takes the place of `destination`. What lies there is replaced at the end,
    where `overwrite`. What a conversion that was killed has left is removed first. Raises ConfigError where something
    lies at the destination, WriteError where another process builds the same, OSError if the disk refuses.
    """
    part = destination.with_name(f".{destination.name}.tensorferry.part")
    fd = _locked(part, destination)
    try:
        _recover(part, destination)
        refuse_taken(destination, single=single, overwrite=overwrite)
        new = part / "new"
        new.mkdir()
        yield new
        _sync(new)
        refuse_taken(destination, single=single, overwrite=overwrite)
        _put_in_place(_only_file(new) if single else new, destination, part / "old", overwrite=overwrite)
        sync_folder(destination.parent)
    finally:
        _remove(part, fd)


def _locked(part: Path, destination: Path) -> int:
    """Return the lock of the folder `part`, which is there then and ours. Raises WriteError where it is another's."""
    while True:
        if part.is_symlink():
            raise UnsafeFile(f"{shown(str(part), 300)}: is a link, where a folder is expected: remove it")
        part.mkdir(exist_ok=True)
        lock = part / "lock"
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            continue  # whoever had it has finished just now
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise WriteError(
                f"{shown(str(destination), 300)}: another process is writing it (it holds {shown(str(lock), 300)}): "
                "wait for it, or stop it"
            ) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), lock.stat()):
                return fd
        os.close(fd)  # the lock of a folder that is no longer there


def _recover(part: Path, destination: Path) -> None:
    """Remove what a process that was killed has left, and put back what it was about to replace."""
    old = part / "old"
    if old.exists() and not destination.exists():
        old.rename(destination)
    for name in ("new", "old"):
        _discard(part / name)


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove(part: Path, fd: int) -> None:
    """Remove the folder `part` and give the lock back. What cannot be removed stays for the next conversion."""
    with suppress(OSError):
        for name in ("new", "old", "lock"):
            _discard(part / name)
        part.rmdir()
    os.close(fd)


def _sync(folder: Path) -> None:
    """Bring to the disk which files a folder and those below it have; what is in them is there already."""
    for below in folder.iterdir():
        if below.is_dir():
            _sync(below)
    sync_folder(folder)


def _only_file(folder: Path) -> Path:
    (only,) = folder.iterdir()
    return only


def _put_in_place(new: Path, destination: Path, old: Path, *, overwrite: bool) -> None:
    """Rename `new` to `destination`; a folder that lies there and is not empty becomes `new`, or `old`."""
    try:
        new.replace(destination)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not overwrite:
            raise
        if not _exchanged(new, destination):
            destination.rename(old)
            new.rename(destination)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange what two paths mean, at once; return whether this system and its file system can do that."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    done: int = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return done == 0


@contextmanager
def telling_of_the_disk(destination: Path, needed: int) -> Iterator[None]:
    """Turn what the disk refuses inside into a WriteError that names `destination`, and what a full disk lacks.

    needed: bytes that the whole conversion takes.
    """
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        if error.errno is None:
            raise  # of the source: reading has errors of its own
        room = lacking(error, destination.parent, needed)
        said = f"{shown(str(destination), 300)}: {error.strerror}{room}; nothing is left half written"
        raise WriteError(said, error.errno) from error
