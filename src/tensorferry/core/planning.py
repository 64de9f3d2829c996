"""Making a plan: matching a catalogue with a target under rules. Pure; collects every problem before it returns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product

from tensorferry.core.boxes import Shape
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.coverage import check_slots, uncovered
from tensorferry.core.dtypes import DTYPES, Kind
from tensorferry.core.lossy import changed_kind, unscaled
from tensorferry.core.made import resolved
from tensorferry.core.plan import Dropped, Plan, Step, Strictness
from tensorferry.core.ruleset import COMMON_LEFTOVERS, Destination, RuleSet
from tensorferry.core.steps import (
    as_numbers,
    cut_block,
    cut_in_words,
    dequantized,
    is_packed,
    is_placing,
    plain_copy,
    steps_of,
)
from tensorferry.core.strays import Strays, listed, suggestions
from tensorferry.core.target import Slot, Target, TargetTensor
from tensorferry.core.transforms import Concat, Stack, TensorSpec, Transform
from tensorferry.errors import PlanError
from tensorferry.problems import Problem, ProblemKind

__all__ = ["make_plan"]

_NO_RULES = RuleSet()


def make_plan(
    catalogue: Catalogue, target: Target, rules: RuleSet = _NO_RULES, *, strict: Strictness | None = None
) -> Plan:
    """Return the account of filling `target` from `catalogue`: every step, every drop, every problem.

    An entry goes where the first matching rule sends it, else to the parameter of its own name. Nothing is
    raised for what does not fit; see `Plan.raise_for_problems`.
    """
    planner = _Planner(target, rules, strict or Strictness())
    for entry in catalogue.values():
        planner.place(entry)
    return planner.finish()


class _Planner:
    """The collecting half of `make_plan`: filled entry by entry, then closed by `finish`."""

    def __init__(self, target: Target, rules: RuleSet, strict: Strictness) -> None:
        self.target = target
        self.rules = rules
        self.strict = strict
        self.steps: list[Step] = []
        self.dropped: list[Dropped] = []
        self.problems: list[Problem] = []
        self.fed: dict[tuple[str, str], str] = {}
        self.joins: dict[tuple[str, str], list[tuple[Destination, TensorEntry]]] = defaultdict(list)
        self.leftovers: list[tuple[str, str]] = []
        self.strays = Strays()
        self.by_alias: list[tuple[TensorEntry, Destination, bool]] = []

    def place(self, entry: TensorEntry) -> None:
        route = self.rules.route(entry.name)
        if route is not None and route.to:
            for destination in route.to:
                self._send(entry, destination, ruled=True)
        elif route is not None and route.dropped is not None:
            self.dropped.append(Dropped(entry.name, route.dropped))
        elif entry.name in self.target:
            self._send(entry, Destination(entry.name, "", None))
        else:
            common = route or COMMON_LEFTOVERS.route(entry.name)
            if common is not None and common.ignorable:
                self.dropped.append(Dropped(entry.name, common.ignorable))
            else:
                self.leftovers.append((entry.name, ""))

    def finish(self) -> Plan:
        for (parameter, slot), inputs in self.joins.items():
            self._join(parameter, slot, inputs)
        self.joins.clear()
        self._use_aliases()
        for (parameter, slot), inputs in self.joins.items():
            self._join(parameter, slot, inputs)
        owned = {t.name: t for t in self.target.values() if t.alias_of is None}
        for tensor in owned.values():
            self._close(tensor)
        self._report_leftovers(owned)
        specs = {t.name: TensorSpec(t.dtype, t.shape) for t in owned.values()}
        self._report_unscaled(specs)
        aliases = {t.name: self.owner_of(t) for t in self.target.values() if t.alias_of is not None}
        return Plan(tuple(map(resolved, self.steps)), specs, aliases, tuple(self.dropped), tuple(self.problems))

    def _send(self, entry: TensorEntry, to: Destination, *, ruled: bool = False) -> None:
        tensor = self.target.get(to.into)
        if tensor is None:
            common = COMMON_LEFTOVERS.route(to.into)
            if common is not None and common.ignorable:
                self.dropped.append(Dropped(entry.name, common.ignorable))
                return
            self.leftovers.append((entry.name, self.strays.lost(entry.name, to.into)))
            return
        if tensor.alias_of is not None:
            self.by_alias.append((entry, to._replace(into=self.owner_of(tensor)), ruled))
            return
        slot = tensor.slots.get(to.slot)
        if slot is None:
            self._no_such_slot(entry, tensor, to.slot, ruled=ruled)
        elif to.order is not None:
            self.joins[to.into, to.slot].append((to, entry))
        elif self._claim(to.into, to.slot, entry.name):
            self._add([entry], tensor, slot, to.via)

    def owner_of(self, tensor: TargetTensor) -> str:
        """Return the parameter that a tied tensor shares, however many ties away."""
        seen = [tensor.name]
        while tensor.alias_of is not None:
            owner = self.target.get(tensor.alias_of)
            if owner is None or owner.name in seen:
                raise PlanError(f"{seen[0]} is tied to {tensor.alias_of}, which is no parameter to be filled")
            seen.append(owner.name)
            tensor = owner
        return tensor.name

    def _no_such_slot(self, entry: TensorEntry, tensor: TargetTensor, slot: str, *, ruled: bool) -> None:
        if slot in tensor.absent:
            self.dropped.append(Dropped(entry.name, "not on this rank"))
        elif ruled:
            detail = self.strays.misplaced(entry.name, tensor, slot)
            self.problems.append(Problem(ProblemKind.UNEXPECTED, entry.name, detail))
        else:
            detail = (
                f"the parameter of this name is filled in parts, its slots {listed(tensor.slots)}; no rule says which"
            )
            self.leftovers.append((entry.name, detail))

    def _claim(self, parameter: str, slot: str, entry: str) -> bool:
        if (parameter, slot) not in self.fed:
            self.fed[parameter, slot] = entry
            return True
        self._ambiguous(parameter, slot, self.fed[parameter, slot], entry)
        return False

    def _ambiguous(self, parameter: str, slot: str, first: str, second: str) -> None:
        where = f"{parameter}[{slot}]" if slot else parameter
        detail = f"{first} and {second} both go to {where}; change the rules so that one of them does"
        self.problems.append(Problem(ProblemKind.AMBIGUOUS_RULE, parameter, detail))

    def _add(self, entries: Sequence[TensorEntry], tensor: TargetTensor, slot: Slot, via: Transform | None) -> None:
        if via is None and (step := plain_copy(entries[0], tensor, slot)) is not None:
            self.steps.append(step)
            return
        if unknown := [e for e in entries if e.dtype.kind is Kind.UNKNOWN]:
            self.problems += [_unsupported(entry, tensor) for entry in unknown]
            return
        numbers = tensor.dtype.kind is not Kind.PACKED and is_packed(entries)
        try:
            specs = [TensorSpec(e.dtype, e.shape) for e in entries]
            if numbers and len(entries) == 1:
                via = as_numbers(via, entries[0].shape)
            if numbers and len(entries) > 1:
                made = _joined_numbers(entries, slot, via)
            else:
                made = specs[0] if via is None else via.infer(specs)
        except ValueError as error:
            self.problems.append(Problem(ProblemKind.SHAPE, entries[0].name, f"for {tensor.name}: {error}"))
            return
        if made.shape != slot.logical and made.shape not in slot.also:
            self._misshapen(entries[0], tensor, slot, made.shape)
            return
        if (lossy := changed_kind(entries[0].name, made.dtype, tensor.dtype, self.strict)) is not None:
            self.problems.append(lossy)
        for copy in steps_of(entries, tensor.name, slot, via, made.shape):
            is_blocks = numbers and copy.via is None and is_packed([s.entry for s in copy.sources])
            step = dequantized(copy) if is_blocks else copy
            self.steps.append(step)
            if (cut := cut_block(step)) is not None:
                detail = f"{tensor.name} would take {cut_in_words(cut)}: split it elsewhere"
                self.problems.append(Problem(ProblemKind.SHAPE, cut.entry.name, detail))

    def _misshapen(self, entry: TensorEntry, tensor: TargetTensor, slot: Slot, found: Shape) -> None:
        whose = "the model expects" if slot.logical == tensor.shape else f"{tensor.name} expects"
        self.problems.append(
            Problem(ProblemKind.SHAPE, entry.name, f"the checkpoint has {found}, {whose} {slot.logical}")
        )

    def _join(self, parameter: str, slot: str, inputs: list[tuple[Destination, TensorEntry]]) -> None:
        inputs.sort(key=lambda pair: pair[0].order or ())
        first, entries = inputs[0], [entry for _, entry in inputs]
        if not self._claim(parameter, slot, entries[0].name):
            return
        for (to, one), (also, other) in pairwise(inputs):
            if to.order == also.order or (to.via, to.sources) != (also.via, also.sources):
                self._ambiguous(parameter, slot, one.name, other.name)
                return
        hole = _first_hole([to.order or () for to, _ in inputs], first[0].sources)
        if hole is not None:
            what = f"of the tensors that are joined into it, {hole} is absent"
            self.problems.append(Problem(ProblemKind.MISSING, parameter, what))
            return
        tensor = self.target[parameter]
        self._add(entries, tensor, tensor.slots[slot], first[0].via)

    def _use_aliases(self) -> None:
        """A tied tensor saved under another of its names fills the parameter; saved twice, one copy is used."""
        for entry, to, ruled in self.by_alias:
            has_slot = to.slot in self.target[to.into].slots
            if (to.into, to.slot) in self.fed or not (has_slot or ruled):
                self.dropped.append(Dropped(entry.name, f"tied to {to.into}"))
            else:
                self._send(entry, to, ruled=ruled)

    def _close(self, tensor: TargetTensor) -> None:
        wrong = check_slots(tensor)
        self.problems += wrong
        empty = [slot for slot in tensor.slots if (tensor.name, slot) not in self.fed]
        if empty:
            self._missing(tensor, empty)
        if tensor.default is not None and not wrong:
            self.steps += [Step(tensor.name, hole, (), fill=tensor.default) for hole in uncovered(tensor)]

    def _missing(self, tensor: TargetTensor, empty: Sequence[str]) -> None:
        """Report slots that nothing feeds, in one finding; all of them empty is said like a plain parameter."""
        details = []
        if len(empty) < len(tensor.slots):
            details = [f"nothing in the checkpoint feeds its slot{'s' if len(empty) > 1 else ''} {listed(empty)}"]
        details += self.strays.meant_for(tensor)
        fatal = self.strict.needs(tensor.name)
        self.problems.append(Problem(ProblemKind.MISSING, tensor.name, "; ".join(details), fatal=fatal))

    def _report_leftovers(self, owned: Target) -> None:
        missing = [p.subject for p in self.problems if p.kind is ProblemKind.MISSING]
        meant = suggestions(missing, [name for name, _ in self.leftovers])
        astray = self.strays.spelt_like(missing)
        self.problems = [
            _explained(p, meant.get(p.subject, ()), astray.get(p.subject, "")) if p.kind is ProblemKind.MISSING else p
            for p in self.problems
        ]
        strict = self.strict.unexpected == "error"
        stuck = any(p.kind is ProblemKind.MISSING and p.fatal for p in self.problems)
        for name, detail in self.leftovers:
            # Where parameters are missing, what rules lead nowhere is likely why.
            fatal = strict or (stuck and self.strays.untold(name))
            self.problems.append(Problem(ProblemKind.UNEXPECTED, name, detail, fatal=fatal))

    def _report_unscaled(self, specs: Mapping[str, TensorSpec]) -> None:
        self.problems += unscaled(self.steps, specs, [name for name, _ in self.leftovers], self.strict)


def _explained(missing: Problem, near: tuple[str, ...], astray: str) -> Problem:
    detail = "; ".join(filter(None, (missing.detail, astray)))
    return replace(missing, detail=detail, near=() if astray else near)


def _unsupported(entry: TensorEntry, tensor: TargetTensor) -> Problem:
    what = f"{entry.dtype}, which cannot be read here; {tensor.name} takes {tensor.dtype}"
    return Problem(ProblemKind.UNSUPPORTED_DTYPE, entry.name, what)


def _joined_numbers(entries: Sequence[TensorEntry], slot: Slot, via: Transform | None) -> TensorSpec:
    """Return what a join makes of packed entries, of any types, as numbers; ValueError where they are not dequantized
    one by one.
    """
    if isinstance(via, Stack | Concat):
        made = via.infer([TensorSpec(DTYPES["F32"] if is_packed([e]) else e.dtype, e.shape) for e in entries])
        if is_placing(slot, made.shape):
            return made
    raise ValueError("packed entries can be joined only by a stack or concat whose parts the parameter takes")


def _first_hole(orders: Sequence[tuple[int, ...]], sources: int) -> str | None:
    """Return in words the first input of a join that is not there, counting every number from 0."""
    have, most = set(orders), len(orders) + 1  # n inputs leave a hole among the first n + 1 numbers of any axis
    extents = [sources, *(min(max(o[d] for o in orders) + 1, most) for d in range(1, len(orders[0])))]
    for index in product(*map(range, extents)):
        if index not in have:
            which = f" {'.'.join(map(str, index[1:]))}" if index[1:] else ""
            return f"input{which} of its source {index[0]}"
    return None
