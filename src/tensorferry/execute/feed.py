"""A plan the other way round: somebody else brings the tensors, and the plan says where they go."""

from __future__ import annotations

from collections import defaultdict

import torch

from tensorferry.core.amounts import counted
from tensorferry.core.boxes import Box, Region
from tensorferry.core.plan import Plan, Step
from tensorferry.errors import PlanError, shown
from tensorferry.execute.base import Counters, OnReady, Parameters, Remaining
from tensorferry.execute.placing import region_of, write
from tensorferry.execute.simple import made_of
from tensorferry.numerics.casts import fill
from tensorferry.numerics.torch_dtypes import torch_dtype, torch_shape

__all__ = ["Feeder"]


class Feeder:
    """Fills parameters from tensors that are pushed: by a trainer, a third-party reader, another process.

    Tensors are copied at once and not kept, but for inputs of a transform that waits for others: those must not be
    written to until then. Parameters and tensors may require gradients; neither gets any from this.
    """

    def __init__(self, plan: Plan, parameters: Parameters, *, on_ready: OnReady | None = None) -> None:
        self._plan = plan
        self._parameters = parameters
        self._on_ready = on_ready
        self._remaining = Remaining.of_steps(plan)
        self._steps: dict[str, list[Step]] = defaultdict(list)
        self._fed: set[str] = set()
        self._held: dict[str, torch.Tensor] = {}
        self._counters = Counters()
        for step in plan.steps:
            for name in dict.fromkeys(s.entry.name for s in step.sources):
                self._steps[name].append(step)
            if not step.sources:
                fill(self._target(step), step.fill)
                self._done(step)

    def feed(self, name: str, tensor: torch.Tensor) -> bool:
        """Take the whole entry `name`; return whether the plan has a use for it.

        Raises PlanError where shape or dtype are not those the plan was made for, or the entry came before.
        """
        steps = self._steps.get(name)
        if steps is None:
            return False
        if name in self._fed:
            raise PlanError(f"tensor {shown(name)!r} was fed twice")
        self._check(name, steps[0], tensor)
        self._fed.add(name)
        self._held[name] = tensor
        self._counters.bytes_read += tensor.nbytes
        for step in steps:
            if self._complete(step):
                self._fill(step)
        for used in {s.entry.name for step in steps for s in step.sources}:
            if used in self._held and all(map(self._complete, self._steps[used])):
                del self._held[used]
        return True

    def finish(self) -> Counters:
        """Return what was done; raises PlanError naming the entries that never came."""
        never = sorted(self._steps.keys() - self._fed)
        if never:
            was = "was" if len(never) == 1 else "were"
            raise PlanError(f"{counted(len(never), 'tensor')} {was} never fed: {', '.join(map(shown, never[:5]))}")
        return self._counters

    def _check(self, name: str, step: Step, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            found = "a tensor on meta" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise PlanError(f"tensor {shown(name)!r} was fed as {found}: a tensor with values is expected")
        entry = next(s.entry for s in step.sources if s.entry.name == name)
        if tensor.dtype != torch_dtype(entry.dtype) or tuple(tensor.shape) != torch_shape(entry.dtype, entry.shape):
            raise PlanError(
                f"tensor {shown(name)!r} was fed as {tensor.dtype} {tuple(tensor.shape)}, "
                f"but the plan was made for {entry.dtype} {entry.shape}"
            )

    def _fill(self, step: Step) -> None:
        values = made_of(step, [self._held[s.entry.name] for s in step.sources])
        shape = tuple(values.shape)
        loss = write(self._target(step), values, Box.whole(shape), Region.whole(shape))
        self._counters.lost(step.parameter, loss)
        self._done(step)

    def _complete(self, step: Step) -> bool:
        return all(s.entry.name in self._fed for s in step.sources)

    def _target(self, step: Step) -> torch.Tensor:
        return region_of(self._parameters[step.parameter], step.into, self._plan.parameters[step.parameter].dtype)

    def _done(self, step: Step) -> None:
        if self._remaining.done(step.parameter) and self._on_ready is not None:
            self._on_ready(step.parameter)
