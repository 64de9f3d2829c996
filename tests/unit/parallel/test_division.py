"""Who has what: even parts, heads, experts."""

from __future__ import annotations

import pytest

from tensorferry.errors import ConfigError
from tensorferry.parallel.division import Heads, even_part, part_slot, placed_experts, split_heads


def test_tp_07_a_size_that_ranks_do_not_divide_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"output size: 10 cannot be divided among 4 ranks"):
        even_part(10, 4, 0, what="output size")


def test_tp_02_heads_are_replicated_where_there_are_more_ranks() -> None:
    assert [split_heads(8, 2, 4, r).kv for r in range(4)] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert split_heads(8, 2, 4, 3) == Heads(range(6, 8), range(1, 2), 2)


@pytest.mark.parametrize(
    ("heads", "kv", "ranks", "why"),
    [
        (6, 4, 2, "6 attention heads cannot share 4 key-value heads"),
        (9, 3, 2, "attention heads: 9 cannot be divided among 2 ranks"),
        (12, 3, 2, "key-value heads: 3 cannot be divided among 2 ranks"),
        (24, 3, 8, "3 key-value heads cannot be replicated on 8 ranks"),
        (8, 0, 2, "8 attention heads cannot share 0 key-value heads"),
    ],
)
def test_heads_that_do_not_go_with_the_ranks_are_refused(heads: int, kv: int, ranks: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        split_heads(heads, kv, ranks, 0)


def test_moe_08_experts_are_dealt_in_blocks_or_in_turns() -> None:
    assert [placed_experts(8, 3, r) for r in range(3)] == [(0, 1, 2), (3, 4, 5), (6, 7)]
    assert placed_experts(8, 2, 1, "round_robin") == (1, 3, 5, 7)


def test_experts_for_which_there_are_too_many_ranks_and_unknown_placements_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 experts cannot be placed on 3 ranks"):
        placed_experts(2, 3, 0)
    with pytest.raises(ConfigError, match="one of linear, round_robin is expected"):
        placed_experts(8, 2, 0, "random")  # type: ignore[arg-type]


def test_what_lies_past_the_end_of_a_tensor_is_not_taken() -> None:
    slot = part_slot((4, 2), 0, (10, 2), range(8, 12), 0)
    assert slot.window.box.slices == (slice(8, 10), slice(0, 2))
    assert slot.local.box.slices == (slice(0, 2), slice(0, 2))
    assert part_slot((4, 2), 0, (10, 2), range(12, 16), 0).window.size == 0
