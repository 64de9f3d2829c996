"""Entries that lie in no file: transforms of several inputs, steps written out, catalogues under other names."""

from __future__ import annotations

import json

import pytest

from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import Catalogue, Made, TensorEntry
from tensorferry.core.dtypes import DTYPES, DType, Kind
from tensorferry.core.made import resolved
from tensorferry.core.making import Assemble, Each, Scale
from tensorferry.core.mapped import Laid, map_catalogue, parts_of
from tensorferry.core.plan import Source, Step
from tensorferry.core.planning import make_plan
from tensorferry.core.rules import Drop, Join, Part, Place, Split
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Slot, TargetTensor
from tensorferry.core.transform_json import transform_from_json
from tensorferry.core.transforms import (
    Add,
    Chain,
    Concat,
    Dequantize,
    Permute,
    Stack,
    Take,
    TensorSpec,
    Transpose,
)
from tensorferry.errors import PlanError

F32, F16, Q8 = DTYPES["F32"], DTYPES["F16"], DTYPES["Q8_0"]


def entry(name: str, *shape: int, dtype: DType = F32, at: int = 0) -> TensorEntry:
    return TensorEntry.at(name, dtype, shape, "f", at)


def catalogue(*entries: TensorEntry) -> Catalogue:
    return Catalogue(entries, format="any", files=["f"])


def spec(*shape: int, dtype: DType = F32) -> TensorSpec:
    return TensorSpec(dtype, shape)


def region(view: tuple[int, ...], *bounds: tuple[int, int]) -> Region:
    return Region(view, Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds)))


def test_scale_takes_one_factor_or_one_for_each_index_of_the_first_dimension() -> None:
    for factors in ((), (1,), (4,)):
        assert Scale().infer([spec(4, 2, 64, dtype=Q8), spec(*factors)]) == spec(4, 2, 64)
    with pytest.raises(ValueError, match=r"one for each of the \(4,\), not \(2,\)"):
        Scale().infer([spec(4, 2, 64, dtype=Q8), spec(2)])
    with pytest.raises(ValueError, match="not U8 by F32"):
        Scale().infer([spec(4, dtype=DTYPES["U8"]), spec(1)])


def test_scale_needs_whole_blocks_and_the_factors_of_its_rows() -> None:
    out = Box((1, 0, 5), (3, 2, 20))
    numbers, factors = Scale().pull(out, [spec(4, 2, 64, dtype=Q8), spec(4)])
    assert (numbers, factors) == (Box((1, 0, 0), (3, 2, 32)), Box((1,), (3,)))
    assert Scale().pull(out, [spec(4, 2, 64), spec(1)]) == [out, Box((0,), (1,))]


def test_each_makes_its_inputs_and_asks_them_for_what_is_needed() -> None:
    each = Each(((1, Dequantize()), (2, Stack(0)), (1, None)), Concat(0))
    inputs = [spec(2, 64, dtype=Q8), spec(64), spec(64), spec(3, 64)]
    assert each.infer(inputs) == spec(7, 64)
    nothing = Box((0,), (0,))
    assert each.pull(Box((1, 0), (3, 8)), inputs) == [
        Box((1, 0), (2, 32)), Box((0,), (8,)), nothing, Box((0, 0), (0, 8))
    ]  # fmt: skip


def test_each_counts_its_inputs() -> None:
    with pytest.raises(ValueError, match="each takes 3 tensors, not 2"):
        Each(((1, None), (2, Scale())), Concat(0)).infer([spec(1), spec(1)])


def test_assemble_takes_windows_and_refuses_those_that_do_not_fit() -> None:
    pieces = (
        (region((4, 2), (1, 3), (0, 2)), region((4, 2), (0, 2), (0, 2))),
        (Region.whole((4,)), region((8,), (4, 8))),
    )
    assemble = Assemble(spec(4, 2), pieces)
    assert assemble.infer([spec(4, 2), spec(2, 2)]) == spec(4, 2)
    assert assemble.pull(Box.whole((4, 2)), [spec(4, 2), spec(2, 2)]) == [Box((1, 0), (3, 2)), Box.whole((2, 2))]
    with pytest.raises(ValueError, match="cannot put"):
        assemble.infer([spec(4, 2), spec(5)])


@pytest.mark.parametrize(
    "transform",
    [
        Scale(),
        Each(((1, None), (2, Scale())), Concat(0)),
        Assemble(spec(4, 2), ((Region.whole((4, 2)), region((8,), (0, 8))),)),
        Chain((Scale(), Transpose((1, 0)))),
    ],
    ids=lambda t: t.op,
)
def test_they_are_data(transform: Scale | Each | Assemble | Chain) -> None:
    assert transform_from_json(json.loads(json.dumps(transform.to_json()))) == transform


def test_a_step_over_what_is_made_reads_what_it_is_made_of() -> None:
    weight, factor = entry("w", 4, 64, dtype=Q8), entry("s", 1, at=999)
    product = TensorEntry("w", F32, (4, 64), (), made=Made((weight, factor), Scale()))
    step = Step("p", Region.whole((2, 64)), (Source(product, region((4, 64), (2, 4), (0, 64))),))
    assert resolved(step) == Step(
        "p",
        Region.whole((2, 64)),
        (Source(weight, region((4, 64), (2, 4), (0, 64))), Source(factor, Region.whole((1,)))),
        Scale(),
        region((4, 64), (2, 4), (0, 64)),
    )


def test_a_renamed_entry_is_read_under_its_own_name() -> None:
    weight = entry("w", 4, 2)
    other = TensorEntry("v", F32, (4, 2), weight.chunks, made=Made((weight,)))
    step = Step(
        "p", Region.whole((2, 4)), (Source(other, Region.whole((4, 2))),), Transpose((1, 0)), Region.whole((2, 4))
    )
    assert resolved(step) == step._replace(sources=(Source(weight, Region.whole((4, 2))),))
    assert other.lying == (weight,)


