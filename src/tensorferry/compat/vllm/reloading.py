"""Loading a vLLM model again: what its plan took of each entry is kept, and only that is read the next time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
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

__all__ = ["Needs", "is_elsewhere", "needs_of", "remember", "restored", "taken"]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model took of a checkpoint. shapes: of the entries that it took something of. parts: of which it took
    regions, with these; the others it took whole. useless: the entries that it took nothing of.
    """

    shapes: Mapping[str, tuple[int, ...]]
    parts: Mapping[str, tuple[Region, ...]]
    useless: frozenset[str]


class _Loaded(NamedTuple):
    """A load that has been done. place: where vLLM said that the weights are. needs: None where it needed all."""

    place: str
    needs: Needs | None


_loaded: WeakKeyDictionary[nn.Module, _Loaded] = WeakKeyDictionary()
"""The last load of each model that was loaded in this process and is alive."""


def remember(model: nn.Module, place: str, needs: Needs | None) -> None:
    """Keep what a load of `model` took, and where vLLM said that its weights are."""
    _loaded[model] = _Loaded(place, needs)


def taken(traced: Traced, catalogue: Catalogue) -> Needs | None:
    """Return what a plan takes of `catalogue`, None where that cannot be said. What is streamed counts as whole.

    So does what the loader took and overwrote later: vLLM's reload may keep the first of its writes.
    """
    if traced.fallback is not None or any(entry.made for entry in catalogue.values()):
        return None
    regions: dict[str, dict[Region, None]] = defaultdict(dict)
    for source in (s for step in traced.plan.steps for s in step.sources):
        regions[source.entry.name][source.region] = None
    whole = set(traced.stream)
    parts = {name: tuple(found) for name, found in regions.items() if name not in whole}
    shapes = {name: catalogue[name].shape for name in (*parts, *whole)}
    useless = catalogue.keys() - shapes.keys() - {dropped.name for dropped in traced.plan.dropped}
    return Needs(shapes, parts, frozenset(useless))


def is_elsewhere(model: nn.Module, place: str) -> bool:
    """Whether `model` was loaded when vLLM said that its weights were somewhere else than at `place`."""
    known = _loaded.get(model)
    return known is not None and known.place != place


def needs_of(model: nn.Module, checkpoint: Checkpoint) -> Needs | None:
    """Return what `model` took when it was loaded, None where that is not known: then it needs everything.

    Raises PlanError where `checkpoint` lacks an entry of it, or has it in another shape.
    """
    known = _loaded.get(model)
    if known is None or known.needs is None:
        return None
    needs = known.needs
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
