"""Pipeline stages take layers in blocks, what comes before at the first, what comes after at the last."""

from __future__ import annotations

import pytest

from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.planning import make_plan
from tensorferry.core.stages import on_stage
from tensorferry.core.target import TargetTensor
from tensorferry.errors import ConfigError

F32 = DTYPES["F32"]
NAMES = ["embed.weight", *(f"model.layers.{i}.w" for i in range(5)), "norm.weight", "head.weight"]


def model(*, tied: bool = False) -> dict[str, TargetTensor]:
    target = {name: TargetTensor.plain(name, F32, (2,)) for name in NAMES}
    if tied:
        target["head.weight"] = TargetTensor("head.weight", F32, (2,), alias_of="embed.weight")
    return target


def kept(stages: int, stage: int, *, tied: bool = False) -> list[str]:
    return [name for name, t in on_stage(model(tied=tied), stages, stage).items() if t.shape == (2,)]


def test_layers_are_dealt_in_blocks_and_the_ends_have_the_rest() -> None:
    assert kept(2, 0) == ["embed.weight", "model.layers.0.w", "model.layers.1.w", "model.layers.2.w"]
    assert kept(2, 1) == ["model.layers.3.w", "model.layers.4.w", "norm.weight", "head.weight"]
    assert kept(3, 1) == ["model.layers.2.w", "model.layers.3.w"]
    assert kept(1, 0) == NAMES


def test_what_is_tied_is_where_one_of_its_names_is() -> None:
    assert "embed.weight" in kept(2, 0, tied=True)
    assert "embed.weight" in kept(2, 1, tied=True)


def test_entries_of_other_stages_are_dropped_for_that_reason() -> None:
    entries = [TensorEntry.at(name, F32, (2,), "f", 8 * n) for n, name in enumerate(NAMES)]
    plan = make_plan(Catalogue(entries, format="memory", files=["f"]), on_stage(model(), 2, 1))
    assert not plan.problems
    assert plan.bytes_needed == 4 * 8
    assert {d.why for d in plan.dropped} == {"not on this rank"}


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 layers cannot be dealt to 6 pipeline stages"):
        on_stage(model(), 6, 0)
