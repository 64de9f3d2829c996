"""Pausing Python's cyclic garbage collector while many lasting values are made.

A catalogue or a plan is some hundred thousand values without cycles; going through them again and again as they
grow takes about as long as making them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

__all__ = ["collector_paused"]

_lock = Lock()
_pauses = 0
_was_on = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the collector off within the block, in all threads; as a decorator, within the function.

    Blocks may overlap, in one thread or several. The collector is as before after the last one, so a program that
    keeps it off is not surprised.
    """
    global _pauses, _was_on
    paused = False
    try:
        with _lock:
            if _pauses == 0:
                _was_on = gc.isenabled()
            _pauses, paused = _pauses + 1, True  # an interrupt comes before both or after both
            gc.disable()
        yield
    finally:
        if paused:
            with _lock:
                _pauses -= 1
                if _pauses == 0 and _was_on:
                    gc.enable()