def test_what_is_made_of_what_is_made_is_read_from_the_file() -> None:
    weight = entry("w", 4, 64, dtype=Q8)
    numbers = TensorEntry("n", F32, (4, 64), (), made=Made((weight,), Dequantize()))
    turned = TensorEntry("t", F32, (64, 4), (), made=Made((numbers,), Transpose((1, 0))))
    step = resolved(Step("p", Region.whole((64, 4)), (Source(turned, Region.whole((64, 4))),)))
    assert step.sources == (Source(weight, Region.whole((4, 64))),)
    assert step.via == Chain((Dequantize(), Transpose((1, 0))))


def test_a_join_of_what_is_made_makes_each_of_its_own() -> None:
    weights = [entry(f"w.{n}", 2, 64, dtype=Q8, at=1000 * n) for n in (0, 1)]
    made = [TensorEntry(f"v.{n}", F32, (2, 64), (), made=Made((w,), Dequantize())) for n, w in enumerate(weights)]
    rules = RuleSet(Join(("v.{i}",), "p", Chain((Concat(0), Transpose((1, 0))))))
    plan = make_plan(catalogue(*made), {"p": TargetTensor.plain("p", F32, (64, 4))}, rules)
    (step,) = plan.steps
    assert step.via == Each(((1, Dequantize()), (1, Dequantize())), Chain((Concat(0), Transpose((1, 0)))))
    assert [s.entry.name for s in step.sources] == ["w.0", "w.1"]


def test_names_that_only_change_lie_where_they_did() -> None:
    weight = entry("a.w", 4, 2, dtype=F16)
    mapped = map_catalogue(catalogue(weight, entry("b", 1)), RuleSet(Place("a.{x:part}", "model.{x}")))
    assert list(mapped.catalogue) == ["model.w", "b"]
    assert mapped.catalogue["model.w"].span == weight.span
    assert (mapped.catalogue["model.w"].dtype, mapped.catalogue["b"].made) == (F16, None)


def test_packed_blocks_become_float32_and_what_is_moved_keeps_its_type() -> None:
    rules = RuleSet(
        Place("q", "Q", via=Permute((2, 2, 2, 64), (0, 2, 1, 3))), Place("n", "N", via=Add(-1.0)),
        Place("t", "T", via=Transpose((1, 0))),
    )  # fmt: skip
    entries = catalogue(entry("q", 8, 64, dtype=Q8), entry("n", 4, dtype=F16), entry("t", 4, 2, dtype=F16))
    made = map_catalogue(entries, rules).catalogue
    assert [(e.name, e.dtype.name, e.shape) for e in made.values()] == [
        ("Q", "F32", (8, 64)), ("N", "F32", (4,)), ("T", "F16", (2, 4))
    ]  # fmt: skip
    assert made["Q"].made == Made((entries["q"],), Chain((Permute((2, 2, 2, 64), (0, 2, 1, 3)), Dequantize())))


def test_parts_of_an_entry_are_entries_of_which_only_they_are_read() -> None:
    rows = region((4, 64), (2, 4), (0, 64))
    rules = RuleSet(
        Split(
            "qk", (Part("q", via=Take(region((4, 64), (0, 2), (0, 64)), (2, 64))), Part("k", via=Take(rows, (2, 64))))
        )
    )
    made = map_catalogue(catalogue(entry("qk", 4, 64, dtype=Q8)), rules).catalogue
    ((part, window, into),) = parts_of(made["k"]) or []
    assert (part.dtype, part.shape, window, into) == (F32, (4, 64), rows, Region.whole((2, 64)))
    step = resolved(Step("p", into, (Source(made["k"], into),)))
    assert step.sources[0].region == rows


def test_several_entries_make_one_where_the_layout_says() -> None:
    slots = {name: Slot.of(region((3, 2), (0, 3), (n, n + 1)), (3,)) for n, name in enumerate("ab")}
    rules = RuleSet(Place("x", "w", "a"), Place("y", "w", "b"))
    made = map_catalogue(
        catalogue(entry("x", 3), entry("y", 3, at=12)), rules, lambda name: Laid((6,), slots)
    ).catalogue
    assert (made["w"].shape, [e.name for e in made["w"].lying]) == ((6,), ["x", "y"])
    assert [into.box.start for _, _, into in parts_of(made["w"]) or []] == [(0, 0), (0, 1)]


def test_what_is_dropped_is_told() -> None:
    mapped = map_catalogue(catalogue(entry("a", 1), entry("b", 1)), RuleSet(Drop("b", "of no use")))
    assert (list(mapped.catalogue), mapped.dropped) == (["a"], {"b": "of no use"})


def test_a_tensor_of_an_unknown_type_is_renamed_and_spoils_no_other() -> None:
    odd = TensorEntry("b", DType("ggml type 200", Kind.UNKNOWN, 0), (4,), entry("b", 1).chunks)
    made = map_catalogue(catalogue(entry("a", 1), odd), RuleSet(Place("b", "B"))).catalogue
    assert (list(made), made["B"].dtype.kind) == (["a", "B"], Kind.UNKNOWN)


def test_rules_that_do_not_fit_are_told_all_at_once() -> None:
    rules = RuleSet(Place("a", "A", via=Transpose((1, 0))), Place("b", "C"), Place("c", "C"))
    with pytest.raises(PlanError, match=r"(?s)2 problems.*transposes dimensions.*b and c both go to C"):
        map_catalogue(catalogue(entry("a", 4), entry("b", 1), entry("c", 1)), rules)
