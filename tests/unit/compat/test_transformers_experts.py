"""Experts that are stacked: each is found by its number, and what is wrong with one is told by its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tensorferry
from helpers.tiny_transformers import saved

pytestmark = pytest.mark.transformers

EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"


def changed(folder: Path, *, drop: tuple[str, ...] = (), add: dict[str, torch.Tensor] | None = None) -> Path:
    """Write a Qwen3-MoE of 12 experts, less and more some tensors."""
    path = saved("Qwen3-MoE", folder) / "model.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if n not in drop}
    save_file({**tensors, **(add or {})}, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("number", "part"), [(0, "gate"), (5, "up"), (11, "up"), (3, "down")])
def test_a_missing_expert_is_a_problem_by_name(number: int, part: str, tmp_path: Path) -> None:
    gone = EXPERT.format(number, part)
    with pytest.raises(tensorferry.PlanError, match=re.escape(gone)) as raised:
        tensorferry.load_model(changed(tmp_path, drop=(gone,)))
    assert len(raised.value.problems) == 1


def test_a_last_expert_that_is_missing_whole_is_a_problem_by_name(tmp_path: Path) -> None:
    gone = tuple(EXPERT.format(11, part) for part in ("gate", "up", "down"))
    with pytest.raises(tensorferry.PlanError) as raised:
        tensorferry.load_model(changed(tmp_path, drop=gone))
    said = " ".join(problem.detail for problem in raised.value.problems)
    assert [name for name in gone if name not in said] == []


def test_a_part_that_every_expert_lacks_is_told_by_the_first_names_and_how_many_more(tmp_path: Path) -> None:
    gone = tuple(EXPERT.format(n, "up") for n in range(12))
    with pytest.raises(tensorferry.PlanError) as raised:
        tensorferry.load_model(changed(tmp_path, drop=gone))
    (problem,) = raised.value.problems
    assert [name for name in gone[:4] if f"'{name}'" not in problem.detail] == []
    assert problem.detail.endswith("and 8 more")


def test_one_expert_too_many_is_unexpected_and_leaves_the_others_in_place(tmp_path: Path) -> None:
    extra = EXPERT.format(12, "down")
    changed(tmp_path, add={extra: torch.zeros(32, 16)})
    model, report = tensorferry.load_model(tmp_path, return_report=True)
    file = load_file(tmp_path / "model.safetensors")
    down = model.get_parameter("model.layers.1.mlp.experts.down_proj")
    assert report.unexpected == (extra,)
    assert all(torch.equal(down[n], file[EXPERT.format(n, "down")]) for n in range(12))


def test_an_expert_of_another_shape_is_a_problem_with_both_shapes(tmp_path: Path) -> None:
    odd = EXPERT.format(7, "gate")
    changed(tmp_path, drop=(odd,), add={odd: torch.zeros(15, 32)})
    with pytest.raises(tensorferry.PlanError, match=rf"shape: {re.escape(odd)}.*\(15, 32\).*\(16, 32\)"):
        tensorferry.load_model(tmp_path)


def test_experts_are_placed_by_number_and_not_by_spelling(tmp_path: Path) -> None:
    changed(tmp_path)
    file = load_file(tmp_path / "model.safetensors")
    fused = tensorferry.load_model(tmp_path).get_parameter("model.layers.1.mlp.experts.gate_up_proj")
    for n in (1, 2, 9, 10, 11):
        expected = torch.cat([file[EXPERT.format(n, "gate")], file[EXPERT.format(n, "up")]])
        assert torch.equal(fused[n], expected)
