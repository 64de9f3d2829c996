"""What a module needs: names, types, shapes, ties, and slots that layers declare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import nn

from tensorferry.core.boxes import Box, Region
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.target import Layout, Slot, owner_of
from tensorferry.errors import PlanError, UnsupportedDtype
from tensorferry.modules.describe import describe, identity_of, places, tensors_of, walked

F32 = DTYPES["F32"]


class Tied(nn.Module):
    def __init__(self, *, by_object: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight if by_object else nn.Parameter(self.embed.weight.data)


def test_parameters_and_persistent_buffers_are_described_by_name() -> None:
    module = nn.BatchNorm1d(3)
    module.register_buffer("scratch", torch.zeros(9), persistent=False)
    target = describe(module)
    assert {n: (t.dtype.name, t.shape) for n, t in target.items()} == {
        "weight": ("F32", (3,)),
        "bias": ("F32", (3,)),
        "running_mean": ("F32", (3,)),
        "running_var": ("F32", (3,)),
        "num_batches_tracked": ("I64", ()),
    }
    assert all(t.slots[""] == Slot.whole(t.shape, also=t.slots[""].also) for t in target.values())


def test_the_names_are_those_of_the_state_dict() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8), nn.LSTM(3, 4, 2), nn.Conv2d(1, 2, 3))
    assert list(describe(model)) == list(model.state_dict())


def test_what_is_none_is_left_out() -> None:
    assert list(describe(nn.Linear(2, 2, bias=False))) == ["weight"]


def test_nothing_is_allocated_for_a_module_on_meta() -> None:
    with torch.device("meta"):
        module = nn.Linear(1 << 20, 1 << 20)
    assert describe(module)["weight"].shape == (1 << 20, 1 << 20)


def test_scalars_and_vectors_of_one_take_each_other() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(1.0))
            self.one = nn.Parameter(torch.ones(1))

    target = describe(Scales())
    assert target["scalar"].slots[""].also == ((1,),)
    assert target["one"].slots[""].also == ((),)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_parameter_in_two_places_is_tied_to_the_first(device: str) -> None:
    with torch.device(device):
        target = describe(Tied())
    assert target["head.weight"].alias_of == "embed.weight"
    assert target["embed.weight"].alias_of is None


def test_two_parameters_over_one_piece_of_memory_are_tied() -> None:
    assert describe(Tied(by_object=False))["head.weight"].alias_of == "embed.weight"


def test_a_view_of_part_of_a_parameter_is_not_tied_to_it() -> None:
    module = Tied()
    module.head.weight = nn.Parameter(module.embed.weight.data[:2])
    assert describe(module)["head.weight"].alias_of is None


def test_tensors_without_elements_are_not_taken_for_tied() -> None:
    module = nn.ParameterList([torch.empty(0), torch.empty(0)])
    assert describe(module)["1"].alias_of is None


def test_a_module_in_two_places_is_tied_throughout() -> None:
    shared = nn.Linear(2, 2)
    target = describe(nn.Sequential(shared, nn.Sequential(shared)))
    assert {n: t.alias_of for n, t in target.items()} == {
        "0.weight": None,
        "0.bias": None,
        "1.0.weight": "0.weight",
        "1.0.bias": "0.bias",
    }
    assert owner_of(target, "1.0.bias") == "0.bias"
    assert owner_of(target, "0.bias") == "0.bias"


@pytest.mark.parametrize("name", ["float8_e4m3fn", "uint16", "bool", "complex64", "float64", "bfloat16"])
def test_every_type_that_checkpoints_have_is_described(name: str) -> None:
    dtype = getattr(torch, name)
    module = nn.Module()
    module.register_buffer("b", torch.zeros(2, dtype=torch.uint8).to(dtype))
    assert describe(module)["b"].shape == (2,)


def test_f4_is_counted_in_elements() -> None:
    module = nn.Module()
    module.register_buffer("b", torch.zeros(2, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    described = describe(module)["b"]
    assert (described.dtype.name, described.shape) == ("F4", (2, 8))


def test_a_lazy_module_is_refused_with_what_to_do() -> None:
    with pytest.raises(PlanError, match=r"1\.weight has no shape yet, as LazyLinear finds it out .*run the model once"):
        describe(nn.Sequential(nn.ReLU(), nn.LazyLinear(3)))


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
def test_a_quantized_tensor_is_refused() -> None:
    module = nn.Module()
    module.register_buffer("b", torch.empty(2, dtype=torch.qint8, device="meta"))
    with pytest.raises(UnsupportedDtype, match="qint8"):
        describe(module)


class Column(nn.Module):
    """Rows 2 and 3 of a logical tensor of four rows."""

    def __init__(self, slots: Mapping[str, Mapping[str, Slot]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))
        self.register_parameter("bias", None)
        self.slots = slots

    def tensor_slots(self) -> Mapping[str, Mapping[str, Slot]]:
        return self.slots


SLOT = Slot(Region.whole((2, 3)), (4, 3), Region((4, 3), Box((2, 0), (4, 3))))


def test_a_layer_says_how_its_parameters_are_laid_out() -> None:
    target = describe(nn.Sequential(Column({"weight": {"": SLOT}, "bias": {"": SLOT}})))
    assert target["0.weight"].slots == {"": SLOT}


def test_a_layout_declares_padding_and_the_slots_of_other_ranks() -> None:
    class Padded(nn.Module):
        """Three rows of which one is padding; a second slot is another rank's."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 3))

        def tensor_slots(self) -> Mapping[str, Layout]:
            rows = Slot.of(Region((3, 3), Box((0, 0), (2, 3))), (2, 3))
            return {"weight": Layout({"0": rows}, default=0.0, absent={"1"})}

    target = describe(Padded())["weight"]
    assert target.default == 0.0
    assert "1" in target.absent
    assert list(target.slots) == ["0"]


