"""Writes NumPy caches: built beside, whole, and put in place by renaming. The bytes come from the caller."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tensorferry.core.dtypes import DType
from tensorferry.errors import FormatError, UnsafeFile, UnsupportedDtype, shown
from tensorferry.formats.npcache import array_shape, array_type
from tensorferry.formats.npcache_record import (
    FOLDER,
    NAMES,
    RECORD,
    CachedTensor,
    CacheRecord,
    SourceFile,
    file_name_of,
    names_bytes,
    path_of,
    record_bytes,
)
from tensorferry.formats.npy import npy_header
from tensorferry.formats.writing import NewTensor, new_file, write_chunks

__all__ = ["NpcacheWriter", "one_builder", "refuse_strangers", "write_npcache"]

logger = logging.getLogger(__name__)

_LOCK = f".{FOLDER}.lock"
_SCRATCH = f".{FOLDER}.*.part"
_MAGIC = b"\x93NUMPY"


class NpcacheWriter:
    """The `CheckpointWriter` of NumPy caches: ``np/`` with one file for each tensor, which stands for itself."""

    name = "npcache"
    has_shards = False

    def write(
        self,
        folder: Path,
        tensors: Mapping[str, NewTensor],
        *,
        metadata: Mapping[str, str],
        max_shard_size: int | None,
    ) -> Sequence[str]:
        """Write the folder, in place of an older cache; see `CheckpointWriter`. Every tensor has a file of its own."""
        return write_npcache(folder, tensors, metadata=metadata)


def write_npcache(
    folder: Path,
    tensors: Mapping[str, NewTensor],
    *,
    metadata: Mapping[str, str],
    sources: Sequence[SourceFile] = (),
    confirm: Callable[[], None] | None = None,
) -> list[str]:
    """Write `tensors` as the cache of `folder` and return the paths of its files there, the list of names and our
    record last.

    It is built in a folder beside, whose name begins with a dot, and takes the place of an older cache when it is
    whole. Chunks are asked for in the order of `tensors`. sources: the files that it is made of, if it is a cache of
    some. confirm: called when all is written and nothing is in place; what it raises stops the writing.

    Raises FormatError, before anything is written, for a tensor that NumPy files cannot hold, and where its chunks are
    not as long as its shape says; UnsafeFile where ``np/`` is no cache; OSError if the disk refuses.
    """
    files = {name: file_name_of(name) for name in tensors}
    _refuse_collision(files)
    shapes = {name: _shape_of(name, dtype, shape) for name, (dtype, shape, _) in tensors.items()}
    record = CacheRecord(
        {files[name]: CachedTensor(name, dtype, tuple(shape)) for name, (dtype, shape, _) in tensors.items()},
        sources,
        metadata,
    )
    texts = {NAMES: names_bytes(record), RECORD: record_bytes(record)}
    refuse_strangers(folder, files.values())
    with _scratch(folder) as scratch:
        new = scratch / FOLDER
        new.mkdir()
        for name, tensor in tensors.items():
            with new_file(new / files[name]) as out:
                out.write(npy_header(array_type(tensor.dtype), shapes[name]))
                write_chunks(out, name, tensor)
        for file, text in texts.items():
            with new_file(new / file) as out:
                out.write(text)
        if confirm is not None:
            confirm()
        _put_in_place(new, folder / FOLDER)
    return [path_of(file) for file in (*files.values(), *texts)]


@contextmanager
def one_builder(folder: Path) -> Iterator[None]:
    """Keep others that build the cache of `folder` waiting, on this machine and wherever the file system locks.

    What builders that were killed have left is removed. Where locks do not work, several build at once, each for
    itself, and the last one stays. Raises OSError where the folder cannot be written to.
    """
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        if _locked(fd, folder):
            for left in folder.glob(_SCRATCH):
                shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(fd)


def refuse_strangers(folder: Path, names: Collection[str]) -> None:
    """Raise UnsafeFile if ``np/`` of `folder` holds anything that no cache does, so that it must not be replaced.

    names: of the files of the cache that is to be there, which an unfinished one has, too.
    """
    place = folder / FOLDER
    if not place.is_dir():
        return
    found = [*os.scandir(place)]
    finished = any(entry.name in (NAMES, RECORD) for entry in found)
    known = {NAMES, RECORD, *names}
    for entry in found:
        if entry.name not in known and not (finished and _is_array(entry)) and not entry.name.endswith(".part"):
            raise UnsafeFile(
                f"{shown(str(place), 300)}: {shown(entry.name)} is no part of a NumPy cache, so the folder is not"
                " replaced by one: move it away"
            )


def _is_array(entry: os.DirEntry[str]) -> bool:
    """Tell whether an entry of a folder is a NumPy file, or one that was begun."""
    if not entry.is_file(follow_symlinks=False):
        return False
    with Path(entry.path).open("rb") as file:
        return file.read(len(_MAGIC)) in (_MAGIC, b"")


def _locked(fd: int, folder: Path) -> bool:
    """Wait for the lock and return whether there is one to be had."""
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("%s: waiting for another process that builds its NumPy cache", shown(str(folder), 300))
            fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    made = folder / _SCRATCH.replace("*", secrets.token_hex(8))
    made.mkdir()
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _put_in_place(new: Path, place: Path) -> None:
    """Rename `new` to `place`, moving what is there beside `new`; whoever does the same meanwhile comes off well."""
    while True:
        try:
            new.rename(place)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
        with suppress(FileNotFoundError):
            place.rename(new.with_name(f"old.{secrets.token_hex(8)}"))


def _refuse_collision(files: Mapping[str, str]) -> None:
    taken: dict[str, str] = {}
    for name, file in files.items():
        if taken.setdefault(file, name) != name:
            raise FormatError(f"tensors {shown(taken[file])!r} and {shown(name)!r} would have one file, {shown(file)}")


def _shape_of(name: str, dtype: DType, shape: Sequence[int]) -> tuple[int, ...]:
    try:
        return array_shape(dtype, shape)
    except UnsupportedDtype as error:
        raise UnsupportedDtype(f"tensor {shown(name)!r}: {error}: a NumPy file cannot hold it") from None
