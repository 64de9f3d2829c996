"""Writes Tensorizer files, whole or not at all, as the library reads them. Nothing is converted here.

Headers hold a hash of the bytes that follow them, so that each is written twice: with zeros, and filled in when its
data have gone by.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from tensorferry.errors import ConfigError, FormatError, shown
from tensorferry.formats.tensorizer_hashes import hasher
from tensorferry.formats.tensorizer_header import (
    CRC32,
    ENCRYPTED,
    INDEX_START,
    LONG_VERSION,
    MAGIC,
    MAX_INDEX,
    MAX_PADDING,
    MAX_TENSORS,
    SHA256,
    TYPED_INDEX,
    TensorKind,
)
from tensorferry.formats.tensorizer_keys import KEY_BYTES, nonce_of, seal_box
from tensorferry.formats.tensorizer_sealed import BOXES, MAC_BYTES, NONCE_BYTES
from tensorferry.formats.tensorizer_types import dtype_text, is_opaque, stored_shape
from tensorferry.formats.writing import NewFile, NewTensor, new_file, write_chunks

__all__ = ["TensorizerWriter", "write_tensorizer"]

_SINGLE = "model.tensors"
_BOX = 2 << 20
_END = 8  # zero bytes where another header would begin
_ALIGNMENT = 64
_MAX_NAME = (1 << 16) - 1
_PATH = "\x1e"


class TensorizerWriter:
    """The `CheckpointWriter` of ``model.tensors``: one file, as the format knows no shards."""

    name = "tensorizer"
    has_shards = False
    suffix = ".tensors"

    def files(
        self, tensors: Mapping[str, NewTensor], *, metadata: Mapping[str, str], max_shard_size: int | None
    ) -> Sequence[NewFile]:
        """Return what `write` would write; see `PlansFiles`."""
        drafts = _drafts(tensors, None, encrypted=False)
        head = len(_placed(drafts, _ALIGNMENT, encrypted=False))
        end = drafts[-1].data + drafts[-1].length if drafts else head
        return [NewFile(_SINGLE, end + _END, tuple(tensors))]

    def write(
        self,
        folder: Path,
        tensors: Mapping[str, NewTensor],
        *,
        metadata: Mapping[str, str],
        max_shard_size: int | None,
    ) -> Sequence[str]:
        """Write the file; see `CheckpointWriter`. The format carries no metadata."""
        write_tensorizer(folder / _SINGLE, tensors)
        return [_SINGLE]


def write_tensorizer(
    path: str | os.PathLike[str],
    tensors: Mapping[str, NewTensor],
    *,
    key: bytes | None = None,
    buffers: Collection[str] | None = None,
    alignment: int = _ALIGNMENT,
) -> None:
    """Write `tensors` to `path` as one Tensorizer file with hashes, in their order, in place of what is there.

    key: 32 secret bytes that each tensor is encrypted with; needs PyNaCl. buffers: given, the file is one of a module,
    which the library loads with ``load_into_module``: these names are its buffers, the others its parameters. Without,
    it is one of a dictionary. alignment: of each tensor in the file, in bytes; a power of two. The file itself is
    replaced as `new_file` says.

    Raises FormatError, with `path` untouched, if a tensor does not fit the format or its chunks are not as long as its
    shape says; ConfigError for a key or an alignment that is none; OSError if the disk refuses.
    """
    if key is not None and len(key) != KEY_BYTES:
        raise ConfigError(f"key: {KEY_BYTES} bytes are expected, not {len(key)}")
    if not 1 <= alignment <= MAX_PADDING or alignment & (alignment - 1):
        raise ConfigError(f"alignment {alignment}: a power of two up to {MAX_PADDING:,} is expected")
    drafts = _drafts(tensors, buffers, encrypted=key is not None)
    head = _placed(drafts, alignment, encrypted=key is not None)
    with new_file(path) as out:
        out.write(head)
        for draft in drafts:
            _write(out, draft, key)
        out.write(bytes(_END))


@dataclass(slots=True)
class _Draft:
    """A tensor on its way: what its header says, and where it goes. header, data: offsets in the file."""

    name: str
    tensor: NewTensor
    label: bytes
    kind: TensorKind
    dtype: bytes
    dims: tuple[int, ...]
    sealed: int
    header: int = 0
    data: int = 0
    nonce: bytes = field(default=b"", repr=False)

    @property
    def long(self) -> bool:
        return any(dim >= 1 << 32 for dim in self.dims)

    @property
    def length(self) -> int:
        return self.tensor.dtype.nbytes(self.tensor.shape)

    @property
    def hashes(self) -> tuple[int, ...]:
        # Of encrypted data only the longer one, as by the library: 32 bits would be easy to search.
        return (SHA256,) if self.sealed else (CRC32, SHA256)

    def typed(self) -> bytes:
        """Return dtype and dimensions, as both index and header have them."""
        shape = struct.pack(f"<B{len(self.dims)}{'Q' if self.long else 'I'}", len(self.dims), *self.dims)
        return bytes([len(self.dtype)]) + self.dtype + shape


def _drafts(tensors: Mapping[str, NewTensor], buffers: Collection[str] | None, *, encrypted: bool) -> list[_Draft]:
    if len(tensors) > MAX_TENSORS:
        raise FormatError(f"{len(tensors):,} tensors, the limit of a Tensorizer file is {MAX_TENSORS:,}")
    return [_draft(name, tensor, buffers, encrypted) for name, tensor in tensors.items()]


def _draft(name: str, tensor: NewTensor, buffers: Collection[str] | None, encrypted: bool) -> _Draft:
    dtype, dims = dtype_text(tensor.dtype), stored_shape(tensor.dtype, tensor.shape)
    if dtype is None:
        raise FormatError(f"tensor {shown(name)!r}: Tensorizer files have no dtype {tensor.dtype}")
    if dims is None or any(dim < 0 for dim in dims) or len(dims) > 64:
        raise FormatError(f"tensor {shown(name)!r}: no Tensorizer file holds {tensor.dtype} of {list(tensor.shape)}")
    kind = TensorKind.STATE_DICT
    if buffers is not None:
        kind = TensorKind.BUFFER if name in buffers else TensorKind.PARAMETER
    label = _label(name, kind)
    boxes = -(-tensor.dtype.nbytes(tensor.shape) // _BOX)
    sealed = (8 + 2 + (8 + 2 + 8 + NONCE_BYTES + 8 + boxes * MAC_BYTES if boxes else 0)) if encrypted else 0
    return _Draft(name, tensor, label, kind, dtype.encode(), dims, sealed)


def _label(name: str, kind: TensorKind) -> bytes:
    """Return what the file calls `name`; the library looks for a dot before the last part of a module's tensor."""
    text = f".{name}" if kind is not TensorKind.STATE_DICT and "." not in name else name
    try:
        label = text.encode()
    except UnicodeEncodeError:
        raise FormatError(f"tensor {shown(name)!r}: lone surrogate in its name") from None
    if not name or name.startswith(_PATH) or len(label) > _MAX_NAME:
        raise FormatError(
            f"tensor {shown(name)!r}: a name of 1 to {_MAX_NAME:,} bytes that begins with a letter is expected"
        )
    return label


