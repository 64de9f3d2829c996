"""What a plan says of itself: problems in words, explanations on one screen, JSON, fingerprints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from dataclasses import replace

import pytest

from helpers.core_values import catalogue_of, target_of
from helpers.model_shapes import DeepSeek, Llama
from helpers.model_targets import FUSED, catalogue_of_tensors, deepseek_rank, llama_rank
from tensorferry.core import strays
from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.names import nearest
from tensorferry.core.plan import Plan, Strictness, describe_problems
from tensorferry.core.planning import make_plan
from tensorferry.core.rules import Join, Place
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Slot, TargetTensor
from tensorferry.core.transforms import Chain, Custom, Stack, TensorSpec, Transpose
from tensorferry.errors import PlanError
from tensorferry.problems import Problem, ProblemKind

LLAMA = {name: shape for name, _, shape in Llama().tensors()}


def message(have: dict[str, Shape], want: dict[str, Shape], *, strict: Strictness | None = None) -> str:
    with pytest.raises(PlanError) as caught:
        make_plan(catalogue_of(have), target_of(want), strict=strict).raise_for_problems()
    return str(caught.value)


# -- problems in words


def test_a_plan_without_fatal_problems_does_not_raise() -> None:
    make_plan(catalogue_of({"w": (2,), "extra": (1,)}), target_of({"w": (2,)})).raise_for_problems()


def test_the_error_carries_every_problem_and_says_that_nothing_was_touched() -> None:
    with pytest.raises(PlanError, match="2 problems; the model was not touched") as caught:
        make_plan(catalogue_of({}), target_of({"a": (1,), "b": (1,)})).raise_for_problems()
    assert [p.subject for p in caught.value.problems] == ["a", "b"]
    assert not caught.value.touched


def test_layers_are_folded() -> None:
    text = message({}, {f"model.layers.{i}.mlp.up_proj.weight": (2,) for i in range(80)})
    assert text.splitlines()[1:] == ["  missing: model.layers.{0..79}.mlp.up_proj.weight"]


def test_shapes_that_differ_in_the_same_way_are_one_line() -> None:
    text = message({f"l.{i}.w": (2,) for i in range(80)}, {f"l.{i}.w": (3,) for i in range(80)})
    assert text.splitlines()[1:] == ["  shape: l.{0..79}.w: the checkpoint has (2,), the model expects (3,)"]


def test_details_that_differ_in_layer_numbers_are_one_line() -> None:
    problems = [Problem(ProblemKind.SHAPE, f"q.{i}", f"l.{i}.qkv expects (3,)") for i in range(80)]
    assert describe_problems(problems).splitlines()[1:] == ["  shape: q.{0..79}: l.{0..79}.qkv expects (3,)"]


def test_the_name_that_was_meant_is_offered_folded() -> None:
    text = message({f"h.{i}.weight": (2,) for i in range(80)}, {f"model.h.{i}.weight": (2,) for i in range(80)})
    assert "missing: model.h.{0..79}.weight (did you mean h.{0..79}.weight?)" in text


def test_no_sort_of_problem_hides_another() -> None:
    many = [Problem(ProblemKind.MISSING, f"a{'x' * i}") for i in range(50)]
    lines = describe_problems([*many, Problem(ProblemKind.GAP, "g")]).splitlines()
    assert len(lines) == 32
    assert "  gap: g" in lines
    assert lines[-1] == "  … and 21 more lines"


def test_names_out_of_files_cannot_play_tricks_on_a_terminal() -> None:
    text = message({"a\x1b[31m\n": (2,)}, {}, strict=Strictness.strict())
    assert "unexpected: a\\x1b[31m\\n" in text


def test_eighty_layers_with_every_name_wrong_is_a_short_message() -> None:
    wrong = {name.replace("model.", "encoder."): s for name, s in LLAMA.items()}
    text = message(wrong, LLAMA, strict=Strictness.strict())
    assert len(text.splitlines()) <= 40
    assert "model.layers.{0..79}.mlp.up_proj.weight (did you mean encoder.layers.{0..79}.mlp.up_proj.weight?)" in text


def test_names_that_cannot_be_folded_still_make_a_short_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words stuck to numbers that are spelled out: every name is a sort of its own, and only some are looked for."""
    letters = str.maketrans("0123456789", "abcdefghij")
    wrong = {name.translate(letters): s for name, s in LLAMA.items()}
    right = {name.translate(letters).replace("proj", "projection"): s for name, s in LLAMA.items()}
    looks: list[str] = []

    def counted(name: str, known: Collection[str]) -> tuple[str, ...]:
        looks.append(name)
        return nearest(name, known)

    monkeypatch.setattr(strays, "nearest", counted)
    text = message(wrong, right, strict=Strictness.strict())
    assert len(text.splitlines()) <= 40
    assert "model.layers.a.self_attn.q_projection.weight (did you mean model.layers.a.self_attn.q_proj.weight?)" in text
    assert len(looks) <= 100


# -- explanations


