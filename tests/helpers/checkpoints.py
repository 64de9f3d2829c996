"""Tiny checkpoints on disk, written by independent libraries or byte by byte."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def ar(*shape: int, start: float = 0.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return start, start + 1, … in `shape`, so that every value says where it came from."""
    return (torch.arange(math.prod(shape), dtype=torch.float64) + start).reshape(shape).to(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    """Return the bytes of `tensor`, row-major, little-endian."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write `tensors` with the reference library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, str(path), metadata={"format": "pt"})
    return path


def write_index(path: Path, weight_map: Mapping[str, str], **more: Any) -> Path:
    """Write a shard index."""
    path.write_text(json.dumps({"metadata": {}, "weight_map": dict(weight_map), **more}))
    return path


def write_raw_safetensors(
    path: Path, entries: Sequence[tuple[Any, ...]], *, pad_to: int | None = None, header_text: str | None = None
) -> Path:
    """Write a safetensors file byte by byte: entries are (name, dtype, shape, bytes[, data_offsets])."""
    offset, blob, header = 0, b"", {}
    for name, dtype, shape, data, *given in entries:
        span = given[0] if given else (offset, offset + len(data))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": list(span)}
        blob += data
        offset += len(data)
    text = (header_text if header_text is not None else json.dumps(header)).encode()
    text += b" " * ((pad_to - len(text)) if pad_to else -len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + blob)
    return path