def _placed(drafts: Sequence[_Draft], alignment: int, *, encrypted: bool) -> bytes:
    """Give each draft its place in the file, and return what goes before them: head and index."""
    typed = any(draft.long for draft in drafts)
    entry = 4 * typed + 2 + 1 + 24
    length = sum(entry + len(draft.label) + len(draft.typed()) for draft in drafts)
    if length > MAX_INDEX:
        raise FormatError(f"the names of {len(drafts):,} tensors take {length:,} bytes, the limit is {MAX_INDEX:,}")
    end = INDEX_START + length
    for draft in drafts:
        least = len(_header(draft))
        draft.header = end
        draft.data = end + least + -(end + least) % alignment
        end = draft.data + draft.length
    index = b"".join(_entries(drafts, typed))
    flags = ENCRYPTED * encrypted | TYPED_INDEX * typed
    version = max([1, *(2 for d in drafts if is_opaque(d.tensor.dtype)), 3 * encrypted, LONG_VERSION * typed])
    # Files of version 3 are encrypted by what they are; the library leaves their flags empty.
    stored = (flags if version > 3 else 0).to_bytes(32, "little")
    total = sum(draft.length for draft in drafts)
    return MAGIC + struct.pack("<I32sQ8xQQ", version, stored, total, len(drafts), length) + index


