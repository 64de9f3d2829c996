"""The feeder: tensors are pushed, in any order, and the plan says where they go."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar
from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.plan import Plan
from tensorferry.core.planning import make_plan
from tensorferry.core.rules import Join, Place, Rule
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Slot, TargetTensor
from tensorferry.core.transforms import Chain, Stack, Transpose
from tensorferry.errors import PlanError
from tensorferry.execute import Feeder
from tensorferry.numerics.casts import Loss
from tensorferry.numerics.torch_dtypes import dtype_of

F32 = DTYPES["F32"]


def _plan(tensors: dict[str, torch.Tensor], *target: TargetTensor, rules: tuple[Rule, ...] = ()) -> Plan:
    entries = [TensorEntry.at(n, dtype_of(t.dtype), tuple(t.shape), "f", 0) for n, t in tensors.items()]
    wanted = target or [TargetTensor.plain(n, dtype_of(t.dtype), tuple(t.shape)) for n, t in tensors.items()]
    plan = make_plan(Catalogue(entries, format="memory"), {t.name: t for t in wanted}, RuleSet(*rules))
    plan.raise_for_problems()
    return plan


TWO = {"a": ar(2, 2), "b": ar(2, start=10)}


def test_what_is_fed_is_in_the_parameters() -> None:
    found = {name: torch.zeros_like(t) for name, t in TWO.items()}
    feeder = Feeder(_plan(TWO), found)
    assert feeder.feed("b", TWO["b"])
    assert feeder.feed("a", TWO["a"])
    counters = feeder.finish()
    assert all(torch.equal(found[n], TWO[n]) for n in TWO)
    assert counters.bytes_read == 24


def test_what_nothing_wants_is_said_to_be_of_no_use() -> None:
    feeder = Feeder(_plan(TWO), {name: torch.zeros_like(t) for name, t in TWO.items()})
    assert feeder.feed("optimizer.step", torch.zeros(1)) is False


def test_what_is_fed_is_copied_at_once() -> None:
    found = {"a": torch.zeros(2, 2)}
    feeder = Feeder(_plan({"a": TWO["a"]}), found)
    pushed = TWO["a"].clone()
    feeder.feed("a", pushed)
    pushed.zero_()
    assert torch.equal(found["a"], TWO["a"])


def test_inputs_of_a_transform_wait_for_each_other() -> None:
    tensors = {f"e.{i}": ar(2, start=10 * i) for i in range(3)}
    plan = _plan(tensors, TargetTensor.plain("s", F32, (3, 2)), rules=(Join(("e.{i}",), "s", Stack(0)),))
    found, ready = {"s": torch.zeros(3, 2)}, list[str]()
    feeder = Feeder(plan, found, on_ready=ready.append)
    for i in (2, 0):
        feeder.feed(f"e.{i}", tensors[f"e.{i}"])
        assert ready == []
    feeder.feed("e.1", tensors["e.1"])
    assert ready == ["s"]
    assert found["s"].tolist() == [[0, 1], [10, 11], [20, 21]]
    assert feeder.held_bytes == 0


def test_a_window_is_cut_out_and_the_rest_filled() -> None:
    slot = Slot(Region((3, 2), Box((0, 0), (2, 2))), (4, 2), Region((4, 2), Box((2, 0), (4, 2))))
    plan = _plan({"w": ar(4, 2)}, TargetTensor("w", F32, (3, 2), {"": slot}, default=7.0))
    found = {"w": torch.zeros(3, 2)}
    feeder = Feeder(plan, found)
    feeder.feed("w", ar(4, 2))
    feeder.finish()
    assert found["w"].tolist() == [[4, 5], [6, 7], [7, 7]]


def test_parameters_that_train_are_fed_from_parameters_that_train() -> None:
    found = {"a": nn.Parameter(torch.zeros(2, 2))}
    Feeder(_plan({"a": TWO["a"]}), found).feed("a", nn.Parameter(TWO["a"].clone()))
    assert torch.equal(found["a"], TWO["a"])
    assert found["a"].is_leaf


def test_strided_tensors_may_be_fed() -> None:
    found = {"a": torch.zeros(2, 2)}
    Feeder(_plan({"a": TWO["a"]}), found).feed("a", TWO["a"].t().contiguous().t())
    assert torch.equal(found["a"], TWO["a"])


def test_losses_are_counted() -> None:
    plan = _plan({"w": torch.tensor([1.0, 1e6])}, TargetTensor.plain("w", DTYPES["F16"], (2,)))
    feeder = Feeder(plan, {"w": torch.zeros(2, dtype=torch.float16)})
    feeder.feed("w", torch.tensor([1.0, 1e6]))
    assert feeder.finish().losses == {"w": Loss(overflow=1)}


def test_another_shape_or_type_than_planned_is_refused_before_anything_is_written() -> None:
    found = {name: torch.zeros_like(t) for name, t in TWO.items()}
    feeder = Feeder(_plan(TWO), found)
    with pytest.raises(
        PlanError, match=r"'a' was fed as torch\.float32 \(4,\), but the plan was made for F32 \(2, 2\)"
    ):
        feeder.feed("a", ar(4))
    with pytest.raises(PlanError, match=r"'a' was fed as torch\.float64"):
        feeder.feed("a", TWO["a"].double())
    assert not found["a"].any()
    assert feeder.feed("a", TWO["a"])


def test_the_same_tensor_twice_is_refused() -> None:
    feeder = Feeder(_plan(TWO), {name: torch.zeros_like(t) for name, t in TWO.items()})
    feeder.feed("a", TWO["a"])
    with pytest.raises(PlanError, match="'a' was fed twice"):
        feeder.feed("a", TWO["a"])


def test_what_never_came_is_named_at_the_end() -> None:
    feeder = Feeder(_plan(TWO), {name: torch.zeros_like(t) for name, t in TWO.items()})
    feeder.feed("a", TWO["a"])
    with pytest.raises(PlanError, match="1 tensor was never fed: b"):
        feeder.finish()


@pytest.mark.parametrize("pushed", [None, 1.0, [0.0, 1.0], ar(2).numpy(), ar(2).to("meta")])
def test_what_is_no_tensor_with_values_is_refused_and_may_still_come(pushed: object) -> None:
    found = {"b": torch.zeros(2)}
    feeder = Feeder(_plan({"b": TWO["b"]}), found)
    with pytest.raises(PlanError, match="a tensor with values is expected"):
        feeder.feed("b", pushed)  # type: ignore[arg-type]
    feeder.feed("b", TWO["b"])
    feeder.finish()
    assert torch.equal(found["b"], TWO["b"])


def _part(view: tuple[int, ...], start: tuple[int, ...], stop: tuple[int, ...]) -> Region:
    return Region(view, Box(start, stop))


def test_an_entry_may_come_in_parts_and_is_ready_with_the_last_one() -> None:
    found, ready = {"w": torch.zeros(4, 3)}, list[str]()
    feeder = Feeder(_plan({"w": ar(4, 3)}), found, on_ready=ready.append)
    assert feeder.feed("w", ar(4, 3)[2:], _part((4, 3), (2, 0), (4, 3)))
    assert feeder.feed("w", ar(4, 3)[:2, :1], _part((4, 3), (0, 0), (2, 1)))
    assert ready == []
    feeder.feed("w", ar(4, 3)[:2, 1:], _part((4, 3), (0, 1), (2, 3)))
    assert ready == ["w"]
    assert feeder.finish().bytes_read == 48
    assert torch.equal(found["w"], ar(4, 3))


def test_parts_of_another_view_land_where_they_belong() -> None:
    found = {"w": torch.zeros(4, 3)}
    feeder = Feeder(_plan({"w": ar(4, 3)}), found)
    feeder.feed("w", ar(12)[:5], _part((12,), (0,), (5,)))
    feeder.feed("w", ar(2, 6)[1:], _part((2, 6), (1, 0), (2, 6)))
    feeder.feed("w", ar(1, start=5), _part((12,), (5,), (6,)))
    feeder.finish()
    assert torch.equal(found["w"], ar(4, 3))


def test_only_the_elements_that_the_plan_needs_have_to_come() -> None:
    slot = Slot(Region.whole((2, 2)), (4, 2), Region((4, 2), Box((2, 0), (4, 2))))
    found = {"w": torch.zeros(2, 2)}
    feeder = Feeder(_plan({"w": ar(4, 2)}, TargetTensor("w", F32, (2, 2), {"": slot})), found)
    feeder.feed("w", ar(4, 2)[1:3], _part((4, 2), (1, 0), (3, 2)))
    with pytest.raises(PlanError, match=r"1 tensor was never fed: w \(2 of 4 elements\)"):
        feeder.finish()
    feeder.feed("w", ar(4, 2)[3:], _part((4, 2), (3, 0), (4, 2)))
    feeder.finish()
    assert found["w"].tolist() == [[4, 5], [6, 7]]


def test_an_element_that_comes_twice_is_refused_before_anything_is_written() -> None:
    found = {"w": torch.zeros(4, 2)}
    feeder = Feeder(_plan({"w": ar(4, 2)}), found)
    feeder.feed("w", ar(4, 2)[:2], _part((4, 2), (0, 0), (2, 2)))
    for again in (_part((4, 2), (1, 0), (3, 2)), _part((8,), (3,), (4,)), _part((2, 4), (0, 0), (2, 1))):
        with pytest.raises(PlanError, match=r"part \(slice.*\) of tensor 'w' was fed twice"):
            feeder.feed("w", torch.full(again.shape, -1.0), again)
    with pytest.raises(PlanError, match="tensor 'w' was fed twice"):
        feeder.feed("w", ar(4, 2))
    assert found["w"].tolist() == [[0, 1], [2, 3], [0, 0], [0, 0]]


def test_a_part_that_is_none_or_of_another_shape_is_refused() -> None:
    feeder = Feeder(_plan({"w": ar(4, 2)}), {"w": torch.zeros(4, 2)})
    with pytest.raises(PlanError, match=r"seen as \(4, 2\), is no part of its shape \(4, 2\)"):
        feeder.feed("w", ar(2, 2), _part((4, 2), (3, 0), (5, 2)))
    with pytest.raises(PlanError, match=r"seen as \(9,\), is no part of its shape"):
        feeder.feed("w", ar(9), _part((9,), (0,), (9,)))
    with pytest.raises(PlanError, match=r"was fed as torch\.float32 \(4,\), but the plan was made for F32 \(2, 2\)"):
        feeder.feed("w", ar(4), _part((4, 2), (0, 0), (2, 2)))


def test_parts_that_a_transform_needs_are_put_together_first() -> None:
    found = {"t": torch.zeros(3, 2)}
    plan = _plan({"w": ar(2, 3)}, TargetTensor.plain("t", F32, (3, 2)), rules=(Place("w", "t", via=Transpose((1, 0))),))
    feeder = Feeder(plan, found)
    feeder.feed("w", ar(2, 3)[:, :2], _part((2, 3), (0, 0), (2, 2)))
    assert feeder.held_bytes == 24
    feeder.feed("w", ar(2, 3)[:, 2:], _part((2, 3), (0, 2), (2, 3)))
    assert feeder.finish().staging_peak == 24
    assert found["t"].tolist() == ar(2, 3).t().tolist()


@pytest.mark.parametrize("borrowed", [True, False])
def test_borrowed_tensors_are_copied_where_they_have_to_wait(borrowed: bool) -> None:
    tensors = {"e.0": ar(2, 2), "e.1": ar(2, 2, start=10)}
    rule = Join(("e.{i}",), "t", Chain((Stack(0), Transpose((2, 1, 0)))))
    plan = _plan(tensors, TargetTensor.plain("t", F32, (2, 2, 2)), rules=(rule,))
    found, buffer = {"t": torch.zeros(2, 2, 2)}, torch.zeros(2, 2)
    feeder = Feeder(plan, found, borrowed=borrowed)
    for name, values in tensors.items():
        feeder.feed(name, buffer.copy_(values))
    feeder.finish()
    assert torch.equal(found["t"], torch.stack(list(tensors.values())).permute(2, 1, 0)) is borrowed


def test_packed_elements_are_fed_by_whole_blocks() -> None:
    f4 = DTYPES["F4"]
    entry = TensorEntry.at("w", f4, (2, 4), "f", 0)
    plan = make_plan(Catalogue([entry], format="memory"), {"w": TargetTensor.plain("w", f4, (2, 4))}, RuleSet())
    found = {"w": torch.zeros(2, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}
    pushed = torch.arange(4, dtype=torch.uint8).reshape(2, 2).view(torch.float4_e2m1fn_x2)
    feeder = Feeder(plan, found)
    with pytest.raises(PlanError, match="cuts through a block"):
        feeder.feed("w", pushed[:, :1], _part((2, 4), (0, 0), (2, 1)))
    feeder.feed("w", pushed[:, 1:], _part((2, 4), (0, 2), (2, 4)))
    with pytest.raises(PlanError, match=r"w \(2 of 4 elements\)"):
        feeder.finish()
    feeder.feed("w", pushed[:, :1], _part((2, 4), (0, 0), (2, 2)))
    feeder.finish()
    assert found["w"].view(torch.uint8).tolist() == [[0, 1], [2, 3]]
