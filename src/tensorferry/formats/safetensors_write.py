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
from tensorferry.formats.writing import NewFile, NewTensor, new_file, write_chunks

__all__ = ["SafetensorsWriter", "planned_file", "shards_of", "write_safetensors"]

_SINGLE = "model.safetensors"
_INDEX = f"{_SINGLE}.index.json"
_LENGTH = struct.Struct("<Q")
_PAGE = 4096
"""Bytes that values begin at a multiple of."""


class SafetensorsWriter:
    """The `CheckpointWriter` of Hugging Face's layout: ``model.safetensors``, or shards and their index."""

    name = "safetensors"
    has_shards = True
    suffix = ".safetensors"

    def files(
        self, tensors: Mapping[str, NewTensor], *, metadata: Mapping[str, str], max_shard_size: int | None
    ) -> Sequence[NewFile]:
        """Return what `write` would write; see `PlansFiles`."""
        shards = list(shards_of(tensors, max_shard_size)) or [[]]
        names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
        if len(shards) == 1:
            names = [_SINGLE]
        found = [planned_file(name, tensors, shard, metadata) for name, shard in zip(names, shards, strict=True)]
        return found if len(found) == 1 else [*found, NewFile(_INDEX, len(_index(found, tensors)))]

    def write(
        self,
        folder: Path,
        tensors: Mapping[str, NewTensor],
        *,
        metadata: Mapping[str, str],
        max_shard_size: int | None,
    ) -> Sequence[str]:
        """Write the files, the index last; see `CheckpointWriter`."""
        files = self.files(tensors, metadata=metadata, max_shard_size=max_shard_size)
        for name, _, held in files:
            if name != _INDEX:
                write_safetensors(folder / name, {n: tensors[n] for n in held}, metadata=metadata)
                continue
            with new_file(folder / name) as out:
                out.write(_index(files, tensors))
        return [file.name for file in files]


def planned_file(
    name: str, tensors: Mapping[str, NewTensor], held: Sequence[str], metadata: Mapping[str, str]
) -> NewFile:
    """Return what `write_safetensors` would write into the file `name` of those of `tensors` that it is to hold.

    Raises FormatError for one that does not fit the format.
    """
    order = _in_order({n: tensors[n] for n in held})
    header = _header({n: tensors[n] for n in order}, metadata)
    return NewFile(name, len(header) + sum(_nbytes(tensors[n]) for n in order), tuple(order))


def _index(files: Sequence[NewFile], tensors: Mapping[str, NewTensor]) -> bytes:
    weight_map = {n: file.name for file in files for n in file.tensors}
    total = sum(map(_nbytes, tensors.values()))
    in_turn = {n: weight_map[n] for n in tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": in_turn}, indent=2).encode()


def _in_order(tensors: Mapping[str, NewTensor]) -> list[str]:
    """Return names in the order of their bytes: wider types first, so that every tensor is aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.bits, name))


def _nbytes(tensor: NewTensor) -> int:
    return tensor.dtype.nbytes(tensor.shape)


def shards_of(tensors: Mapping[str, NewTensor], most: int | None) -> Iterator[list[str]]:
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
    aligned; `chunks` are asked for in that order. Values begin on a page of the file, after a header that is filled up
    with spaces, which the format allows: so they can be read directly, and copied as fast as the processor can.

    Raises FormatError, with `path` untouched, if a tensor does not fit the format or its chunks are not as long as its
    shape says; OSError if the disk refuses.
    """
    order = _in_order(tensors)
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
    step = _PAGE if len(text) + _PAGE <= MAX_HEADER else 8
    text += b" " * (-(_LENGTH.size + len(text)) % step)
    if len(text) > MAX_HEADER:
        raise FormatError(
            f"the header takes {len(text)} bytes, the limit of the format is {MAX_HEADER}: use more files"
        )
    return _LENGTH.pack(len(text)) + text


def _refuse_unwritable(name: str, dtype: DType, shape: Shape) -> None:
    if name == "__metadata__":
        raise FormatError("a tensor cannot be called '__metadata__' in a safetensors file")
    if SAFETENSORS_DTYPES.get(dtype.name) != dtype:
        raise FormatError(f"tensor {shown(name)!r}: safetensors has no dtype {dtype}")
    if any(dim < 0 for dim in shape) or not fills_bytes(dtype, shape):
        raise FormatError(f"tensor {shown(name)!r}: {dtype} of shape {list(shape)} fills no whole bytes")
