"""Where checkpoints lie, and what the header of a safetensors file says. Pure Python."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from benchmarks.peers.works import Work

__all__ = ["FILES", "digest_file", "folder_of", "headers"]

FILES = {"safetensors": "*.safetensors", "bin": "*.bin", "tensors": "*.tensors", "gguf": "*.gguf"}
"""The files of each family."""


def folder_of(root: Path, size: str, checkpoint: str, family: str) -> Path:
    """Return where a checkpoint lies, in the files of one family."""
    return root / size / f"{checkpoint}-{family}"


def digest_file(root: Path, size: str, work: Work) -> Path:
    """Return the file that holds the digest of the rank's part."""
    return root / size / f"{work.checkpoint}-{work.part}.digest"


def headers(path: Path) -> tuple[int, dict[str, Any]]:
    """Return where the data of a safetensors file begins, and its header."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return 8 + length, header
