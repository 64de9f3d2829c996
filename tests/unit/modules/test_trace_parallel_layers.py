"""Models on our layers that fill themselves through `weight_loader`, as engines do: each rank reads its part."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from tensorferry import LoadConfig, ModelConfig, ParallelConfig, get_model_loader, load
from tensorferry.parallel import (
    FusedMoE,
    HeadParallelRMSNorm,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

HIDDEN, HEAD, HEADS, KV, INNER, VOCAB, EXPERTS = 8, 2, 4, 2, 12, 10, 4
STACKED = {"q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "v_proj": ("qkv_proj", "v")}
STACKED |= {"mlp.gate_proj": ("mlp.gate_up_proj", "gate"), "mlp.up_proj": ("mlp.gate_up_proj", "up")}
KINDS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class Layer(nn.Module):
    """All that a layer of a decoder may have."""

    def __init__(self, p: ParallelConfig) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(HIDDEN, HEAD, HEADS, KV, parallel=p)
        self.k_norm = HeadParallelRMSNorm(KV, HEAD, parallel=p)
        self.o_proj = RowParallelLinear(HEADS * HEAD, HIDDEN, parallel=p)
        self.mlp = nn.Module()
        self.mlp.gate_up_proj = MergedColumnParallelLinear(HIDDEN, [INNER] * 2, False, names=("gate", "up"), parallel=p)
        self.mlp.down_proj = RowParallelLinear(INNER, HIDDEN, False, parallel=p)
        self.experts = FusedMoE(EXPERTS, 2, HIDDEN, INNER, parallel=p)


class Model(nn.Module):
    """A decoder with a ``load_weights`` in the manner of vLLM's models."""

    def __init__(self, p: ParallelConfig) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(VOCAB, HIDDEN, padding_size=8, parallel=p)
        self.layers = nn.ModuleList(Layer(p) for _ in range(2))
        self.lm_head = ParallelLMHead(VOCAB, HIDDEN, padding_size=8, parallel=p)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters: dict[str, Any] = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            into, arguments = self._place(name)
            parameter = parameters[into]
            parameter.weight_loader(parameter, tensor, *arguments)
            loaded.add(into)
        return loaded

    def _place(self, name: str) -> tuple[str, tuple[Any, ...]]:
        if ".experts." in name:
            prefix, _, rest = name.partition(".experts.")
            expert, projection, leaf = rest.split(".")
            kind = KINDS[projection]
            return f"{prefix}.experts.{'w2' if kind == 'w2' else 'w13'}_{leaf}", (kind, int(expert))
        for part, (whole, shard) in STACKED.items():
            if f".{part}." in name:
                return name.replace(part, whole), (shard,)
        return name, ()


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Write every tensor of the model, each element with a number of its own."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    for i in range(2):
        rows = {"q_proj": HEADS * HEAD, "k_proj": KV * HEAD, "v_proj": KV * HEAD}
        shapes |= {f"layers.{i}.{n}.weight": (r, HIDDEN) for n, r in rows.items()}
        shapes |= {f"layers.{i}.{n}.bias": (r,) for n, r in rows.items()}
        shapes |= {f"layers.{i}.o_proj.weight": (HIDDEN, HEADS * HEAD), f"layers.{i}.o_proj.bias": (HIDDEN,)}
        shapes[f"layers.{i}.k_norm.weight"] = (KV * HEAD,)
        for where in ("mlp", *(f"experts.{e}" for e in range(EXPERTS))):
            shapes |= {f"layers.{i}.{where}.{n}_proj.weight": (INNER, HIDDEN) for n in ("gate", "up")}
            shapes[f"layers.{i}.{where}.down_proj.weight"] = (HIDDEN, INNER)
    tensors, at = {}, 0
    for name, shape in shapes.items():
        tensors[name] = ar(*shape, start=at)
        at += tensors[name].numel()
    write_safetensors(folder / "model.safetensors", tensors)
    return tensors


def pushed(tensors: dict[str, torch.Tensor], parallel: ParallelConfig) -> Model:
    model = Model(parallel)
    model.load_weights(tensors.items())
    return model


RANKS = [
    *ParallelConfig.every_rank(tp_size=2),
    *ParallelConfig.every_rank(tp_size=4),
    *ParallelConfig.every_rank(ep_size=2),
    *ParallelConfig.every_rank(tp_size=2, ep_size=2),
]


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("parallel", RANKS, ids=lambda p: f"tp{p.tp_rank}of{p.tp_size}ep{p.ep_rank}of{p.ep_size}")
def test_a_traced_rank_has_what_was_pushed_and_reads_no_more(
    parallel: ParallelConfig, on_meta: bool, tmp_path: Path
) -> None:
    expected = pushed(checkpoint(tmp_path), parallel)
    loader = get_model_loader(LoadConfig(parallel=parallel))

    def build(_: ModelConfig) -> nn.Module:
        with torch.device("meta" if on_meta else "cpu"):
            return Model(parallel)

    model = loader.load_model(ModelConfig(str(tmp_path)), build)
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    assert loader.report is not None
    assert not loader.report.streamed
    padding = 2 * sum(_padding_rows(parallel)) * HIDDEN * 4
    assert loader.report.bytes_needed == sum(p.nbytes for p in expected.parameters()) - padding


def _padding_rows(parallel: ParallelConfig) -> list[int]:
    """Return how many rows of the rank's part of ten tokens, padded to sixteen, are no tokens."""
    each = 16 // parallel.tp_size
    return [max(0, min(each, (parallel.tp_rank + 1) * each - VOCAB))]


def test_pushed_parameters_of_a_loaded_model_take_new_values(tmp_path: Path) -> None:
    """As after training: the parameters that took the place of those on meta are filled by the same loader."""
    tensors = checkpoint(tmp_path)
    parallel = ParallelConfig(tp_size=2, tp_rank=1)
    model = get_model_loader(LoadConfig(parallel=parallel)).load_model(
        ModelConfig(str(tmp_path)), lambda _: Model(parallel)
    )
    changed = {name: tensor + 1 for name, tensor in tensors.items()}
    model.load_weights(changed.items())  # type: ignore[operator]
    for name, parameter in pushed(changed, parallel).named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_rules_do_the_same_as_a_loader(tmp_path: Path) -> None:
    """A layer by itself: names that need no rule."""
    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(4, 6), "bias": ar(4)})
    layer = RowParallelLinear(6, 4, parallel=ParallelConfig(tp_size=2, tp_rank=1))
    assert load(layer, tmp_path).bytes_needed == 4 * 3 * 4 + 4 * 4
    assert torch.equal(layer.weight, ar(4, 6)[:, 3:])