def test_an_explanation_of_eighty_layers_fits_a_screen() -> None:
    plan = make_plan(catalogue_of_tensors(Llama().tensors(), shards=30), llama_rank(Llama().tensors(), 1, 8), FUSED)
    lines = plan.explain().splitlines()
    assert len(lines) <= 45
    assert lines[0] == "483 parameters, 723 steps, 16.4 GiB to read"
    assert (
        "  model.layers.{0..79}.self_attn.qkv_proj.weight[1024:1152, 0:8192] <- model.layers.{0..79}.self_attn"
        ".k_proj.weight BF16 [1024, 8192] part [128, 8192], 160.0 MiB"
    ) in lines


def test_an_explanation_of_two_hundred_experts_fits_a_screen() -> None:
    model = DeepSeek()
    plan = make_plan(catalogue_of_tensors(model.tensors(), shards=160), deepseek_rank(model, 1, 8), FUSED)
    assert plan.problems == ()
    lines = plan.explain().splitlines()
    assert len(lines) <= 45
    assert any("experts.{0..31,64..255}.up_proj.weight (not on this rank)" in line for line in lines)


def test_an_explanation_full_of_problems_fits_a_screen() -> None:
    plan = make_plan(catalogue_of({f"x{n}": s for n, s in LLAMA.items()}), llama_rank(Llama().tensors(), 0, 8), FUSED)
    assert len(plan.explain().splitlines()) <= 45


def test_an_explanation_says_whether_findings_stop_the_load() -> None:
    plan = make_plan(catalogue_of({"w": (2,), "extra": (1,)}), target_of({"w": (2,)}))
    assert plan.explain().splitlines() == [
        "1 parameter, 1 step, 8 B to read",
        "  w <- F32 [2], 8 B",
        "1 finding, which does not stop the load:",
        "  unexpected: extra",
    ]


def test_ties_and_fills_are_explained() -> None:
    target = target_of({"embed": (2,)}) | {"head": TargetTensor("head", DTYPES["F32"], (2,), alias_of="embed")}
    assert "  head = embed (tied)" in make_plan(catalogue_of({"embed": (2,)}), target).explain()


def test_only_the_inputs_that_something_is_taken_of_are_explained() -> None:
    window = Slot(Region.whole((1, 3, 2)), (2, 3, 2), Region((2, 3, 2), Box((1, 0, 0), (2, 3, 2))))
    target = {"w": TargetTensor("w", DTYPES["F32"], (1, 3, 2), {"": window})}
    rules = RuleSet(Join(("e.{i}",), "w", Chain((Stack(), Transpose((0, 2, 1))))))
    plan = make_plan(catalogue_of({"e.0": (2, 3), "e.1": (2, 3)}), target, rules)
    assert "  w <- e.1 F32 [2, 3] via chain, 24 B" in plan.explain().splitlines()


def test_a_value_made_of_nothing_is_explained() -> None:
    ones = Custom("ones", TensorSpec(DTYPES["F32"], (2,)))
    plan = make_plan(catalogue_of({"e.0": (0,)}), target_of({"w": (2,)}), RuleSet(Join(("e.{i}",), "w", ones)))
    assert "  w <- e.0 F32 [0] via custom, 0 B" in plan.explain().splitlines()


# -- JSON and fingerprints


def small() -> Plan:
    have, want = {"h.0.w": (4, 2), "h.1.w": (4, 2), "extra": (1,)}, {"l.0.w": (4, 2), "l.1.w": (4, 2), "gone": (2,)}
    return make_plan(catalogue_of(have), target_of(want), RuleSet(Place("h.{i}.w", "l.{i}.w")))


def test_json_gives_an_equal_plan_back() -> None:
    plan = small()
    back = Plan.from_json(plan.to_json())
    assert back == plan
    assert back.fingerprint == plan.fingerprint


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"tensorferry_plan": 1}',
        '{"tensorferry_plan": 1, "entries": 3}',
        '{"tensorferry_plan": 9}',
    ],
)
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"no plan written by tensorferry|plan version 9 cannot be read"):
        Plan.from_json(text)


def test_json_with_an_unknown_type_or_transform_is_refused() -> None:
    with pytest.raises(PlanError):
        Plan.from_json(small().to_json().replace('"F32"', '"F33"'))


def test_the_fingerprint_does_not_depend_on_the_process() -> None:
    code = "from test_plan import small; print(small().fingerprint)"
    paths = os.pathsep.join([os.path.dirname(__file__), os.path.join(os.path.dirname(__file__), "..", "..")])
    seeds = ("0", "1", "random")
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=True,
        )
        for seed in seeds
    ]
    assert {run.stdout.strip() for run in runs} == {small().fingerprint}


def test_the_fingerprint_changes_with_any_step_but_not_with_words() -> None:
    plan = small()
    assert replace(plan, problems=(), dropped=()).fingerprint == plan.fingerprint
    for i, step in enumerate(plan.steps):
        (source,) = step.sources
        moved = replace(source.entry, chunks=(source.entry.chunks[0]._replace(strides=(1, 4)),))
        for other in (
            step._replace(parameter="x"),
            step._replace(fill=1.0),
            step._replace(sources=(source._replace(entry=moved),)),
        ):
            steps = (*plan.steps[:i], other, *plan.steps[i + 1 :])
            assert replace(plan, steps=steps).fingerprint != plan.fingerprint
    assert replace(plan, aliases={"a": "b"}).fingerprint != plan.fingerprint
