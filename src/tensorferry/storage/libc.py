"""The C library, as far as reading needs more of it than Python has, and where bytes lie in memory."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

__all__ = ["address", "libc"]


def address(view: memoryview) -> int:
    """Return where the bytes of `view`, which is writable, lie; 0 where there are none."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0


@cache
def libc(*needed: str) -> Any:  # functions of a library, which name no types
    """Return the C library of this process; None where it is not Linux's, or has not all that is `needed` of it."""
    found = _library()
    return found if found is not None and all(hasattr(found, name) for name in needed) else None


@cache
def _library() -> Any:
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        library = ctypes.CDLL(None)
        library.mmap.restype = ctypes.c_void_p
        library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        library.mremap.restype = ctypes.c_void_p
        library.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        library.syscall.restype = ctypes.c_long
    except (AttributeError, OSError, TypeError):
        return None
    return library
