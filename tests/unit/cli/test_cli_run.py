"""What ``run`` prints, and how it ends where there is nothing to run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.command_line import CommandLine
from helpers.gguf_models import tiny_llama
from helpers.tiny_transformers import saved

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 96 words, each a number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(n): n for n in range(96)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path_factory.mktemp("tokenizer")
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=words, unk_token="0").save_pretrained(folder)
    return folder


def test_the_report_comes_first_then_the_prompt_with_what_follows(
    run: CommandLine, tokenizer: Path, tmp_path: Path
) -> None:
    file, _ = tiny_llama(tmp_path)
    ran = run("run", file, "--tokenizer", tokenizer, "--prompt", "3 4 5", "--max-new-tokens", "2", "--quiet")
    report, _, text = ran.out.partition("\n\n")
    assert (ran.status, report.startswith("loaded 21 parameters from ")) == (0, True)
    assert text.startswith("3 4 5")
    assert text.endswith("\n")


def test_json_has_prompt_text_tokens_and_report(run: CommandLine, tokenizer: Path, tmp_path: Path) -> None:
    folder = saved("Llama", tmp_path)
    ran = run("run", folder, "--tokenizer", tokenizer, "--prompt", "7 8", "--max-new-tokens", "3", "--json", "--quiet")
    told = json.loads(ran.out)
    assert (ran.status, told["prompt"], len(told["tokens"])) == (0, "7 8", 3)
    assert told["report"]["parameters"] == 21


def test_a_checkpoint_without_a_tokenizer_asks_for_one(run: CommandLine, tmp_path: Path) -> None:
    ran = run("run", saved("Llama", tmp_path), "--quiet")
    assert ran.status == 2
    assert "give --tokenizer" in ran.err


def test_a_prompt_of_no_tokens_is_refused(run: CommandLine, tokenizer: Path, tmp_path: Path) -> None:
    ran = run("run", saved("Llama", tmp_path), "--tokenizer", tokenizer, "--prompt", "", "--quiet")
    assert ran.status == 2
    assert "--prompt" in ran.err


def test_a_model_that_does_not_generate_is_refused(run: CommandLine, tokenizer: Path, tmp_path: Path) -> None:
    ran = run("run", saved("BERT", tmp_path), "--tokenizer", tokenizer, "--prompt", "1 2", "--quiet")
    assert ran.status == 2
    assert "does not generate text" in ran.err
