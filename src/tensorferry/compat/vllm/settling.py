"""What becomes of memory that was borrowed, when vLLM has made of parameters what it uses."""

from __future__ import annotations

import logging
import time

from torch import nn

from tensorferry.core.amounts import human_bytes
from tensorferry.execute.borrowed import Borrowed
from tensorferry.modules.moving import realigned

__all__ = ["settle"]

_ALIGNED = 64
"""What addresses are multiples of that products are quick with."""


def settle(model: nn.Module, borrowed: Borrowed, log: logging.Logger) -> None:
    """Give the parameters of `model` that still have pages of files pages of their own. Raises ReadError.

    Matrices on addresses that products are slow with move, unless another tensor uses their memory.
    """
    began, left = time.perf_counter(), borrowed.in_use
    nbytes = sum(pages.borrowed for pages in left)
    realigned(model, lambda address: address % _ALIGNED > 0 and any(pages.is_at(address) for pages in left))
    borrowed.settle()
    seconds = time.perf_counter() - began
    if nbytes:
        log.info("tensorferry: copied %s that vLLM uses as they were loaded, in %.2f s", human_bytes(nbytes), seconds)
