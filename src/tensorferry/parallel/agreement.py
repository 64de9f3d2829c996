"""Ranks that do something together: all of them end it well, or all raise what the first of them met."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from tensorferry import errors
from tensorferry.errors import ConfigError, ReadError, TensorferryError, shown
from tensorferry.numerics.memory import bytes_of
from tensorferry.parallel.groups import Ranks

__all__ = ["Agreement"]

_EVERY = 0.2
"""Seconds between two looks at whether another rank has failed."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.00005, 0.002
"""Seconds between two looks at whether all ranks have come: they mostly come together, and may be late by minutes."""

_LENGTH, _SHORT = 8, 64
"""Bytes of a length, and of the words of a rank that are sent with it; those of an error are more."""

_KEYS = "tensorferry"
"""Before the keys by which ranks tell each other, beside collectives, that one of them has failed, or is lost."""


class _Stopped(TensorferryError):
    """Another rank has failed, and this one has no error of its own."""


class Agreement:
    """What `ranks` do as one. Where torch.distributed is not initialized, or for a rank alone, nothing is asked.

    Every rank has to make one, and to enter the same blocks in the same order. group: of torch.distributed, with just
    these ranks; by default all. Where no group has just these, several do that divide them like a grid: each rank gives
    the groups that it is in, in the same order, and ranks are counted along the first of them first.
    What is agreed on by one group of ranks has nothing to do with what others agree on.
    device: on which the group exchanges tensors, if it cannot on the CPU; by default torch's current one.
    """

    def __init__(
        self,
        ranks: Ranks,
        group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        self._ranks, self._device = ranks, device
        self._groups = tuple(group) if isinstance(group, Sequence) else (group,)
        self._asks = ranks.size > 1 and dist.is_available() and dist.is_initialized()
        self._failed = ""  # a key, as the others known when the ranks have met
        self._lost: tuple[str, ...] = ()
        self._looked = time.monotonic()

    @contextmanager
    def together(self, *, touches: bool = False) -> Iterator[None]:
        """Raise in every rank what the block raised in the first rank in which it did; only then may ranks go on.

        touches: whether the block writes to a model, so that an error of another rank finds this one's written to.
        Raises ConfigError where the ranks are not those of the group, and ReadError where one of them cannot be
        reached any more; the group is of no use then.
        """
        if not self._asks:
            yield
            return
        self._meet()
        mine: BaseException | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for word of it
            mine = error
            if not isinstance(error, _Stopped):
                self._tell(self._failed)
        touched = getattr(mine, "touched", touches)  # what is not ours, such as a lack of memory, does not say
        for rank, found in enumerate(self._outcomes(mine, touched)):
            if found is not None:
                again = _again(rank, self._ranks.size, found)
                again.touched = touched
                raise again from (mine if rank == self._ranks.rank else None)

    def _outcomes(self, mine: BaseException | None, touched: bool) -> list[Any]:
        """Return what became of the block in each rank: None, or the error that it met. touched: as of `mine`."""
        own = None if isinstance(mine, _Stopped) else mine
        try:
            return self._gathered(None if own is None else _told(own))
        except ReadError as lost:
            lost.touched = touched
            if own is None:
                raise
            raise own from lost

    def watch(self) -> None:
        """Leave the block at once where another rank has failed meanwhile. Cheap; to be called often."""
        now = time.monotonic()
        if self._asks and now - self._looked >= _EVERY:
            self._looked = now
            if self._was_told(self._failed, *self._lost):
                raise _Stopped

    def exchanged(self, told: str) -> list[str]:
        """Return what each rank tells, in the order of ranks. Every rank has to call it, outside of blocks.

        Raises ReadError where one of them cannot be reached any more.
        """
        return [str(one) for one in self._gathered(told)] if self._asks else [told]

    def _meet(self) -> None:
        """Find a name that no other agreement has, and see that the ranks are those of the group."""
        if self._failed:
            return
        sizes = [dist.get_world_size(group) for group in self._groups]
        if min(sizes, default=0) < 1:
            raise ConfigError(f"{self._ranks} was given a process group that this process is no member of")
        size = prod(sizes)
        groups: list[Any] = [group or dist.group.WORLD for group in self._groups]
        self._lost = tuple(f"{_KEYS}/lost/{group.group_name}" for group in groups)
        said = self._gathered([uuid.uuid4().hex, self._ranks.size, self._ranks.rank])
        self._failed = f"{_KEYS}/failed/{said[0][0]}"
        if [given[1:] for given in said] != [[size, rank] for rank in range(size)]:
            given = ", ".join(f"{rank} of {ranks}" for _, ranks, rank in said)
            raise ConfigError(
                f"the {size} processes of the group were told to be ranks {given}: give each its own rank in "
                "`parallel`, and as `group` the one of the ranks that share the model"
            )

    def _gathered(self, told: Any) -> list[Any]:
        """Return what every rank of the group tells, which is plain data; what is short takes one exchange, not two."""
        data = json.dumps(told).encode() if told is not None else b""
        heads = self._exchanged(len(data).to_bytes(_LENGTH, "little") + data[:_SHORT].ljust(_SHORT))
        sizes = [int.from_bytes(head[:_LENGTH], "little") for head in heads]
        longest = max(sizes)
        texts = [head[_LENGTH:] for head in heads] if longest <= _SHORT else self._exchanged(data.ljust(longest))
        return [json.loads(text[:size]) if size else None for text, size in zip(texts, sizes, strict=True)]

    def _exchanged(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, as many of each. Raises ReadError, soon, where one of them has ended."""
        found = data
        for group in self._groups:  # what the ranks of a row have said goes along the columns
            found = self._joined(found, group)
        return [found[at : at + len(data)] for at in range(0, len(found), len(data))]

    def _joined(self, data: bytes, group: dist.ProcessGroup | None) -> bytes:
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(_device(group, self._device))
        found = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
        pause = _SHORTEST_PAUSE
        try:
            work = dist.all_gather(found, sent, group=group, async_op=True)
            while not work.is_completed():
                if pause == _LONGEST_PAUSE and self._was_told(*self._lost):
                    self._tell(*self._lost)  # to those, too, that are in no group with the one that is lost
                    raise _lost(self._ranks)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            work.wait()
        except RuntimeError as error:  # of torch, which has no class for it
            self._tell(*self._lost)
            raise _lost(self._ranks) from error
        return b"".join(bytes(bytes_of(tensor.cpu())) for tensor in found)

    def _tell(self, *keys: str) -> None:
        try:
            for key in keys:
                self._store().set(key, "")
        except RuntimeError:  # of torch: the rank that keeps the store has ended, which all will notice
            return

    def _was_told(self, *keys: str) -> bool:
        try:
            return any(self._store().check([key]) for key in keys)
        except RuntimeError as error:
            raise _lost(self._ranks) from error

    def _store(self) -> Any:
        return dist.distributed_c10d._get_default_store()


def _device(group: dist.ProcessGroup | None, device: torch.device | str | None) -> torch.device:
    """Return where tensors have to be that the group exchanges: on the CPU, if it can."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    if backends.get("cpu", "nccl") != "nccl":
        return torch.device("cpu")
    given = torch.device(device or "cuda")
    return given if given.type != "cpu" else torch.device("cuda")


def _lost(ranks: Ranks) -> ReadError:
    return ReadError(
        f"rank {ranks.rank} of {ranks.size} has lost another rank, which has ended or cannot be reached: its own output"
        " says why; this process group is of no use any more"
    )


def _told(error: BaseException) -> tuple[list[str], str]:
    """Return the words of an error, and the nearest classes of ours that it is of."""
    if not isinstance(error, TensorferryError):
        return ["ReadError"], f"{type(error).__name__}: {shown(str(error), 1000)}"
    ours = [kind for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind]
    nearest = [kind for kind in ours if not any(issubclass(other, kind) for other in ours if other is not kind)]
    return [kind.__name__ for kind in nearest], str(error)


def _again(rank: int, ranks: int, found: tuple[list[str], str]) -> TensorferryError:
    """Return the error of a rank for all of them."""
    names, words = found
    kinds = tuple(getattr(errors, name) for name in names)
    kind: type[TensorferryError] = kinds[0] if len(kinds) == 1 else type(names[0], kinds, {})
    return kind(f"rank {rank} of {ranks}: {words}")
