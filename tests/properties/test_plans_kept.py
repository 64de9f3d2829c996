"""Plans written to JSON and read back are the same plans."""

from __future__ import annotations

import json

from hypothesis import given, settings

from helpers.random_plans import World, worlds
from tensorferry.core.lower import lower
from tensorferry.core.plan import Plan


@settings(max_examples=200, deadline=None)
@given(worlds())
def test_a_plan_read_back_is_equal_and_is_lowered_alike(world: World) -> None:
    plan = world.plan()
    text = plan.to_json()
    back = Plan.from_json(text)
    assert back == plan
    assert back.fingerprint == plan.fingerprint == json.loads(text)["fingerprint"]
    cost = {"max_gap": 8, "max_read": 64, "max_staging": 128}
    assert lower(back, **cost, waste=2).batches == lower(plan, **cost, waste=2).batches


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_the_fingerprint_is_that_of_the_steps(world: World) -> None:
    plan, again = world.plan(), world.plan()
    assert plan.fingerprint == again.fingerprint
    shorter = Plan(plan.steps[1:], plan.parameters, plan.aliases)
    assert shorter.fingerprint != plan.fingerprint
