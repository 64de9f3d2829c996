"""What the ranks of a sharded state hold, as whole tensors: from slots to chunks. Pure geometry; reads nothing.

A slot says which part of a rank's parameter is which window of a logical tensor. Turned round, it says where the bytes
of that window lie: a box of the logical tensor, in one span of a file, with strides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import NamedTuple

from tensorferry.core.boxes import Box, Shape, strides_of
from tensorferry.core.catalogue import Chunk, Span, TensorEntry
from tensorferry.core.cutting import in_blocks
from tensorferry.core.dtypes import DType
from tensorferry.core.target import Slot
from tensorferry.errors import FormatError, shown
from tensorferry.formats.sharded_state_manifest import RankManifest, SavedTensor
from tensorferry.formats.sharded_state_names import RankNumbers

__all__ = ["HeldTensor", "alias_entries", "joined_entries", "slot_name", "strides_in"]

_MAX_PIECES = 1 << 11
"""Windows that may make up one tensor, so that finding out whether they overlap stays quick."""


class HeldTensor(NamedTuple):
    """A tensor as one rank holds it: what the manifest says, and where its bytes are, row-major."""

    ranks: RankNumbers
    tensor: SavedTensor
    span: Span


def slot_name(parameter: str, slot: str) -> str:
    """Return what the logical tensor of a slot is called: as the parameter, where it has one slot without a name.

    >>> slot_name("qkv.weight", "q"), slot_name("norm.weight", "")
    ('qkv.weight[q]', 'norm.weight')
    """
    return f"{parameter}[{slot}]" if slot else parameter


def joined_entries(manifests: Sequence[RankManifest], spans: Sequence[Mapping[str, Span]]) -> Iterator[TensorEntry]:
    """Yield a whole tensor for every slot of every parameter that a rank holds, in the order in which they come first.

    spans: of each manifest's tensors. What several ranks hold alike is taken of the first one. Raises FormatError where
    the parts do not make up whole tensors, or nothing says how they do.
    """
    held: dict[str, list[HeldTensor]] = {}
    for manifest, where in zip(manifests, spans, strict=True):
        for name, tensor in manifest.tensors.items():
            held.setdefault(name, []).append(HeldTensor(manifest.ranks, tensor, where[name]))
    for name, several in held.items():
        _refuse_unlike(name, several)
        if several[0].tensor.slots is None:
            yield _replicated(name, several)
        else:
            yield from _by_slot(name, several)


def alias_entries(
    whole: Mapping[str, TensorEntry], manifests: Sequence[RankManifest], aliases: Mapping[str, str]
) -> Iterator[TensorEntry]:
    """Yield the entries that tied tensors have in `whole`, once more under their other names.

    aliases: names to those that the tensors were saved under. Names that are there already are passed over.
    """
    slots: dict[str, dict[str, None]] = {}
    for manifest in manifests:
        for name, tensor in manifest.tensors.items():
            slots.setdefault(name, {}).update(dict.fromkeys(tensor.slots or ()))
    for alias, owner in aliases.items():
        for slot in [""] if owner in whole else slots[owner]:
            if slot_name(alias, slot) not in whole:
                yield replace(whole[slot_name(owner, slot)], name=slot_name(alias, slot))


def _refuse_unlike(name: str, several: Sequence[HeldTensor]) -> None:
    """Raise FormatError for a tensor that was laid out anew, or that ranks hold as different things."""
    first = several[0]
    if any(h.tensor.processed for h in several):
        raise FormatError(
            f"{shown(name)} was saved after post-processing, and its module does not say that this keeps the layout"
            " (processing_keeps_layout = True): load it with the ranks that saved it, or save the state before"
        )
    for other in several:
        if other.tensor.dtype != first.tensor.dtype:
            found = f"{first.tensor.dtype} on {first.ranks}, {other.tensor.dtype} on {other.ranks}"
            raise FormatError(f"{shown(name)} has two types: {found}")
        if (other.tensor.slots is None) != (first.tensor.slots is None):
            raise FormatError(
                f"{shown(name)} has slots on one of {first.ranks} and {other.ranks}, and none on the other"
            )


def _replicated(name: str, several: Sequence[HeldTensor]) -> TensorEntry:
    """Return a tensor whose layer declares nothing, so that all copies must be alike."""
    first = several[0]
    for other in several[1:]:
        if (other.tensor.shape, other.tensor.digest) != (
            first.tensor.shape,
            first.tensor.digest,
        ) or not first.tensor.digest:
            raise FormatError(
                f"{shown(name)} differs between {first.ranks} and {other.ranks}, and its layer declares no slots"
                " (tensor_slots), so that nothing says how the parts go together"
            )
    return TensorEntry(name, first.tensor.dtype, first.tensor.shape, (Chunk(None, first.span),))


def _by_slot(name: str, several: Sequence[HeldTensor]) -> Iterator[TensorEntry]:
    slots: dict[str, list[tuple[HeldTensor, Slot]]] = {}
    for held in several:
        for slot, declared in (held.tensor.slots or {}).items():
            slots.setdefault(slot, []).append((held, declared))
    for slot, parts in slots.items():
        yield _whole(slot_name(name, slot), parts)


def _whole(name: str, parts: Sequence[tuple[HeldTensor, Slot]]) -> TensorEntry:
    """Return the logical tensor that `parts` are windows of."""
    first, declared = parts[0]
    logical, dtype = declared.logical, first.tensor.dtype
    chunks: dict[Box, tuple[RankNumbers, Chunk]] = {}
    for held, slot in parts:
        if slot.logical != logical:
            raise FormatError(
                f"{shown(name)} has the shape {list(logical)} for {first.ranks}, {list(slot.logical)} for {held.ranks}"
            )
        chunk = _chunk(name, held, slot)
        if chunk is not None and chunk.box is not None:
            chunks.setdefault(chunk.box, (held.ranks, chunk))
    if 0 in logical:
        return TensorEntry(name, dtype, logical, (Chunk(None, first.span._replace(length=0)),))
    _refuse_untiled(name, logical, {box: ranks for box, (ranks, _) in chunks.items()})
    found = [chunk for _, chunk in chunks.values()]
    if len(found) == 1:
        found = [found[0]._replace(box=None)]
    return TensorEntry(name, dtype, logical, tuple(found))


def _refuse_untiled(name: str, logical: Shape, boxes: Mapping[Box, RankNumbers]) -> None:
    """Raise FormatError unless `boxes` are all of a tensor of shape `logical`, each element once."""
    if len(boxes) > _MAX_PIECES:
        raise FormatError(f"{shown(name)} lies in {len(boxes):,} parts, and at most {_MAX_PIECES:,} are put together")
    for one, other in _neighbours(list(boxes)):
        if common := one.meet(other):
            raise FormatError(
                f"{shown(name)}: {boxes[one]} and {boxes[other]} both hold the elements from {list(common.start)} to"
                f" {list(common.stop)}, and not the same part: they are of different states, or declare it wrongly"
            )
    have, all_of_it = sum(box.size for box in boxes), Box.whole(logical).size
    if have != all_of_it:
        raise FormatError(
            f"{shown(name)}: the ranks hold {have:,} of its {all_of_it:,} elements (shape {list(logical)})"
        )


def _neighbours(boxes: Sequence[Box]) -> Iterable[tuple[Box, Box]]:
    """Return the pairs of boxes among which there is one that overlaps, if there is any at all."""
    varying = {d for box in boxes for d in range(len(box.start)) if (box.start[d], box.stop[d]) != _edge(boxes[0], d)}
    if len(varying) > 1:
        return combinations(boxes, 2)
    return pairwise(sorted(boxes, key=lambda box: (box.start, box.stop)))


def _edge(box: Box, dim: int) -> tuple[int, int]:
    return box.start[dim], box.stop[dim]


def _chunk(name: str, held: HeldTensor, slot: Slot) -> Chunk | None:
    """Return where the window of a slot is, and which bytes it is made of; None for an empty one."""
    if not slot.window.size:
        return None
    dtype = held.tensor.dtype
    window = slot.window.seen_as(slot.logical)
    local = in_blocks(slot.local, dtype)
    where = None if window is None else in_blocks(window, dtype)
    steps = None
    if local is not None and where is not None:
        steps = strides_in(local.shape, strides_of(local.view), where.shape)
    if window is None or local is None or where is None or steps is None:
        raise FormatError(
            f"{shown(name)}: what {held.ranks} holds of it is no box of the tensor (shape {list(slot.logical)}), or"
            " does not lie in its file like one: such a part cannot be put together with others"
        )
    first = sum(a * s for a, s in zip(local.box.start, strides_of(local.view), strict=True))
    last = sum((n - 1) * s for n, s in zip(where.shape, steps, strict=True))
    span = _inside(held.span, first, last + 1, dtype)
    return Chunk(window.box, span, None if steps == strides_of(where.shape) else steps)


def _inside(span: Span, first: int, count: int, dtype: DType) -> Span:
    size = dtype.block_bytes
    return Span(span.file, span.offset + first * size, count * size)


def strides_in(shape: Shape, strides: Shape, other: Shape) -> Shape | None:
    """Return the strides with which what lies as `shape` and `strides` is of shape `other`, None if there are none.

    Both shapes have as many elements, and some. Dimensions of one element get the stride that a row-major one has.

    >>> strides_in((2, 3, 4), (100, 8, 1), (6, 4)), strides_in((6, 4), (8, 1), (2, 3, 4))
    (None, (24, 8, 1))
    """
    runs: list[tuple[int, int]] = []  # dimensions, those that go on where the next one ends taken together
    for n, step in zip(shape, strides, strict=True):
        if n != 1 and runs and runs[-1][1] == n * step:
            runs[-1] = (runs[-1][0] * n, step)
        elif n != 1:
            runs.append((n, step))
    found: list[int] = []
    left, step = 1, 0
    for n, natural in zip(reversed(other), reversed(strides_of(other)), strict=True):
        if left == 1 and n != 1:
            left, step = runs.pop()
        if left % n:
            return None
        found.append(natural if n == 1 else step)
        left, step = left // n, step * n
    return tuple(reversed(found))
