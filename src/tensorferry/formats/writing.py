"""Writing checkpoints: what the writers of all formats share. The bytes come from the caller; nothing is converted."""

from __future__ import annotations

import os
import secrets
import stat as modes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, cast, runtime_checkable

from tensorferry.core.boxes import Shape
from tensorferry.core.dtypes import DType
from tensorferry.errors import FormatError, UnknownFormat, shown

__all__ = [
    "WRITERS",
    "CheckpointWriter",
    "NewFile",
    "NewTensor",
    "PlansFiles",
    "WritesOneFile",
    "checkpoint_writer",
    "new_file",
    "sync_folder",
    "write_chunks",
]


class NewTensor(NamedTuple):
    """A tensor to write: row-major, little-endian bytes in `chunks` that are cut anywhere and taken one at a time."""

    dtype: DType
    shape: Shape
    chunks: Iterable[bytes | bytearray | memoryview]


class CheckpointWriter(Protocol):
    """Writes whole checkpoints of one format. Stateless.

    name: what ``WRITERS``, messages and ``tensorferry convert --to`` call it. has_shards: whether `max_shard_size` says
    how many files there are.
    """

    name: str
    has_shards: bool

    def write(
        self,
        folder: Path,
        tensors: Mapping[str, NewTensor],
        *,
        metadata: Mapping[str, str],
        max_shard_size: int | None,
    ) -> Sequence[str]:
        """Write `tensors` into `folder`, which is there, and return the names of the files in the order of writing.

        An index comes last. Every file is there whole or not at all (`new_file`). The chunks of a tensor are asked for
        once, of one tensor at a time, and nothing more than one chunk is held. metadata: what the source says beside
        its tensors; formats that cannot carry it leave it out. max_shard_size: most bytes of tensors in one file, where
        the format has several; a larger tensor gets a file of its own. None for no limit.

        Raises FormatError for a tensor that the format cannot hold, before anything is written, or whose chunks are
        not as long as its shape says; OSError if the disk refuses.
        """
        ...


class NewFile(NamedTuple):
    """A file that a writer is going to write: its name, all its bytes, and its tensors in the order of their bytes."""

    name: str
    nbytes: int
    tensors: tuple[str, ...] = ()


@runtime_checkable
class PlansFiles(Protocol):
    """Writers that know beforehand what they write; what asks them for it can make the chunks ahead, in that order."""

    def files(
        self, tensors: Mapping[str, NewTensor], *, metadata: Mapping[str, str], max_shard_size: int | None
    ) -> Sequence[NewFile]:
        """Return what `CheckpointWriter.write` would write, in its order, without asking for a chunk.

        Raises FormatError for a tensor that the format cannot hold.
        """
        ...


@runtime_checkable
class WritesOneFile(Protocol):
    """Writers whose checkpoints can be a single file, which may then have any name that ends in `suffix`."""

    suffix: str


WRITERS = {
    "npcache": "tensorferry.formats.npcache_write:NpcacheWriter",
    "safetensors": "tensorferry.formats.safetensors_write:SafetensorsWriter",
    "sharded_state": "tensorferry.formats.sharded_state_write:ShardedStateWriter",
    "tensorizer": "tensorferry.formats.tensorizer_write:TensorizerWriter",
}
"""Writers by name, as module and class; imported when one is first needed."""


def checkpoint_writer(name: str) -> CheckpointWriter:
    """Return the writer called `name`. Raises UnknownFormat if there is none."""
    if name not in WRITERS:
        raise UnknownFormat(f"nothing here writes {shown(name)!r}; there are writers of {', '.join(WRITERS)}")
    module, _, attribute = WRITERS[name].partition(":")
    return cast("CheckpointWriter", getattr(import_module(module), attribute)())


@contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` when the block ends well, and is gone when it does not.

    It is written beside, under a name that begins with a dot and ends in ``.part``, flushed to the disk and renamed, so
    that `path` is always the old file or the new one. It keeps the permissions of the old file; a new one gets those
    of the umask. A link at `path` is replaced, not followed. Raises OSError.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    out = beside.open("x+b")
    try:
        with out:
            _keep_mode(out.fileno(), target)
            yield out
            out.flush()
            os.fsync(out.fileno())
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def write_chunks(out: BinaryIO, name: str, tensor: NewTensor) -> None:
    """Write the bytes of `tensor` to `out`. Raises FormatError where its chunks are not as long as its shape says."""
    wanted, written = tensor.dtype.nbytes(tensor.shape), 0
    for chunk in tensor.chunks:
        written += memoryview(chunk).nbytes
        if written > wanted:
            break
        out.write(chunk)
    if written != wanted:
        found = f"over {wanted}" if written > wanted else str(written)
        raise FormatError(f"tensor {shown(name)!r} takes {wanted} bytes, its chunks have {found}; nothing was written")


def _keep_mode(fd: int, target: Path) -> None:
    with suppress(FileNotFoundError):
        old = target.lstat()
        if modes.S_ISREG(old.st_mode):
            os.fchmod(fd, modes.S_IMODE(old.st_mode))


def sync_folder(folder: Path) -> None:
    """Bring to the disk which files `folder` has. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
