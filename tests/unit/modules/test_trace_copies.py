"""What loaders do with elements without changing them: each such copy becomes a few exact steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from helpers.old_loaders import Loaded, load_both_ways, twin
from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.plan import Plan, Strictness
from tensorferry.core.transforms import Transpose
from tensorferry.modules.trace import Traced, trace

Put = Callable[[torch.Tensor, torch.Tensor], object]


class One(nn.Module):
    """One parameter `p`, filled from one entry `e` by `put`."""

    def __init__(self, shape: tuple[int, ...], put: Put, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        self.put = put

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            self.put(self.p, weight)


def load(
    tmp_path: Path, entry: torch.Tensor, shape: tuple[int, ...], put: Put, dtype: torch.dtype | None = None
) -> Loaded:
    """Fill a parameter of `shape` both ways, check that it is equal, and return how."""
    folder = write_safetensors(tmp_path / "model.safetensors", {"e": entry}).parent
    loaded = load_both_ways(lambda: One(shape, put, dtype or entry.dtype), folder)
    loaded.assert_equal()
    return loaded


def steps(loaded: Loaded) -> int:
    """Return the number of steps of a plan that leaves nothing to the loader."""
    assert loaded.traced.opaque == {}
    assert loaded.counters.bytes_read <= loaded.traced.plan.bytes_needed
    return len(loaded.traced.plan.steps)


def of_specs(model: nn.Module, strict: Strictness | None = None, **entries: tuple[str, tuple[int, ...]]) -> Traced:
    found = (TensorEntry.at(n, DTYPES[d], shape, "f", 0) for n, (d, shape) in entries.items())
    return trace(model, Catalogue(found, format="test"), strict=strict)


HEADS, HEAD, WIDTH = 4, 3, 5


def bloom(p: torch.Tensor, w: torch.Tensor) -> None:
    """Heads that each hold query, key and value become all queries, all keys, all values."""
    p.copy_(w.view(HEADS, 3, HEAD, WIDTH).transpose(0, 1).reshape(w.shape))


def falcon(p: torch.Tensor, w: torch.Tensor) -> None:
    """Groups of two queries, a key and a value are taken apart and put together again."""
    groups = w.view(2, 4, -1, WIDTH)
    q, k, v = groups[:, :2].reshape(-1, WIDTH), groups[:, 2].reshape(-1, WIDTH), groups[:, [3]].reshape(-1, WIDTH)
    p.copy_(torch.cat([q, k, v]))


def picked(p: torch.Tensor, w: torch.Tensor) -> None:
    """Rows in the order even, odd, by numbers."""
    n = w.shape[0]
    p.copy_(w[torch.cat([torch.arange(0, n, 2), torch.arange(1, n, 2)])])


def interleaved(p: torch.Tensor, w: torch.Tensor) -> None:
    """Gate rows go to even and up rows to odd places."""
    gate, up = w.chunk(2)
    p[0::2] = gate
    p[1::2] = up


@pytest.mark.parametrize(("put", "expected"), [(bloom, 3), (falcon, 3), (interleaved, 2), (picked, 24)])
def test_heads_regrouped_by_copying_operations_are_a_few_steps(tmp_path: Path, put: Put, expected: int) -> None:
    shape = (24, WIDTH) if put in (falcon, picked, interleaved) else (HEADS * 3 * HEAD, WIDTH)
    assert steps(load(tmp_path, ar(*shape), shape, put)) == expected


def test_a_rank_that_takes_its_rows_of_regrouped_heads_reads_only_those(tmp_path: Path) -> None:
    def put(p: torch.Tensor, w: torch.Tensor) -> None:
        whole = w.view(HEADS, 3, HEAD, WIDTH).transpose(0, 1).reshape(w.shape)
        p.copy_(whole.narrow(0, HEADS * HEAD, HEADS * HEAD // 2))

    loaded = load(tmp_path, ar(HEADS * 3 * HEAD, WIDTH), (HEADS * HEAD // 2, WIDTH), put)
    assert steps(loaded) == 1
    assert loaded.counters.bytes_read == HEADS * HEAD // 2 * WIDTH * 4
    # Keys of the first half of the heads: of each 45 numbers the second 15.
    assert loaded.traced.plan.steps[0].sources[0].region == Region((4, 45), Box((0, 15), (2, 30)))


def test_one_part_of_interleaved_heads_is_one_step(tmp_path: Path) -> None:
    def put(p: torch.Tensor, w: torch.Tensor) -> None:
        p.copy_(w.view(HEADS, 3, HEAD, WIDTH)[:, 1].flatten(0, 1))

    assert steps(load(tmp_path, ar(HEADS * 3 * HEAD, WIDTH), (HEADS * HEAD, WIDTH), put)) == 1


def test_a_transpose_is_a_transform_and_a_part_of_it_reads_a_part(tmp_path: Path) -> None:
    def put(p: torch.Tensor, w: torch.Tensor) -> None:
        p.copy_(w.t()[10:80])

    loaded = load(tmp_path, ar(90, 100), (70, 90), put)
    assert steps(loaded) == 1
    assert loaded.traced.plan.steps[0].via == Transpose((1, 0))
    assert loaded.counters.bytes_read == 70 * 90 * 4


def test_inner_dimensions_exchanged_by_a_copy_are_a_transform(tmp_path: Path) -> None:
    def put(p: torch.Tensor, w: torch.Tensor) -> None:
        p.copy_(w.permute(0, 2, 1).contiguous()[:, 8:])

    loaded = load(tmp_path, ar(3, 70, 80), (3, 72, 70), put)
    assert steps(loaded) == 1
    assert loaded.traced.plan.steps[0].via == Transpose((0, 2, 1))


def test_writing_through_a_transposed_view_is_the_same_as_reading_one(tmp_path: Path) -> None:
    loaded = load(tmp_path, ar(90, 70), (70, 90), lambda p, w: p.t().copy_(w))
    assert steps(loaded) == 1


@pytest.mark.parametrize("put", [
    lambda p, w: p.copy_(w.contiguous()), lambda p, w: p.copy_(w.clone().cpu()), lambda p, w: p.copy_(w.to(p.device)),
    lambda p, w: p.copy_(w.float().double()), lambda p, w: p.copy_(torch.cat(list(w.split(3)))),
    lambda p, w: p.copy_(torch.stack(list(w.unbind()))), lambda p, w: p.copy_(w.t().t().reshape(-1).view(6, 4)),
    lambda p, w: p.copy_(torch.empty_like(w).copy_(w)), lambda p, w: p.view(-1).copy_(w.view(-1)),
    lambda p, w: p.copy_(w.detach().requires_grad_(False).type(torch.float32)),
])  # fmt: skip
def test_what_changes_no_value_reads_each_byte_once(tmp_path: Path, put: Put) -> None:
    loaded = load(tmp_path, ar(6, 4), (6, 4), put)
    assert loaded.traced.opaque == {}
    assert loaded.counters.bytes_read == 96


def test_rows_repeated_for_each_rank_are_read_for_each(tmp_path: Path) -> None:
    loaded = load(tmp_path, ar(4, 3), (8, 3), lambda p, w: p.copy_(w.view(2, 2, 3).repeat_interleave(2, 0).view(8, 3)))
    assert steps(loaded) == 2
    assert loaded.traced.plan.bytes_needed == 8 * 3 * 4


def test_a_scalar_goes_to_one_place_or_to_a_few(tmp_path: Path) -> None:
    def put(p: torch.Tensor, w: torch.Tensor) -> None:
        p[0] = w
        p[1:].copy_(w.expand(2))

    assert steps(load(tmp_path, ar(start=5), (3,), put)) == 3


def test_a_scalar_spread_over_a_large_parameter_is_left_to_the_loader(tmp_path: Path) -> None:
    loaded = load(tmp_path, ar(start=5), (1000,), lambda p, w: p.copy_(w))
    assert loaded.traced.opaque == {"p": "is regrouped in too many pieces"}


def test_rows_in_no_order_at_all_are_left_to_the_loader(tmp_path: Path) -> None:
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    loaded = load(tmp_path, ar(300, 2), (300, 2), lambda p, w: p.copy_(w[order]))
    assert loaded.traced.opaque == {"p": "is computed by index"}


def test_a_cast_that_the_parameter_makes_anyway_is_a_plain_copy(tmp_path: Path) -> None:
    loaded = load(tmp_path, ar(4, 3), (4, 3), lambda p, w: p.copy_(w.to(p.dtype)), torch.bfloat16)
    assert steps(loaded) == 1


def test_a_cast_through_a_narrower_type_is_left_to_the_loader(tmp_path: Path) -> None:
    entry = ar(4, 3, start=1.001)
    loaded = load(tmp_path, entry, (4, 3), lambda p, w: p.copy_(w.bfloat16()))
    assert loaded.traced.opaque == {"p": "is rounded to BF16 on its way to F32"}
    loaded = load(tmp_path, entry, (4, 3), lambda p, w: p.copy_(w.bfloat16()), torch.float16)
    assert loaded.traced.opaque == {"p": "is rounded twice on its way to F16"}


def test_bytes_seen_as_another_type_are_left_to_the_loader(tmp_path: Path) -> None:
    loaded = load(tmp_path, ar(4), (4,), lambda p, w: p.view(torch.int32).copy_(w.view(torch.int32)))
    assert loaded.traced.opaque == {"p": "is copied through a view of another type"}


def test_a_copy_that_is_copied_over_is_forgotten(tmp_path: Path) -> None:
    def put(p: torch.Tensor, w: torch.Tensor) -> None:
        p.fill_(3)
        p[:2].copy_(w[2:])
        p.copy_(w)

    assert steps(load(tmp_path, ar(4, 3), (4, 3), put)) == 1


def test_what_is_copied_over_in_part_is_left_to_the_loader(tmp_path: Path) -> None:
    def put(p: torch.Tensor, w: torch.Tensor) -> None:
        p.copy_(w)
        p[1:3].copy_(w[:2])

    assert load(tmp_path, ar(4, 3), (4, 3), put).traced.opaque == {"p": "is written twice in part"}


def test_a_fill_below_a_copy_fills_what_the_copy_leaves(tmp_path: Path) -> None:
    def put(p: torch.Tensor, w: torch.Tensor) -> None:
        p.zero_()
        p[1:, :2].copy_(w)

    loaded = load(tmp_path, ar(3, 2, start=1), (4, 3), put)
    assert loaded.traced.opaque == {}
    assert [s.into.size for s in loaded.traced.plan.steps] == [3, 1, 1, 1, 6]


def test_an_entry_that_is_cleared_before_it_is_copied_is_a_fill(tmp_path: Path) -> None:
    loaded = load(tmp_path, ar(6, 4), (3, 4), lambda p, w: p.copy_(w.zero_()[3:]))
    assert steps(loaded) == 1
    assert loaded.traced.plan.steps[0].fill == 0
    assert loaded.counters.bytes_read == 0


def test_a_parameter_that_is_not_row_major_is_planned_in_its_own_shape() -> None:
    class Turned(One):
        def __init__(self) -> None:
            super().__init__((3, 4), lambda p, w: p.copy_(w))
            self.p = nn.Parameter(torch.empty(4, 3).t(), requires_grad=False)

    (step,) = of_specs(Turned(), e=("F32", (3, 4))).plan.steps
    assert step.into == step.sources[0].region == Region.whole((3, 4))


def test_tied_parameters_are_filled_once_under_their_first_name() -> None:
    class Tied(One):
        def __init__(self) -> None:
            super().__init__((3, 4), lambda p, w: p.copy_(w))
            self.q = self.p

    plan = of_specs(twin(Tied), e=("F32", (3, 4))).plan
    assert [s.parameter for s in plan.steps] == ["p"]
    assert plan.aliases == {"q": "p"}
    assert list(plan.parameters) == ["p"]


def test_entries_stored_with_strides_are_taken_apart_by_a_transform() -> None:
    entry = TensorEntry.at("e", DTYPES["F32"], (4, 6), "f", 0, strides=(1, 4), length=96)
    model = One((2, 12), lambda p, w: p.copy_(w.view(2, 12)))
    (step,) = trace(model, Catalogue([entry], format="test")).plan.steps
    assert step.via is None  # all of it, in order, is a region of its own shape
    model = One((4, 3), lambda p, w: p.copy_(w.view(4, 2, 3)[:, 1]))
    (step,) = trace(model, Catalogue([entry], format="test")).plan.steps
    assert step.sources[0].region == Region((4, 6), Box((0, 3), (4, 6)))
    model = One((2, 6), lambda p, w: p.copy_(w.view(2, 12)[:, 3:9]))
    (step,) = trace(model, Catalogue([entry], format="test")).plan.steps
    assert step.via is not None
    assert step.sources[0].region == Region.whole((4, 6))


def test_packed_entries_are_left_to_the_loader() -> None:
    model = One((4, 3), lambda p, w: p.view(torch.uint8).view(-1)[: w.numel()].copy_(w.view(-1)))
    assert of_specs(model, e=("F6_E2M3", (4, 4))).opaque == {"p": "comes from packed F6_E2M3 values"}


def problems(plan: Plan) -> list[tuple[str, str, str, bool]]:
    return [(p.kind.value, p.subject, p.detail, p.fatal) for p in plan.problems]


def test_a_parameter_that_the_loader_never_fills_is_missing() -> None:
    model = One((3, 4), lambda p, w: None)
    assert problems(of_specs(model, e=("F32", (3, 4))).plan) == [
        ("missing", "p", "", True),
        ("unexpected", "e", "the model's loader ignores it", False),
    ]
    allowed = of_specs(model, Strictness(may_miss=("p",)), e=("F32", (3, 4)))
    assert problems(allowed.plan)[0] == ("missing", "p", "", False)


def test_a_parameter_that_is_filled_in_part_is_missing_and_says_how_much() -> None:
    model = One((3, 4), lambda p, w: p[1:].copy_(w[1:]))
    detail = "the model's loader fills 8 of its 12 elements"
    assert problems(of_specs(model, e=("F32", (3, 4))).plan) == [("missing", "p", detail, True)]


def test_integers_that_become_floats_are_a_problem_unless_allowed() -> None:
    model = One((4,), lambda p, w: p.copy_(w))
    detail = "I32 in the checkpoint, F32 in the model: not the same sort of number"
    assert problems(of_specs(model, e=("I32", (4,))).plan) == [("lossy dtype", "e", detail, True)]
    allowed = of_specs(model, Strictness(lossy="warn"), e=("I32", (4,)))
    assert problems(allowed.plan) == [("lossy dtype", "e", detail, False)]


def test_an_entry_of_another_shape_is_refused_by_the_loader_itself_and_reported() -> None:
    traced = of_specs(One((3, 4), lambda p, w: p.copy_(w)), e=("F32", (5, 4)))
    assert traced.fallback is not None
    assert "size of tensor" in traced.fallback or "expand" in traced.fallback


def test_an_entry_whose_copy_is_overwritten_is_dropped_and_says_so() -> None:
    model = One((4,), lambda p, w: p.copy_(w))
    plan = of_specs(model, e=("F32", (4,)), late=("F32", (4,))).plan
    assert plan.dropped == (("e", "what the model's loader copies of it is overwritten later"),)


def test_empty_tensors_need_nothing() -> None:
    traced = of_specs(One((0, 4), lambda p, w: p.copy_(w)), e=("F32", (0, 4)))
    assert traced.plan.problems == ()
    assert traced.opaque == {}
