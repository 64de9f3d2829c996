"""NumPy files byte by byte, and caches as vLLM lays them out, written with NumPy."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["npy", "write_vllm_cache"]


def npy(
    header: str | bytes, data: bytes = b"", *, version: tuple[int, int] = (1, 0), length: int | None = None
) -> bytes:
    """Return a file with that header, as it is, and `data` after it. length: what the file says of its header."""
    text = header.encode("latin-1") if isinstance(header, str) else header
    size = struct.pack("<H" if version == (1, 0) else "<I", len(text) if length is None else length)
    return b"\x93NUMPY" + bytes(version) + size + text + data


def write_vllm_cache(folder: Path, arrays: Mapping[str, np.ndarray[Any, Any]], *, age_s: int = 0) -> Path:
    """Write ``np/`` of `folder` with NumPy alone, the list last. age_s: how long ago that was."""
    place = folder / "np"
    place.mkdir(exist_ok=True)
    for name, array in arrays.items():
        with (place / name).open("wb") as out:
            np.save(out, array)
    listed = place / "weight_names.json"
    listed.write_text(json.dumps(list(arrays)))
    if age_s:
        then = listed.stat().st_mtime - age_s
        os.utime(listed, (then, then))
    return place
