"""What is to be done to fill a vLLM model from a checkpoint, found out before anything is touched."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from tensorferry import api
from tensorferry.checkpoint import Checkpoint
from tensorferry.compat.vllm.expectations import HasDefaultScales, computed, padded_only, without_computed
from tensorferry.config import LoadConfig
from tensorferry.core.plan import describe_problems
from tensorferry.core.strays import suggestions
from tensorferry.errors import PlanError, shown
from tensorferry.loaders.own_loader import SelfLoad, prepare_own
from tensorferry.loaders.reading import OwnReading
from tensorferry.modules.finalize import hooked_modules
from tensorferry.modules.trace import Traced, trace
from tensorferry.problems import Problem, ProblemKind

__all__ = ["Planned", "planned"]

_TRIES = 5
"""Entries that are left out one after the other, to see what else the loader cannot take."""

_HINT = (
    "if the loader fails only because it has no values while it is traced, give model_loader_extra_config "
    """{"own_loader": "stream"}"""
)


@dataclass(frozen=True, slots=True)
class Planned:
    """A load that can begin. computed: tensors that are left as the constructor made them, with the reason."""

    own: SelfLoad
    computed: dict[str, str]


def planned(
    model: nn.Module, checkpoint: Checkpoint, config: LoadConfig, has_default_scales: HasDefaultScales
) -> Planned:
    """Trace the ``load_weights`` of `model` on `model` itself, and return what follows. Touches nothing.

    Raises PlanError with every problem; also where the loader fails, as it would when half of the model is filled.
    """
    left = computed(model, has_default_scales)
    strict = replace(config.strictness, may_miss=(*config.strictness.may_miss, *left))
    own = prepare_own(model, checkpoint, config, strict, OwnReading(config))
    if own.traced.failed:
        raise _refused(model, checkpoint, own.traced)
    filled = set(own.traced.opaque) | {step.parameter for step in own.traced.plan.steps}
    plan = without_computed(padded_only(model, own.prepared.plan), left)
    # vLLM runs the hooks itself, in its own order.
    own.prepared = replace(own.prepared, plan=plan, strict=config.strictness, processed=tuple(hooked_modules(model)))
    api.refuse_misfit(own.prepared)
    return Planned(own, {name: why for name, why in left.items() if name not in filled})


def _refused(model: nn.Module, checkpoint: Checkpoint, traced: Traced) -> PlanError:
    """Return what to raise where the model's loader fails: at which entries, and what is missing then."""
    failures: dict[str, Problem] = {}
    while traced.failed and len(failures) < _TRIES:
        at = traced.failed_at or ""
        if at in failures:
            break
        failures[at] = Problem(ProblemKind.UNEXPECTED, at or "(all entries)", f"the model's loader {traced.fallback}")
        traced = trace(model, checkpoint.catalogue, names=checkpoint.catalogue.keys() - failures.keys())
    rest = [] if traced.failed else [p for p in traced.plan.fatal if p.kind is not ProblemKind.UNEXPECTED]
    near = suggestions([p.subject for p in rest if p.kind is ProblemKind.MISSING], list(failures))
    problems = [*failures.values(), *(replace(p, near=near.get(p.subject, p.near)) for p in rest)]
    return PlanError(f"{shown(checkpoint.uri, 300)}: {describe_problems(problems)}\n  {_HINT}", problems)
