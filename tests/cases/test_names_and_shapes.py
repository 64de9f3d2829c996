"""Reported failures with names, completeness, fused shapes and layer numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import tensorferry
from helpers.checkpoints import ar, write_safetensors
from tensorferry.core.boxes import Box, Region
from tensorferry.core.plan import Strictness
from tensorferry.core.rules import Drop, Part, Place, Split
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Slot
from tensorferry.errors import PlanError

LINEAR = {"weight": ar(2, 2), "bias": ar(2)}


class One(nn.Module):
    """A model with a single linear layer called `lin`."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)


class Fused(nn.Module):
    """One rank's share of a parameter that several logical tensors feed."""

    def __init__(self, rows: int, slots: Mapping[str, Slot]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, 1, device="meta"))
        self._declared = slots

    def tensor_slots(self) -> Mapping[str, Mapping[str, Slot]]:
        return {"weight": self._declared}


def filled(module: nn.Module, folder: Path, rules: RuleSet) -> list[float]:
    tensorferry.load(module, folder, rules=rules)
    weight = module.get_parameter("weight")
    return [float(x) for x in weight.detach().flatten()]


def test_keys_01_names_that_do_not_match_are_refused_with_the_nearest(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"lin.weight_v": ar(2, 2), "lin.bias": ar(2)})
    model = One()
    before = model.lin.bias.detach().clone()
    with pytest.raises(PlanError, match=r"missing: lin\.weight \(did you mean lin\.weight_v\?\)") as caught:
        tensorferry.load(model, tmp_path)
    assert not caught.value.touched
    assert torch.equal(model.lin.bias, before)


def test_keys_02_an_extra_tensor_is_a_line_of_the_report(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"lin.weight": ar(2, 2), "lin.bias": ar(2), "extra.stat": ar(3)})
    assert tensorferry.load(One(), tmp_path).unexpected == ("extra.stat",)
    with pytest.raises(PlanError, match=r"unexpected: extra\.stat"):
        tensorferry.load(One(), tmp_path, strict=Strictness.strict())


def test_keys_02_a_shape_that_differs_is_an_error_however_lax(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"lin.weight": ar(2, 3), "lin.bias": ar(2)})
    with pytest.raises(PlanError, match=r"shape: lin\.weight: the checkpoint has \(2, 3\), the model expects \(2, 2\)"):
        tensorferry.load(One(), tmp_path, strict=Strictness(missing="warn", lossy="warn", may_miss=("{x:path}",)))


def test_keys_03_buffers_that_models_compute_are_never_copied_over(tmp_path: Path) -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.tensor([1.0, 0.01]), persistent=False)

    model = One()
    model.add_module("rotary_emb", Rotary())
    old = {"lin.weight": ar(2, 2), "lin.bias": ar(2), "rotary_emb.inv_freq": ar(2, start=9), "position_ids": ar(1)}
    write_safetensors(tmp_path / "model.safetensors", old)
    report = tensorferry.load(model, tmp_path)
    assert dict(report.dropped) == dict.fromkeys(("rotary_emb.inv_freq", "position_ids"), "the model computes it")
    assert report.unexpected == ()
    assert model.get_buffer("rotary_emb.inv_freq").tolist() == pytest.approx([1.0, 0.01])


def test_keys_07_a_head_that_is_neither_there_nor_tied_is_missing(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(3, 2), "lm_head": nn.Linear(2, 3, bias=False)})
    write_safetensors(tmp_path / "model.safetensors", {"embed_tokens.weight": ar(3, 2)})
    with pytest.raises(PlanError, match=r"missing: lm_head\.weight"):
        tensorferry.load(model, tmp_path)


def test_keys_13_a_tower_under_another_prefix_is_missing_by_its_prefix(tmp_path: Path) -> None:
    model = nn.ModuleDict({"model": nn.ModuleDict({"visual": One(), "text": One()})})
    names = {f"{at}.lin.{leaf}": value.clone() for at in ("visual", "model.text") for leaf, value in LINEAR.items()}
    write_safetensors(tmp_path / "model.safetensors", names)
    with pytest.raises(PlanError) as caught:
        tensorferry.load(model, tmp_path)
    assert str(caught.value).splitlines()[1:] == [
        "  missing: model.visual.lin.weight (did you mean visual.lin.weight?)",
        "  missing: model.visual.lin.bias (did you mean visual.lin.bias?)",
    ]
    report = tensorferry.load(model, tmp_path, rules=RuleSet(Place("visual.{x:path}", "model.visual.{x}")))
    assert report.unexpected == ()


