"""Strided copies against torch itself: looking through one copy at another is the same as indexing twice."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorferry.core.boxes import strides_of
from tensorferry.modules.recorder import geometry
from tensorferry.modules.regions import as_region
from tensorferry.modules.views import Copy, TooScattered, in_order, through

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def moves(copy: Copy) -> dict[int, int]:
    """Return by hand what `copy` does: written position to read position."""
    out = {}
    for index in product(*(range(a.size) for a in copy.axes)):
        into = copy.into + sum(i * a.into for i, a in zip(index, copy.axes, strict=True))
        assert into not in out, "a copy writes each position once"
        out[into] = copy.source + sum(i * a.source for i, a in zip(index, copy.axes, strict=True))
    return out


@st.composite
def some_view(draw: st.DrawFn, base: torch.Tensor) -> torch.Tensor:
    """A view of `base` as loaders make them: slices, transposes, reshapes that stay views, picks."""
    view = base
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["narrow", "permute", "split", "merge", "select", "step"]))
        dim = draw(st.integers(0, max(view.dim() - 1, 0)))
        if view.dim() == 0:
            break
        n = view.shape[dim]
        if kind == "narrow":
            a = draw(st.integers(0, n - 1))
            view = view.narrow(dim, a, draw(st.integers(1, n - a)))
        elif kind == "permute":
            view = view.permute(draw(st.permutations(range(view.dim()))))
        elif kind == "split":
            k = draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0]))
            view = view.view(*view.shape[:dim], k, n // k, *view.shape[dim + 1 :])
        elif kind == "merge" and dim + 1 < view.dim() and view.stride(dim) == n_stride(view, dim):
            view = view.flatten(dim, dim + 1)
        elif kind == "select":
            view = view.select(dim, draw(st.integers(0, n - 1)))
        elif kind == "step":
            view = view[(*[slice(None)] * dim, slice(draw(st.integers(0, n - 1)), None, draw(st.integers(1, 3))))]
    return view


def n_stride(view: torch.Tensor, dim: int) -> int:
    return view.shape[dim + 1] * view.stride(dim + 1)


def meta(shape: list[int]) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def row_major(shape: torch.Size) -> tuple[int, tuple[int, ...]]:
    return 0, strides_of(shape)


@given(st.data(), SHAPES)
def test_looking_through_a_copy_reads_what_indexing_twice_reads(data: st.DataObject, shape: list[int]) -> None:
    middle = meta(shape)
    written = data.draw(some_view(middle))
    inner = Copy.of(written.shape, geometry(written), row_major(written.shape)).tidy()
    read = data.draw(some_view(middle))
    copy = Copy.of(read.shape, row_major(read.shape), geometry(read))
    first, second = moves(inner), moves(copy)
    expected = {into: first[at] for into, at in second.items() if at in first}
    if not inner.nested:
        return
    try:
        found = through(copy, inner)
    except TooScattered:
        return
    got: dict[int, int] = {}
    for part in found:
        assert not got.keys() & moves(part).keys()
        got |= moves(part)
    assert got == expected


@given(st.data(), SHAPES)
def test_a_region_made_of_a_view_holds_the_elements_of_the_view_in_their_order(
    data: st.DataObject, shape: list[int]
) -> None:
    base = torch.arange(meta(shape).numel()).reshape(shape)
    view = data.draw(some_view(base))
    copy = Copy.of(view.shape, geometry(view), row_major(view.shape)).tidy()
    region = as_region(copy.into, [(a.size, a.into) for a in copy.axes], tuple(shape))
    if region is not None:
        assert region.fits(shape)
        picked = base.reshape(region.view)[region.box.slices].flatten().tolist()
        assert picked == sorted(view.flatten().tolist())


@given(st.data(), SHAPES)
def test_a_box_of_a_tensor_is_always_a_region_in_the_shape_of_the_tensor(data: st.DataObject, shape: list[int]) -> None:
    base = meta(shape)
    start = [data.draw(st.integers(0, n - 1)) for n in shape]
    stop = [data.draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True)]
    view = base[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
    copy = Copy.of(view.shape, geometry(view), row_major(view.shape)).tidy()
    region = as_region(copy.into, [(a.size, a.into) for a in copy.axes], tuple(shape))
    assert region is not None
    assert region.view == tuple(shape)
    assert (region.box.start, region.box.stop) == (tuple(start), tuple(stop))


@given(st.data(), SHAPES)
def test_copies_put_in_order_do_the_same_and_read_as_they_write(data: st.DataObject, shape: list[int]) -> None:
    base = meta(shape)
    view = data.draw(some_view(base))
    copy = Copy.of(view.shape, row_major(view.shape), geometry(view))
    parts = in_order(copy, 64)
    assert parts is not None or copy.size > 64
    got: dict[int, int] = {}
    for part in parts or [copy]:
        if parts is not None:
            order = [source for _, source in sorted(moves(part).items())]
            assert order == sorted(order)
        got |= moves(part)
    assert got == moves(copy)
