"""Names for people: folding, natural order, the name that was meant."""

from __future__ import annotations

import pytest

from tensorferry.core.names import fold, natural_key, nearest, template_of


def folded(*names: str) -> list[str]:
    return [f.text for f in fold(names)]


def test_numbers_sort_as_numbers() -> None:
    assert sorted(["h.10.w", "h.9.w", "h.w", "g.10"], key=natural_key) == ["g.10", "h.9.w", "h.10.w", "h.w"]


def test_a_number_of_any_length_can_be_sorted() -> None:
    long = "h." + "9" * 6000
    assert sorted([long + "9", long], key=natural_key) == [long, long + "9"]


def test_only_whole_components_that_are_numbers_are_layer_numbers() -> None:
    assert template_of("model.layers.12.mlp.w1.4bit.7") == "model.layers.*.mlp.w1.4bit.*"


def test_layers_in_a_row_fold_to_a_range() -> None:
    assert folded(*(f"model.layers.{i}.mlp" for i in range(32))) == ["model.layers.{0..31}.mlp"]


def test_two_neighbours_are_listed() -> None:
    assert folded("h.3.w", "h.4.w") == ["h.{3,4}.w"]


def test_holes_are_shown() -> None:
    assert folded(*(f"h.{i}.w" for i in (0, 1, 2, 5, 6, 9))) == ["h.{0..2,5,6,9}.w"]


def test_many_holes_are_cut_in_the_middle() -> None:
    assert folded(*(f"h.{i}.w" for i in range(0, 40, 2))) == ["h.{0,2,4,…,36,38}.w"]


def test_layers_and_experts_fold_together() -> None:
    assert folded(*(f"l.{i}.e.{j}.w" for i in range(3) for j in range(8))) == ["l.{0..2}.e.{0..7}.w"]


def test_layers_with_unequal_experts_are_told_apart() -> None:
    assert folded("l.0.e.0", "l.0.e.1", "l.1.e.0", "l.1.e.1", "l.2.e.1") == ["l.{0,1}.e.{0,1}", "l.2.e.1"]


def test_names_keep_the_order_in_which_they_appeared() -> None:
    assert folded("z.1", "a", "z.0") == ["z.{0,1}", "a"]


def test_what_was_folded_is_kept() -> None:
    assert fold(["h.1.w", "h.0.w"])[0].names == ("h.0.w", "h.1.w")


def test_a_number_with_a_leading_zero_is_text() -> None:
    assert folded("h.00.w", "h.0.w", "h.1.w") == ["h.00.w", "h.{0,1}.w"]


@pytest.mark.parametrize("name", ["", ".", "..", "*.0", "a.*.b", "0", "0.1", "9" * 5000, "a.\0.b", "٣.a"])
def test_strange_names_are_left_alone(name: str) -> None:
    assert folded(name) == [name]


def test_a_star_in_a_name_is_no_layer() -> None:
    assert folded("a.*.0", "a.1.0") == ["a.*.0", "a.1.0"]


def test_a_name_under_another_prefix_is_the_nearest() -> None:
    names = ["model.norm.weight", "model.model.lm_head.weight", "lm_haed.weight"]
    assert nearest("lm_head.weight", names)[0] == "model.model.lm_head.weight"


def test_a_misspelt_name_is_near() -> None:
    assert nearest("lin.weight", ["lin.bias", "lin.weight_v", "norm"]) == ("lin.weight_v",)


def test_nothing_is_near_what_is_different() -> None:
    assert nearest("lm_head.weight", ["visual.patch_embed.proj.bias"]) == ()


def test_the_nearest_of_many_is_found_by_the_words_they_share() -> None:
    names = [f"blocks.{i}.attention.{p}.kernel" for i in range(500) for p in ("query", "key", "value")]
    assert nearest("blocks.77.attention.key.weight", [*names, "blocks.77.attention.keys.weight"])[0] == (
        "blocks.77.attention.keys.weight"
    )


def test_a_name_is_not_its_own_suggestion() -> None:
    assert nearest("a.weight", ["a.weight"]) == ()


def test_endless_names_are_not_compared_letter_by_letter() -> None:
    assert nearest("a" * 100_000, ["a" * 99_999]) == ()
