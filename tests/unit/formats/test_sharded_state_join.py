"""Where the bytes of a window lie: boxes with strides, from what slots say."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import Chunk, Span
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.target import Slot
from tensorferry.formats.sharded_state_join import joined_entries, strides_in
from tensorferry.formats.sharded_state_manifest import RankManifest, SavedTensor
from tensorferry.formats.sharded_state_names import RankNumbers


def manifest(rank: int, tensor: SavedTensor) -> RankManifest:
    return RankManifest(RankNumbers(2, rank), "", (1,), "", {"w": tensor})


def test_columns_of_two_ranks_are_two_strided_boxes() -> None:
    halves = [
        SavedTensor(
            DTYPES["F32"], (2, 3), {"": Slot(Region.whole((2, 3)), (2, 6), Region((2, 6), Box((0, c), (2, c + 3))))}
        )
        for c in (0, 3)
    ]
    manifests = [manifest(n, half) for n, half in enumerate(halves)]
    (entry,) = joined_entries(manifests, [{"w": Span(f"{n}", 100, 24)} for n in range(2)])
    assert (entry.name, entry.shape) == ("w", (2, 6))
    assert entry.chunks == (
        Chunk(Box((0, 0), (2, 3)), Span("0", 100, 24)),
        Chunk(Box((0, 3), (2, 6)), Span("1", 100, 24)),
    )


def test_a_slot_inside_of_a_parameter_has_the_strides_of_it() -> None:
    fused = Region((3, 4), Box((0, 2), (3, 4)))
    tensor = SavedTensor(DTYPES["I8"], (3, 4), {"up": Slot.of(fused, (3, 2))})
    (entry,) = joined_entries([manifest(0, tensor)], [{"w": Span("f", 7, 12)}])
    assert entry.name == "w[up]"
    assert entry.chunks == (Chunk(None, Span("f", 9, 10), (4, 1)),)


def test_types_of_which_two_elements_share_a_byte_are_counted_in_bytes() -> None:
    half = Region((2, 8), Box((0, 4), (2, 8)))
    tensor = SavedTensor(DTYPES["F4"], (2, 8), {"b": Slot.of(half, (2, 4))})
    (entry,) = joined_entries([manifest(0, tensor)], [{"w": Span("f", 0, 8)}])
    assert entry.chunks == (Chunk(None, Span("f", 2, 6), (4, 1)),)


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Draw a strided tensor, and another shape of as many elements."""
    dims = st.lists(st.sampled_from([1, 2, 3]), min_size=0, max_size=4)
    shape = draw(dims)
    lying = [n + draw(st.integers(0, 1)) for n in shape]
    factors = [n for n in shape if n > 1]
    other, left = [], list(draw(st.permutations(factors)))
    while left:
        take = draw(st.integers(1, len(left)))
        other.append(math.prod(left[:take]))
        left = left[take:]
    for _ in range(draw(st.integers(0, 2))):
        other.insert(draw(st.integers(0, len(other))), 1)
    tensor = torch.arange(math.prod(lying)).reshape(lying)[tuple(slice(0, n) for n in shape)]
    return tensor, tuple(other)


@given(views())
def test_strides_of_another_shape_are_those_of_torch(drawn: tuple[torch.Tensor, tuple[int, ...]]) -> None:
    tensor, other = drawn
    found = strides_in(tuple(tensor.shape), tensor.stride(), other)
    try:
        viewed = tensor.view(other)
    except RuntimeError:
        assert found is None
    else:
        assert found is not None
        assert torch.equal(torch.as_strided(tensor, other, found), viewed)
