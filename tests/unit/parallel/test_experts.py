"""Experts: names on disk, placements, places that several have, and what they compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from helpers.checkpoints import ar, write_safetensors
from tensorferry import ParallelConfig, RuleSet, load
from tensorferry.errors import ConfigError, PlanError
from tensorferry.parallel import FusedMoE


def ep(number: int, size: int) -> ParallelConfig:
    return ParallelConfig(ep_size=size, ep_rank=number)


def test_moe_01_gate_lies_above_up_whatever_the_names(tmp_path: Path) -> None:
    tensors = {"experts.0.w1.weight": ar(2, 1), "experts.0.w3.weight": ar(2, 1, start=10)}
    write_safetensors(tmp_path / "model.safetensors", tensors | {"experts.0.w2.weight": ar(1, 2, start=20)})
    layer = FusedMoE(1, 1, 1, 2)
    load(layer, tmp_path, rules=RuleSet(*layer.rules("", "experts.{e}.", gate="w1", up="w3", down="w2")))
    assert layer.w13_weight[0].flatten().tolist() == [0, 1, 10, 11]
    assert layer.w2_weight[0].flatten().tolist() == [20, 21]


def test_moe_03_interleaved_gate_and_up_are_taken_in_pairs(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"gate_up": ar(1, 8, 1), "down": ar(1, 1, 4)})
    layer = FusedMoE(1, 1, 1, 4, parallel=ParallelConfig(tp_size=2, tp_rank=0))
    report = load(layer, tmp_path, rules=RuleSet(*layer.stacked_rules("", "gate_up", "down", interleaved=True)))
    assert layer.w13_weight.flatten().tolist() == [0, 2, 1, 3]
    assert report.bytes_needed == 4 * 4 + 2 * 4


def test_tensors_with_exchanged_dimensions_are_declared_so(tmp_path: Path) -> None:
    gate_up, down = ar(3, 2, 8), ar(3, 4, 2)
    write_safetensors(tmp_path / "model.safetensors", {"gate_up": gate_up, "down": down})
    for number in range(2):
        layer = FusedMoE(3, 1, 2, 4, transposed=True, parallel=ParallelConfig(tp_size=2, tp_rank=number))
        load(layer, tmp_path, rules=RuleSet(*layer.stacked_rules("", "gate_up", "down", interleaved=True)))
        pairs = gate_up.reshape(3, 2, 4, 2)[:, :, 2 * number : 2 * number + 2]
        assert torch.equal(layer.w13_weight, torch.cat([pairs[..., 0], pairs[..., 1]], dim=-1))
        assert torch.equal(layer.w2_weight, down[:, 2 * number : 2 * number + 2])


def test_moe_08_one_table_says_who_has_which_expert(tmp_path: Path) -> None:
    tensors = {f"{e}.{kind}.weight": ar(1, 1, start=e) for e in range(8) for kind in ("w1", "w2", "w3")}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    layer = FusedMoE(8, 2, 1, 1, placement="round_robin", parallel=ep(1, 2))
    report = load(layer, tmp_path, rules=RuleSet(*layer.rules("", "{e}.", gate="w1", up="w3", down="w2")))
    assert layer.here == (1, 3, 5, 7)
    assert layer.w2_weight.flatten().tolist() == [1, 3, 5, 7]
    assert report.dropped["0.w1.weight"] == "not on this rank"
    assert report.bytes_needed == 12 * 4


def test_every_place_of_a_redundant_expert_is_filled(tmp_path: Path) -> None:
    tensors = {f"{e}.{kind}.weight": ar(1, 1, start=e) for e in range(3) for kind in ("w1", "w2", "w3")}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    places = [0, 1, 2, 1, 0, 1]
    for number, expected in enumerate(([0, 1, 2], [1, 0, 1])):
        layer = FusedMoE(3, 2, 1, 1, physical_to_logical=places, parallel=ep(number, 2))
        load(layer, tmp_path, rules=RuleSet(*layer.rules("", "{e}.", gate="w1", up="w3", down="w2")))
        assert layer.w2_weight.flatten().tolist() == expected


def test_tensors_are_pushed_by_expert_or_stacked() -> None:
    gate, up, down = ar(4, 2, 3), ar(4, 2, 3, start=50), ar(4, 3, 2, start=90)
    one, other = (FusedMoE(4, 1, 3, 2, parallel=ep(1, 2)) for _ in "ab")
    for e in range(4):
        one.weight_loader(one.w13_weight, gate[e], "w1", e)
        one.weight_loader(one.w13_weight, up[e], "w3", e)
        one.weight_loader(one.w2_weight, down[e], "w2", e)
    other.weight_loader(other.w13_weight, torch.cat([gate, up], dim=1))
    other.weight_loader(other.w2_weight, down)
    assert torch.equal(one.w13_weight, torch.cat([gate, up], dim=1)[2:])
    assert torch.equal(one.w13_weight, other.w13_weight)
    assert torch.equal(one.w2_weight, other.w2_weight)
    halves = FusedMoE(4, 1, 3, 2, parallel=ep(1, 2))
    halves.weight_loader(halves.w13_weight, gate, "w1")
    halves.weight_loader(halves.w13_weight, up, "w3")
    assert torch.equal(halves.w13_weight, one.w13_weight)


def test_a_tensor_of_an_expert_that_is_too_long_is_refused() -> None:
    layer = FusedMoE(2, 1, 3, 2)
    with pytest.raises(PlanError, match=r"FusedMoE\.w2_weight\[1\.w2\]: the tensor has shape \(3, 4\)"):
        layer.weight_loader(layer.w2_weight, ar(3, 4), "w2", 1)


@pytest.mark.parametrize(
    ("config", "more", "why"),
    [
        (ParallelConfig(tp_size=4), {}, "intermediate size: 6 cannot be divided among 4 ranks"),
        (ParallelConfig(tp_size=3, ep_size=2), {}, "of 3 tensor-parallel and 2 expert-parallel ranks, one must divide"),
        (ParallelConfig(tp_size=2, ep_size=2, ep_rank=1), {}, "tensor-parallel rank 0 of 2 is expert-parallel rank 0"),
        (ParallelConfig(ep_size=9), {}, "8 experts cannot be placed on 9 ranks"),
        (ParallelConfig(), {"physical_to_logical": [0, 1]}, r"lost: \[2, 3, 4, 5, 6, 7\]"),
        (ParallelConfig(), {"physical_to_logical": [*range(8)], "placement": "round_robin"}, "dealt in blocks"),
    ],
)
def test_what_does_not_go_together_is_refused_when_it_is_built(config: ParallelConfig, more: dict, why: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError, match=why):
        FusedMoE(8, 2, 4, 6, parallel=config, **more)


def filled(layer: FusedMoE, tensors: dict[str, torch.Tensor]) -> FusedMoE:
    for name, tensor in tensors.items():
        expert, kind = name.split(".")
        parameter = layer.w2_weight if kind == "w2" else layer.w13_weight
        layer.weight_loader(parameter, tensor, kind, int(expert))
    return layer


@pytest.mark.parametrize("places", [None, [0, 1, 2, 3, 3, 1]])
def test_ranks_together_compute_what_a_loop_over_tokens_does(places: list[int] | None) -> None:
    torch.manual_seed(0)
    x, logits = torch.randn(5, 4), torch.randn(5, 4)
    tensors = {
        f"{e}.{k}": torch.randn(4, 6) if k == "w2" else torch.randn(6, 4) for e in range(4) for k in ("w1", "w2", "w3")
    }
    expected = torch.zeros(5, 4)
    for t in range(5):
        chance = logits[t].softmax(-1)
        best = chance.topk(2)
        for weight, e in zip(best.values / best.values.sum(), best.indices.tolist(), strict=True):
            inner = functional.silu(tensors[f"{e}.w1"] @ x[t]) * (tensors[f"{e}.w3"] @ x[t])
            expected[t] += weight * (tensors[f"{e}.w2"] @ inner)
    made = torch.zeros(5, 4)
    for number in range(2):
        layer = FusedMoE(4, 2, 4, 6, parallel=ep(number, 2), physical_to_logical=places, reduce_results=False)
        made += filled(layer, tensors)(x, logits)
    assert torch.allclose(made, expected, atol=1e-5)
