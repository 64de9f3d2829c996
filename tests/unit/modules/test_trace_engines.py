"""Loaders of the sort that small inference engines have: every layer that they shard becomes an exact plan."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from helpers.old_loaders import (
    EXPERTS,
    HIDDEN,
    INNER,
    VOCAB,
    NanoModel,
    execute,
    load_both_ways,
    nano_checkpoint,
    poisoned,
    twin,
)  # fmt: skip
from tensorferry.core.boxes import Box, Region
from tensorferry.formats.opening import open_files
from tensorferry.modules.trace import trace

RANKS = [(1, 0), (2, 0), (2, 1), (4, 0), (4, 3)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nano_checkpoint(tmp_path_factory.mktemp("nano"))


@pytest.mark.parametrize(("tp", "rank"), RANKS)
def test_every_layer_is_filled_as_its_own_loader_fills_it(checkpoint: Path, tp: int, rank: int) -> None:
    loaded = load_both_ways(partial(NanoModel, tp, rank), checkpoint)
    loaded.assert_equal()
    assert loaded.traced.opaque == {}
    assert loaded.traced.stream == ()


@pytest.mark.parametrize(("tp", "rank"), RANKS)
def test_exactly_the_bytes_of_the_plan_are_read(checkpoint: Path, tp: int, rank: int) -> None:
    loaded = load_both_ways(partial(NanoModel, tp, rank), checkpoint)
    filled = sum(p.nbytes for n, p in loaded.got.named_parameters() if n not in ("embed.weight", "lm_head.weight"))
    rows = max(0, min(64 // tp, VOCAB - rank * 64 // tp))
    assert loaded.counters.bytes_read == loaded.traced.plan.bytes_needed == filled + 2 * rows * HIDDEN * 4


def test_a_model_with_values_is_traced_like_its_twin_and_not_touched(checkpoint: Path) -> None:
    with open_files(checkpoint) as opened:
        model = poisoned(NanoModel(2, 1))
        attributes = {n: dict(vars(m)) for n, m in model.named_modules()}
        traced = trace(model, opened.catalogue)
        assert traced.plan.fingerprint == trace(twin(partial(NanoModel, 2, 1)), opened.catalogue).plan.fingerprint
    assert all(bool((p == 77).all()) for p in model.parameters())
    assert {n: dict(vars(m)) for n, m in model.named_modules()} == attributes


def test_a_twin_is_left_as_it_was_with_the_loaders_of_its_parameters(checkpoint: Path) -> None:
    model = twin(NanoModel)
    before = dict(model.named_parameters())
    with open_files(checkpoint) as opened:
        first = trace(model, opened.catalogue)
        again = trace(model, opened.catalogue)
    assert all(p is before[n] and p.is_meta for n, p in model.named_parameters())
    assert callable(before["layers.0.qkv_proj.weight"].weight_loader)  # type: ignore[attr-defined]
    assert first.plan.fingerprint == again.plan.fingerprint


def test_steps_say_which_box_goes_where(checkpoint: Path) -> None:
    with open_files(checkpoint) as opened:
        plan = trace(twin(partial(NanoModel, 4, 3)), opened.catalogue).plan
    steps = {s.sources[0].entry.name: s for s in plan.steps if s.sources}
    # Rank 3 of 4 shares the second of two key heads with rank 2, behind its own two query heads.
    key = steps["layers.0.k_proj.weight"]
    assert key.into == Region((16, HIDDEN), Box((8, 0), (12, HIDDEN)))
    assert key.sources[0].region == Region((8, HIDDEN), Box((4, 0), (8, HIDDEN)))
    out = steps["layers.1.o_proj.weight"]
    assert out.sources[0].region == Region((HIDDEN, 32), Box((0, 24), (HIDDEN, 32)))
    up = steps[f"layers.0.experts.{EXPERTS - 1}.up_proj.weight"]
    assert up.into == Region((1, 2 * INNER, HIDDEN), Box((0, INNER, 0), (1, 2 * INNER, HIDDEN)))


def test_steps_are_in_the_order_of_the_checkpoint_after_the_fills(checkpoint: Path) -> None:
    with open_files(checkpoint) as opened:
        plan = trace(twin(NanoModel), opened.catalogue).plan
        order = [s.sources[0].entry.name for s in plan.steps if s.sources]
        assert order == [n for n in opened.catalogue if n in set(order)]
    assert [(s.parameter, s.into.size) for s in plan.steps if not s.sources] == [
        ("embed.weight", 14 * HIDDEN),
        ("lm_head.weight", 14 * HIDDEN),
    ]


def test_entries_that_the_loader_passes_over_are_unexpected(checkpoint: Path) -> None:
    with open_files(checkpoint) as opened:
        plan = trace(twin(partial(NanoModel, 2, 0)), opened.catalogue).plan
    assert plan.dropped == ()
    assert "layers.0.rotary.inv_freq" in plan.unexpected
    assert "layers.0.experts.3.up_proj.weight" in plan.unexpected
    assert "layers.0.experts.1.up_proj.weight" not in plan.unexpected


def test_what_the_loader_returned_is_kept(checkpoint: Path) -> None:
    with open_files(checkpoint) as opened:
        model = twin(NanoModel)
        assert trace(model, opened.catalogue).loaded == frozenset(n for n, _ in model.named_parameters())


def test_only_the_entries_that_are_named_are_offered(checkpoint: Path) -> None:
    with open_files(checkpoint) as opened:
        traced = trace(twin(NanoModel), opened.catalogue, names={"norm.weight", "embed.weight"})
    assert {s.parameter for s in traced.plan.steps} == {"norm.weight", "embed.weight"}
    assert traced.plan.dropped == ()
    assert "lm_head.weight" in traced.plan.missing


def test_a_traced_plan_survives_json_and_is_lowered_to_the_same_reads(checkpoint: Path) -> None:
    with open_files(checkpoint) as opened:
        traced = trace(twin(partial(NanoModel, 2, 1)), opened.catalogue)
        again = type(traced.plan).from_json(traced.plan.to_json())
        assert again.fingerprint == traced.plan.fingerprint
        model = poisoned(NanoModel(2, 1))
        counters = execute(traced, opened, model)
    assert counters.bytes_read == again.bytes_needed
    assert not any(bool((p == 77).any()) for p in model.parameters() if isinstance(p, torch.nn.Parameter))