def test_none_takes_a_declaration_away() -> None:
    class Plain(Column):
        tensor_slots = None  # type: ignore[assignment]

    assert describe(Plain({"weight": {"": SLOT}}))["weight"].slots[""].logical == (2, 3)
    one = Column({"weight": {"": SLOT}})
    one.tensor_slots = None  # type: ignore[assignment, method-assign]
    assert describe(one)["weight"].slots[""].logical == (2, 3)


def test_slots_of_a_parameter_that_is_not_there_are_refused() -> None:
    with pytest.raises(PlanError, match=r"Column declares slots of 0\.wieght, which it does not have"):
        describe(nn.Sequential(Column({"wieght": {"": SLOT}})))


def test_places_come_once_for_each_name() -> None:
    assert [p.name for p in places(Tied())] == ["embed.weight", "head.weight"]
    one, other = places(Tied())
    assert identity_of(one.tensor) == identity_of(other.tensor)


class _Hiding(nn.Module):
    """A module that says itself which modules are in it."""

    def named_modules(self, *given: object, **named: object) -> Iterator[tuple[str, nn.Module]]:
        yield from ((name, module) for name, module in super().named_modules(*given, **named) if "hidden" not in name)  # type: ignore[arg-type]


def test_modules_are_walked_as_torch_walks_them() -> None:
    shared, hiding = nn.Sequential(nn.Linear(1, 1)), _Hiding()
    hiding.add_module("hidden", nn.Linear(1, 1))
    hiding.add_module("seen", nn.Linear(1, 1))
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared, hiding])})
    model.register_module("none", None)
    expected = [(n + "." if n else "", m) for n, m in model.named_modules(remove_duplicate=False)]
    assert walked(model) == expected
    assert "b.1.seen." in dict(expected)
    assert "b.1.hidden." not in dict(expected)


def test_tensors_are_those_of_places() -> None:
    shared = nn.BatchNorm1d(2)
    model = nn.Sequential(shared, nn.Linear(2, 2, bias=False), shared)
    assert [id(t) for t in tensors_of(model)] == [id(p.tensor) for p in places(model)]
