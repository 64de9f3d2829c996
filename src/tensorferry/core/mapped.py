"""A catalogue under other names: entries that rules make of those of another catalogue, which lie in its files.

So who asks for tensors by name, such as a model's own loader, gets them as another library would have written them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from tensorferry.core.boxes import Region, Shape
from tensorferry.core.catalogue import Catalogue, Made, TensorEntry
from tensorferry.core.dtypes import DTYPES, DType, Kind
from tensorferry.core.making import Assemble, Each
from tensorferry.core.plan import Step
from tensorferry.core.planning import make_plan
from tensorferry.core.ruleset import Destination, RuleSet
from tensorferry.core.target import Slot, TargetTensor
from tensorferry.core.transforms import Add, Chain, TensorSpec, Transform

__all__ = ["Laid", "Mapped", "map_catalogue", "parts_of"]

_NUMBERS = DTYPES["F32"]


@dataclass(frozen=True, slots=True)
class Laid:
    """How a tensor that several entries make up is laid out: its shape, and where the slots of rules lie in it."""

    shape: Shape
    slots: Mapping[str, Slot]


@dataclass(frozen=True, slots=True)
class Mapped:
    """A catalogue under other names, and why entries of the original one are not in it."""

    catalogue: Catalogue
    dropped: Mapping[str, str]


def map_catalogue(
    catalogue: Catalogue, rules: RuleSet, laid: Callable[[str], Laid | None] = lambda name: None
) -> Mapped:
    """Return what `rules` make of `catalogue`: an entry for each name that they lead to, in storage order.

    Entries that no rule matches stay as they are. Numbers made of packed blocks, or by arithmetic, are float32; what is
    only moved keeps its type. laid: how the tensor of a name is laid out, for names whose rules lead to slots, or that
    come in several shapes.

    Raises PlanError, with every problem, where the rules do not fit the entries.
    """
    fed, dropped = _sorted_out(catalogue, rules)
    target = {into: _wanted(into, sources, laid(into)) for into, sources in fed.items()}
    unknown = {into: sources[0][1] for into, sources in fed.items() if sources[0][1].dtype.kind is Kind.UNKNOWN}
    readable = [e for e in catalogue.values() if e.dtype.kind is not Kind.UNKNOWN]
    plan = make_plan(catalogue.replacing(readable), {n: t for n, t in target.items() if n not in unknown}, rules)
    plan.raise_for_problems()
    steps: dict[str, list[Step]] = defaultdict(list)
    for step in plan.steps:
        steps[step.parameter].append(step)
    made = [_renamed(unknown[n], n) if n in unknown else _made(wanted, steps[n]) for n, wanted in target.items()]
    return Mapped(catalogue.replacing(made), dropped)


def parts_of(entry: TensorEntry) -> list[tuple[TensorEntry, Region, Region]] | None:
    """Return what an entry is put together of: each part, the region of it that is taken, and where that goes.

    The parts have the name of the entry. None where it is one thing.
    """
    if entry.made is None or not isinstance(entry.made.via, Each) or not isinstance(entry.made.via.then, Assemble):
        return None
    each, assemble = entry.made.via, entry.made.via.then
    inputs = zip(each.made, each.groups(entry.made.inputs), assemble.pieces, strict=True)
    return [(_part(entry.name, via, some), window, into) for (_, via), some, (window, into) in inputs]


def _part(name: str, via: Transform | None, inputs: Sequence[TensorEntry]) -> TensorEntry:
    if via is None:
        return _renamed(inputs[0], name)
    spec = via.infer([TensorSpec(e.dtype, e.shape) for e in inputs])
    return TensorEntry(name, spec.dtype, spec.shape, (), made=Made(tuple(inputs), via))


_Fed = Mapping[str, Sequence[tuple[Destination, TensorEntry]]]


def _sorted_out(catalogue: Catalogue, rules: RuleSet) -> tuple[_Fed, dict[str, str]]:
    """Return what feeds each name, and why the other entries are not wanted."""
    fed: dict[str, list[tuple[Destination, TensorEntry]]] = defaultdict(list)
    dropped: dict[str, str] = {}
    for entry in catalogue.values():
        route = rules.route(entry.name)
        why = route and (route.dropped or route.ignorable)
        if why:
            dropped[entry.name] = why
            continue
        for to in route.to if route is not None else (Destination(entry.name, "", None),):
            fed[to.into].append((to, entry))
    return fed, dropped


def _wanted(into: str, sources: Sequence[tuple[Destination, TensorEntry]], laid: Laid | None) -> TargetTensor:
    dtype = _dtype([entry for _, entry in sources], [to.via for to, _ in sources])
    if laid is not None:
        return TargetTensor(into, dtype, laid.shape, laid.slots)
    return TargetTensor.plain(into, dtype, _shape(sources))


def _dtype(entries: Sequence[TensorEntry], vias: Sequence[Transform | None]) -> DType:
    computed = any(isinstance(step, Add) for via in vias for step in (via.steps if isinstance(via, Chain) else (via,)))
    dtypes = {entry.dtype for entry in entries}
    if computed or len(dtypes) > 1 or entries[0].dtype.kind is Kind.PACKED:
        return _NUMBERS
    return entries[0].dtype


def _shape(sources: Sequence[tuple[Destination, TensorEntry]]) -> Shape:
    """Return the shape that comes out, of numbers; that of the entry where it does not fit, which planning will say."""
    to, entry = sources[0]
    inputs = (
        [entry] if to.order is None else [e for _, e in sorted(((t.order, e) for t, e in sources), key=itemgetter(0))]
    )
    try:
        return entry.shape if to.via is None else to.via.infer([TensorSpec(_NUMBERS, e.shape) for e in inputs]).shape
    except ValueError:
        return entry.shape


def _renamed(entry: TensorEntry, name: str) -> TensorEntry:
    if entry.name == name or entry.made is not None:
        return replace(entry, name=name)
    return replace(entry, name=name, made=Made((entry,)))


def _made(wanted: TargetTensor, steps: Sequence[Step]) -> TensorEntry:
    """Return the entry that stands for the tensor that `steps` put together."""
    inputs = tuple(source.entry for step in steps for source in step.sources)
    if len(steps) == 1 and steps[0].into.is_whole:
        (step,) = steps
        region = step.sources[0].region if step.via is None else step.window
        if region == Region.whole(wanted.shape) and _spec(step).shape == wanted.shape:
            if step.via is None:
                return _renamed(inputs[0], wanted.name)
            return TensorEntry(wanted.name, wanted.dtype, wanted.shape, (), made=Made(inputs, step.via))
    pieces = tuple((step.sources[0].region if step.window is None else step.window, step.into) for step in steps)
    output = TensorSpec(wanted.dtype, wanted.shape)
    via = Each(tuple((len(step.sources), step.via) for step in steps), Assemble(output, pieces))
    return TensorEntry(wanted.name, wanted.dtype, wanted.shape, (), made=Made(inputs, via))


def _spec(step: Step) -> TensorSpec:
    specs = [TensorSpec(s.entry.dtype, s.entry.shape) for s in step.sources]
    return specs[0] if step.via is None else step.via.infer(specs)
