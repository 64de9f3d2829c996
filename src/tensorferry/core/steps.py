"""From entries that fit a slot to the steps that fill it: transforms that only move values are folded into regions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.catalogue import TensorEntry
from tensorferry.core.cutting import in_blocks
from tensorferry.core.dtypes import Kind
from tensorferry.core.plan import Source, Step
from tensorferry.core.target import Slot, TargetTensor
from tensorferry.core.transforms import (
    Chain,
    Concat,
    Dequantize,
    Permute,
    Stack,
    Take,
    TensorSpec,
    Transform,
    Transpose,
)

__all__ = [
    "as_numbers", "cut_block", "cut_in_words", "dequantized", "is_packed", "is_placing", "plain_copy", "steps_of",
]  # fmt: skip


def is_packed(entries: Sequence[TensorEntry]) -> bool:
    """Whether the entries hold packed blocks, which a parameter of numbers takes dequantized."""
    return any(e.dtype.kind is Kind.PACKED for e in entries)


def as_numbers(via: Transform | None, shape: Shape) -> Transform:
    """Return `via` with its one packed input, which is of `shape`, dequantized.

    What only moves rows comes before, while there are few bytes to move; everything else works on numbers.
    """
    if via is None:
        return Dequantize()
    steps = via.steps if isinstance(via, Chain) else (via,)
    first = next((i for i, step in enumerate(steps) if not _moves_rows(step, shape)), len(steps))
    return Chain((*steps[:first], Dequantize(), *steps[first:]))


def _moves_rows(step: Transform, shape: Shape) -> bool:
    match step:
        case Permute():
            return step.moves_rows(shape)
        case Transpose(dims):
            return dims[-1:] == (len(dims) - 1,)
        case _:
            return False


def plain_copy(entry: TensorEntry, tensor: TargetTensor, slot: Slot) -> Step | None:
    """Return the step for what most entries are: just what the slot takes, in the type and shape it takes it.

    None for all others, of which `steps_of` may make steps. Equal to what comes of that; found sooner.
    """
    dtype = entry.dtype
    plain = dtype is tensor.dtype and dtype.block == 1 and dtype.kind not in (Kind.PACKED, Kind.UNKNOWN)
    if not plain or entry.shape != slot.logical or slot.window.view != entry.shape:
        return None
    return Step(tensor.name, slot.local, (Source(entry, slot.window),))


def steps_of(
    entries: Sequence[TensorEntry], parameter: str, slot: Slot, via: Transform | None, made: Shape
) -> Iterator[Step]:
    """Yield the steps that fill `slot` of `parameter`; `made` is the shape that comes out of `via`."""
    if via is None:
        yield _copy(entries[0], parameter, slot.local, slot.window)
    elif isinstance(via, Take) and (region := _within(via.region, slot.window, via.shape)) is not None:
        yield _copy(entries[0], parameter, slot.local, region)
    elif isinstance(via, Stack | Concat) and is_placing(slot, made):
        yield from _placed(entries, parameter, slot, via)
    elif (part := _part_of_blocks(entries[0], slot, via)) is not None:
        yield dequantized(Step(parameter, slot.local, (Source(entries[0], part),)))
    else:
        window = slot.window.box if slot.window.view == made else Box.whole(made)
        boxes = via.pull(window, [TensorSpec(e.dtype, e.shape) for e in entries])
        read = tuple(Source(e, Region(e.shape, b)) for e, b in zip(entries, boxes, strict=True))
        yield Step(parameter, slot.local, read, via, slot.window)


def dequantized(step: Step) -> Step:
    """Return the step that fills the same with numbers, for a step that copies packed blocks."""
    ((entry, window),) = step.sources
    box = Box.whole(entry.shape)
    if window.view == entry.shape:
        (box,) = Dequantize().pull(window.box, [TensorSpec(entry.dtype, entry.shape)])
    return step._replace(sources=(Source(entry, Region(entry.shape, box)),), via=Dequantize(), window=window)


def cut_block(step: Step) -> Source | None:
    """Return an input of which the step would need a part of a block (of packed elements), if there is one."""
    for source in step.sources:
        if source.entry.dtype.block > 1 and in_blocks(source.region, source.entry.dtype) is None:
            return source
    return None


def cut_in_words(cut: Source) -> str:
    """Return what is wrong with taking a region that cuts through blocks.

    >>> from tensorferry.core.dtypes import DTYPES
    >>> entry = TensorEntry("w", DTYPES["Q8_0"], (2, 64), ())
    >>> cut_in_words(Source(entry, Region((2, 64), Box((0, 0), (2, 48)))))
    'columns 0 to 48 of 64, which are not whole blocks of 32 Q8_0 elements'
    """
    region, dtype = cut.region, cut.entry.dtype
    part = "a part"
    if region.view:
        part = f"columns {region.box.start[-1]} to {region.box.stop[-1]} of {region.view[-1]}"
    return f"{part}, which are not whole blocks of {dtype.block} {dtype} elements"


def _part_of_blocks(entry: TensorEntry, slot: Slot, via: Transform) -> Region | None:
    """Return which part of a packed entry the slot takes, for a `via` that takes a part of its numbers as they lie."""
    match via:
        case Chain((Dequantize(), Take(region, shape))) if region.view == entry.shape:
            return _within(region, slot.window, shape)
    return None


def _copy(entry: TensorEntry, parameter: str, into: Region, region: Region) -> Step:
    """Take `region` of an entry; where its bytes do not lie in that order, the entry is read whole first."""
    if region.view == entry.shape or entry.span is not None:
        return Step(parameter, into, (Source(entry, region),))
    whole = Region.whole(entry.shape)
    return Step(parameter, into, (Source(entry, whole),), Take(region, region.shape), Region.whole(region.shape))


def _within(taken: Region, window: Region, shape: Shape) -> Region | None:
    """Return `window` of a tensor that is itself the region `taken` of an entry, as a region of the entry.

    None where it is no region; the window may be seen in another shape than the tensor was taken in.
    """
    if window.is_whole:
        return taken
    inner = window.seen_as(taken.box.shape) if window.view == shape else None
    return None if inner is None else taken.part(inner.box)


def is_placing(slot: Slot, made: Shape) -> bool:
    """Whether parts of what was joined are parts of the parameter, so that each input can be put there by itself."""
    return slot.window.view == made and slot.window.shape == slot.local.shape and slot.window.size > 0


def _placed(entries: Sequence[TensorEntry], parameter: str, slot: Slot, via: Stack | Concat) -> Iterator[Step]:
    """Yield one copy for each input of which something is needed: rows of experts, halves of gate and up."""
    window, at = slot.window.box, 0
    for entry in entries:
        flat = Box.whole(entry.shape)
        box = _inserted(flat, via.dim, at) if isinstance(via, Stack) else _moved(flat, via.dim, at)
        at = box.stop[via.dim]
        common = box.meet(window)
        if common is not None:
            inner = common.relative_to(box)
            part = _removed(inner, via.dim) if isinstance(via, Stack) else inner
            into = slot.local.part(common.relative_to(window))
            yield _copy(entry, parameter, into, Region(entry.shape, part))


def _inserted(box: Box, dim: int, at: int) -> Box:
    return Box((*box.start[:dim], at, *box.start[dim:]), (*box.stop[:dim], at + 1, *box.stop[dim:]))


def _removed(box: Box, dim: int) -> Box:
    return Box((*box.start[:dim], *box.start[dim + 1 :]), (*box.stop[:dim], *box.stop[dim + 1 :]))


def _moved(box: Box, dim: int, by: int) -> Box:
    return box.shift(tuple(by if d == dim else 0 for d in range(len(box.start))))
