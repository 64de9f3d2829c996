"""What a rank has of a tensor: planned, pushed and cut by hand are the same, and all ranks together have all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.checkpoints import write_safetensors
from tensorferry import ParallelConfig, Place, RuleSet, load
from tensorferry.core.rules import Rule
from tensorferry.errors import ConfigError
from tensorferry.parallel import (
    ColumnParallelLinear,
    FusedMoE,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

SIZES = (1, 2, 3, 4, 8, 16)
IN, OUT, HEAD, HEADS, KV, VOCAB = 48, 96, 4, 48, 2, 130


def coded(*shape: int, start: int = 0) -> torch.Tensor:
    """Return a tensor whose every element says where it was."""
    n = int(torch.tensor(shape).prod())
    return (torch.arange(n, dtype=torch.float64) + start).reshape(shape)


def rank(size: int, number: int) -> ParallelConfig:
    return ParallelConfig(tp_size=size, tp_rank=number)


def split(tensor: torch.Tensor, ranks: int, number: int, dim: int = 0) -> torch.Tensor:
    """Return a part as torch itself cuts it."""
    return tensor.chunk(ranks, dim)[number]


class Kind:
    """A layer kind: how it is built, what fills its slots, and what a rank should then have, cut by hand."""

    def __init__(
        self,
        build: Callable[[ParallelConfig], nn.Module],
        tensors: Mapping[str, torch.Tensor],
        expected: Callable[[int, int], torch.Tensor],
    ) -> None:
        self.build, self.tensors, self.expected = build, tensors, expected


def _qkv(ranks: int, number: int) -> torch.Tensor:
    q, k, v = coded(HEADS * HEAD, IN), coded(KV * HEAD, IN, start=20_000), coded(KV * HEAD, IN, start=30_000)
    if ranks <= KV:
        return torch.cat([split(t, ranks, number) for t in (q, k, v)])
    mine = number * KV // ranks
    return torch.cat([split(q, ranks, number), *(t[mine * HEAD : (mine + 1) * HEAD] for t in (k, v))])


def _vocabulary(ranks: int, number: int) -> torch.Tensor:
    padded = torch.zeros(192, IN, dtype=torch.float64)
    padded[:VOCAB] = coded(VOCAB, IN)
    return split(padded, ranks, number)


def _padded_columns(ranks: int, number: int) -> torch.Tensor:
    padded = torch.zeros(OUT, -(-10 // ranks) * ranks, dtype=torch.float64)
    padded[:, :10] = coded(OUT, 10)
    return split(padded, ranks, number, 1)


GATE, UP = coded(OUT, IN), coded(OUT, IN, start=10_000)

KINDS = {
    "replicated": Kind(
        lambda p: ReplicatedLinear(IN, OUT, False, dtype=torch.float64),
        {"": coded(OUT, IN)},
        lambda ranks, number: coded(OUT, IN),
    ),
    "column": Kind(
        lambda p: ColumnParallelLinear(IN, OUT, False, parallel=p, dtype=torch.float64),
        {"": coded(OUT, IN)},
        lambda ranks, number: split(coded(OUT, IN), ranks, number),
    ),
    "merged": Kind(
        lambda p: MergedColumnParallelLinear(
            IN, [OUT, OUT], False, names=("gate", "up"), parallel=p, dtype=torch.float64
        ),
        {"gate": GATE, "up": UP},
        lambda ranks, number: torch.cat([split(GATE, ranks, number), split(UP, ranks, number)]),
    ),
    "qkv": Kind(
        lambda p: QKVParallelLinear(IN, HEAD, HEADS, KV, False, parallel=p, dtype=torch.float64),
        {
            "q": coded(HEADS * HEAD, IN),
            "k": coded(KV * HEAD, IN, start=20_000),
            "v": coded(KV * HEAD, IN, start=30_000),
        },
        _qkv,
    ),
    "row": Kind(
        lambda p: RowParallelLinear(IN, OUT, False, parallel=p, dtype=torch.float64),
        {"": coded(OUT, IN)},
        lambda ranks, number: split(coded(OUT, IN), ranks, number, 1),
    ),
    "padded row": Kind(
        lambda p: RowParallelLinear(10, OUT, False, pad=True, parallel=p, dtype=torch.float64),
        {"": coded(OUT, 10)},
        _padded_columns,
    ),
    "embedding": Kind(
        lambda p: VocabParallelEmbedding(VOCAB, IN, parallel=p, dtype=torch.float64),
        {"": coded(VOCAB, IN)},
        _vocabulary,
    ),
    "head": Kind(
        lambda p: ParallelLMHead(VOCAB, IN, parallel=p, dtype=torch.float64), {"": coded(VOCAB, IN)}, _vocabulary
    ),
}
"""Every kind that has one weight, with sizes that most numbers of ranks divide."""


def built(kind: Kind, ranks: int, number: int) -> nn.Module:
    try:
        return kind.build(rank(ranks, number))
    except ConfigError as error:
        pytest.skip(f"not legal: {error}")


CASES = [(name, ranks) for name, ranks in product(KINDS, SIZES)]


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_planned_is_pushed_is_cut_by_hand(name: str, ranks: int, tmp_path: Path) -> None:
    kind = KINDS[name]
    write_safetensors(tmp_path / "model.safetensors", {f"t.{slot}": t for slot, t in kind.tensors.items()})
    for number in range(ranks):
        planned, pushed = built(kind, ranks, number), built(kind, ranks, number)
        rules: list[Rule] = [Place(f"t.{slot}", "weight", slot=slot) for slot in kind.tensors]
        load(planned, tmp_path, rules=RuleSet(*rules))
        for slot, tensor in kind.tensors.items():
            parameter: torch.Tensor = pushed.weight  # type: ignore[assignment]
            parameter.weight_loader(parameter, tensor, slot or None)  # type: ignore[attr-defined]
        expected = kind.expected(ranks, number)
        assert torch.equal(planned.weight, expected)  # type: ignore[arg-type]
        assert torch.equal(pushed.weight, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_the_windows_of_all_ranks_tile_the_logical_tensor(name: str, ranks: int) -> None:
    kind = KINDS[name]
    for slot, tensor in kind.tensors.items():
        seen = torch.zeros(tensor.shape, dtype=torch.int64)
        for number in range(ranks):
            window = built(kind, ranks, number).tensor_slots()["weight"].slots[slot].window  # type: ignore[operator]
            seen.view(window.view)[window.box.slices] += 1
        copies = ranks if name == "replicated" else max(1, ranks // KV) if slot in ("k", "v") else 1
        assert torch.equal(seen, torch.full_like(seen, copies))


EXPERTS, INNER = 16, 48
W1 = {e: coded(INNER, IN, start=10_000 * e) for e in range(EXPERTS)}
W3 = {e: coded(INNER, IN, start=10_000 * e + 3_000) for e in range(EXPERTS)}
W2 = {e: coded(IN, INNER, start=10_000 * e + 6_000) for e in range(EXPERTS)}
LAYOUTS = [(tp, ep) for tp, ep in product((1, 2, 3, 4, 8), (1, 2, 4, 8)) if tp % ep == 0 or tp == 1]


def experts_of(tp: int, ep: int) -> list[ParallelConfig]:
    """Return the configuration of every rank: expert-parallel ranks are groups of tensor-parallel ones, or alone."""
    if tp == 1:
        return [ParallelConfig(ep_size=ep, ep_rank=r) for r in range(ep)]
    return [ParallelConfig(tp_size=tp, tp_rank=r, ep_size=ep, ep_rank=r * ep // tp) for r in range(tp)]


def by_hand(experts: range, sharing: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    w13 = [torch.cat([split(W1[e], sharing, number), split(W3[e], sharing, number)]) for e in experts]
    w2 = [split(W2[e], sharing, number, 1) for e in experts]
    return torch.stack(w13), torch.stack(w2)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("tp", "ep"), LAYOUTS)
def test_experts_are_divided_by_number_and_by_inner_dimension(tp: int, ep: int, stacked: bool, tmp_path: Path) -> None:
    if stacked:
        w13 = torch.stack([torch.cat([W1[e], W3[e]]) for e in range(EXPERTS)])
        tensors = {"gate_up": w13, "down": torch.stack([W2[e] for e in range(EXPERTS)])}
    else:
        tensors = {f"{e}.gate_proj.weight": W1[e] for e in W1} | {f"{e}.up_proj.weight": W3[e] for e in W3}
        tensors |= {f"{e}.down_proj.weight": W2[e] for e in W2}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    for config in experts_of(tp, ep):
        layer = FusedMoE(EXPERTS, 2, IN, INNER, parallel=config, dtype=torch.float64)
        rules = layer.stacked_rules("", "gate_up", "down") if stacked else layer.rules("", "{e}.")
        report = load(layer, tmp_path, rules=RuleSet(*rules))
        each = EXPERTS // ep
        sharing = max(1, tp // ep)
        mine = range(config.ep_rank * each, (config.ep_rank + 1) * each)
        w13, w2 = by_hand(mine, sharing, config.tp_rank % sharing)
        assert torch.equal(layer.w13_weight, w13)
        assert torch.equal(layer.w2_weight, w2)
        assert report.bytes_needed == w13.nbytes + w2.nbytes
