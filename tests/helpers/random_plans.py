"""Random checkpoints in memory and random ways to use them, for property tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

from helpers.simulate import Array, numpy_dtype
from tensorferry.core.boxes import Box, Region, Shape, strides_of
from tensorferry.core.catalogue import Catalogue, Chunk, Span, TensorEntry
from tensorferry.core.coverage import flat_runs
from tensorferry.core.dtypes import DTYPES, DType, Kind
from tensorferry.core.plan import Plan
from tensorferry.core.planning import make_plan
from tensorferry.core.rules import Join, Place, Rule
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Slot, TargetTensor
from tensorferry.core.transforms import Add, Chain, Concat, Stack, Take, Transform, Transpose

PLAIN = ("U8", "I16", "I32", "I64")
PACKED = ("F4", "F6_E2M3")
EVERY = tuple(name for name, dtype in DTYPES.items() if dtype.kind is not Kind.PACKED)
"""Every type of single elements, and of small groups; GGUF's blocks are bytes like these."""


@dataclass
class World:
    """A checkpoint in memory: files that grow, entries over them, and what each entry holds, in blocks."""

    files: dict[str, bytearray] = field(default_factory=lambda: {"a": bytearray(), "b": bytearray()})
    entries: list[TensorEntry] = field(default_factory=list)
    values: dict[str, Array] = field(default_factory=dict)
    target: dict[str, TargetTensor] = field(default_factory=dict)
    rules: list[Rule] = field(default_factory=list)

    def plan(self) -> Plan:
        catalogue = Catalogue(self.entries, format="memory", files=self.files)
        return make_plan(catalogue, self.target, RuleSet(*self.rules))

    def frozen_files(self) -> dict[str, bytes]:
        return {name: bytes(data) for name, data in self.files.items()}


@st.composite
def shapes(draw: st.DrawFn, *, most: int = 5, rank: int = 3, least: int = 1) -> Shape:
    return tuple(draw(st.lists(st.integers(least, most), max_size=rank)))


@st.composite
def boxes(draw: st.DrawFn, shape: Sequence[int], *, least: int = 0) -> Box:
    """Return a box of a tensor of `shape`, with at least `least` of every dimension."""
    start, stop = [], []
    for n in shape:
        a = draw(st.integers(0, n - least))
        start.append(a)
        stop.append(draw(st.integers(a + least, n)))
    return Box(tuple(start), tuple(stop))


