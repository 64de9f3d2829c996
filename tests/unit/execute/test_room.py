"""What computing takes beside staged bytes is part of the bound, and of the peak that is told."""

from __future__ import annotations

import torch

from helpers.checkpoints import ar, raw
from helpers.memory_storage import MemoryStorage
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.lower import lower
from tensorferry.core.planning import make_plan
from tensorferry.core.rules import Place
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import TargetTensor
from tensorferry.core.transforms import Add
from tensorferry.execute import ThreadedExecutor
from tensorferry.execute.staging import Staging


def test_room_beside_a_block_counts_while_it_is_lent() -> None:
    staging = Staging(4096, 8192)
    with staging.lend(100, room=300), staging.lend(50):
        pass
    with staging.lend(200):
        pass
    assert staging.peak == 450


def test_float32_numbers_made_of_smaller_ones_are_counted_and_stay_within_the_bound() -> None:
    values = ar(64, 16).to(torch.bfloat16)
    entry = TensorEntry.at("w", DTYPES["BF16"], (64, 16), "f", 0)
    target = {"p": TargetTensor.plain("p", DTYPES["BF16"], (64, 16))}
    plan = make_plan(Catalogue([entry], format="memory"), target, RuleSet(Place("w", "p", via=Add(1))))
    found = {"p": torch.zeros(64, 16, dtype=torch.bfloat16)}
    schedule = lower(plan, max_gap=0, max_read=1024, max_staging=2048, waste=1.0)
    counters = ThreadedExecutor(4).run(schedule, MemoryStorage({"f": raw(values)}), found)
    assert torch.equal(found["p"], (values.float() + 1).to(torch.bfloat16))
    assert schedule.largest_batch == 3 * 320 + 640  # three times ten rows in bfloat16, ten in float32
    assert 1600 <= counters.staging_peak <= 2048
