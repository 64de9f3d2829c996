"""Prefixes that wrappers leave on names are stripped where every name has them and the model wants it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tensorferry.core.wrappers import unwrapping

LIN = ["lin.weight", "lin.bias"]


def _stripped(names: Sequence[str], wanted: Sequence[str]) -> dict[str, str] | None:
    """Return where each name goes, or None where nothing is stripped."""
    found = unwrapping(names, set(wanted))
    if found is None:
        return None
    routes = {name: found[0].route(name) for name in names}
    return {name: route.to[0].into for name, route in routes.items() if route is not None}


@pytest.mark.parametrize(
    "prefix",
    ["module.", "_orig_mod.", "_fsdp_wrapped_module.", "_forward_module.", "module._orig_mod.", "_orig_mod.module."],
)
def test_a_prefix_on_every_name_goes(prefix: str) -> None:
    assert _stripped([prefix + n for n in LIN], LIN) == {prefix + n: n for n in LIN}
    found = unwrapping([prefix + n for n in LIN], set(LIN))
    assert found is not None
    assert found[1] == prefix


def test_names_that_are_wanted_as_they_are_stay() -> None:
    assert _stripped(["module.lin.weight", "module.lin.bias"], ["module.lin.weight", "module.lin.bias"]) is None


def test_a_prefix_on_some_names_only_stays() -> None:
    assert _stripped(["module.lin.weight", "lin.bias"], LIN) is None


def test_a_prefix_stays_where_the_model_wants_neither() -> None:
    assert _stripped(["module.a", "module.b"], LIN) is None


def test_leftovers_behind_the_prefix_do_not_hold_it() -> None:
    names = [*LIN, "lin.scale"]
    assert _stripped([f"module.{n}" for n in names], LIN) == {f"module.{n}": n for n in names}


def test_one_prefix_of_two_stays_where_the_model_has_a_sub_module_of_that_name() -> None:
    wanted = [f"module.{n}" for n in LIN]
    assert _stripped([f"_orig_mod.module.{n}" for n in LIN], wanted) == {
        f"_orig_mod.module.{n}": f"module.{n}" for n in LIN
    }


def test_inner_traces_of_compiled_parts_go() -> None:
    names = ["norm.weight", "layers.0._orig_mod.lin.weight", "layers.1._fsdp_wrapped_module.lin.weight"]
    wanted = ["norm.weight", "layers.0.lin.weight", "layers.1.lin.weight"]
    assert _stripped(names, wanted) == dict(zip(names, wanted, strict=True))


def test_inner_and_outer_traces_go_together() -> None:
    names = ["module.norm.weight", "module.layers.0._orig_mod.lin.weight"]
    wanted = ["norm.weight", "layers.0.lin.weight"]
    assert _stripped(names, wanted) == dict(zip(names, wanted, strict=True))


def test_nothing_is_stripped_where_two_names_would_become_one() -> None:
    assert _stripped(["lin._orig_mod.weight", "lin.weight"], ["lin.weight"]) is None


def test_names_with_braces_are_left_alone() -> None:
    assert _stripped(["module.lin.weight", "module.{i}"], ["lin.weight"]) is None
    assert _stripped(["lin._orig_mod.weight", "a{b"], ["lin.weight"]) is None


def test_an_empty_checkpoint_has_no_prefix() -> None:
    assert _stripped([], LIN) is None