def test_keys_13_rules_are_anchored_at_the_start(tmp_path: Path) -> None:
    rules = RuleSet(Place("visual.{x:path}", "model.visual.{x}"))
    assert rules.route("model.visual.lin.weight") is None


def test_keys_14_a_head_under_another_prefix_is_offered(tmp_path: Path) -> None:
    there = {"model.model.lm_head.weight": ar(3, 2), "model.norm.weight": ar(3, 2)}
    write_safetensors(tmp_path / "model.safetensors", there)
    with pytest.raises(PlanError, match=r"missing: lm_head\.weight \(did you mean model\.model\.lm_head\.weight\?\)"):
        tensorferry.load(nn.ModuleDict({"lm_head": nn.Linear(2, 3, bias=False)}), tmp_path)


def rows(total: int, a: int, b: int) -> Region:
    return Region((total, 1), Box((a, 0), (b, 1)))


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 1, 4, 5]), (1, [2, 3, 6, 7])])
def test_tp_08_a_fused_gate_and_up_is_split_in_each_part(tmp_path: Path, rank: int, expected: list[float]) -> None:
    """An [8, 1] tensor holds gate in rows 0 to 3 and up in rows 4 to 7; each of two ranks has half of both."""
    write_safetensors(tmp_path / "model.safetensors", {"gate_up": ar(8, 1)})
    window = Region((2, 2, 2, 1), Box((0, rank, 0, 0), (2, rank + 1, 2, 1)))
    module = Fused(4, {"": Slot(Region.whole((4, 1)), (8, 1), window)})
    assert filled(module, tmp_path, RuleSet(Place("gate_up", "weight"))) == expected


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 1, 4, 5]), (1, [2, 3, 6, 7])])
def test_tp_08_separate_gate_and_up_give_the_same(tmp_path: Path, rank: int, expected: list[float]) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"gate": ar(4, 1), "up": ar(4, 1, start=4)})
    window = rows(4, 2 * rank, 2 * rank + 2)
    slots = {"gate": Slot(rows(4, 0, 2), (4, 1), window), "up": Slot(rows(4, 2, 4), (4, 1), window)}
    rules = RuleSet(Place("{part:part}", "weight", "{part}"))
    assert filled(Fused(4, slots), tmp_path, rules) == expected


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 2, 1, 3]), (1, [4, 6, 5, 7])])
def test_moe_03_interleaved_rows_are_taken_in_pairs(tmp_path: Path, rank: int, expected: list[float]) -> None:
    """Of an expert's rows 0 to 7, even ones are gate and odd ones up; rank 0 of 2 has gate [0, 2] and up [1, 3]."""
    write_safetensors(tmp_path / "model.safetensors", {"experts": ar(1, 8, 1)})
    pairs = [Region((1, 4, 2, 1), Box((0, 2 * rank, k, 0), (1, 2 * rank + 2, k + 1, 1))) for k in range(2)]
    slots = {str(k): Slot(rows(4, 2 * k, 2 * k + 2), (1, 8, 1), pair) for k, pair in enumerate(pairs)}
    rules = RuleSet(Split("experts", tuple(Part("weight", str(k)) for k in range(2))))
    assert filled(Fused(4, slots), tmp_path, rules) == expected


def test_arch_04_borders_between_layers_are_exact(tmp_path: Path) -> None:
    """Two layers, one draft layer (number 2), and a layer 20 that nobody asked for."""
    model = nn.ModuleDict({"layers": nn.ModuleList([One(), One()])})
    layers = {f"layers.{i}.lin.{leaf}": value.clone() for i in (0, 1, 2, 20) for leaf, value in LINEAR.items()}
    write_safetensors(tmp_path / "model.safetensors", layers)
    report = tensorferry.load(model, tmp_path, rules=RuleSet(Drop("layers.2.{x:path}", "skipped: draft")))
    assert dict(report.dropped) == dict.fromkeys(("layers.2.lin.bias", "layers.2.lin.weight"), "skipped: draft")
    assert sorted(report.unexpected) == ["layers.20.lin.bias", "layers.20.lin.weight"]
