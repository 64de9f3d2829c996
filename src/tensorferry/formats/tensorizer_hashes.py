"""Verifies the hashes in Tensorizer files, tensor by tensor, in threads and in pieces. Parses nothing itself."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Container, Iterator
from typing import Protocol

from tensorferry.core.amounts import few
from tensorferry.errors import CorruptFile, ReadError, shown
from tensorferry.formats.tensorizer_decrypt import decrypted_path
from tensorferry.formats.tensorizer_header import SHA256, StoredTensor, read_header
from tensorferry.in_threads import in_threads
from tensorferry.storage.base import File, Storage
from tensorferry.storage.reading import read_bytes
from tensorferry.waiting import Flag

__all__ = ["hasher", "verify_hashes"]

_BLOCK = 2 << 20  # the boxes that encrypted files of the library are made of
_MOST_NAMED = 5


class Hasher(Protocol):
    """Takes bytes, and says what the hash of them all is, as it stands in files."""

    def update(self, data: bytes | bytearray | memoryview) -> None: ...

    def digest(self) -> bytes: ...


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "little")


def hasher(kind: int) -> Hasher:
    """Return what computes hashes of a `kind` that the format knows."""
    return hashlib.sha256() if kind == SHA256 else _Crc32()


def verify_hashes(
    storage: Storage,
    file: File,
    *,
    workers: int = 1,
    only: Container[tuple[str, int]] | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> int:
    """Compare every hash of the tensors of `file`, and return how many bytes of data were covered by one.

    Each hash is of the tensor's header, in which hashes count as zeros, and its decrypted data. only: the places of
    the data, as file and offset of spans, of the tensors that matter; None for all. workers: threads; each holds a
    piece of 2 MiB. advance: called with the bytes read, from these threads; what it raises ends the work.

    Raises CorruptFile naming file and tensors that differ, AccessDenied where they are encrypted and the storage has
    no key, ReadError.
    """
    header = read_header(storage, file)
    path = decrypted_path(file.path) if header.encrypted else file.path
    chosen = [t for t in header.tensors if t.hashes and (only is None or (path, t.data) in only)]
    stop = Flag()

    def check(tensor: StoredTensor) -> str | None:
        pieces = _watched(_pieces(storage, file.path, path, tensor), file, stop)
        return _fault(tensor, pieces, advance)

    faults = [fault for fault in in_threads(check, chosen, max(workers, 1), stop=stop) if fault is not None]
    if faults:
        found = few(faults, _MOST_NAMED, between="; ")
        raise CorruptFile(f"{shown(file.path)} ({shown(storage.uri, 300)}): {found}; fetch it again")
    return sum(t.length for t in chosen)


def _watched(pieces: Iterator[bytes | memoryview], file: File, stop: Flag) -> Iterator[bytes | memoryview]:
    for piece in pieces:
        if stop.is_set():
            raise ReadError(f"{shown(file.path)}: verifying its hashes was stopped")
        yield piece


def _fault(tensor: StoredTensor, pieces: Iterator[bytes | memoryview], advance: Callable[[int], None]) -> str | None:
    """Return which hash of `tensor` is not that of `pieces`, in words, or None."""
    computed = {h.kind: hasher(h.kind) for h in tensor.hashes}
    for piece in pieces:
        for one in computed.values():
            one.update(piece)
        advance(len(piece))
    for kind, _, expected in tensor.hashes:
        if (found := computed[kind].digest()) != expected:
            word = "sha256" if kind == SHA256 else "CRC-32"
            return f"the {word} of tensor {shown(tensor.name)!r} is {found.hex()}, its header says {expected.hex()}"
    return None


def _pieces(storage: Storage, path: str, data: str, tensor: StoredTensor) -> Iterator[bytes | memoryview]:
    """Yield what is hashed: the header in the file `path` without hashes and encryption, then the data in `data`."""
    sealed = tensor.sealed
    cut = (sealed.start, sealed.stop) if sealed is not None else (tensor.data, tensor.data)
    start = bytearray(read_bytes(storage, path, tensor.header, cut[0] - tensor.header))
    for _, at, value in tensor.hashes:
        start[at : at + len(value)] = bytes(len(value))
    yield bytes(start)
    if cut[1] < tensor.data:
        yield read_bytes(storage, path, cut[1], tensor.data - cut[1])
    buffer = memoryview(bytearray(min(_BLOCK, tensor.length)))
    for at in range(0, tensor.length, _BLOCK):
        piece = buffer[: min(_BLOCK, tensor.length - at)]
        storage.read_into(data, tensor.data + at, piece)
        yield piece
