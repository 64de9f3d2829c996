"""Tracing: a model's own ``load_weights(iterable)`` is run once without values, and its copies become a plan.

What is no plain copy is *opaque*: it is named, left out of the plan, and streamed through the same loader
afterwards by `stream_opaque`. Reading and writing values happens elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn

from tensorferry.collector import collector_paused
from tensorferry.core.amounts import few
from tensorferry.core.boxes import strides_of
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.lossy import changed_kind, unscaled
from tensorferry.core.made import resolved
from tensorferry.core.plan import Dropped, Plan, Step, Strictness
from tensorferry.core.ruleset import COMMON_LEFTOVERS
from tensorferry.core.strays import suggestions
from tensorferry.core.target import Target, TargetTensor
from tensorferry.core.transforms import TensorSpec
from tensorferry.errors import ConfigError, FinalizeError, shown
from tensorferry.modules.containers import is_a
from tensorferry.modules.contents import Contents, Patch
from tensorferry.modules.describe import describe, dtensors_of, places, seen_as_plain
from tensorferry.modules.recorder import Memory, geometry, key_of
from tensorferry.modules.snapshot import Setting
from tensorferry.modules.traced_run import LoadWeights, Run, harm, run_loader, undone
from tensorferry.modules.traced_steps import fill_steps, steps_of
from tensorferry.modules.views import Copy, TooScattered
from tensorferry.numerics.torch_dtypes import dtype_of
from tensorferry.problems import Problem, ProblemKind

__all__ = ["LoadWeights", "Traced", "all_streamed", "ignored_by_loader", "stream_opaque", "trace"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Traced:
    """What a model's own loader does with a checkpoint.

    plan: everything that is plain copying. Its `parameters` are all of the model's; those named in `opaque` have
    no steps. opaque: what the loader has to fill itself, by name, and why. stream: the entries that it needs for
    that, in storage order. loaded: what it returned, None where that were no names. fallback: why nothing could be
    traced, so that the whole checkpoint is streamed and its completeness is not proven; None where it could.
    failed: whether that is an error of the loader's own, which it would most likely raise with values, too. failed_at:
    the entry that it had then, if any. settings: what the loader set on modules, such as flags for what it has found,
    and values from before for those that it sets only when it gets a part; `stream_opaque` sets them on the model,
    which tracing leaves as it was.
    """

    plan: Plan
    opaque: Mapping[str, str] = field(default_factory=dict)
    stream: tuple[str, ...] = ()
    loaded: frozenset[str] | None = None
    fallback: str | None = None
    failed: bool = False
    failed_at: str | None = None
    settings: tuple[Setting, ...] = ()

    def settle(self, model: nn.Module) -> None:
        """Set on the modules of `model` what the loader set when it was traced; what cannot be set again is logged."""
        for setting in self.settings:
            try:
                setting.put_on(model)
            except Exception as error:  # noqa: BLE001 - whatever a module's own `__setattr__` raises
                _log.warning("%s, which the model's loader set, could not be set again: %s", setting.name, error)


@collector_paused()
def trace(
    model: nn.Module,
    catalogue: Catalogue,
    *,
    load_weights: LoadWeights | None = None,
    strict: Strictness | None = None,
    names: Collection[str] | None = None,
    target: Target | None = None,
) -> Traced:
    """Return what the loader of `model` would do with `catalogue`, without reading or writing a value.

    model: on meta or not; neither its tensors nor its attributes are changed. load_weights: the loader, by default
    ``model.load_weights``. names: the entries to offer to it, by default all. target: what `describe` says of `model`,
    where that is known. Nothing is raised for what does not fit (see `Plan.raise_for_problems`), nor for a loader that
    cannot be followed: `Traced.fallback` says why.
    Raises ConfigError where there is no loader. Work that the loader does in other threads is not seen.
    """
    loader = _loader_of(model, load_weights)
    entries = [e for e in catalogue.values() if names is None or e.name in names]
    target = describe(model) if target is None else target
    if dtensors := dtensors_of(model):
        fills = f"fills DTensors ({few(dtensors, 3)}), and what it does to those is not followed"
        return _everything_streamed(target, entries, fills)
    run = run_loader(model, loader, entries)
    _log.debug("traced %d entries through %s", len(entries), type(model).__name__)
    if run.unfollowed is not None:
        return _everything_streamed(target, entries, run.unfollowed, run)
    account = _Account(target, strict or Strictness(), entries)
    with seen_as_plain():
        for name, tensor in _owned(model, target):
            if name not in run.kept and not run.takes_off(tensor):
                account.settle(target[name], tensor, run.memory[key_of(tensor)])
    account.add_opaque_leftovers(run)
    stream = [e for e in entries if e.name in account.stream]
    settings = run.settings
    if account.opaque and len(stream) < len(entries):
        part = run_loader(model, loader, stream)
        why = harm(run, part)
        if why is not None:
            return _everything_streamed(target, entries, why, run)
        settings += undone(run, part)
    return Traced(account.plan(run), account.opaque, tuple(e.name for e in stream), run.loaded, settings=settings)


def stream_opaque(
    model: nn.Module,
    traced: Traced,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    load_weights: LoadWeights | None = None,
) -> Any:
    """Fill what is opaque, by the model's own loader; after the plan has run. Return what the loader returned.

    tensors: the entries named in `traced.stream`, in that order; others are passed over. Where nothing is opaque, the
    loader is not run. In the end the model gets what the loader noted when it was traced. Raises FinalizeError where
    the loader asked for all entries and some never came.
    """
    result = _streamed(model, traced, tensors, load_weights) if traced.opaque else None
    traced.settle(model)
    return result


def _streamed(
    model: nn.Module, traced: Traced, tensors: Iterable[tuple[str, torch.Tensor]], load_weights: LoadWeights | None
) -> Any:
    wanted, left = set(traced.stream), dict.fromkeys(traced.stream)
    ended, at = False, ""

    def offered() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal ended, at
        for name, tensor in tensors:
            if name in wanted:
                left.pop(name, None)
                at = name
                yield name, tensor
        ended = True

    try:
        with torch.no_grad():
            result = _loader_of(model, load_weights)(offered())
            result = set(result) if isinstance(result, Iterator) else result
    except Exception as error:
        error.add_note(f"tensorferry: the model's loader had entry {shown(at)!r} when this happened")
        raise
    if ended and left:
        raise FinalizeError(
            f"{len(left)} entries that the model's loader needs were not streamed to it, the first is "
            f"{shown(next(iter(left)))!r}: pass all that `Traced.stream` names"
        )
    return result


def _loader_of(model: nn.Module, given: LoadWeights | None) -> LoadWeights:
    found = given or getattr(model, "load_weights", None)
    if not callable(found):
        raise ConfigError(f"{type(model).__name__} has no load_weights(iterable) that could be traced: pass one")
    loader: LoadWeights = found
    return loader


def _owned(model: nn.Module, target: Target) -> Iterator[tuple[str, torch.Tensor]]:
    for place in places(model):
        if place.persistent and target[place.name].alias_of is None:
            yield place.name, place.tensor


class _Account:
    """Collects steps, opaque parameters and problems, parameter by parameter."""

    def __init__(self, target: Target, strict: Strictness, entries: Sequence[TensorEntry]) -> None:
        self.target = target
        self.strict = strict
        self.order = {e.name: i for i, e in enumerate(entries)}
        self.steps: list[Step] = []
        self.problems: list[Problem] = []
        self.opaque: dict[str, str] = {}
        self.stream: set[str] = set()

    def settle(self, wanted: TargetTensor, tensor: torch.Tensor, memory: Memory) -> None:
        """Decide about one parameter: steps, opaque, or missing."""
        spec = TensorSpec(wanted.dtype, wanted.shape)
        found = memory.opaque or memory.contents.lost or self._steps(wanted.name, spec, tensor, memory.contents)
        if isinstance(found, str):
            self.opaque[wanted.name] = found
            self._stream(memory)
            return
        self.steps += found
        self._check_coverage(wanted, sum(s.into.size for s in found))
        self._check_casts(wanted, found)

    def _stream(self, memory: Memory) -> None:
        self.stream |= memory.contents.taint | memory.during

    def _steps(self, name: str, spec: TensorSpec, tensor: torch.Tensor, held: Contents) -> list[Step] | str:
        """Return the steps that leave the parameter as the loader does, or why there are none."""
        if not held.touched:
            return []
        if dtype_of(tensor.dtype) != held.dtype or tuple(tensor.shape) != spec.shape:
            return f"shares its memory with another type, or is packed {spec.dtype}"
        patches: Sequence[Patch] = held.patches
        if geometry(tensor) != (0, strides_of(spec.shape)) or prod(spec.shape) != held.size:
            try:
                patches = held.covered(Copy.of(spec.shape, (0, strides_of(spec.shape)), geometry(tensor)))
            except TooScattered:
                return "is filled irregularly"
        steps: list[Step] = []
        for patch in patches:
            if patch.rounded not in (None, spec.dtype):
                return f"is rounded to {patch.rounded} on its way to {spec.dtype}"
            more = steps_of(name, spec, patch)
            if more is None:
                return "is regrouped in too many pieces"
            steps += more
        rest = fill_steps(name, spec, steps, held.base) if held.base is not None else []
        return "is filled irregularly" if rest is None else [*rest, *steps]

    def _check_coverage(self, wanted: TargetTensor, covered: int) -> None:
        total = prod(wanted.shape)
        if covered == total:
            return
        fatal = self.strict.needs(wanted.name)
        detail = f"the model's loader fills {covered:,} of its {total:,} elements" if covered else ""
        self.problems.append(Problem(ProblemKind.MISSING, wanted.name, detail, fatal=fatal))

    def _check_casts(self, wanted: TargetTensor, steps: Iterable[Step]) -> None:
        for entry in {s.entry.name: s.entry for step in steps for s in step.sources}.values():
            if (lossy := changed_kind(entry.name, entry.dtype, wanted.dtype, self.strict)) is not None:
                self.problems.append(lossy)

    def add_opaque_leftovers(self, run: Run) -> None:
        """Name what the loader filled beside parameters and persistent buffers; no plan can do that."""
        for memory in (*run.memory.values(), *run.loose):
            if memory.contents.touched and not any(label in self.target for label in memory.labels):
                self.opaque[memory.labels[0]] = memory.opaque or "is no parameter, and filled by the loader"
                self._stream(memory)
        others = {c.name for c in run.changes if not is_a(c.value, torch.Tensor)}
        for name, kept in run.kept.items():
            what = "what no plan can make" if name in others else "a tensor of its own"
            self.opaque[name] = f"is set by the loader to {what}"
            self.stream |= kept.entries

    def plan(self, run: Run) -> Plan:
        """Return the plan of all that was settled."""
        self.steps.sort(key=lambda s: self.order[s.sources[0].entry.name] if s.sources else -1)
        used = {s.entry.name for step in self.steps for s in step.sources} | self.stream
        seen = {name for memory in run.memory.values() for name in memory.contents.taint}
        dropped, unexpected = [], []
        for name in (n for n in self.order if n not in used):
            route = COMMON_LEFTOVERS.route(name)
            if name in seen:
                dropped.append(Dropped(name, "what the model's loader copies of it is overwritten later"))
            elif route is not None:
                dropped.append(Dropped(name, route.ignorable or ""))
            else:
                unexpected.append(ignored_by_loader(name, self.strict))
        parameters, aliases = _described(self.target)
        left = [problem.subject for problem in unexpected]
        spoiled = unscaled(self.steps, parameters, left, self.strict)
        problems = (*_with_near(self.problems, unexpected), *unexpected, *spoiled)
        return Plan(tuple(map(resolved, self.steps)), parameters, aliases, tuple(dropped), problems)


def ignored_by_loader(name: str, strict: Strictness) -> Problem:
    """Return the finding of an entry that a model's own loader takes nothing of: unexpected, as in any other plan."""
    fatal = strict.unexpected == "error"
    return Problem(ProblemKind.UNEXPECTED, name, "the model's loader ignores it", fatal=fatal)


