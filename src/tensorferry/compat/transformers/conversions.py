"""From a converter of transformers to slots and rules: each entry goes straight to its place where that is possible.

What the converter does is found out by running it on tensors without values. Where it computes more than a
rearrangement, its own code is run on the whole tensors while loading.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tensorferry.compat.transformers.internals import Converter, number_pattern, run_converter
from tensorferry.compat.transformers.symbols import Inlay, Symbol
from tensorferry.core.boxes import Region, Shape
from tensorferry.core.rules import Join, Part
from tensorferry.core.target import Slot, Target, TargetTensor
from tensorferry.core.transforms import Custom, TensorSpec
from tensorferry.errors import FinalizeError
from tensorferry.numerics.torch_dtypes import torch_dtype

__all__ = ["Arrangement", "Group", "arrange"]


@dataclass
class Group:
    """The entries that one converter takes for one layer, by the pattern that they matched, in natural order.

    name: of the converter's first target in the model.
    """

    converter: Converter
    name: str
    entries: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class Arrangement:
    """What groups come to: slots by parameter, destinations by entry, and joins for what is computed."""

    slots: dict[str, dict[str, Slot]] = field(default_factory=dict)
    parts: dict[str, list[Part]] = field(default_factory=lambda: defaultdict(list))
    joins: list[Join] = field(default_factory=list)


@dataclass(frozen=True)
class _Collected:
    """Inputs of a converter: name and shape by pattern; names that are not in the checkpoint are among them."""

    inputs: Mapping[str, Sequence[tuple[str, Shape]]]

    @property
    def names(self) -> list[str]:
        """All names, in the order in which the converter takes them."""
        return [name for some in self.inputs.values() for name, _ in some]


def arrange(group: Group, shapes: Mapping[str, Shape], target: Target, model: nn.Module, arranged: Arrangement) -> None:
    """Add to `arranged` where the entries of `group` go. `shapes` are those of the entries in the checkpoint."""
    run = _runner(group, model)
    collected, made = _evaluated(group, shapes, target, run)
    for name, value in made.items():
        tensor = target.get(name)
        if tensor is None:
            continue
        if isinstance(value, Symbol) and tuple(value.shape) == tensor.shape:
            _place(value.pieces, tensor, arranged)
        else:
            output = tuple(value.shape) if isinstance(value, Symbol) else tensor.shape
            arranged.joins.append(_computed(group, collected, tensor, output, run))


Run = Callable[[Mapping[str, list[Any]]], dict[str, Any]]


def _runner(group: Group, model: nn.Module) -> Run:
    return lambda tensors: run_converter(group.converter, tensors, group.name, model)


def _evaluated(
    group: Group, shapes: Mapping[str, Shape], target: Target, run: Run
) -> tuple[_Collected, Mapping[str, Symbol | None]]:
    """Return the inputs of a group and what the converter makes of them; None for what is opaque.

    Where the entries do not make the parameters as they are, those that are absent are found by adding some.
    """
    collected = _collect(group, shapes)
    made = _symbolic(collected, run)
    if made is None or not _fits(made, target):
        for more in _completed(group, shapes, target):
            again = _symbolic(more, run)
            if again is not None and _fits(again, target):
                return more, again
    return collected, made or dict.fromkeys(_targets(group, target))


def _symbolic(collected: _Collected, run: Run) -> Mapping[str, Symbol | None] | None:
    symbols = {p: [Symbol.of_entry(*one) for one in some] for p, some in collected.inputs.items()}
    try:
        made = run(symbols)
    except Exception:  # noqa: BLE001 - code that needs values fails in its own way; it is run on values later.
        return None
    return made if all(isinstance(value, Symbol) for value in made.values()) else None


def _fits(made: Mapping[str, Symbol | None], target: Target) -> bool:
    return all(v is None or n not in target or tuple(v.shape) == target[n].shape for n, v in made.items())


def _completed(group: Group, shapes: Mapping[str, Shape], target: Target) -> Iterator[_Collected]:
    """Yield the inputs with other numbers of members, without and with what patterns should have matched."""
    absent = [p for p in group.converter.source_patterns if p not in group.entries]
    members = any(number_pattern(pattern) is not None for pattern in group.entries)
    counts = {n for name in _targets(group, target) for n in target[name].shape} if members else set()
    for patterns in ([], absent) if absent else ([],):
        for count in (None, *sorted(counts)):
            yield _collect(group, shapes, count, patterns)


def _collect(
    group: Group, shapes: Mapping[str, Shape], count: int | None = None, absent: Sequence[str] = ()
) -> _Collected:
    """Return the inputs by pattern, members of lists in the order of their numbers, absent ones by the name expected.

    count: how many members lists have; by default, as many as the largest number says. absent: patterns that
    nothing matched, and that are filled up with names like those of another pattern.
    """
    numbered = {pattern: _numbered(pattern, names) for pattern, names in group.entries.items()}
    if count is None:
        count = max((1 + max(n) for n in numbered.values() if n is not None), default=1)
    inputs: dict[str, list[tuple[str, Shape]]] = {}
    for pattern, names in group.entries.items():
        numbers = numbered[pattern]
        usual = Counter(shapes[name] for name in names).most_common(1)[0][0]
        if numbers is None:
            inputs[pattern] = [(name, shapes[name]) for name in names]
        else:
            some = next(iter(numbers.items()))
            inputs[pattern] = [(numbers.get(n) or _renumbered(pattern, *some, n), usual) for n in range(count)]
    like, alike = next(iter(inputs.items()))
    for pattern in absent:
        inputs[pattern] = [(_renamed(name, like, pattern), shape) for name, shape in alike]
    return _Collected(inputs)


def _renamed(name: str, like: str, pattern: str) -> str:
    """Return the name that matches `pattern` as `name` matches `like`."""
    for old, new in zip(reversed(like.split(".")), reversed(pattern.split(".")), strict=False):
        if old != new:
            name = new.join(name.rsplit(old, 1))
    return name


def _numbered(pattern: str, names: Sequence[str]) -> dict[int, str] | None:
    """Return names by the number of the list's member; None where they are no members of a list."""
    number = number_pattern(pattern)
    if number is None:
        return None
    found = [(number.search(name), name) for name in names]
    by_number = {int(match["member"]): name for match, name in found if match is not None}
    if len(by_number) == len(names):
        return by_number
    return _numbered_by_difference(names)


