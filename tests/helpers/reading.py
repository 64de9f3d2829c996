"""Reads what a catalogue describes in the plainest way, and watches which files are opened meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tensorferry.formats.opening import Opened, open_files

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "I64": torch.int64}
_watchers: list[list[str]] = []
_hooked = False


def tensors_of(opened: Opened) -> dict[str, torch.Tensor]:
    """Return all tensors of an open checkpoint, each from its one row-major span."""
    found = {}
    for name, entry in opened.catalogue.items():
        assert entry.span is not None
        data = bytearray(entry.span.length)
        opened.storage.read_into(entry.span.file, entry.span.offset, memoryview(data))
        found[name] = torch.frombuffer(data, dtype=_DTYPES[entry.dtype.name]).reshape(entry.shape)
    return found


def read_all(path: Path, **options: Any) -> dict[str, list[Any]]:
    """Open the checkpoint at `path` and return its values as lists."""
    with open_files(path, **options) as opened:
        return as_lists(tensors_of(opened))


def as_lists(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Return the values of `tensors` as nested lists."""
    return {name: tensor.tolist() for name, tensor in tensors.items()}


@contextmanager
def watching_opens() -> Iterator[list[str]]:
    """Collect the path of every file that this process opens within the block, as Python's audit events tell."""
    global _hooked
    if not _hooked:
        sys.addaudithook(_note_open)
        _hooked = True
    seen: list[str] = []
    _watchers.append(seen)
    try:
        yield seen
    finally:
        _watchers.remove(seen)


def _note_open(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _watchers:
        for seen in _watchers:
            seen.append(str(args[0]))
