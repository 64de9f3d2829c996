"""What ``plan`` and ``load`` do with the model that a config.json names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.command_line import CommandLine
from tensorferry.core.plan import Plan

pytestmark = pytest.mark.transformers


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer Llama of 12 tensors in float32, as transformers writes it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def llama(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "llama"))


def change(folder: Path, *, without: str = "", more: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
    """Rewrite the weights without a tensor, or with more of them."""
    path = folder / "model.safetensors"
    tensors = {k: v for k, v in load_file(path).items() if k != without}
    save_file({**tensors, **more}, path, metadata={"format": "pt"})


def test_plan_says_what_would_be_read_into_what(run: CommandLine, llama: Path) -> None:
    ran = run("plan", llama)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith("12 parameters, 12 steps, 13.2 KiB to read\n")
    assert "model.layers.0.self_attn.k_proj.weight <- F32 [8, 16], 512 B" in ran.out


def test_plan_in_json_can_be_read_back(run: CommandLine, llama: Path) -> None:
    out = run("plan", llama, "--json").out
    assert {
        "tensorferry_plan", "fingerprint", "bytes_needed", "parameters", "aliases", "entries", "steps", "dropped",
        "problems",
    } == set(json.loads(out))  # fmt: skip
    assert Plan.from_json(out).bytes_needed == 13504


def test_a_plan_with_problems_is_printed_and_is_status_1(run: CommandLine, llama: Path) -> None:
    change(llama, without="model.norm.weight")
    ran = run("plan", llama)
    assert ran.status == 1
    assert "missing: model.norm.weight" in ran.out
    assert ran.err == f"tensorferry: {llama}: checkpoint and model do not fit: 1 problem, told with the plan\n"


def test_a_plan_with_problems_in_json_is_one_document_and_status_1(run: CommandLine, llama: Path) -> None:
    change(llama, without="model.norm.weight")
    ran = run("plan", llama, "--json")
    assert ran.status == 1
    (problem,) = json.loads(ran.out)["problems"]
    assert (problem["kind"], problem["subject"], problem["fatal"]) == ("missing", "model.norm.weight", True)


def test_load_prints_the_report(run: CommandLine, llama: Path) -> None:
    ran = run("load", llama, "--quiet")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith(f"loaded 12 parameters from {llama} (safetensors, 1 file)\n")
    assert "read 13.2 KiB in " in ran.out
    assert "contents not verified" in ran.out


def test_load_in_json_is_the_report(run: CommandLine, llama: Path) -> None:
    data = json.loads(run("load", llama, "--json", "--quiet").out)
    assert (data["parameters"], data["bytes_needed"], data["casts"]) == (12, 13504, {})


def test_load_tells_of_progress_on_standard_error(run: CommandLine, llama: Path) -> None:
    assert run("load", llama).err.startswith("weights: 100% (13.2 KiB of 13.2 KiB)")


def test_load_can_cast(run: CommandLine, llama: Path) -> None:
    data = json.loads(run("load", llama, "--json", "--quiet", "--dtype", "bfloat16").out)
    assert data["casts"] == {"F32 -> BF16": 12}


def test_load_refuses_what_does_not_fit_with_every_problem(run: CommandLine, llama: Path) -> None:
    change(llama, without="model.norm.weight")
    ran = run("load", llama)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith(
        f"tensorferry: {llama}: checkpoint and model do not fit: 1 problem; the model was not touched\n"
    )
    assert "missing: model.norm.weight" in ran.err


def test_load_reports_what_the_model_does_not_want_and_refuses_it_where_told_to(run: CommandLine, llama: Path) -> None:
    change(llama, more={"more\x1b[31m": torch.zeros(1)})
    ran = run("load", llama, "--quiet")
    assert (ran.status, "unexpected, not used: more\\x1b[31m" in ran.out) == (0, True)
    ran = run("load", llama, "--quiet", "--strict")
    assert (ran.status, ran.out) == (1, "")
    assert "unexpected: more\\x1b[31m" in ran.err


def test_load_can_verify_first(run: CommandLine, llama: Path) -> None:
    (llama / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
    ran = run("load", llama, "--verify", "--quiet")
    assert (ran.status, ran.out) == (1, "")
    assert "SHA256SUMS says" in ran.err


def test_load_writes_the_report_as_a_page(run: CommandLine, llama: Path, tmp_path: Path) -> None:
    assert run("load", llama, "--quiet", "--html", tmp_path / "report.html").status == 0
    assert "parameters filled" in (tmp_path / "report.html").read_text()


def test_a_page_that_cannot_be_written_is_told_before_anything_is_loaded(
    run: CommandLine, llama: Path, tmp_path: Path
) -> None:
    ran = run("load", llama, "--html", tmp_path / "absent" / "report.html")
    assert (ran.status, ran.out) == (2, "")
    assert f"there is no folder {tmp_path / 'absent'}" in ran.err


@pytest.mark.parametrize("command", ["plan", "load"])
def test_a_folder_without_a_configuration_is_told_in_words(run: CommandLine, llama: Path, command: str) -> None:
    (llama / "config.json").unlink()
    ran = run(command, llama)
    assert ran.status in (1, 2)
    assert ran.out == ""
    assert "config.json" in ran.err
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "nothing"}', '{"architectures": ["os.system"]}', ""])
def test_a_configuration_that_makes_no_sense_is_told_in_words(run: CommandLine, llama: Path, text: str) -> None:
    (llama / "config.json").write_text(text)
    ran = run("load", llama, "--quiet")
    assert ran.status in (1, 2)
    assert ran.out == ""
    assert ran.err.startswith("tensorferry: ")
    assert "not foreseen" not in ran.err


@pytest.mark.parametrize("option", [("--dtype", "float33"), ("--device", "toaster"), ("--device", "cuda:99")])
def test_a_type_or_device_that_does_not_exist_is_told_in_words(
    run: CommandLine, llama: Path, option: tuple[str, str]
) -> None:
    ran = run("load", llama, "--quiet", *option)
    assert (ran.status, ran.out) == (2, "")
    assert option[1] in ran.err
