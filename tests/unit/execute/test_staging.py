"""Blocks that bytes pass through: lent, used again, and never more of them than the bound allows."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from tensorferry.execute.staging import Staging

PAGE = 4096


def test_a_block_has_the_size_that_was_asked_for_and_begins_on_a_page() -> None:
    with Staging(3 * PAGE, 9 * PAGE).lend(5000) as block:
        assert (block.shape, block.dtype) == ((5000,), torch.uint8)
        assert block.data_ptr() % PAGE == 0


def test_what_came_back_is_lent_again() -> None:
    staging = Staging(PAGE, 4 * PAGE)
    with staging.lend(100) as block:
        first = block.data_ptr()
    with staging.lend(PAGE) as block:
        assert block.data_ptr() == first


def test_borrowers_at_the_same_time_get_different_memory() -> None:
    staging = Staging(PAGE, 4 * PAGE)
    with staging.lend(PAGE) as one, staging.lend(PAGE) as other:
        one.fill_(1)
        other.fill_(2)
        assert one.sum() == PAGE


def test_the_peak_is_what_was_lent_at_once() -> None:
    staging = Staging(PAGE, 4 * PAGE)
    with staging.lend(10), staging.lend(20):
        pass
    with staging.lend(25):
        pass
    assert staging.peak == 30


def test_no_more_blocks_are_kept_than_the_bound_holds() -> None:
    staging = Staging(PAGE, 2 * PAGE)
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(staging.lend(PAGE))
    assert len(staging._free) == 2


def test_blocks_beyond_the_bound_are_no_larger_than_what_is_asked_for() -> None:
    staging = Staging(64 * PAGE, 64 * PAGE)
    with staging.lend(1), staging.lend(PAGE) as other:
        assert other.untyped_storage().nbytes() == PAGE


def test_a_task_larger_than_any_block_is_served_and_not_kept() -> None:
    staging = Staging(PAGE, 4 * PAGE)
    with staging.lend(10 * PAGE) as block:
        assert block.numel() == 10 * PAGE
    assert staging._free == []


def test_nothing_is_lent_for_nothing() -> None:
    staging = Staging(PAGE, PAGE)
    with staging.lend(0) as block:
        assert block.numel() == 0
    assert staging.peak == 0


def test_a_block_comes_back_when_its_borrower_fails() -> None:
    staging = Staging(PAGE, PAGE)
    with pytest.raises(ZeroDivisionError), staging.lend(100):
        raise ZeroDivisionError
    assert len(staging._free) == 1
    assert staging._lent == 0
