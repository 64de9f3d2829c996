"""What ranks read of tensors of real sizes, by the counter of the report: at most two bytes in a hundred too much."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path

import pytest
import torch
from torch import nn

from tensorferry import ParallelConfig, Place, RuleSet, load
from tensorferry.core.rules import Rule
from tensorferry.parallel import (
    ColumnParallelLinear,
    FusedMoE,
    MergedColumnParallelLinear,
    ParallelLayer,
    QKVParallelLinear,
    VocabParallelEmbedding,
)

HIDDEN, INNER, VOCAB, EXPERTS = 4096, 14336, 128256, 16
Shapes = dict[str, tuple[int, ...]]


def hollow(folder: Path, shapes: Shapes) -> Path:
    """Write a safetensors file of bfloat16 tensors that has a header, and holes for values."""
    header, at = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + 2 * prod(shape)]}
        at += 2 * prod(shape)
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return folder


def over(model: nn.Module, folder: Path, rules: RuleSet) -> tuple[int, float]:
    """Return what a rank needs, and what it reads for each byte of that."""
    report = load(model, folder, rules=rules)
    return report.bytes_needed, report.bytes_read / report.bytes_needed


def column(p: ParallelConfig) -> tuple[ParallelLayer, Shapes]:
    return ColumnParallelLinear(HIDDEN, INNER, False, parallel=p), {"": (INNER, HIDDEN)}


def gate_up(p: ParallelConfig) -> tuple[ParallelLayer, Shapes]:
    layer = MergedColumnParallelLinear(HIDDEN, [INNER, INNER], False, names=("gate", "up"), parallel=p)
    return layer, {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN)}


def qkv(p: ParallelConfig) -> tuple[ParallelLayer, Shapes]:
    layer = QKVParallelLinear(HIDDEN, 128, 32, 8, False, parallel=p)
    return layer, {"q": (HIDDEN, HIDDEN), "k": (1024, HIDDEN), "v": (1024, HIDDEN)}


def embedding(p: ParallelConfig) -> tuple[ParallelLayer, Shapes]:
    return VocabParallelEmbedding(VOCAB, HIDDEN, parallel=p), {"": (VOCAB, HIDDEN)}


@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("build", [column, gate_up, qkv, embedding])
def test_a_rank_reads_its_rows(build: object, tp: int, tmp_path: Path) -> None:
    for number in (1, tp - 1):
        with torch.device("meta"):
            layer, shapes = build(ParallelConfig(tp_size=tp, tp_rank=number))  # type: ignore[operator]
        hollow(tmp_path, {f"t.{slot}": shape for slot, shape in shapes.items()})
        rules: list[Rule] = [Place(f"t.{slot}", "weight", slot) for slot in shapes]
        needed, read = over(layer, tmp_path, RuleSet(*rules))
        assert needed <= sum(2 * prod(shape) for shape in shapes.values()) / min(tp, 8)
        assert read <= 1.02


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("parallel", [
    ParallelConfig(ep_size=8, ep_rank=3), ParallelConfig(tp_size=8, tp_rank=3, ep_size=8, ep_rank=3),
])  # fmt: skip
def test_a_rank_reads_its_experts(parallel: ParallelConfig, stacked: bool, tmp_path: Path) -> None:
    with torch.device("meta"):
        layer = FusedMoE(EXPERTS, 8, HIDDEN, 1536, parallel=parallel)
    shapes: Shapes
    if stacked:
        shapes = {"gate_up": (EXPERTS, 2 * 1536, HIDDEN), "down": (EXPERTS, HIDDEN, 1536)}
        rules = layer.stacked_rules("", "gate_up", "down")
    else:
        shapes = {f"{e}.{n}_proj.weight": (1536, HIDDEN) for e in range(EXPERTS) for n in ("gate", "up")}
        shapes |= {f"{e}.down_proj.weight": (HIDDEN, 1536) for e in range(EXPERTS)}
        rules = layer.rules("", "{e}.")
    needed, read = over(layer, hollow(tmp_path, shapes), RuleSet(*rules))
    assert needed == EXPERTS // 8 * 3 * 1536 * HIDDEN * 2
    assert read <= 1.02
