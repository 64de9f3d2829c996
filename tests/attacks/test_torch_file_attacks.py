"""Every rule for torch files: a file that breaks it is refused by name, its neighbour that does not is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.torch_file_rules import NAME, RULES, Rule
from helpers.torch_files import a_tensor, catalogue_of_bytes, pickled, text, zip_file
from helpers.watched_child import in_a_child
from tensorferry.errors import CorruptFile


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_file_that_breaks_a_rule_is_refused_by_name(rule: Rule, tmp_path: Path) -> None:
    with pytest.raises(rule.error) as caught:
        catalogue_of_bytes(tmp_path, rule.refused, NAME)
    assert rule.says in str(caught.value)
    assert str(caught.value).startswith(f"{NAME}: ")
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_its_neighbour_is_read(rule: Rule, tmp_path: Path) -> None:
    assert "w" in catalogue_of_bytes(tmp_path, rule.accepted, NAME)


def test_names_out_of_a_file_are_escaped_before_they_are_shown(tmp_path: Path) -> None:
    evil = zip_file(pickled(b"}(" + text("\x1b[31m" + "x" * 5000) + a_tensor(shape=(9,)) + b"u"))
    with pytest.raises(CorruptFile) as caught:
        catalogue_of_bytes(tmp_path, evil)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_nothing_is_run_imported_or_opened_elsewhere(tmp_path: Path) -> None:
    for i, rule in enumerate(RULES):
        (tmp_path / f"{i:03}-refused.pt").write_bytes(rule.refused)
        (tmp_path / f"{i:03}-accepted.pt").write_bytes(rule.accepted)
    found = in_a_child(tmp_path)
    assert len(found["results"]) == 2 * len(RULES)
    assert {said == "accepted" for name, (said, *_) in found["results"].items() if "accepted" in name} == {True}
    assert {said == "accepted" for name, (said, *_) in found["results"].items() if "refused" in name} == {False}
    assert found["seen"] == []


def test_a_refusal_costs_little_memory_and_time(tmp_path: Path) -> None:
    for i, rule in enumerate(RULES):
        (tmp_path / f"{i:03}.pt").write_bytes(rule.refused)
    results = in_a_child(tmp_path)["results"]
    assert {name: cost for name, (_, cost, _) in results.items() if cost > 1} == {}
    assert max(grown for *_, grown in results.values()) < 64