def _with_near(problems: Sequence[Problem], unexpected: Sequence[Problem]) -> list[Problem]:
    """Return `problems`, the missing ones with the unexpected names that may have been meant."""
    missing = [p.subject for p in problems if p.kind is ProblemKind.MISSING]
    near = suggestions(missing if unexpected else (), [p.subject for p in unexpected])
    return [replace(p, near=near.get(p.subject, p.near)) for p in problems]


def _described(target: Target) -> tuple[Mapping[str, TensorSpec], Mapping[str, str]]:
    owned = {t.name: TensorSpec(t.dtype, t.shape) for t in target.values() if t.alias_of is None}
    return owned, {t.name: t.alias_of for t in target.values() if t.alias_of is not None}


def _everything_streamed(target: Target, entries: Sequence[TensorEntry], why: str, run: Run | None = None) -> Traced:
    """Return the account of a load that is left to the model's loader altogether."""
    streamed = all_streamed(
        target, [e.name for e in entries], f"everything is streamed, because the model's loader {why}"
    )
    streamed = replace(streamed, fallback=why)
    return streamed if run is None else replace(streamed, loaded=run.loaded, failed=run.failed, failed_at=run.failed_at)


def all_streamed(target: Target, entries: Iterable[str], reason: str) -> Traced:
    """Return the account of a load in which all `entries` are streamed, and every parameter is opaque for `reason`."""
    parameters, aliases = _described(target)
    return Traced(Plan((), parameters, aliases), dict.fromkeys(parameters, reason), tuple(entries))