def _entries(drafts: Iterable[_Draft], typed: bool) -> Iterator[bytes]:
    for draft in drafts:
        if typed:
            yield struct.pack("<I", LONG_VERSION if draft.long else 1)
        yield struct.pack("<H", len(draft.label)) + draft.label + bytes([draft.kind]) + draft.typed()
        yield struct.pack("<3Q", draft.header, draft.data, draft.length)


def _header(draft: _Draft, hashes: Mapping[int, bytes] | None = None, macs: bytes = b"") -> bytes:
    """Return the header, with zeros where hashes and encryption are not known yet, padded up to its data."""
    sizes = {CRC32: 4, SHA256: 32}
    values = b"".join(
        bytes([kind, sizes[kind]]) + (hashes[kind] if hashes else bytes(sizes[kind])) for kind in draft.hashes
    )
    before = struct.pack("<HBH", 0, draft.kind, len(draft.label)) + draft.label + draft.typed()
    before += struct.pack("<HB", len(values) + 1, len(draft.hashes)) + values
    before += _sealing(draft, macs) if draft.sealed else b""
    padding = bytes(max(draft.data - draft.header - 16 - len(before), 0))
    return struct.pack("<Q", 16 + len(before) + len(padding)) + before + padding + struct.pack("<q", draft.length)


def _sealing(draft: _Draft, macs: bytes) -> bytes:
    if not draft.length:
        return struct.pack("<QH", 2, 0)
    macs = macs or bytes(-(-draft.length // _BOX) * MAC_BYTES)
    nonce = draft.nonce or bytes(NONCE_BYTES)
    box = struct.pack("<HQ", BOXES, _BOX) + nonce + struct.pack("<Q", len(macs) // MAC_BYTES) + macs
    return struct.pack("<QHQ", 2 + 8 + len(box), 1, len(box)) + box


def _write(out: BinaryIO, draft: _Draft, key: bytes | None) -> None:
    draft.nonce = b"" if key is None else os.urandom(NONCE_BYTES)
    header = _header(draft)
    out.write(header)
    hashed = _hashed_part(draft, header)
    computed = {kind: hasher(kind) for kind in draft.hashes}
    for one in computed.values():
        one.update(hashed)

    def watched() -> Iterator[bytes | bytearray | memoryview]:
        for chunk in draft.tensor.chunks:
            for one in computed.values():
                one.update(chunk)
            yield chunk

    macs = bytearray()
    chunks = watched() if key is None else _encrypted(watched(), draft.nonce, key, macs)
    write_chunks(out, draft.name, draft.tensor._replace(chunks=chunks))
    end = out.tell()
    out.seek(draft.header)
    out.write(_header(draft, {kind: one.digest() for kind, one in computed.items()}, bytes(macs)))
    out.seek(end)


def _hashed_part(draft: _Draft, header: bytes) -> bytes:
    """Return the header without what it says of its encryption, which no hash covers."""
    if not draft.sealed:
        return header
    start = 8 + 5 + len(draft.label) + len(draft.typed()) + 3 + sum(2 + {CRC32: 4, SHA256: 32}[k] for k in draft.hashes)
    return header[:start] + header[start + draft.sealed :]


def _encrypted(
    chunks: Iterable[bytes | bytearray | memoryview], nonce: bytes, key: bytes, macs: bytearray
) -> Iterator[bytes]:
    """Yield the bytes of `chunks` in sealed boxes, and add the MAC of each to `macs`."""
    waiting = bytearray()
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for at in range(0, len(view), _BOX):
            waiting += view[at : at + _BOX]
            if len(waiting) >= _BOX:
                yield _sealed(waiting, nonce, key, macs)
    if waiting:
        yield _sealed(waiting, nonce, key, macs)


def _sealed(waiting: bytearray, nonce: bytes, key: bytes, macs: bytearray) -> bytes:
    """Take a box off the front of `waiting`."""
    mac, data = seal_box(bytes(waiting[:_BOX]), nonce_of(nonce, len(macs) // MAC_BYTES), key)
    del waiting[:_BOX]
    macs += mac
    return data
