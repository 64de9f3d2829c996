"""Experts: names on disk, placements, places that several have, and what they compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from helpers.checkpoints import ar, write_safetensors
from tensorferry import ParallelConfig, Place, RuleSet, Strictness, load
from tensorferry.errors import ConfigError, PlanError
from tensorferry.parallel import FusedMoE
from tensorferry.parallel.groups import with_the_same_experts


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


@pytest.mark.parametrize(
    ("shard", "expert", "why"),
    [
        ("w2", 0, r"FusedMoE\.w13_weight has no slot 'w2': it has w1, w3"),
        ("gate", None, r"has no slot 'gate'"),
        ("w1", 2, r"has no expert 2: there are 2"),
    ],
)
def test_what_no_expert_has_is_refused(shard: str, expert: int | None, why: str) -> None:
    layer = FusedMoE(2, 1, 3, 2)
    with pytest.raises(PlanError, match=why):
        layer.weight_loader(layer.w13_weight, ar(2, 3), shard, expert)


def test_biases_are_stacked_as_weights_are(tmp_path: Path) -> None:
    """Three experts of inner size two: gate and up in turns, of which the second rank has the second."""
    write_safetensors(tmp_path / "model.safetensors", {"gate_up_bias": ar(3, 4), "down_bias": ar(3, 2, start=50)})
    planned, pushed = (FusedMoE(3, 1, 2, 2, bias=True, parallel=ParallelConfig(tp_size=2, tp_rank=1)) for _ in "ab")
    rules = planned.stacked_rules("", "gate_up_bias", "down_bias", interleaved=True, leaf="bias")
    load(planned, tmp_path, rules=RuleSet(*rules), strict=Strictness(may_miss=("w13_weight", "w2_weight")))
    assert planned.w13_bias is not None
    assert planned.w2_bias is not None
    assert planned.w13_bias.tolist() == [[2, 3], [6, 7], [10, 11]]
    assert planned.w2_bias.tolist() == ar(3, 2, start=50).tolist()
    assert pushed.w13_bias is not None
    assert pushed.w2_bias is not None
    pushed.weight_loader(pushed.w13_bias, torch.tensor([[0, 2, 1, 3], [4, 6, 5, 7], [8, 10, 9, 11.0]]))
    pushed.weight_loader(pushed.w2_bias, ar(3, 2, start=50))
    assert torch.equal(pushed.w13_bias, planned.w13_bias)
    assert torch.equal(pushed.w2_bias, planned.w2_bias)


@pytest.mark.parametrize("places", [None, [0, 1, 0]])
def test_gate_and_up_of_an_expert_may_be_one_tensor(places: list[int] | None, tmp_path: Path) -> None:
    pairs = [ar(4, 3, start=100 * e) for e in range(2)]
    tensors = {f"{e}.gate_up.weight": pairs[e] for e in range(2)} | {
        f"{e}.down_proj.weight": ar(3, 2) for e in range(2)
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    planned, pushed = (
        FusedMoE(2, 1, 3, 2, parallel=ParallelConfig(tp_size=2, tp_rank=1), physical_to_logical=places) for _ in "ab"
    )
    load(planned, tmp_path, rules=RuleSet(*planned.rules("", "{e}.", gate_up="gate_up")))
    expected = [pairs[e][[1, 3]] for e in (places or [0, 1])]
    assert torch.equal(planned.w13_weight, torch.stack(expected))
    for e in range(2):
        pushed.weight_loader(pushed.w13_weight, pairs[e], None, e)
    assert torch.equal(pushed.w13_weight, planned.w13_weight)


def test_several_shared_experts_are_one_tensor_on_disk(tmp_path: Path) -> None:
    """One expert that is chosen, and two shared ones of inner size two: they come after it, and are dealt as it is."""
    gate, up, down = ar(4, 3, start=10), ar(4, 3, start=40), ar(3, 4, start=70)
    tensors = {"shared.gate_proj.weight": gate, "shared.up_proj.weight": up, "shared.down_proj.weight": down}
    tensors |= {"0.gate_proj.weight": ar(2, 3), "0.up_proj.weight": ar(2, 3), "0.down_proj.weight": ar(3, 2)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    layer = FusedMoE(1, 1, 3, 2, shared=2, parallel=ep(1, 2))
    load(layer, tmp_path, rules=RuleSet(*layer.rules("", "{e}.", shared="shared.")))
    assert layer.here == (2,)
    assert torch.equal(layer.w13_weight[0], torch.cat([gate[2:], up[2:]]))
    assert torch.equal(layer.w2_weight[0], down[:, 2:])


def test_the_bias_of_a_router_is_float32_whatever_the_rest_is(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"gate.e_score_correction_bias": torch.tensor([0.1, 0.2])})
    layer = FusedMoE(2, 1, 3, 2, router_bias=True, dtype=torch.bfloat16)
    rule = Place("gate.{leaf:part}", "{leaf}")
    load(layer, tmp_path, rules=RuleSet(rule), strict=Strictness(may_miss=("w13_weight", "w2_weight")))
    assert layer.e_score_correction_bias is not None
    assert torch.equal(layer.e_score_correction_bias, torch.tensor([0.1, 0.2]))
    layer.weight_loader(layer.e_score_correction_bias, torch.tensor([0.3, 0.4]))
    assert layer.e_score_correction_bias.tolist() == pytest.approx([0.3, 0.4])


def test_no_tokens_make_nothing() -> None:
    assert FusedMoE(2, 1, 3, 2)(torch.empty(0, 3), torch.empty(0, 2)).shape == (0, 3)


def test_shared_experts_are_used_by_every_token() -> None:
    layer = FusedMoE(1, 1, 1, 1, shared=1)
    for e, down in enumerate((2.0, 30.0)):
        for kind, value in (("w1", 100.0), ("w3", 1.0), ("w2", down)):
            parameter = layer.w2_weight if kind == "w2" else layer.w13_weight
            layer.weight_loader(parameter, torch.full((1, 1), value), kind, e)
    assert layer(torch.ones(2, 1), torch.zeros(2, 1)).tolist() == [[3200], [3200]]


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


@pytest.mark.parametrize(
    ("sizes", "rank", "sharing"),
    [
        ((1, 1), (0, 0), (1, 0)), ((4, 2), (3, 1), (2, 1)), ((4, 1), (2, 0), (4, 2)), ((1, 4), (0, 3), (1, 0)),
        ((2, 4), (1, 3), (1, 0)),
    ],
)  # fmt: skip
def test_neighbours_among_tensor_parallel_ranks_have_the_same_experts(
    sizes: tuple[int, int], rank: tuple[int, int], sharing: tuple[int, int]
) -> None:
    found = with_the_same_experts(ParallelConfig(tp_size=sizes[0], ep_size=sizes[1], tp_rank=rank[0], ep_rank=rank[1]))
    assert (found.size, found.rank) == sharing
