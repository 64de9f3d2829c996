"""Loading a vLLM model again: what its plan took of each entry is kept, and only that is read the next time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from tensorferry.checkpoint import Checkpoint
from tensorferry.config import LoadConfig, ReadOptions
from tensorferry.core.boxes import Region
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.lower import lower
from tensorferry.core.plan import Plan, Source, Step, describe_problems
from tensorferry.core.transforms import TensorSpec
from tensorferry.errors import PlanError, shown
from tensorferry.execute.base import Counters
from tensorferry.loaders.reading import OwnReading
from tensorferry.modules.trace import Traced
from tensorferry.numerics.memory import zeros_of
from tensorferry.problems import Problem, ProblemKind

__all__ = ["Needs", "is_elsewhere", "needs_of", "remember", "remember_place", "restored"]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model took of a checkpoint. shapes: of the entries that it took something of. parts: of which it took
    regions, with these; the others it took whole. useless: the entries that it took nothing of.
    """

    shapes: Mapping[str, tuple[int, ...]]
    parts: Mapping[str, tuple[Region, ...]]
    useless: frozenset[str]


_needs: WeakKeyDictionary[nn.Module, Needs] = WeakKeyDictionary()
"""Of the models that were loaded in this process and are alive."""

_places: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Where vLLM said that their weights are, when they were loaded."""


def remember(model: nn.Module, traced: Traced, catalogue: Catalogue) -> None:
    """Keep what the plan of `model` took of `catalogue`. What is streamed counts as whole.

    So does what the loader took and overwrote later: vLLM's reload may keep the first of its writes.
    """
    regions: dict[str, dict[Region, None]] = defaultdict(dict)
    for source in (s for step in traced.plan.steps for s in step.sources):
        regions[source.entry.name][source.region] = None
    simple = not any(entry.made for entry in catalogue.values()) and traced.fallback is None
    if not simple:
        _needs.pop(model, None)
        return
    whole = set(traced.stream)
    parts = {name: tuple(found) for name, found in regions.items() if name not in whole}
    shapes = {name: catalogue[name].shape for name in (*parts, *whole)}
    useless = catalogue.keys() - shapes.keys() - {dropped.name for dropped in traced.plan.dropped}
    _needs[model] = Needs(shapes, parts, frozenset(useless))


def remember_place(model: nn.Module, place: str) -> None:
    """Keep where vLLM said that the weights of `model` are."""
    _places[model] = place


def is_elsewhere(model: nn.Module, place: str) -> bool:
    """Whether `model` was loaded when vLLM said that its weights were somewhere else than at `place`."""
    return _places.get(model, place) != place


def needs_of(model: nn.Module, checkpoint: Checkpoint) -> Needs | None:
    """Return what `model` took when it was loaded, None where that is not known: then it needs everything.

    Raises PlanError where `checkpoint` lacks an entry of it, or has it in another shape.
    """
    needs = _needs.get(model)
    if needs is None:
        return None
    problems = [p for name, shape in needs.shapes.items() if (p := _misfit(checkpoint.catalogue, name, shape))]
    if problems:
        raise PlanError(f"{shown(checkpoint.uri, 300)}: {describe_problems(problems)}", problems)
    return needs


def restored(
    checkpoint: Checkpoint, needs: Needs | None, config: LoadConfig
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield name and values of every entry, in storage order; where `needs` knows parts, zeros but for them."""
    options = checkpoint.options
    for group in _groups(list(checkpoint.catalogue.values()), needs, options.max_staging):
        if _is_whole(group[0], needs):
            yield from OwnReading(config).stream(checkpoint.storage, group, Counters())
        else:
            assert needs is not None
            yield from _in_part(checkpoint, group, needs, config, options)
    checkpoint.storage.check_unchanged()


def _misfit(catalogue: Catalogue, name: str, shape: tuple[int, ...]) -> Problem | None:
    if name not in catalogue:
        return Problem(ProblemKind.MISSING, name, "the checkpoint that the model was loaded from had it")
    found = catalogue[name].shape
    if found == shape:
        return None
    return Problem(ProblemKind.SHAPE, name, f"has shape {found}, and had {shape} when the model was loaded")


def _is_whole(entry: TensorEntry, needs: Needs | None) -> bool:
    """Whether all of an entry is read: also of one that is new, as nobody knows what the loader takes of that."""
    if needs is None or entry.name not in needs.parts:
        return needs is None or entry.name not in needs.useless
    return entry.dtype.block != 1 or entry.made is not None


def _groups(entries: Sequence[TensorEntry], needs: Needs | None, bound: int) -> Iterator[list[TensorEntry]]:
    """Yield neighbours that are read in the same way, of about `bound` bytes together."""
    group: list[TensorEntry] = []
    size = 0
    for entry in entries:
        if group and (size + entry.nbytes > bound or _is_whole(entry, needs) != _is_whole(group[0], needs)):
            yield group
            group, size = [], 0
        group.append(entry)
        size += entry.nbytes
    if group:
        yield group


def _in_part(
    checkpoint: Checkpoint, group: Sequence[TensorEntry], needs: Needs, config: LoadConfig, options: ReadOptions
) -> Iterator[tuple[str, torch.Tensor]]:
    made = {e.name: zeros_of(e.dtype, e.shape) for e in group}
    steps = [Step(e.name, r, (Source(e, r),)) for e in group for r in needs.parts.get(e.name, ())]
    if steps:
        plan = Plan(tuple(steps), {e.name: TensorSpec(e.dtype, e.shape) for e in group})
        schedule = lower(
            plan,
            max_gap=options.max_gap,
            max_read=options.max_read,
            max_staging=options.max_staging,
            waste=options.waste,
        )
        OwnReading(config).executor.run(schedule, checkpoint.storage, made)
    while made:
        name = next(iter(made))
        yield name, made.pop(name)
