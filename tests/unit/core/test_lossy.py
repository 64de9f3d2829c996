from __future__ import annotations

import pytest

from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.plan import Strictness
from tensorferry.core.planning import make_plan
from tensorferry.core.target import TargetTensor
from tensorferry.problems import ProblemKind


def _catalogue(weight: str, *beside: str) -> Catalogue:
    entries = [TensorEntry.at("l.weight", DTYPES[weight], (2, 2), "f", 0)]
    entries += [TensorEntry.at(name, DTYPES["F32"], (1, 1), "f", 16 + 4 * i) for i, name in enumerate(beside)]
    return Catalogue(entries, format="memory", files=["f"])


def _target(dtype: str) -> dict[str, TargetTensor]:
    return {"l.weight": TargetTensor.plain("l.weight", DTYPES[dtype], (2, 2))}


@pytest.mark.parametrize("scale", ["l.weight_scale_inv", "l.weight_scale", "l.weight_scales", "l.scale", "l.scales"])
def test_a_quantized_weight_is_not_widened_without_the_scale_that_lies_beside_it(scale: str) -> None:
    plan = make_plan(_catalogue("F8_E4M3", scale), _target("BF16"))
    (problem,) = plan.fatal
    assert (problem.kind, problem.subject) == (ProblemKind.LOSSY_DTYPE, "l.weight")
    assert problem.detail == f"its numbers are to be multiplied by {scale}, which no rule does"


def test_it_can_be_allowed() -> None:
    plan = make_plan(_catalogue("F8_E4M3", "l.weight_scale"), _target("BF16"), strict=Strictness(lossy="warn"))
    assert not plan.fatal
    assert [p.kind for p in plan.problems if p.subject == "l.weight"] == [ProblemKind.LOSSY_DTYPE]


@pytest.mark.parametrize(
    ("weight", "parameter", "beside"),
    [
        ("F8_E4M3", "BF16", ()),
        ("F8_E4M3", "BF16", ("other.weight_scale",)),
        ("F8_E4M3", "F8_E4M3", ("l.weight_scale",)),
        ("F16", "F32", ("l.weight_scale",)),
    ],
)
def test_small_floats_without_scales_and_large_ones_are_loaded(
    weight: str, parameter: str, beside: tuple[str, ...]
) -> None:
    assert not make_plan(_catalogue(weight, *beside), _target(parameter)).fatal
