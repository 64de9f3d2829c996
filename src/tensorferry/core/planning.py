"""Making a plan: matching a catalogue with a target under rules. Pure; collects every problem before it returns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from tensorferry.core import rules as r
from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.coverage import check_slots, uncovered
from tensorferry.core.dtypes import Cast, DType, cast_kind
from tensorferry.core.names import nearest, template_of
from tensorferry.core.plan import Dropped, Plan, Source, Step, Strictness
from tensorferry.core.ruleset import COMMON_LEFTOVERS, Destination, RuleSet
from tensorferry.core.target import Slot, Target, TargetTensor
from tensorferry.core.transforms import Take, TensorSpec, Transform
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
        self.by_alias: list[tuple[TensorEntry, str]] = []
        self.casts: dict[tuple[DType, DType], Cast] = {}

    def place(self, entry: TensorEntry) -> None:
        route = self.rules.route(entry.name)
        if route is not None and route.to:
            for destination in route.to:
                self._send(entry, destination)
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
        self._use_aliases()
        owned = {t.name: t for t in self.target.values() if t.alias_of is None}
        for tensor in owned.values():
            self._close(tensor)
        self._report_leftovers(owned)
        specs = {t.name: TensorSpec(t.dtype, t.shape) for t in owned.values()}
        aliases = {t.name: t.alias_of for t in self.target.values() if t.alias_of is not None}
        return Plan(tuple(self.steps), specs, aliases, tuple(self.dropped), tuple(self.problems))

    def _send(self, entry: TensorEntry, to: Destination) -> None:
        tensor = self.target.get(to.into)
        if tensor is None:
            meant = "" if to.into == entry.name else f"a rule sends it to {to.into}, which the model does not have"
            self.leftovers.append((entry.name, meant))
            return
        if tensor.alias_of is not None:
            self.by_alias.append((entry, tensor.alias_of))
            return
        slot = tensor.slots.get(to.slot)
        if slot is None:
            self._no_such_slot(entry, tensor, to.slot)
        elif to.order is not None:
            self.joins[to.into, to.slot].append((to, entry))
        elif self._claim(to.into, to.slot, entry.name):
            self._add([entry], tensor, slot, to.via)

    def _no_such_slot(self, entry: TensorEntry, tensor: TargetTensor, slot: str) -> None:
        if slot in tensor.absent:
            self.dropped.append(Dropped(entry.name, "not on this rank"))
        else:
            known = ", ".join(map(repr, list(tensor.slots)[:4])) or "none"
            what = f"slot {slot!r}" if slot else "an unnamed slot"
            self.leftovers.append((entry.name, f"{tensor.name} has no {what.removeprefix('an ')}, only {known}"))

    def _claim(self, parameter: str, slot: str, entry: str) -> bool:
        first = self.fed.setdefault((parameter, slot), entry)
        if first is entry:
            return True
        where = f"{parameter}[{slot}]" if slot else parameter
        detail = f"{first} and {entry} both go to {where}; change the rules so that one of them does"
        self.problems.append(Problem(ProblemKind.AMBIGUOUS_RULE, parameter, detail))
        return False

    def _add(self, entries: Sequence[TensorEntry], tensor: TargetTensor, slot: Slot, via: Transform | None) -> None:
        try:
            specs = [TensorSpec(e.dtype, e.shape) for e in entries]
            made = specs[0] if via is None else via.infer(specs)
        except ValueError as error:
            self.problems.append(Problem(ProblemKind.SHAPE, entries[0].name, f"for {tensor.name}: {error}"))
            return
        if made.shape != slot.logical and made.shape not in slot.also:
            self._misshapen(entries[0], tensor, slot, made.shape)
            return
        self._check_cast(entries[0].name, made.dtype, tensor)
        self.steps.append(_step(entries, tensor.name, slot, via, made.shape))

    def _misshapen(self, entry: TensorEntry, tensor: TargetTensor, slot: Slot, found: Shape) -> None:
        whose = "the model expects" if slot.logical == tensor.shape else f"{tensor.name} expects"
        self.problems.append(
            Problem(ProblemKind.SHAPE, entry.name, f"the checkpoint has {found}, {whose} {slot.logical}")
        )

    def _check_cast(self, name: str, source: DType, tensor: TargetTensor) -> None:
        pair = (source, tensor.dtype)
        kind = self.casts.get(pair) or self.casts.setdefault(pair, cast_kind(*pair))
        if kind is Cast.CHANGES_KIND:
            detail = f"{source} in the checkpoint, {tensor.dtype} in the model: not the same sort of number"
            fatal = self.strict.lossy == "error"
            self.problems.append(Problem(ProblemKind.LOSSY_DTYPE, name, detail, fatal=fatal))

    def _join(self, parameter: str, slot: str, inputs: list[tuple[Destination, TensorEntry]]) -> None:
        inputs.sort(key=lambda pair: pair[0].order or ())
        via = inputs[0][0].via
        hole = _first_hole([to.order or () for to, _ in inputs], inputs[0][0].sources)
        if hole is not None:
            what = f"of the tensors that are joined into it, {hole} is absent"
            self.problems.append(Problem(ProblemKind.MISSING, parameter, what))
            self.fed[parameter, slot] = inputs[0][1].name
        elif self._claim(parameter, slot, inputs[0][1].name):
            tensor = self.target[parameter]
            self._add([entry for _, entry in inputs], tensor, tensor.slots[slot], via)

    def _use_aliases(self) -> None:
        """A tied tensor saved under another of its names fills the parameter; saved twice, one copy is used."""
        for entry, owner in self.by_alias:
            if (owner, "") in self.fed or "" not in self.target[owner].slots:
                self.dropped.append(Dropped(entry.name, f"tied to {owner}"))
            else:
                self._send(entry, Destination(owner, "", None))

    def _close(self, tensor: TargetTensor) -> None:
        self.problems += check_slots(tensor)
        for slot in tensor.slots:
            if (tensor.name, slot) not in self.fed:
                self._missing(tensor, slot)
        if tensor.default is not None:
            self.steps += [Step(tensor.name, hole, (), fill=tensor.default) for hole in uncovered(tensor)]

    def _missing(self, tensor: TargetTensor, slot: str) -> None:
        allowed = any(r.compiled(p).fullmatch(tensor.name) for p in self.strict.may_miss)
        detail = f"nothing in the checkpoint feeds its slot {slot!r}" if slot else ""
        fatal = self.strict.missing == "error" and not allowed
        self.problems.append(Problem(ProblemKind.MISSING, tensor.name, detail, fatal=fatal))

    def _report_leftovers(self, owned: Target) -> None:
        missing = {p.subject for p in self.problems if p.kind is ProblemKind.MISSING}
        spare = [name for name, _ in self.leftovers]
        meant = _suggestions(missing, spare)
        self.problems = [
            replace(p, near=meant.get(p.subject, ())) if p.kind is ProblemKind.MISSING else p for p in self.problems
        ]
        fatal = self.strict.unexpected == "error"
        self.problems += [Problem(ProblemKind.UNEXPECTED, name, detail, fatal=fatal) for name, detail in self.leftovers]


def _suggestions(missing: set[str], spare: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return, for missing names, spare ones they may be in the checkpoint; looked up once per shape of name."""
    if not missing or not spare:
        return {}
    known: dict[str, str] = {template_of(name): name for name in reversed(spare)}
    have = set(spare)
    found: dict[str, tuple[str, ...]] = {}
    for template in {template_of(m) for m in missing}:
        found[template] = nearest(template, known)
    numbers_of = {m: [c for c in m.split(".") if c.isdecimal()] for m in missing}
    out = {}
    for name in missing:
        written = (_with_numbers(t, numbers_of[name]) for t in found[template_of(name)])
        out[name] = tuple(w for w in written if w in have)
    return out


