"""Parameters that keep blocks: filled as they lie, cut by ranks between blocks, refused where numbers are needed."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorferry
from helpers.gguf_models import write_gguf
from tensorferry import (
    Add,
    Box,
    Concat,
    ConfigError,
    Dequantize,
    Join,
    PackedParameter,
    PackedTensor,
    Permute,
    Place,
    PlanError,
    Region,
    RuleSet,
    Slot,
    Stack,
    Strictness,
    keep_packed,
    load,
    open_checkpoint,
    packed_types,
)
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.transforms import Transform

ROWS, COLUMNS = 8, 96


def values(start: int = 0) -> torch.Tensor:
    return torch.linspace(start - 1, 1, ROWS * COLUMNS).view(ROWS, COLUMNS)


def write(folder: Path, types: Mapping[str, str]) -> Path:
    """Write tensors of the types that are named; F32 stays numbers."""
    tensors = {name: values(n) for n, name in enumerate(types)}
    packed = {name: kind for name, kind in types.items() if kind != "F32"}
    return write_gguf(folder / "m.gguf", "llama", {}, tensors, packed=packed)


class Holder(nn.Module):
    """One parameter, `w`, with the slots that are given."""

    def __init__(self, w: nn.Parameter, slots: Mapping[str, Slot] | None = None) -> None:
        super().__init__()
        self.w = w
        self.slots = slots

    def tensor_slots(self) -> dict[str, Mapping[str, Slot]]:
        return {} if self.slots is None else {"w": self.slots}


def parameter(rows: int = ROWS, columns: int = COLUMNS, kind: str = "Q8_0", device: str = "meta") -> PackedParameter:
    return PackedParameter.empty(kind, (rows, columns), device=device)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_blocks_come_as_they_lie(device: str, tmp_path: Path) -> None:
    path = write(tmp_path, {"w": "Q8_0"})
    model: Any = Holder(parameter(device=device))
    report = load(model, path)
    with open_checkpoint(path) as checkpoint:
        stored = checkpoint.read("w", packed=True)
    assert isinstance(stored, PackedTensor)
    assert isinstance(model.w, PackedParameter)
    assert model.w.packed.dtype == DTYPES["Q8_0"]
    assert torch.equal(model.w.packed.blocks, stored.blocks)
    assert report.direct_bytes == stored.nbytes
    assert not model.w.requires_grad


def test_numbers_made_of_it_are_those_of_an_ordinary_load(tmp_path: Path) -> None:
    path = write(tmp_path, {"w": "Q4_0"})
    kept: Any = Holder(parameter(kind="Q4_0"))
    plain: Any = Holder(nn.Parameter(torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16)))
    load(kept, path)
    load(plain, path)
    assert torch.equal(kept.w.packed.dequantize(torch.bfloat16), plain.w)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_take_any_rows(rank: int, tmp_path: Path) -> None:
    path = write(tmp_path, {"w": "Q8_0"})
    start, stop = (0, 3, 7, 8)[rank : rank + 2]
    window = Region((ROWS, COLUMNS), Box((start, 0), (stop, COLUMNS)))
    local = Region.whole((stop - start, COLUMNS))
    model: Any = Holder(parameter(rows=stop - start), {"": Slot(local, (ROWS, COLUMNS), window)})
    report = load(model, path)
    with open_checkpoint(path) as checkpoint:
        assert torch.equal(model.w, checkpoint.read("w")[start:stop])
    assert report.bytes_read == (stop - start) * 3 * 34


def columns(start: int, stop: int) -> dict[str, Slot]:
    window = Region((ROWS, COLUMNS), Box((0, start), (ROWS, stop)))
    return {"": Slot(Region.whole((ROWS, stop - start)), (ROWS, COLUMNS), window)}


def test_ranks_take_columns_between_blocks(tmp_path: Path) -> None:
    path = write(tmp_path, {"w": "Q8_0"})
    model: Any = Holder(parameter(columns=64), columns(32, 96))
    load(model, path)
    with open_checkpoint(path) as checkpoint:
        assert torch.equal(model.w, checkpoint.read("w")[:, 34:])


def test_columns_through_a_block_are_refused_with_the_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, {"w": "Q8_0"})
    model: Any = Holder(parameter(columns=32), columns(16, 48))
    expected = "w would take columns 16 to 48 of 96, which are not whole blocks of 32 Q8_0 elements"
    with pytest.raises(PlanError, match=re.escape(expected)) as refusal:
        load(model, path)
    assert not refusal.value.touched


def test_rows_are_moved_while_they_are_packed(tmp_path: Path) -> None:
    path = write(tmp_path, {"w": "Q8_0"})
    model: Any = Holder(parameter())
    load(model, path, rules=RuleSet(Place("w", "w", via=Permute((2, 2, 2, COLUMNS), (0, 2, 1, 3)))))
    with open_checkpoint(path) as checkpoint:
        stored = checkpoint.read("w")
    assert torch.equal(model.w, stored.view(2, 2, 2, -1).transpose(1, 2).reshape(ROWS, -1))


@pytest.mark.parametrize(
    ("via", "expected"),
    [
        (Add(1.0), "adds to numbers, not to blocks of Q8_0"),
        (Permute((ROWS, 2, COLUMNS // 2), (0, 2, 1)), "Q8_0 packs elements along the last dimension"),
        (Dequantize(), "F32 in the checkpoint, Q8_0 in the model, which keeps blocks as they are"),
    ],
)
def test_what_needs_numbers_is_refused(via: Transform, expected: str, tmp_path: Path) -> None:
    path = write(tmp_path, {"w": "Q8_0"})
    with pytest.raises(PlanError, match=expected):
        load(Holder(parameter()), path, rules=RuleSet(Place("w", "w", via=via)))


@pytest.mark.parametrize("kind", ["Q4_0", "F32"])
@pytest.mark.parametrize("strict", [Strictness(), Strictness(lossy="warn")])
def test_another_type_is_refused_however_lenient_a_load_is(kind: str, strict: Strictness, tmp_path: Path) -> None:
    path = write(tmp_path, {"w": kind})
    expected = f"{kind} in the checkpoint, Q8_0 in the model, which keeps blocks as they are: make it {kind}"
    with pytest.raises(PlanError, match=expected):
        load(Holder(parameter()), path, strict=strict)


@pytest.mark.parametrize("join", [Stack(0), Concat(0), Concat(1)])
def test_tensors_of_one_type_are_joined(join: Stack | Concat, tmp_path: Path) -> None:
    path = write(tmp_path, {"a": "Q8_0", "b": "Q8_0"})
    shape = {Stack(0): (2, ROWS, COLUMNS), Concat(0): (2 * ROWS, COLUMNS), Concat(1): (ROWS, 2 * COLUMNS)}[join]
    model: Any = Holder(PackedParameter.empty("Q8_0", shape, device="meta"))
    load(model, path, rules=RuleSet(Join(("a", "b"), "w", via=join)))
    with open_checkpoint(path) as checkpoint:
        parts = [checkpoint.read(name) for name in "ab"]
    assert torch.equal(model.w, torch.stack(parts) if isinstance(join, Stack) else torch.cat(parts, join.dim))


def test_tensors_of_two_types_are_not_joined(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": "Q8_0", "b": "Q4_0"})
    model = Holder(parameter(rows=2 * ROWS))
    with pytest.raises(PlanError, match=r"cannot join.*Q8_0.*Q4_0"):
        load(model, path, rules=RuleSet(Join(("a", "b"), "w", via=Concat(0))))


def test_numbers_of_two_types_are_joined(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": "Q8_0", "b": "Q4_0", "c": "F32"})
    model: Any = Holder(nn.Parameter(torch.empty(3 * ROWS, COLUMNS)))
    load(model, path, rules=RuleSet(Join(("a", "b", "c"), "w", via=Concat(0))))
    with open_checkpoint(path) as checkpoint:
        parts = [PackedTensor(checkpoint.read(n), DTYPES[t]).dequantize() for n, t in (("a", "Q8_0"), ("b", "Q4_0"))]
    assert torch.equal(model.w, torch.cat([*parts, values(2)]))


def test_numbers_of_stacked_columns_are_cut_through_blocks(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": "Q8_0", "b": "Q8_0"})
    window = Region((2, ROWS, COLUMNS), Box((0, 0, 16), (2, ROWS, 48)))
    slot = Slot(Region.whole((2, ROWS, 32)), (2, ROWS, COLUMNS), window)
    model: Any = Holder(nn.Parameter(torch.empty(2, ROWS, 32)), {"": slot})
    load(model, path, rules=RuleSet(Join(("a", "b"), "w", via=Stack(0))))
    with open_checkpoint(path) as checkpoint:
        parts = [PackedTensor(checkpoint.read(name), DTYPES["Q8_0"]).dequantize() for name in "ab"]
    assert torch.equal(model.w, torch.stack(parts)[:, :, 16:48])


def linear() -> Any:
    with torch.device("meta"):
        return nn.ModuleDict({"a": nn.Linear(COLUMNS, ROWS, bias=False), "b": nn.Linear(COLUMNS, ROWS, bias=False)})


def test_a_plan_tells_which_parameters_could_be_kept(tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path, {"a": "Q8_0", "b": "Q4_0", "c": "F32", "d": "Q8_0"})) as checkpoint:
        model = nn.ParameterDict({n: nn.Parameter(torch.empty(ROWS, COLUMNS, device="meta")) for n in "bcdem"})
        model["m"] = nn.Parameter(torch.empty(2, ROWS, COLUMNS, device="meta"))
        moved = Permute((2, 2, 2, COLUMNS), (0, 2, 1, 3))
        rules = RuleSet(Join(("a", "b"), "m", via=Stack(0)), Place("c", "c"), Place("d", "d", via=Add(1.0)))
        alone = RuleSet(Place("a", "e", via=moved), Place("b", "b"), Place("c", "c"), Place("d", "d"))
        assert packed_types(tensorferry.plan(model, checkpoint, rules=rules)) == {}
        kept = packed_types(tensorferry.plan(model, checkpoint, rules=alone))
    assert {name: dtype.name for name, dtype in kept.items()} == {"e": "Q8_0", "b": "Q4_0", "d": "Q8_0"}


def test_a_model_is_given_packed_parameters_and_filled(tmp_path: Path) -> None:
    model = linear()
    rules = RuleSet(Place("a", "a.weight"), Place("b", "b.weight"))
    with open_checkpoint(write(tmp_path, {"a": "Q8_0", "b": "F32"})) as checkpoint:
        keep_packed(model, packed_types(tensorferry.plan(model, checkpoint, rules=rules)))
        load(model, checkpoint, rules=rules)
        assert torch.equal(model["a"].weight, checkpoint.read("a"))
        assert torch.equal(model["b"].weight, checkpoint.read("b"))
    assert isinstance(model["a"].weight, PackedParameter)


def test_tied_parameters_stay_tied() -> None:
    model = linear()
    model["b"].weight = model["a"].weight
    keep_packed(model, {"a.weight": DTYPES["Q8_0"]})
    assert model["b"].weight is model["a"].weight
    assert isinstance(model["b"].weight, PackedParameter)


def test_a_name_that_is_no_parameter_is_refused() -> None:
    with pytest.raises(PlanError, match=r"ModuleDict has no parameter 'c\.weight' that could be kept packed"):
        keep_packed(linear(), {"c.weight": DTYPES["Q8_0"]})


@pytest.mark.parametrize("shape", [(8, 48), (8, 1), ()])
def test_rows_that_are_no_whole_blocks_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="rows of Q8_0 are whole blocks of 32 elements"):
        PackedParameter.empty("Q8_0", shape)


def test_copies_keep_type_and_blocks() -> None:
    model: Any = Holder(parameter(device="cpu"))
    model.w.fill_(3)
    other = copy.deepcopy(model)
    assert isinstance(other.w, PackedParameter)
    assert other.w.packed.dtype == DTYPES["Q8_0"]
    assert torch.equal(other.w, model.w)
    assert other.w.data_ptr() != model.w.data_ptr()


def test_a_module_that_was_pickled_keeps_type_and_blocks() -> None:
    model: Any = Holder(parameter(device="cpu"))
    model.w.fill_(3)
    other = pickle.loads(pickle.dumps(model))
    assert isinstance(other.w, PackedParameter)
    assert other.w.packed.dtype == DTYPES["Q8_0"]
    assert torch.equal(other.w, model.w)
