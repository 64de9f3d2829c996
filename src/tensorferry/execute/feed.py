"""A plan the other way round: somebody else brings the tensors, and the plan says where they go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tensorferry.core.amounts import counted
from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import TensorEntry
from tensorferry.core.overlaps import shared_runs, shared_size
from tensorferry.core.plan import Plan, Step
from tensorferry.errors import PlanError, shown
from tensorferry.execute.base import Counters, OnReady, Parameters, Remaining
from tensorferry.execute.placing import region_of, write
from tensorferry.execute.simple import made_of
from tensorferry.numerics.casts import Loss, fill
from tensorferry.numerics.memory import view_region, zeros_of
from tensorferry.numerics.torch_dtypes import torch_dtype, torch_shape
from tensorferry.numerics.units import to_torch

__all__ = ["Feeder"]

_LISTED = 5


class Feeder:
    """Fills parameters from tensors that are pushed: by a trainer, a third-party reader, another process.

    Whole entries or parts of them come in any order. They are copied at once and not kept, but for inputs of a
    transform that waits for more: whole ones are kept as they are, and must not be written to until then, unless they
    are `borrowed`, which copies what has to wait. Parameters and tensors may require gradients; neither gets any.
    """

    def __init__(
        self, plan: Plan, parameters: Parameters, *, on_ready: OnReady | None = None, borrowed: bool = False
    ) -> None:
        self._plan = plan
        self._parameters = parameters
        self._on_ready = on_ready
        self._borrowed = borrowed
        self._remaining = Remaining.of_steps(plan)
        self._left = [0] * len(plan.steps)
        self._entries: dict[str, _Awaited] = {}
        self._holding: dict[str, _Awaited] = {}
        self._counters = Counters()
        for number, step in enumerate(plan.steps):
            for entry, region in step.sources:
                want = _Want(number, to_torch(region, entry.dtype))
                self._left[number] += want.region.size
                self._entries.setdefault(entry.name, _Awaited(entry)).wants.append(want)
            if not self._left[number]:
                if not step.sources:
                    fill(self._target(step), step.fill)
                elif step.via is not None and step.into.size:
                    self._transform(step)  # of inputs without elements
                self._done(step)

    def feed(self, name: str, tensor: torch.Tensor, region: Region | None = None) -> bool:
        """Take the entry `name`, or the part `region` of it; return whether the plan has a use for the entry.

        region: counted in elements of the entry; `tensor` has the shape of its box.

        Raises PlanError where shape or dtype are not those the plan was made for, or an element came before; nothing
        is taken then.
        """
        awaited = self._entries.get(name)
        if awaited is None:
            return False
        part = awaited.accept(tensor, region)
        self._counters.bytes_read += tensor.nbytes
        tensor = tensor.detach()
        if any(self._plan.steps[want.step].via is not None for want in awaited.wants):
            awaited.hold(tensor, part)
            self._holding[name] = awaited
        for want in awaited.wants:
            self._advance(want, tensor, part)
        if self._borrowed and awaited.held is not None and part.is_whole:
            awaited.held = awaited.held.clone()
        self._counters.staging_peak = max(self._counters.staging_peak, self.held_bytes)
        return True

    @property
    def held_bytes(self) -> int:
        """Bytes that are kept for transforms that wait."""
        return sum(awaited.held.nbytes for awaited in self._holding.values() if awaited.held is not None)

    def finish(self) -> Counters:
        """Return what was done; raises PlanError naming the entries of which something that is needed never came."""
        short = dict(self._short())
        if not short:
            return self._counters
        was = "was" if len(short) == 1 else "were"
        listed = ", ".join(shown(name) + part for name, part in sorted(short.items())[:_LISTED])
        raise PlanError(f"{counted(len(short), 'tensor')} {was} never fed: {listed}")

    def _short(self) -> Iterator[tuple[str, str]]:
        """Yield the entries of which something is missing, with how much of them, if some came."""
        for name, awaited in self._entries.items():
            if any(self._left[want.step] for want in awaited.wants):
                missing, needed = awaited.missing()
                if missing:
                    yield name, f" ({missing:,} of {needed:,} elements)" if awaited.fed else ""

    def _advance(self, want: _Want, tensor: torch.Tensor, part: Region) -> None:
        """Do for one step what a part of an entry is good for, and all that is left where nothing else is missing."""
        new = shared_size(part, want.region)
        if not new:
            return
        step = self._plan.steps[want.step]
        if step.via is None:
            self._counters.lost(step.parameter, _write_part(self._target(step), want.region, tensor, part))
        self._left[want.step] -= new
        if not self._left[want.step]:
            if step.via is not None:
                self._transform(step)
            self._done(step)

    def _transform(self, step: Step) -> None:
        names = [source.entry.name for source in step.sources]
        values = made_of(step, [self._entries[name].whole() for name in names])
        shape = tuple(values.shape)
        loss = write(self._target(step), values, Box.whole(shape), Region.whole(shape))
        self._counters.lost(step.parameter, loss)
        for name in names:
            if not any(self._left[w.step] and self._plan.steps[w.step].via for w in self._entries[name].wants):
                self._entries[name].held = None
                self._holding.pop(name, None)

    def _target(self, step: Step) -> torch.Tensor:
        return region_of(self._parameters[step.parameter], step.into, self._plan.parameters[step.parameter].dtype)

    def _done(self, step: Step) -> None:
        if self._remaining.done(step.parameter) and self._on_ready is not None:
            self._on_ready(step.parameter)


class _Want(NamedTuple):
    """A region of an entry, in torch elements, that the step of that number takes."""

    step: int
    region: Region


@dataclass(slots=True)
class _Awaited:
    """An entry that a plan needs: what is wanted of it, which parts came, and the values that are kept meanwhile."""

    entry: TensorEntry
    wants: list[_Want] = field(default_factory=list)
    fed: list[Region] = field(default_factory=list)
    held: torch.Tensor | None = None

    def accept(self, tensor: torch.Tensor, region: Region | None) -> Region:
        """Note that a part came and return it, or raise PlanError."""
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            found = "a tensor on meta" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise PlanError(f"tensor {self.name!r} was fed as {found}: a tensor with values is expected")
        part, what = self._region(region)
        shape = torch_shape(self.entry.dtype, self.entry.shape) if region is None else part.shape
        if tensor.dtype != torch_dtype(self.entry.dtype) or tuple(tensor.shape) != shape:
            meant = self.entry.shape if region is None else region.shape
            raise PlanError(
                f"{what} was fed as {tensor.dtype} {tuple(tensor.shape)}, "
                f"but the plan was made for {self.entry.dtype} {meant}"
            )
        if any(shared_size(part, earlier) for earlier in self.fed):
            raise PlanError(f"{what} was fed twice")
        self.fed.append(part)
        return part

    def hold(self, tensor: torch.Tensor, part: Region) -> None:
        """Keep a part for the transforms that need it."""
        if part.is_whole:
            self.held = tensor.reshape(torch_shape(self.entry.dtype, self.entry.shape))
            return
        if self.held is None:
            self.held = self._zeros(tensor.device)
        view_region(self.held, part).copy_(tensor)

    def whole(self) -> torch.Tensor:
        """Return the whole entry, zero where nothing came, which is where nothing is needed."""
        return self._zeros(torch.device("cpu")) if self.held is None else self.held

    def missing(self) -> tuple[int, int]:
        """Return how many of the elements that are wanted never came, and how many are wanted."""
        wanted = sum(want.region.size for want in self.wants)
        return wanted - sum(shared_size(part, want.region) for part in self.fed for want in self.wants), wanted

    @property
    def name(self) -> str:
        return shown(self.entry.name)

    def _region(self, region: Region | None) -> tuple[Region, str]:
        """Return the part that `region` is, and what messages call it."""
        if region is None:
            return Region.whole(torch_shape(self.entry.dtype, self.entry.shape)), f"tensor {self.name!r}"
        what = f"part {region.box.slices} of tensor {self.name!r}"
        if not region.fits(self.entry.shape):
            raise PlanError(f"{what}, seen as {region.view}, is no part of its shape {self.entry.shape}")
        try:
            return to_torch(region, self.entry.dtype), what
        except ValueError as error:
            raise PlanError(f"{what}: {error}") from None

    def _zeros(self, device: torch.device) -> torch.Tensor:
        return zeros_of(self.entry.dtype, self.entry.shape, device)


def _write_part(into: torch.Tensor, wanted: Region, values: torch.Tensor, part: Region) -> Loss:
    """Write what `values`, which are `part` of an entry, have of the region `wanted` of it, which `into` takes."""
    if part.is_whole:
        return write(into, view_region(values.contiguous(), wanted), wanted.box, wanted)
    if part.view == wanted.view:
        common = part.box.meet(wanted.box)
        assert common is not None
        return write(into, values[common.relative_to(part.box).slices], common, wanted)
    flat, whole, loss = values.reshape(-1), Region.whole((wanted.size,)), Loss()
    for at, first, length in shared_runs(part, wanted):
        loss += write(into, flat[at : at + length], Box((first,), (first + length,)), whole)
    return loss
