"""A plan for one checkpoint made one for another of the same names, types and shapes. Values only, no planning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tensorferry.core.amounts import counted
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.plan import Plan, Source, Step
from tensorferry.errors import PlanError, shown

__all__ = ["rebased", "refuse_differences"]

_LISTED = 5


def rebased(plan: Plan, catalogue: Catalogue) -> Plan | None:
    """Return `plan` with the entries of `catalogue` in place of those of the same names.

    None where that is not the plan that would be made: an entry is not there, has another type or shape, is made of
    others, or lies in a row-major span in one of both only.
    """
    if not all(_stands_for(catalogue.get(s.entry.name), s.entry) for step in plan.steps for s in step.sources):
        return None
    steps = tuple(_moved(step, catalogue) for step in plan.steps)
    return plan if steps == plan.steps else replace(plan, steps=steps)


def _stands_for(new: TensorEntry | None, old: TensorEntry) -> bool:
    if new is None or new.made is not None or old.made is not None:
        return False
    return (new.dtype, new.shape, new.span is None) == (old.dtype, old.shape, old.span is None)


def _moved(step: Step, catalogue: Catalogue) -> Step:
    return step._replace(sources=tuple(Source(catalogue[s.entry.name], s.region) for s in step.sources))


def refuse_differences(before: Catalogue, now: Catalogue, where: str) -> None:
    """Raise PlanError where the entries of two catalogues differ in names, types or shapes."""
    found = list(_differences(before, now))
    if found:
        more = f"\n  … and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        listed = "".join(f"\n  {line}" for line in found[:_LISTED])
        raise PlanError(
            f"{shown(where, 300)}: not laid out as the checkpoint that the plan is for: "
            f"{counted(len(found), 'difference')}; the model was not touched; plan anew with another Reloader"
            f"{listed}{more}"
        )


def _differences(before: Catalogue, now: Catalogue) -> Iterator[str]:
    for name, old in before.items():
        new = now.get(name)
        if new is None:
            yield f"{shown(name)} is not there"
        elif (new.dtype, new.shape) != (old.dtype, old.shape):
            yield f"{shown(name)} is {new.dtype} {new.shape}, and was {old.dtype} {old.shape}"
    for name in now:
        if name not in before:
            yield f"{shown(name)} is new"
