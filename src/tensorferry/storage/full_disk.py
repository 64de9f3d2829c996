"""What a disk lacks that refuses to take more, in words."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from tensorferry.core.amounts import human_bytes

__all__ = ["lacking"]

_FULL = (errno.ENOSPC, errno.EDQUOT)


def lacking(error: OSError, folder: Path, needed: int) -> str:
    """Return how much room `folder` has, in brackets, where `error` says that its disk is full; else nothing.

    needed: bytes that were to be written in all; 0 where that is not known.
    """
    if error.errno not in _FULL:
        return ""
    free = human_bytes(shutil.disk_usage(folder).free)
    return f" ({human_bytes(needed)} are needed, {free} are free)" if needed else f" ({free} are free)"
