"""What the command line is told, and that its advice is in its own words."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

from helpers.checkpoints import ar, write_safetensors
from helpers.command_line import CommandLine
from helpers.hubserver import HubServer, hub_for_tests
from helpers.tiny_transformers import saved
from tensorferry.cli.main import app

COMMANDS = ("inspect", "plan", "load", "run", "convert", "verify")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    saved("Llama", tmp_path / "llama")
    return tmp_path / "llama"


def config(folder: Path, old: str, new: str) -> None:
    path = folder / "config.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize("arguments", [["-h"], *([command, "-h"] for command in COMMANDS)])
def test_help_has_a_short_name(run: CommandLine, arguments: list[str]) -> None:
    assert run(*arguments).status == 0
    assert set(COMMANDS) == set(app.commands)


def test_links_may_lead_into_folders_that_are_named(run: CommandLine, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "store" / "blob", {"w": ar(2)})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to(tmp_path / "store" / "blob")
    refused = run("inspect", tmp_path / "model")
    assert refused.status == 1
    assert "with --links-to" in refused.err
    assert run("inspect", tmp_path / "model", "--links-to", tmp_path / "store").status == 0


def test_advice_is_given_in_options(run: CommandLine, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"w": ar(2)})
    assert "name the files to load with --allow." in run("inspect", tmp_path).err
    assert "no weights for --load-format 'pt'" in run("inspect", tmp_path, "--load-format", "pt").err


def test_places_that_were_not_named_are_advised_in_options(run: CommandLine, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "nested" / "unet" / "model.safetensors", {"w": ar(2)})
    assert "Pass --subfolder 'unet' to load from there." in run("inspect", tmp_path / "nested").err
    write_safetensors(tmp_path / "half" / "model.fp16.safetensors", {"w": ar(2)})
    assert "Pass --variant 'fp16' to load that variant." in run("inspect", tmp_path / "half").err


def test_a_key_that_nothing_needs_is_called_by_its_option(run: CommandLine, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"w": ar(2)})
    ran = run("inspect", tmp_path, "--encryption-keyfile", tmp_path / "key")
    assert (ran.status, "--encryption-keyfile was given" in ran.err) == (2, True)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_names_on_the_hub_are_for_commands(run: CommandLine, command: str) -> None:
    ran = run(command, "owner/llama")
    assert ran.err.endswith("there is no such file or folder; names on the Hub are for plan, load and convert\n")


@pytest.mark.transformers
def test_another_class_can_be_asked_for(run: CommandLine, llama: Path) -> None:
    config(llama, "LlamaForCausalLM", "LlamaForTelepathy")
    refused = run("plan", llama)
    assert (refused.status, "give --auto-class" in refused.err) == (1, True)
    assert run("plan", llama, "--auto-class", "AutoModelForCausalLM").status == 0
    assert run("load", llama, "--quiet", "--auto-class", "LlamaForCausalLM").status == 0
    assert run("plan", llama, "--auto-class", "LlamaForTelepathy").status == 2


@pytest.mark.transformers
@pytest.mark.parametrize(("name", "cast"), [("bf16", "F32 -> BF16"), ("fp16", "F32 -> F16")])
def test_types_have_short_names(run: CommandLine, llama: Path, name: str, cast: str) -> None:
    report = json.loads(run("load", llama, "--quiet", "--json", "--dtype", name).out)
    assert list(report["casts"]) == [cast]


@pytest.mark.transformers
def test_a_type_that_is_none_is_answered_with_those_that_there_are(run: CommandLine, llama: Path) -> None:
    ran = run("plan", llama, "--dtype", "bfloat")
    assert (ran.status, "bfloat16" in ran.err, "bf16" in ran.err) == (2, True, True)


@pytest.mark.transformers
@pytest.mark.parametrize("device", ["gpu", "meta", "cpu:9"])
def test_a_device_that_is_none_is_the_fault_of_the_call(run: CommandLine, device: str) -> None:
    ran = run("load", "there-is-no-such-folder", "--device", device)
    assert (ran.status, f"device '{device}'" in ran.err) == (2, True)


@pytest.fixture
def hub(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_for_tests(monkeypatch, tmp_path / "home") as server:
        server.add("owner/llama", llama)
        yield server


@pytest.mark.transformers
def test_plan_and_load_take_names_on_the_hub(run: CommandLine, hub: HubServer) -> None:
    assert run("plan", "owner/llama").status == 0
    assert run("load", "owner/llama", "--revision", "main", "--quiet").out.startswith("loaded ")
    assert run("load", "owner/llama", "--revision", "v9", "--quiet").status == 1
    inspected = run("inspect", "owner/llama")
    assert (inspected.status, "names on the Hub are for" in inspected.err) == (1, True)


def test_what_a_pattern_of_inspect_matches_is_added_up(run: CommandLine, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a.w": ar(2), "a.v": ar(4), "b": ar(1024)})
    assert "matching: 2 tensors, 24 B" in run("inspect", tmp_path, "--tensors", "a.*").out
    assert "matching: 0 tensors, 0 B" in run("inspect", tmp_path, "--tensors", "c").out
    assert "matching" not in run("inspect", tmp_path).out


def test_ctrl_c_while_the_command_line_is_imported_ends_in_words() -> None:
    code = """
import runpy, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "tensorferry.cli.main":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
runpy.run_module("tensorferry", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "tensorferry: interrupted\n")
