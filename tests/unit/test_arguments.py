"""What callers hand over that is of another type, or misspelt, is refused before anything is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorferry
from helpers.checkpoints import ar, write_safetensors
from tensorferry import Place, RuleSet, Strictness, load, open_checkpoint, plan, verify
from tensorferry.api import prepare
from tensorferry.errors import ConfigError, PlanError, RuleError
from tensorferry.problems import ProblemKind
from tensorferry.progress import SILENT, progress_of

NOWHERE = "there-is-no-such-folder"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(3, 2), "bias": ar(3)})
    return tmp_path


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strict": True}, r"strict: a Strictness is expected, not bool: Strictness.strict\(\) refuses"),
        ({"strict": "error"}, "not str"),
        ({"rules": [Place("a", "b")]}, r"rules: a RuleSet is expected, not list: RuleSet\(\*rules\)"),
        ({"rules": Place("a", "b")}, r"not Place: RuleSet\(Place\(...\), ...\)"),
        ({"model": nn.Linear}, r"model: a Module is expected, not the class Linear: build one, Linear\(...\)"),
        ({"model": {"weight": torch.zeros(1)}}, "model: a Module is expected, not dict"),
        ({"model": "tiny"}, "not str: the model comes first, then the path"),
        ({"options": {"threads": 1}}, "options .*: ReadOptions are expected, not dict"),
        ({"progress": 3}, "progress 3: true, false or a Progress"),
        ({"progress": tensorferry.progress.Bar}, "true, false or a Progress"),
        ({"device": "gpu"}, "device 'gpu'"),
        ({"device": "cpu:9"}, "device 'cpu:9'"),
        ({"device": "meta"}, "device 'meta'"),
    ],
)
def test_another_type_is_refused_before_anything_is_looked_for(options: Any, words: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        given = {"model": nn.Linear(2, 3), **options}
    model = given.pop("model")
    where = tmp_path if "options" in given else NOWHERE
    with pytest.raises(ConfigError, match=words):
        load(model, where, **given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_a_device_that_is_not_there_is_refused_before_planning() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    with pytest.raises(ConfigError, match="device 'cuda': nothing can be put there"):
        load(model, NOWHERE, device="cuda")


@pytest.mark.parametrize("function", [load, plan])
def test_a_misspelt_option_names_the_function_and_the_option_that_was_meant(function: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{function.__name__}\(\) has no .* 'load_fromat'; did you mean 'load_format'"
    ):
        function(nn.Linear(2, 3), NOWHERE, load_fromat="pt")


def test_options_of_the_function_itself_are_among_those_that_may_have_been_meant() -> None:
    with pytest.raises(ConfigError, match="'stirct'; did you mean 'strict'"):
        load(nn.Linear(2, 3), NOWHERE, stirct=Strictness())  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^verify\(\) has no option 'manifst'; did you mean 'manifest'"):
        verify(NOWHERE, manifst={})  # type: ignore[call-arg]


def test_a_plan_takes_no_options_of_reading() -> None:
    with pytest.raises(ConfigError, match=r"^plan\(\) has no option 'verify'"):
        plan(nn.Linear(2, 3), NOWHERE, verify=True)  # type: ignore[call-arg]


def test_progress_is_true_false_or_what_is_told_of_it() -> None:
    assert progress_of(False) is SILENT
    assert progress_of(SILENT) is SILENT
    assert progress_of(True) is not SILENT


def test_progress_can_be_asked_for_with_true(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(nn.Linear(2, 3), folder, progress=True)
    assert "weights: 100%" in capsys.readouterr().err
    load(nn.Linear(2, 3), folder, progress=False)
    assert capsys.readouterr().err == ""


def test_the_error_of_a_plan_names_the_checkpoint(folder: Path) -> None:
    with pytest.raises(PlanError) as refused:
        load(nn.Linear(2, 4), folder)
    assert str(refused.value).startswith(f"{folder}: checkpoint and model do not fit: 2 problems")


def test_rules_that_match_nothing_are_told_in_plan_and_report(folder: Path) -> None:
    rules = RuleSet(Place("wieght", "weight"))
    found = [p for p in plan(nn.Linear(2, 3), folder, rules=rules).problems if p.kind is ProblemKind.UNUSED_RULE]
    assert [(p.subject, p.near) for p in found] == [("wieght", ("weight",))]
    report = load(nn.Linear(2, 3), folder, rules=rules, strict=Strictness(may_miss=("bais",)))
    assert report.warnings == (
        "unused rule: wieght matches no entry of the checkpoint",
        "unused rule: bais of may_miss matches no parameter of the model",
    )


def test_globs_in_rules_are_refused(folder: Path) -> None:
    with pytest.raises(RuleError, match=r"'\*.weight' matches no entry .* '\*' stands for itself there"):
        plan(nn.Linear(2, 3), folder, rules=RuleSet(Place("*.weight", "weight")))


def test_a_model_with_a_loader_of_its_own_is_told_who_uses_it(folder: Path) -> None:
    class Engine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fused = nn.Parameter(torch.zeros(3, 2))

        def load_weights(self, weights: Any) -> None: ...

    with pytest.raises(
        PlanError, match=r"Engine has a load_weights of its own, which is not used here: .*get_model_lo"
    ):
        load(Engine(), folder)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 3, bias=False)
        self.b = nn.Linear(2, 3, bias=False)
        self.b.weight = self.a.weight


def test_what_is_read_to_compare_tied_tensors_is_counted(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a.weight": ar(3, 2), "b.weight": ar(3, 2)})
    report = load(Tied(), tmp_path)
    assert (report.bytes_compared, report.bytes_needed) == (2 * 24, 24)


def test_tied_tensors_that_are_the_same_bytes_are_not_read_to_compare_them(tmp_path: Path) -> None:
    weight = ar(3, 2)
    torch.save({"a.weight": weight, "b.weight": weight}, tmp_path / "pytorch_model.bin")
    with open_checkpoint(tmp_path) as checkpoint:
        assert prepare(Tied(), checkpoint).bytes_compared == 0
