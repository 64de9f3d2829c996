"""Layers that are divided among ranks: fused tensors on disk, padding, what is refused; alone they are torch's own."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from helpers.checkpoints import ar, write_safetensors
from tensorferry import ParallelConfig, RuleSet, Split, load
from tensorferry.errors import ConfigError, PlanError
from tensorferry.parallel import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)


def rank(number: int, size: int) -> ParallelConfig:
    return ParallelConfig(tp_size=size, tp_rank=number)


def push(layer: nn.Module, tensor: torch.Tensor, shard: str | int | None = None, name: str = "weight") -> None:
    parameter = layer.get_parameter(name)
    parameter.weight_loader(parameter, tensor, shard)  # type: ignore[attr-defined]


def test_tp_08_a_tensor_that_is_fused_on_disk_is_cut_part_by_part(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"gate_up": ar(8, 1)})
    for number, rows in enumerate(([0, 1, 4, 5], [2, 3, 6, 7])):
        planned, pushed = (
            MergedColumnParallelLinear(1, [4, 4], False, names=("gate", "up"), parallel=rank(number, 2)) for _ in "ab"
        )
        report = load(planned, tmp_path, rules=RuleSet(Split("gate_up", planned.placing("weight"))))
        push(pushed, ar(8, 1))
        assert planned.weight.flatten().tolist() == pushed.weight.flatten().tolist() == rows
        assert report.bytes_needed == 4 * 4


@pytest.mark.parametrize("order", ["blocks", "interleaved"])
def test_fused_qkv_is_cut_by_heads_in_either_order(order: str, tmp_path: Path) -> None:
    """Two key-value heads with two query heads each, of size two; every row has its number."""
    q, k, v = ar(8, 3), ar(4, 3, start=100), ar(4, 3, start=200)
    if order == "blocks":
        fused = torch.cat([q, k, v])
    else:
        fused = torch.cat([part for g in range(2) for part in (q[4 * g :][:4], k[2 * g :][:2], v[2 * g :][:2])])
    write_safetensors(tmp_path / "model.safetensors", {"qkv": fused})
    for number in range(2):
        one, other = (
            QKVParallelLinear(3, 2, 4, 2, False, fused=order, parallel=rank(number, 2))  # type: ignore[arg-type]
            for _ in "ab"
        )
        report = load(one, tmp_path, rules=RuleSet(Split("qkv", one.placing("weight"))))
        push(other, fused)
        expected = torch.cat([t.chunk(2)[number] for t in (q, k, v)])
        assert torch.equal(one.weight, expected)
        assert torch.equal(other.weight, expected)
        assert report.bytes_needed == expected.nbytes


def test_values_may_have_heads_of_their_own_size() -> None:
    layer = QKVParallelLinear(3, 2, 4, 2, True, v_head_size=5, parallel=rank(1, 2))
    push(layer, ar(10), "v", "bias")
    q, k, v = layer.split(layer.bias)  # type: ignore[arg-type]
    assert (len(q), len(k), v.tolist()) == (4, 2, [5, 6, 7, 8, 9])


def test_slots_are_told_by_name_or_number() -> None:
    layer = MergedColumnParallelLinear(1, [2, 2], False, names=("gate", "up"))
    push(layer, ar(2, 1, start=5), "up")
    push(layer, ar(2, 1), 0)
    assert layer.weight.flatten().tolist() == [0, 1, 5, 6]


@pytest.mark.parametrize(
    ("tensor", "shard", "why"),
    [
        (ar(4, 1), "gate", r"MergedColumnParallelLinear\.weight\[gate\]: .* \(4, 1\), all ranks .* expect \(2, 1\)"),
        (ar(2, 1), "down", r"has no slot 'down': it has 'gate', 'up'"),
        (ar(2, 1), 2, r"has no slot 2"),
        (ar(5, 1), None, r"a tensor of shape \(5, 1\) is not fused as \[4, 1\]"),
        (ar(2, 1, dtype=torch.int32), "up", r"torch\.int32, which torch\.float32 is no other precision of"),
    ],
)
def test_what_does_not_fit_a_slot_is_refused_and_named(tensor: torch.Tensor, shard: str | int | None, why: str) -> None:
    layer = MergedColumnParallelLinear(1, [2, 2], False, names=("gate", "up"))
    with pytest.raises(PlanError, match=why):
        push(layer, tensor, shard)


def test_a_parameter_of_another_layer_is_refused() -> None:
    layer, other = ReplicatedLinear(2, 2), ReplicatedLinear(2, 2)
    with pytest.raises(PlanError, match=r"a parameter of shape .* that is not its own"):
        layer.weight_loader(other.weight, ar(2, 2))


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda p: ColumnParallelLinear(4, 10, parallel=p), "ColumnParallelLinear: output size: 10 .* 4 ranks"),
        (lambda p: RowParallelLinear(10, 4, parallel=p), "RowParallelLinear: input size: 10 .* 4 ranks"),
        (lambda p: RowParallelLinear(8, 4, reduce_results=False, parallel=p), "every rank would add the bias"),
        (lambda p: VocabParallelEmbedding(10, 4, padding_size=2, parallel=p), "rows, .* multiple of 2: 10 .* 4 ranks"),
        (lambda p: MergedColumnParallelLinear(4, [8], names=("a", "b"), parallel=p), "1 output sizes and 2 names"),
    ],
)
def test_tp_07_what_ranks_cannot_share_is_refused_when_it_is_built(build: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        build(rank(0, 4))  # type: ignore[operator]


def test_padding_makes_any_size_fit_and_is_zero() -> None:
    with torch.no_grad():
        layers = [ColumnParallelLinear(1, 10, pad=True, parallel=rank(r, 4)) for r in range(4)]
        for layer in layers:
            layer.weight.fill_(9)
            push(layer, ar(10, 1))
            push(layer, ar(10), name="bias")
    assert torch.cat([layer.weight for layer in layers]).flatten().tolist() == [*range(10), 0, 0]
    assert layers[3].bias is not None
    assert layers[3].bias.tolist() == [9, 0, 0]


def test_tp_04_a_row_parallel_bias_is_whole_and_added_once() -> None:
    w, b, x = torch.tensor([[1.0, 4.0], [0.0, 0.0]]), torch.tensor([10.0, 20.0]), torch.ones(2)
    layers = [RowParallelLinear(2, 2, parallel=rank(r, 2)) for r in range(2)]
    for layer in layers:
        push(layer, w)
        push(layer, b, name="bias")
        assert layer.bias is not None
        assert layer.bias.tolist() == [10, 20]
    summands = [functional.linear(x[r : r + 1], layer.weight) for r, layer in enumerate(layers)]
    assert (sum(summands) + b).tolist() == [15, 20]
    with pytest.raises(ConfigError, match=r"only where torch\.distributed\.init_process_group was called, in each"):
        layers[0](x[:1])


def test_alone_layers_do_what_those_of_torch_do() -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 3, 4), torch.randn(6, 4), torch.randn(6)
    for kind in (ReplicatedLinear, ColumnParallelLinear, RowParallelLinear):
        layer = kind(4, 6)
        push(layer, w)
        push(layer, b, name="bias")
        assert torch.equal(layer(x), functional.linear(x, w, b))


def test_an_embedding_alone_is_torch_s_own_and_added_tokens_come_after_it() -> None:
    embedding = VocabParallelEmbedding(5, 2, padding_size=4, added=2)
    push(embedding, ar(5, 2, start=1))
    assert embedding.weight.shape == (12, 2)
    assert embedding(torch.tensor([[0, 4], [5, 6]])).tolist() == [[[1, 2], [9, 10]], [[0, 0], [0, 0]]]
    with torch.no_grad():
        embedding.weight[8] = 7
    assert embedding(torch.tensor([5])).tolist() == [[7, 7]]
    with pytest.raises(IndexError, match="there are 7 tokens"):
        embedding(torch.tensor([7]))


def test_a_head_gives_logits_of_tokens_and_of_nothing_else() -> None:
    head = ParallelLMHead(5, 2, bias=True, padding_size=4, added=1)
    push(head, ar(5, 2))
    push(head, ar(5), name="bias")
    assert head(torch.ones(1, 2)).tolist() == [[1, 6, 11, 16, 21, 0]]
    assert ParallelLMHead(4, 2, padding_size=4)(torch.ones(3, 2)).shape == (3, 4)


def test_a_head_shares_the_weight_of_an_embedding_that_is_divided_alike() -> None:
    embedding, head = VocabParallelEmbedding(5, 2), ParallelLMHead(5, 2)
    head.tie_weights(embedding)
    assert head.weight is embedding.weight
    with pytest.raises(ConfigError, match="cannot share the weight"):
        ParallelLMHead(6, 2).tie_weights(embedding)


def test_the_vocabulary_of_a_rank_may_be_nothing_but_padding() -> None:
    embedding = VocabParallelEmbedding(3, 2, padding_size=8, parallel=rank(3, 4))
    with torch.no_grad():
        embedding.weight.fill_(9)
    push(embedding, ar(3, 2))
    assert embedding.weight.tolist() == [[0, 0], [0, 0]]


def test_a_rank_s_heads_are_cut_out_of_fused_weights_and_biases_where_heads_are_replicated(tmp_path: Path) -> None:
    """Four query heads and two key-value heads of size one for four ranks, in groups on disk: q q k v, q q k v."""
    weight, bias = ar(8, 1), ar(8, start=100)
    write_safetensors(tmp_path / "model.safetensors", {"qkv.weight": weight, "qkv.bias": bias})
    for number, rows in enumerate(([0, 2, 3], [1, 2, 3], [4, 6, 7], [5, 6, 7])):
        one, other = (QKVParallelLinear(1, 1, 4, 2, fused="interleaved", parallel=rank(number, 4)) for _ in "ab")
        splits = [Split(f"qkv.{leaf}", one.placing(leaf, leaf)) for leaf in ("weight", "bias")]
        load(one, tmp_path, rules=RuleSet(*splits))
        push(other, weight)
        push(other, bias, name="bias")
        for layer in (one, other):
            assert layer.weight.flatten().tolist() == rows
            assert layer.bias is not None
            assert layer.bias.tolist() == [100 + row for row in rows]


class Doubling(ColumnParallelLinear):
    """Puts another parameter in the place of its weight once it is loaded."""

    def process_weights_after_loading(self) -> None:
        self.weight = nn.Parameter(self.weight.detach() * 2, requires_grad=False)


def on_meta(kind: type[ColumnParallelLinear] = ColumnParallelLinear) -> ColumnParallelLinear:
    with torch.device("meta"):
        return kind(1, 2, False)


def materialized(folder: Path, kind: type[ColumnParallelLinear]) -> ColumnParallelLinear:
    write_safetensors(folder / "model.safetensors", {"weight": ar(2, 1)})
    layer = on_meta(kind)
    load(layer, folder)
    return layer


@pytest.mark.parametrize(
    "replaced",
    [
        lambda folder: materialized(folder, ColumnParallelLinear),
        lambda folder: materialized(folder, Doubling),
        lambda folder: on_meta().to_empty(device="cpu"),
        lambda folder: ColumnParallelLinear(1, 2, False).double(),
        lambda folder: copy.deepcopy(ColumnParallelLinear(1, 2, False)),
        lambda folder: pickle.loads(pickle.dumps(ColumnParallelLinear(1, 2, False))),
    ],
    ids=["loaded", "post-processed", "to_empty", "cast", "copied", "pickled"],
)
def test_parameters_that_take_the_place_of_others_can_be_pushed_into(replaced: Any, tmp_path: Path) -> None:
    layer = replaced(tmp_path)
    push(layer, ar(2, 1, start=5))
    assert layer.weight.flatten().tolist() == [5, 6]


def test_a_copy_leaves_the_layer_alone_that_it_is_of() -> None:
    layer = ColumnParallelLinear(1, 2, False)
    push(layer, ar(2, 1))
    push(copy.deepcopy(layer), ar(2, 1, start=5))
    assert layer.weight.flatten().tolist() == [0, 1]


def test_padding_is_no_token() -> None:
    with pytest.raises(IndexError, match="there are 5 tokens"):
        VocabParallelEmbedding(5, 2)(torch.tensor([5]))


def head_of(number: int) -> ParallelLMHead:
    return ParallelLMHead(5, 2, parallel=rank(number, 2))


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: MergedColumnParallelLinear(1, [2, 2], names=("a", "a")), "not all different"),
        (lambda: VocabParallelEmbedding(5, 2, padding_size=0), "padding_size 0"),
        (lambda: head_of(0).tie_weights(head_of(1)), "cannot share the weight"),
    ],
)
def test_what_makes_no_layer_is_refused(build: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        build()