def _with_numbers(template: str, numbers: Sequence[str]) -> str:
    left = iter(numbers)
    return ".".join(next(left, "*") if c == "*" else c for c in template.split("."))


def _step(entries: Sequence[TensorEntry], parameter: str, slot: Slot, via: Transform | None, made: Shape) -> Step:
    region = slot.window if via is None else None
    if isinstance(via, Take):
        region = _within(via.region, slot.window, via.shape)
    if region is not None:
        if region.view == entries[0].shape or entries[0].span is not None:
            return Step(parameter, slot.local, (Source(entries[0], region),))
        via, made = Take(region, region.shape), region.shape
        window = Region.whole(region.shape)
    else:
        window = slot.window
    assert via is not None
    boxes = _pulled(via, window, made, [TensorSpec(e.dtype, e.shape) for e in entries])
    read = tuple(Source(e, Region(e.shape, b)) for e, b in zip(entries, boxes, strict=True))
    return Step(parameter, slot.local, read, via, window)


def _within(taken: Region, window: Region, shape: Shape) -> Region | None:
    """Return `window` of a tensor that is itself the region `taken` of an entry, as a region of the entry."""
    if window.view == shape and taken.box.shape == shape:
        return taken.part(window.box)
    return taken if window.is_whole else None


def _pulled(via: Transform, window: Region, made: Shape, specs: Sequence[TensorSpec]) -> Sequence[Box]:
    """Return what the transform needs of its inputs for `window`; all of it where the window is of a reshape."""
    out = window.box if window.view == made else Box.whole(made)
    return via.pull(out, specs)


def _first_hole(orders: Sequence[tuple[int, ...]], sources: int) -> str | None:
    """Return in words the first input of a join that is not there, counting every number from 0."""
    have = set(orders)
    extents = [sources, *(max(o[d] for o in orders) + 1 for d in range(1, len(orders[0])))]
    for index in product(*map(range, extents)):
        if index not in have:
            which = f" {'.'.join(map(str, index[1:]))}" if index[1:] else ""
            return f"input{which} of its source {index[0]}"
    return None if len(have) == len(orders) else "one input of several that have the same numbers"
