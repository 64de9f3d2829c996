"""Plans of well-known models must not change unnoticed: stored headers in, stored explanation and fingerprint out.

After a change that is meant, write the stored files again and read the difference before committing it::

    TENSORFERRY_UPDATE_GOLDEN=1 python -m pytest tests/golden
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.core_values import rows
from helpers.model_shapes import SMOLLM2_135M, Mixtral, Tensor
from helpers.model_targets import FUSED, catalogue_of_tensors, llama_rank
from tensorferry.core.boxes import Box, Region
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.lower import lower
from tensorferry.core.plan import Plan
from tensorferry.core.planning import make_plan
from tensorferry.core.rules import Join, Place
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Slot, Target, TargetTensor
from tensorferry.core.transforms import Chain, Stack, Transpose

HERE = Path(__file__).parent
UPDATE = bool(os.environ.get("TENSORFERRY_UPDATE_GOLDEN"))


def plain(tensors: Sequence[Tensor]) -> tuple[Target, RuleSet]:
    return {name: TargetTensor.plain(name, DTYPES[dtype], shape) for name, dtype, shape in tensors}, RuleSet()


def smollm_rank(tensors: Sequence[Tensor]) -> tuple[Target, RuleSet]:
    """Rank 1 of 3, as the model has 9 heads and 3 of keys and values; the head is tied to the embeddings."""
    return llama_rank(tensors, 1, 3, tied=True), FUSED


def mixtral_rank(tensors: Sequence[Tensor]) -> tuple[Target, RuleSet]:
    """Experts stacked: gate and up as slots of the two experts of rank 1, down by a join and transposed."""
    target = dict(plain([t for t in tensors if ".experts." not in t[0]])[0])
    for i in range(2):
        at = f"model.layers.{i}.block_sparse_moe."
        shape = (2, 96, 32)
        slots = {}
        for e in (2, 3):
            for k, name in enumerate(("w1", "w3")):
                local = Region(shape, Box((e - 2, 48 * k, 0), (e - 1, 48 * (k + 1), 32)))
                slots[f"{e}.{name}"] = Slot(local, (48, 32), Region.whole((48, 32)))
        absent = frozenset(f"{e}.{name}" for e in (0, 1) for name in ("w1", "w3"))
        target[at + "w13"] = TargetTensor(at + "w13", DTYPES["BF16"], shape, slots, absent=absent)
        down = {"": Slot(Region.whole((2, 48, 32)), (4, 48, 32), rows((4, 48, 32), 2, 4))}
        target[at + "w2"] = TargetTensor(at + "w2", DTYPES["BF16"], (2, 48, 32), down)
    return target, RuleSet(
        *(Place(f"{{m:path}}.experts.{{e}}.{n}.weight", "{m}.w13", f"{{e}}.{n}") for n in ("w1", "w3")),
        Join(("{m:path}.experts.{e}.w2.weight",), "{m}.w2", Chain((Stack(), Transpose((0, 2, 1))))),
    )


Describe = Callable[[Sequence[Tensor]], tuple[Target, RuleSet]]

CASES: Mapping[str, tuple[str, Describe]] = {
    "smollm2-135m": ("smollm2-135m", plain),
    "smollm2-135m-rank-1-of-3": ("smollm2-135m", smollm_rank),
    "mixtral-tiny-experts-1-of-2": ("mixtral-tiny", mixtral_rank),
}

HEADERS: Mapping[str, Sequence[Tensor]] = {
    "smollm2-135m": tuple(SMOLLM2_135M.tensors()),
    "mixtral-tiny": tuple(Mixtral().tensors()),
}


def stored(name: str, text: str) -> str:
    """Return what is stored as `name`, after storing `text` there if that is asked for."""
    path = HERE / name
    if UPDATE:
        path.write_text(text, encoding="utf-8")
    return path.read_text(encoding="utf-8")


def header_text(tensors: Sequence[Tensor]) -> str:
    lines = ",\n".join(json.dumps([name, dtype, list(shape)]) for name, dtype, shape in tensors)
    return f"[\n{lines}\n]\n"


def tensors_of(header: str) -> list[Tensor]:
    found: list[Any] = json.loads(stored(f"{header}.header.json", header_text(HEADERS[header])))
    return [(name, dtype, tuple(shape)) for name, dtype, shape in found]


def planned(case: str) -> Plan:
    header, describe = CASES[case]
    tensors = tensors_of(header)
    target, rules = describe(tensors)
    return make_plan(catalogue_of_tensors(tensors, shards=2), target, rules)


def account(plan: Plan) -> str:
    """Return everything that is stored of a plan: fingerprint, explanation, and what its schedule reads."""
    schedule = lower(plan, max_gap=1 << 18, max_read=1 << 24, max_staging=1 << 28, waste=32)
    reads = f"{schedule.reads} reads in {len(schedule.batches)} batches, {schedule.bytes_read:,} bytes"
    return f"fingerprint {plan.fingerprint}\n{reads}\n{plan.explain()}\n"


@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_the_stored_one(case: str) -> None:
    text = account(planned(case))
    assert text == stored(f"{case}.plan.txt", text), f"if this is meant, see the top of {Path(__file__).name}"


@pytest.mark.parametrize("header", HEADERS)
def test_a_stored_header_is_that_of_the_model(header: str) -> None:
    assert tensors_of(header) == list(HEADERS[header])


@pytest.mark.parametrize("case", CASES)
def test_a_stored_plan_has_no_problems_and_survives_json(case: str) -> None:
    plan = planned(case)
    assert plan.problems == ()
    assert Plan.from_json(plan.to_json()) == plan