@st.composite
def views(draw: st.DrawFn, shape: Sequence[int], *, block: int = 1) -> Shape:
    """Return another shape of the same elements; the last dimension stays a multiple of `block`."""
    dims = list(shape)
    for _ in range(draw(st.integers(0, 3))):
        if len(dims) > 1 and draw(st.booleans()):
            d = draw(st.integers(0, len(dims) - 2))
            dims[d : d + 2] = [dims[d] * dims[d + 1]]
        elif dims:
            d = draw(st.integers(0, len(dims) - 1))
            unit = block if d == len(dims) - 1 else 1
            inner = draw(st.sampled_from([f * unit for f in range(1, dims[d] + 1) if dims[d] % (f * unit) == 0] or [0]))
            if inner:
                dims[d : d + 1] = [dims[d] // inner, inner]
        else:
            dims = [1]
    return tuple(dims)


@st.composite
def regions(draw: st.DrawFn, shape: Sequence[int], *, block: int = 1, least: int = 0) -> Region:
    """Return a region of a tensor of `shape` that cuts through no block."""
    view = draw(views(shape, block=block))
    if block == 1:
        return Region(view, draw(boxes(view, least=least)))
    box = draw(boxes((*view[:-1], view[-1] // block), least=least))
    start, stop = ((*b[:-1], b[-1] * block) for b in (box.start, box.stop))
    return Region(view, Box(start, stop))


@st.composite
def cuts(draw: st.DrawFn, shape: Shape, *, block: int = 1) -> list[Region]:
    """Return regions that together are a tensor of `shape`, each element once; they cut through no block."""
    view = draw(views(shape, block=block))
    parts = [Box.whole(view)]
    for _ in range(draw(st.integers(0, 4))):
        box = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dim = draw(st.integers(0, len(view) - 1)) if view else 0
        unit = block if dim == len(view) - 1 else 1
        at = unit * draw(st.integers(0, box.shape[dim] // unit)) if view else 0
        parts += _halves(box, dim, at) if view else [box]
    return [draw(_as_run(Region(view, box))) for box in parts]


def _halves(box: Box, dim: int, at: int) -> list[Box]:
    middle = box.start[dim] + at
    return [
        Box(box.start, (*box.stop[:dim], middle, *box.stop[dim + 1 :])),
        Box((*box.start[:dim], middle, *box.start[dim + 1 :]), box.stop),
    ]


@st.composite
def _as_run(draw: st.DrawFn, region: Region) -> Region:
    """Return a region, or the same elements of the flat tensor where they follow each other."""
    runs = list(flat_runs(region))
    if len(runs) == 1 and draw(st.booleans()):
        return Region((prod(region.view),), Box((runs[0][0],), (runs[0][1],)))
    return region


@st.composite
def entries(draw: st.DrawFn, world: World, name: str, dtype: DType, shape: Shape, *, odd: bool = True) -> TensorEntry:
    """Write random values of `shape` into the files: in one piece, in chunks, or (if `odd`) as a strided view."""
    blocks = (*shape[:-1], shape[-1] // dtype.block) if dtype.block > 1 else shape
    count = prod(blocks)
    raw = draw(st.binary(min_size=count * dtype.block_bytes, max_size=count * dtype.block_bytes))
    if dtype.kind is Kind.BOOL:
        raw = bytes(byte & 1 for byte in raw)  # torch makes ones of other bytes where it copies by element
    values = np.frombuffer(raw, numpy_dtype(dtype)).reshape(blocks)
    ways = ["plain", "plain", *(["chunked"] if shape else []), *(["strided", "expanded"] if odd else [])]
    way = draw(st.sampled_from(ways))
    if way == "expanded" and shape and 0 not in shape and dtype.block == 1:
        d = draw(st.integers(0, len(shape) - 1))
        values = np.repeat(values.take([0], d), shape[d], d)
    world.values[name] = values
    if way == "chunked":
        chunks = draw(_chunked(world, values, dtype))
    elif way == "plain" or dtype.block > 1:
        chunks = (_write(draw, world, values, None),)
    elif way == "strided":
        order = draw(st.permutations(range(len(shape))))
        chunks = (_write(draw, world, values, None, order),)
    else:
        repeated = tuple(
            d
            for d in range(len(shape))
            if shape[d] and all((values.take(i, d) == values.take(0, d)).all() for i in range(shape[d]))
        )
        chunks = (_write(draw, world, values, None, None, repeated[:1]),)
    entry = TensorEntry(name, dtype, shape, chunks)
    world.entries.append(entry)
    return entry


@st.composite
def _chunked(draw: st.DrawFn, world: World, values: Array, dtype: DType) -> tuple[Chunk, ...]:
    """Split along two dimensions, each part somewhere else, some of them stored in another order."""
    boxes = [Box.whole(values.shape)]
    for _ in range(2):
        d = draw(st.integers(0, values.ndim - 1))
        at = draw(st.integers(0, values.shape[d]))
        line = Box.whole(values.shape)
        low = Box(line.start, (*line.stop[:d], at, *line.stop[d + 1 :]))
        high = Box((*line.start[:d], at, *line.start[d + 1 :]), line.stop)
        boxes = [part for box in boxes for half in (low, high) if (part := box.meet(half)) is not None]
    chunks = []
    for box in draw(st.permutations(boxes)):
        order = draw(st.permutations(range(values.ndim))) if dtype.block == 1 and draw(st.booleans()) else None
        inner = box
        if dtype.block > 1:
            k = dtype.block
            inner = Box((*box.start[:-1], box.start[-1] * k), (*box.stop[:-1], box.stop[-1] * k))
        chunks.append(_write(draw, world, values[box.slices], inner, order))
    return tuple(chunks) or (_write(draw, world, values, None),)


def _write(
    draw: st.DrawFn,
    world: World,
    values: Array,
    box: Box | None,
    order: Sequence[int] | None = None,
    repeated: Sequence[int] = (),
) -> Chunk:
    """Append values to a file, in the dimension order `order`, with `repeated` dimensions stored once."""
    file = draw(st.sampled_from(sorted(world.files)))
    data = world.files[file]
    data += bytes(draw(st.integers(0, 9)))
    at, size = len(data), values.itemsize
    stored = values
    for d in repeated:
        stored = stored.take([0], d)
    order = order or range(values.ndim)
    stored = stored.transpose(order)
    inner = strides_of(stored.shape)
    strides = tuple(0 if d in repeated else inner[list(order).index(d)] for d in range(values.ndim))
    data += stored.tobytes()
    natural = strides == strides_of(values.shape)
    return Chunk(box, Span(file, at, stored.size * size), None if natural else strides)


@st.composite
def placements(draw: st.DrawFn, world: World, n: int) -> None:
    """Add an entry and a parameter that takes a random part of it into a random part of itself."""
    dtype = DTYPES[draw(st.sampled_from(EVERY))]
    shape = draw(shapes(least=draw(st.sampled_from([0, 1, 1, 1]))))
    if dtype.block > 1:
        shape = (*shape, dtype.block * draw(st.integers(1, 4)))
    draw(entries(world, f"e{n}", dtype, shape))
    _place(draw, world, f"e{n}", f"p{n}", dtype, shape)


@st.composite
def overlaps(draw: st.DrawFn, world: World, n: int) -> None:
    """Add an entry over bytes that others may have, too, at any offset, and a parameter that takes part of it."""
    dtype = DTYPES[draw(st.sampled_from(PLAIN))]
    file = draw(st.sampled_from(sorted(world.files)))
    data, size = world.files[file], dtype.block_bytes
    at = draw(st.integers(0, len(data)))
    shape = (draw(st.integers(0, min((len(data) - at) // size, 24))),)
    values = (
        np.frombuffer(bytes(data), numpy_dtype(dtype), shape[0], at) if shape[0] else np.empty(0, numpy_dtype(dtype))
    )
    world.values[f"o{n}"] = values
    world.entries.append(TensorEntry.at(f"o{n}", dtype, shape, file, at))
    _place(draw, world, f"o{n}", f"r{n}", dtype, shape)


def _place(draw: st.DrawFn, world: World, name: str, parameter: str, dtype: DType, shape: Shape) -> None:
    window = draw(regions(shape, block=dtype.block))
    local = draw(_local(window.size, dtype))
    default = 3.0 if not local.is_whole and dtype.kind in (Kind.SIGNED, Kind.UNSIGNED) else None
    slots = {"": Slot(local, shape, window)}
    if default is None and not local.is_whole:
        local = Region.whole((window.size,))
        slots = {"": Slot(local, shape, window)}
    world.target[parameter] = TargetTensor(parameter, dtype, local.view, slots, default=default)
    world.rules.append(Place(name, parameter))


@st.composite
def _local(draw: st.DrawFn, size: int, dtype: DType) -> Region:
    """Return a region of some parameter with `size` elements: all of it, a row of it, or a column block."""
    flat = (size,)
    shape = draw(views(flat, block=dtype.block)) if size else flat
    way = draw(st.sampled_from(["whole", "row", "columns"]))
    if way == "whole":
        return Region.whole(shape)
    if way == "row":
        return Region((3, *shape), Box((1, *(0 for _ in shape)), (2, *shape)))
    wide = (*shape[:-1], shape[-1] + 2 * dtype.block)
    start = (*(0 for _ in shape[:-1]), dtype.block)
    return Region(wide, Box(start, (*shape[:-1], shape[-1] + dtype.block)))


@st.composite
def joins(draw: st.DrawFn, world: World, n: int) -> None:
    """Add entries that make a parameter through a transform."""
    dtype = DTYPES[draw(st.sampled_from(PLAIN))]
    shape = draw(shapes(rank=2)) or (2,)
    count = draw(st.integers(1, 3))
    via: Transform
    match draw(st.sampled_from(["stack", "concat", "transpose", "add", "chain", "take"])):
        case "stack":
            via = Stack(draw(st.integers(0, len(shape))))
        case "concat":
            via = Concat(draw(st.integers(0, len(shape) - 1)))
        case "transpose":
            via, count = Transpose(tuple(draw(st.permutations(range(len(shape)))))), 1
        case "add":
            via, count = Add(3), 1
        case "take":
            region = draw(regions(shape))
            via, count = Take(region, draw(views((region.size,))) if region.size else region.shape), 1
        case _:
            order = tuple(draw(st.permutations(range(len(shape) + 1))))
            via = Chain((Stack(draw(st.integers(0, len(shape)))), Transpose(order), Add(1)))
    made = [draw(entries(world, f"j{n}.{i}", dtype, shape)) for i in range(count)]
    from tensorferry.core.transforms import TensorSpec

    out = via.infer([TensorSpec(e.dtype, e.shape) for e in made]).shape
    window = draw(st.one_of(st.just(Region.whole(out)), regions(out), boxes(out).map(lambda b: Region(out, b))))
    local = draw(_local(window.size, dtype))
    parameter = f"q{n}"
    slots = {"": Slot(local, out, window)}
    world.target[parameter] = TargetTensor(parameter, dtype, local.view, slots, default=None if local.is_whole else 3.0)
    rule: Any = Join((f"j{n}.{{i}}",), parameter, via) if count > 1 else Place(f"j{n}.0", parameter, via=via)
    world.rules.append(rule)


@st.composite
def narrow_columns(draw: st.DrawFn, world: World, n: int) -> None:
    """Add a wide matrix, or a stack of them, of which a parameter takes a few columns: many runs at equal distances."""
    dtype = DTYPES[draw(st.sampled_from((*PLAIN, *PACKED)))]
    shape = (*draw(shapes(most=3, rank=1)), draw(st.integers(2, 9)), dtype.block * draw(st.integers(4, 24)))
    draw(entries(world, f"n{n}", dtype, shape, odd=draw(st.booleans())))
    start = dtype.block * draw(st.integers(0, shape[-1] // dtype.block - 1))
    stop = min(shape[-1], start + dtype.block * draw(st.integers(1, 3)))
    first = draw(st.integers(0, shape[-2] - 1))
    lead = [0] * (len(shape) - 2)
    window = Region(shape, Box((*lead, first, start), (*shape[:-1], stop)))
    wide = (*window.shape[:-1], window.shape[-1] + draw(st.sampled_from([0, 2 * dtype.block])))
    local = Region(wide, Box.whole(window.shape))
    default = 3.0 if dtype.block == 1 and not local.is_whole else None
    if default is None:
        local = Region.whole(window.shape)
    world.target[f"c{n}"] = TargetTensor(f"c{n}", dtype, local.view, {"": Slot(local, shape, window)}, default=default)
    world.rules.append(Place(f"n{n}", f"c{n}"))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Return a few entries, placed or joined into a few parameters."""
    world = World()
    for n in range(draw(st.integers(1, 4))):
        draw(draw(st.sampled_from([placements, placements, joins, narrow_columns, overlaps]))(world, n))
    return world


costs = st.fixed_dictionaries(
    {
        "max_gap": st.sampled_from([0, 0, 1, 3, 8, 50, 1000]),
        "max_read": st.integers(1, 200),
        "max_staging": st.integers(1, 300),
        "waste": st.sampled_from([1.0, 1.5, 2.0, 8.0, 50.0]),
    }
)
