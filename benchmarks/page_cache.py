"""What scripts of this folder do to the page cache before they measure."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["bring", "forget"]

MIB = 1 << 20


def forget(files: Iterable[Path]) -> None:
    """Have the page cache forget files that are on the disk by then, as far as it listens."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bring(files: Iterable[Path]) -> None:
    """Bring all of the files into the page cache."""
    block = memoryview(bytearray(MIB))
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
