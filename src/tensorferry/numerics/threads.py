"""How many threads torch takes for the work of one of ours. Which threads there are is the business of `execute`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

__all__ = ["alone", "take_share"]


def take_share(among: int) -> None:
    """Have torch's functions called from this thread use as many threads as fall to one of `among`; at least one.

    Otherwise each thread that copies more than a few rows would start a team of its own, one for each core, whose
    members wait for each other. Other threads are left as they are, and so is this one where OpenMP is not the library
    that torch was built with.
    """
    _limit(max(1, torch.get_num_threads() // among))  # asking also has torch do what it does once in each thread


@contextmanager
def alone() -> Iterator[None]:
    """Have torch's functions called from this thread use no other one within the block.

    A team that waits for each of many short copies takes ten times the processor's time of the copies.
    """
    before = torch.get_num_threads()
    if before == 1:  # saying so again takes as long as copying some of it
        yield
        return
    _limit(1)
    try:
        yield
    finally:
        _limit(before)


def _limit(threads: int) -> None:
    limit = _omp_set_num_threads()
    if limit is not None:
        limit(threads)  # other than torch.set_num_threads, it is for this thread only


@cache
def _omp_set_num_threads() -> Any:  # a function of the OpenMP library that torch has loaded
    try:
        return ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError, TypeError):
        return None
