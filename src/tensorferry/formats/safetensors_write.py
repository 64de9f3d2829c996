"""Writes safetensors files, whole or not at all. The bytes come from the caller; nothing is converted here."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tensorferry.core.boxes import Shape
from tensorferry.core.dtypes import DType
from tensorferry.errors import FormatError, shown
from tensorferry.formats.safetensors import MAX_HEADER, MAX_TENSORS, SAFETENSORS_DTYPES, fills_bytes
from tensorferry.formats.writing import NewTensor, new_file, write_chunks

__all__ = ["SafetensorsWriter", "write_safetensors"]

_SINGLE = "model.safetensors"


class SafetensorsWriter:
    """The `CheckpointWriter` of Hugging Face's layout: ``model.safetensors``, or shards and their index."""

    name = "safetensors"

    def write(
        self,
        folder: Path,
        tensors: Mapping[str, NewTensor],
        *,
        metadata: Mapping[str, str],
        max_shard_size: int | None,
    ) -> Sequence[str]:
        """Write the files, the index last; see `CheckpointWriter`."""
        for name, (dtype, shape, _) in tensors.items():
            _refuse_unwritable(name, dtype, shape)
        shards = list(_shards(tensors, max_shard_size))
        if len(shards) <= 1:
            write_safetensors(folder / _SINGLE, tensors, metadata=metadata)
            return [_SINGLE]
        names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
        for name, shard in zip(names, shards, strict=True):
            write_safetensors(folder / name, {n: tensors[n] for n in shard}, metadata=metadata)
        index = f"{_SINGLE}.index.json"
        weight_map = {n: name for name, shard in zip(names, shards, strict=True) for n in shard}
        total = sum(t.dtype.nbytes(t.shape) for t in tensors.values())
        with new_file(folder / index) as out:
            out.write(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode())
        return [*names, index]


def _shards(tensors: Mapping[str, NewTensor], most: int | None) -> Iterator[list[str]]:
    """Yield the names of each shard: as many, in their order, as `most` bytes and the limits of a file allow."""
    shard: list[str] = []
    size = 0
    for name, (dtype, shape, _) in tensors.items():
        more = dtype.nbytes(shape)
        if shard and (len(shard) == MAX_TENSORS or (most is not None and size + more > most)):
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += more
    if shard:
        yield shard


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, NewTensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write `tensors` to `path` as one safetensors file, in place of what is there.

    The file is written beside, under a name that begins with a dot, flushed to the disk and renamed, so that `path` is
    always the old file or the new one. It keeps the permissions of the old file; a new one gets those of the umask. A
    link at `path` is replaced, not followed. Wider types come first, then names in order, so that every tensor is
    aligned; `chunks` are asked for in that order.

    Raises FormatError, with `path` untouched, if a tensor does not fit the format or its chunks are not as long as its
    shape says; OSError if the disk refuses.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.bits, name))
    header = _header({name: tensors[name] for name in order}, metadata)
    with new_file(path) as out:
        out.write(header)
        for name in order:
            write_chunks(out, name, tensors[name])


def _header(tensors: Mapping[str, NewTensor], metadata: Mapping[str, str] | None) -> bytes:
    fields: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, shape, _) in tensors.items():
        _refuse_unwritable(name, dtype, shape)
        end = at + dtype.nbytes(shape)
        fields[name] = {"dtype": dtype.name, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    try:
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"lone surrogate in a name or in the metadata: {shown(error.object)!r}") from None
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise FormatError(
            f"the header takes {len(text)} bytes, the limit of the format is {MAX_HEADER}: use more files"
        )
    return struct.pack("<Q", len(text)) + text


def _refuse_unwritable(name: str, dtype: DType, shape: Shape) -> None:
    if name == "__metadata__":
        raise FormatError("a tensor cannot be called '__metadata__' in a safetensors file")
    if SAFETENSORS_DTYPES.get(dtype.name) != dtype:
        raise FormatError(f"tensor {shown(name)!r}: safetensors has no dtype {dtype}")
    if any(dim < 0 for dim in shape) or not fills_bytes(dtype, shape):
        raise FormatError(f"tensor {shown(name)!r}: {dtype} of shape {list(shape)} fills no whole bytes")
