"""Watching a model's own loader at work with real values: which elements it writes, and which tensors it looks at.

Every torch operation is seen, by the memory that it writes and reads, so it does not matter what the loader says of
itself, through which view it writes, or whether it writes ``param.data``. Other threads and code that writes to
memory without torch are not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tensorferry.core.boxes import strides_of
from tensorferry.modules.contents import Contents
from tensorferry.modules.describe import places
from tensorferry.modules.distributed import memory_of
from tensorferry.modules.operations import Sort, sort_of, tensors_in, written_by
from tensorferry.modules.recorder import key_of
from tensorferry.modules.views import Copy, TooScattered
from tensorferry.numerics.torch_dtypes import dtype_of

__all__ = ["Share", "Watch"]


class Share(NamedTuple):
    """How many elements of a tensor were written, and how many it has, as torch counts them."""

    written: int
    total: int


@dataclass(slots=True)
class _Watched:
    """Memory of the model, kept alive even if a parameter gets another one, so that its number is not given away."""

    alive: torch.Tensor
    contents: Contents

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Watched:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(tensor.detach(), Contents(dtype_of(tensor.dtype), size))


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, notes what is written to the parameters and persistent buffers of `model`, which are on a device.

    Element-exact for views that are regular; what is written in an irregular order counts as whole. Of DTensors, what
    is written of the local parts counts.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._before: dict[str, int] = {}
        self._memory: dict[int, _Watched] = {}
        for place in places(model):
            if place.persistent:
                memory = memory_of(place.tensor)
                key = self._before[place.name] = key_of(memory)
                self._memory.setdefault(key, _Watched.of(memory))
        self._offered: dict[int, tuple[str, StorageWeakRef]] = {}
        self._used: set[str] = set()

    def offer(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `tensors` on, and note from now on whether anything looks at their values."""
        for name, tensor in tensors:
            # A weak reference keeps the number from being given to other memory, and keeps no values.
            kept = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._offered[key_of(tensor)] = (name, kept)
            if not tensor.numel():
                self._used.add(name)
            yield name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if sort_of(func) is not Sort.VIEW:
            written = written_by(func, args, kwargs)
            for tensor in written:
                self._note_write(memory_of(tensor))
            for tensor in tensors_in(args, kwargs):
                if not any(tensor is w for w in written):
                    self._note_use(memory_of(tensor))
        return result

    def unused(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that were never offered, or whose values nothing looked at or kept."""
        kept = {key_of(memory_of(place.tensor)) for place in places(self._model)}
        used = self._used | {name for key, (name, _) in self._offered.items() if key in kept}
        return [name for name in names if name not in used]

    def written(self) -> Mapping[str, Share]:
        """Return how much of each tensor was written, by name; all of one that was replaced by another."""
        hanging = {p.name: memory_of(p.tensor) for p in places(self._model) if p.persistent}
        return {name: Share(self._written(name, tensor), tensor.numel()) for name, tensor in hanging.items()}

    def _written(self, name: str, now: torch.Tensor) -> int:
        if key_of(now) != self._before.get(name):
            return 0 if now.is_meta else now.numel()
        contents = self._memory[key_of(now)].contents
        if contents.lost is not None or contents.base is not None:
            return now.numel()
        try:
            found = contents.covered(Copy.of(now.shape, (0, strides_of(now.shape)), _positions(now)))
        except TooScattered:
            return now.numel()
        return sum(patch.copy.size for patch in found)

    def _note_write(self, tensor: torch.Tensor) -> None:
        watched = self._memory.get(key_of(tensor))
        if watched is None:
            return
        contents = watched.contents
        if dtype_of(tensor.dtype) != contents.dtype:
            contents.lose("is written through a view of another type")
            return
        contents.fill(Copy.of(tensor.shape, _positions(tensor), _positions(tensor)), 0.0)

    def _note_use(self, tensor: torch.Tensor) -> None:
        offered = self._offered.get(key_of(tensor))
        if offered is not None:
            self._used.add(offered[0])


def _positions(tensor: torch.Tensor) -> tuple[int, Sequence[int]]:
    return int(tensor.storage_offset()), tensor.stride()