def _numbered_by_difference(names: Sequence[str]) -> dict[int, str] | None:
    """Return names by the one numeric component in which they differ: they were renamed before they matched."""
    split = [name.split(".") for name in names]
    if len({len(s) for s in split}) != 1 or len(names) < 2:
        return None
    differing = [d for d in range(len(split[0])) if len({s[d] for s in split}) > 1]
    if len(differing) != 1 or not all(s[differing[0]].isdecimal() for s in split):
        return None
    return {int(s[differing[0]]): name for s, name in zip(split, names, strict=True)}


def _renumbered(pattern: str, number: int, name: str, wanted: int) -> str:
    """Return the name that member `wanted` would have, from that of another member."""
    found = number_pattern(pattern)
    match = found.search(name) if found is not None else None
    if match is not None:
        return name[: match.start("member")] + str(wanted) + name[match.end("member") :]
    return re.sub(rf"\.{number}\.(?!.*\.{number}\.)", f".{wanted}.", name)


def _targets(group: Group, target: Target) -> list[str]:
    """Return the parameters that an opaque converter makes: its first target, and the names beside it."""
    patterns: Sequence[str] = group.converter.target_patterns
    full = group.name.replace("*.", "0.")
    first = next((p for p in patterns if p in full), None)
    if first is None:
        return [group.name]
    names = [full.replace(first, pattern, 1) for pattern in patterns]
    return [name for name in names if name in target] or [group.name]


def _place(pieces: Sequence[Inlay], tensor: TargetTensor, arranged: Arrangement) -> None:
    slots = arranged.slots.setdefault(tensor.name, {})
    for piece in pieces:
        made = piece.made
        whole = piece.into.shape == tensor.shape
        name = "" if whole else piece.entry
        while name in slots and not whole:
            name += "'"
        slots[name] = Slot(Region(tensor.shape, piece.into), made, Region.whole(made))
        arranged.parts[piece.entry].append(Part(tensor.name, name, piece.via))


def _computed(group: Group, collected: _Collected, tensor: TargetTensor, output: Shape, run: Run) -> Join:
    """Return the join that runs the converter's own code on whole tensors, which have the parameter's type by then."""
    operations = ", ".join(repr(o) for o in group.converter.operations)
    counts = [(pattern, len(some)) for pattern, some in collected.inputs.items()]
    dtype = torch_dtype(tensor.dtype)

    def convert(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        left = iter(parts)
        tensors = {pattern: [next(left).to(dtype) for _ in range(n)] for pattern, n in counts}
        try:
            made: torch.Tensor = run(tensors)[tensor.name]
        except Exception as error:
            raise FinalizeError(
                f"{tensor.name}: {operations} of transformers failed on its tensors: {error}"
            ) from error
        return made

    name = f"transformers: {operations} -> {tensor.name}"
    return Join(tuple(collected.names), tensor.name, Custom(name, TensorSpec(tensor.dtype, output), convert))
