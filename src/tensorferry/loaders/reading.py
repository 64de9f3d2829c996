"""Who reads for a loader: what a plan needs into parameters, and what no plan can be made for as a stream."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tensorferry.config import LoadConfig
from tensorferry.core.catalogue import TensorEntry
from tensorferry.execute.base import Counters, Executor
from tensorferry.execute.borrowed import Borrowed
from tensorferry.execute.borrowing import Adopt, BorrowingExecutor
from tensorferry.execute.exchange import Exchange
from tensorferry.loaders.strategies import executor_for, streamed
from tensorferry.storage.base import Storage

__all__ = ["OwnReading", "Reading"]


class Reading(Protocol):
    """A way of reading checkpoints."""

    @property
    def executor(self) -> Executor:
        """What fills parameters as a plan says; its class is named in reports."""
        ...

    def stream(
        self, storage: Storage, entries: Sequence[TensorEntry], counters: Counters
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield name and values of each entry, in memory of their own, counting up `counters`. Raises ReadError."""
        ...


@dataclass(frozen=True, slots=True)
class OwnReading:
    """Reading by the strategy that is configured.

    exchange: what other ranks of this machine read for this one, and it for them. borrowed: what needs no reading, and
    what has parameters lie there.
    """

    config: LoadConfig
    exchange: Exchange | None = None
    borrowed: tuple[Borrowed, Adopt] | None = None

    @property
    def executor(self) -> Executor:
        executor = executor_for(self.config, self.exchange)
        if self.borrowed is None:
            return executor
        return BorrowingExecutor(executor, *self.borrowed)

    def stream(
        self, storage: Storage, entries: Sequence[TensorEntry], counters: Counters
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        return streamed(self.config, storage, entries, counters)
