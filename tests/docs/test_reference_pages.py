"""The reference pages list just what there is: keys of JSON, options of commands, errors and kinds of problems."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

import tensorferry
from helpers.checkpoints import ar, write_safetensors
from tensorferry.cli.inspecting import inspection
from tensorferry.cli.main import app
from tensorferry.compat.transformers import ClusterPlan
from tensorferry.conversion import Conversion
from tensorferry.problems import Problem, ProblemKind
from tensorferry.report import Report

REFERENCE = Path(__file__).resolve().parent.parent.parent / "docs" / "reference"
COMMANDS = ("inspect", "plan", "load", "convert", "verify")


def section(page: str, title: str) -> str:
    """Return the part of a page below the heading `title`, up to the next of its level."""
    text = (REFERENCE / page).read_text()
    return re.split(r"^## ", text.partition(f"\n## {title}\n")[2], flags=re.MULTILINE)[0]


def first_column(text: str) -> list[str]:
    """Return what is in backquotes in the first column of the tables of `text`."""
    rows = re.findall(r"^\| (`.*?) \|", text, flags=re.MULTILINE)
    return [key for row in rows for key in re.findall(r"`([^`]+)`", row)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_safetensors(tmp_path / "model.safetensors", {"w": ar(2)}).parent


def test_the_keys_of_inspect_are_listed(checkpoint: Path) -> None:
    with tensorferry.open_checkpoint(checkpoint) as opened:
        data = inspection(opened)
    assert first_column(section("json.md", "inspect")) == [*data, *_in_order_of_the_page(data["tensors"][0])]


def _in_order_of_the_page(tensor: dict[str, object]) -> list[str]:
    listed = ["name", "dtype", "shape", "file", "offset", "nbytes", "strides"]
    assert set(listed) == set(tensor)
    return listed


def test_the_keys_of_plan_are_listed() -> None:
    assert first_column(section("json.md", "plan")) == list(json.loads(tensorferry.Plan((), {}).to_json()))


def test_the_keys_of_plans_of_ranks_are_listed() -> None:
    assert first_column(section("json.md", "plan of ranks")) == list(ClusterPlan((), 0).to_dict())


def test_the_keys_of_load_are_listed() -> None:
    assert sorted(first_column(section("json.md", "load"))) == sorted(f.name for f in fields(Report))


def test_the_keys_of_convert_are_listed() -> None:
    listed = first_column(section("json.md", "convert"))
    assert sorted(set(listed) - {"as it is", "changed", "made"}) == sorted(f.name for f in fields(Conversion))


def test_the_keys_of_verify_are_listed(checkpoint: Path) -> None:
    data = tensorferry.verify(checkpoint).to_dict()
    assert first_column(section("json.md", "verify")) == list(data)
    assert all(f"`{key}`" in section("json.md", "verify") for key in data["files"][0])


@pytest.mark.parametrize("command", COMMANDS)
def test_the_options_of_a_command_are_listed(command: str) -> None:
    rows = re.findall(r"^\| (`-.*?) \| (.*?) \|", section("cli.md", "Options"), flags=re.MULTILINE)
    listed = {
        o for row, commands in rows if commands == "all" or command in commands for o in re.findall(r"(--[\w-]+)", row)
    }
    assert listed == {o for p in app.commands[command].params for o in p.opts if o.startswith("--")}


def test_every_error_is_listed() -> None:
    text = (REFERENCE / "errors.md").read_text()
    kinds = (getattr(tensorferry, name) for name in tensorferry.__all__)
    errors = {k.__name__ for k in kinds if isinstance(k, type) and issubclass(k, tensorferry.TensorferryError)}
    assert set(first_column(text.partition("## Problems")[0])) | {"TensorferryError"} == errors


def test_every_kind_of_problem_is_listed() -> None:
    text = section("errors.md", "Problems of a plan")
    rows = re.findall(r"^\| ([a-z ]+?) \|", text, flags=re.MULTILINE)
    assert rows == ["kind", *(kind.value for kind in ProblemKind)]
    assert all(f"`{f.name}`" in text for f in fields(Problem))


def test_every_public_name_of_python_is_listed_and_no_other() -> None:
    text = (REFERENCE / "python.md").read_text()
    listed = first_column(text.partition("## In modules of the package")[0])
    assert sorted(n for n in listed if n != "name") == sorted(tensorferry.__all__)


def test_names_in_modules_are_where_the_page_says() -> None:
    for path in first_column(section("python.md", "In modules of the package")):
        module, _, name = path.rpartition(".")
        assert name in import_module(module).__all__, path
