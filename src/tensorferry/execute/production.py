"""Making the parameters of a plan as bytes, a portion after the other, for who writes or digests them.

Nothing is kept: a portion is made by the ordinary executor while the one before it is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from tensorferry.config import ReadOptions
from tensorferry.core.lower import lower
from tensorferry.core.plan import Plan
from tensorferry.core.portions import portions
from tensorferry.core.transforms import TensorSpec
from tensorferry.errors import PlanError, shown
from tensorferry.execute.base import Counters
from tensorferry.execute.pool import PATIENCE, Readers
from tensorferry.execute.staging import anonymous
from tensorferry.execute.threaded import ThreadedExecutor
from tensorferry.numerics.memory import bytes_of
from tensorferry.numerics.torch_dtypes import torch_dtype, torch_shape
from tensorferry.storage.base import Storage
from tensorferry.waiting import Outcome

__all__ = ["Production"]

_ALIGNED = 64


class Production:
    """Makes the parameters of a plan that has no problems, as row-major bytes. Close it, or use it in a ``with``.

    Beside the portion that it lends, it holds one that is being made and what the executor stages; together at most
    ``options.max_staging`` bytes, or what a single step needs that cannot be cut.

    counters: what was done so far, the portions being staged, too. digests: hex digits of a sha256, by name, of the
    parameters that were taken to their end, where `digested`.
    """

    def __init__(
        self, plan: Plan, storage: Storage, options: ReadOptions, order: Iterable[str], *, digested: bool = False
    ) -> None:
        """Make ready to be asked for parameters in `order`; another order is served, too, and costs reading twice."""
        self.plan = plan
        self.counters = Counters()
        self.digests: dict[str, str] = {}
        self._order = tuple(order)
        self._at = {name: n for n, name in enumerate(self._order)}
        self._make = _Maker(storage, options, self.counters)
        self._digested = digested
        self._stream: Generator[_Piece, None, None] | None = None
        self._next = 0

    def chunks(self, name: str) -> Iterator[memoryview]:
        """Yield the bytes of the parameter `name` in order; each chunk is good until the next one is asked for.

        Raises what reading raises, and PlanError for a name that is not among those to be asked for.
        """
        stream = self._stream_at(name)
        self._next = -1  # nowhere, until this one was taken whole
        piece = next(stream)
        yield piece.data
        while not piece.last:
            piece = next(stream)
            yield piece.data
        if piece.digest is not None:
            self.digests[name] = piece.digest
        self._next = self._at[name] + 1

    def close(self) -> None:
        """Stop making; idempotent."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _stream_at(self, name: str) -> Generator[_Piece, None, None]:
        """Return what yields the pieces of `name` next."""
        if name not in self._at:
            raise PlanError(f"tensor {shown(name)!r} is none of those that are to be made")
        if self._stream is None or self._next != self._at[name]:
            self.close()
            self._stream = self._pieces(self._order[self._at[name] :])
        return self._stream

    def _pieces(self, order: Sequence[str]) -> Generator[_Piece, None, None]:
        """Yield the pieces of the parameters called `order`, made one portion ahead."""
        ends = _Ends(self.plan, digested=self._digested)
        blocks = [_Block(), _Block()]

        def made(portion: Plan, block: _Block) -> list[_Piece]:
            return [ends.piece(name, bytes_of(tensor)) for name, tensor in self._make(portion, block).items()]

        maker = Readers[list[_Piece]](1)
        try:
            ahead: Outcome[list[_Piece]] | None = None
            for n, portion in enumerate(portions(self.plan, order, self._make.portion)):
                before, ahead = ahead, maker.submit(made, portion, blocks[n % 2])
                if before is not None:
                    yield from before.result()
            if ahead is not None:
                yield from ahead.result()
        finally:
            maker.close(PATIENCE)  # what it makes still, nobody asked for


class _Piece(NamedTuple):
    """A run of a parameter's bytes; `last` with its end, and with the digest of all of it where one is wanted."""

    data: memoryview
    last: bool
    digest: str | None


class _Ends:
    """Knows of each parameter how much has come, and digests it."""

    def __init__(self, plan: Plan, *, digested: bool) -> None:
        self._plan = plan
        self._digested = digested
        self._name: str | None = None
        self._left = 0
        self._sha: Any = None  # hashlib does not name its type

    def piece(self, name: str, data: memoryview) -> _Piece:
        """Return the next piece of `name`, which follows its last one or begins another parameter."""
        if name != self._name:
            spec = self._plan.parameters[name]
            self._name, self._left = name, spec.dtype.nbytes(spec.shape)
            self._sha = hashlib.sha256() if self._digested else None
        self._left -= len(data)
        if self._sha is not None:
            self._sha.update(data)
        if self._left:
            return _Piece(data, last=False, digest=None)
        self._name = None
        return _Piece(data, last=True, digest=None if self._sha is None else self._sha.hexdigest())


class _Block:
    """Memory for one portion, mapped when it is first needed and used again."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def of(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` uninitialized bytes, aligned; what was lent before is gone."""
        if nbytes > self._bytes.numel():
            self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")  # or both would be there for a moment
            self._bytes = anonymous(nbytes)
        return self._bytes[:nbytes]


@dataclass(frozen=True)
class _Maker:
    """Makes portions. What it may hold is divided: a quarter each for two portions, half for what is staged."""

    storage: Storage
    options: ReadOptions
    counters: Counters
    _waste: float = field(default=4.0)
    """Less than when a parameter is filled at once: a portion of a turned matrix is a little of each of its rows."""

    @property
    def portion(self) -> int:
        """Most bytes that are made at once, unless they cannot be cut."""
        return max(1, min(4 * self.options.max_read, self.options.max_staging // 4))

    def __call__(self, portion: Plan, block: _Block) -> dict[str, torch.Tensor]:
        """Return the parameters of `portion`, contiguous, in its order, in `block`."""
        tensors, size = _laid_out(portion, block)
        staging = max(self.options.max_staging // 2, 1)
        schedule = lower(
            portion,
            max_gap=self.options.max_gap,
            max_read=min(self.options.max_read, staging),
            max_staging=staging,
            waste=min(self.options.waste, self._waste),
        )
        done = ThreadedExecutor.of(self.options).run(schedule, self.storage, tensors)
        self.counters.absorb(done)
        self.counters.staging_peak = max(self.counters.staging_peak, done.staging_peak + 2 * size)
        return tensors


def _laid_out(portion: Plan, block: _Block) -> tuple[dict[str, torch.Tensor], int]:
    """Return a tensor in `block` for each parameter of a portion, and how many bytes they take."""
    where, at = {}, 0
    for name, spec in portion.parameters.items():
        where[name] = at
        at += -(-spec.dtype.nbytes(spec.shape) // _ALIGNED) * _ALIGNED
    memory = block.of(at)
    return {name: _tensor(spec, memory[where[name] :]) for name, spec in portion.parameters.items()}, at


def _tensor(spec: TensorSpec, memory: torch.Tensor) -> torch.Tensor:
    nbytes = spec.dtype.nbytes(spec.shape)
    return memory[:nbytes].view(torch_dtype(spec.dtype)).view(torch_shape(spec.dtype, spec.shape))
