"""`load_model` makes the model that `from_pretrained` makes, bit for bit, from every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorferry
from helpers.tiny_transformers import MODELS, by_transformers, differences, equal_bits, logits, saved, tiny
from tensorferry.core.plan import Strictness

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_one_that_from_pretrained_makes(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    ours, theirs = tensorferry.load_model(tmp_path), by_transformers(tmp_path)
    assert differences(ours, theirs) == []
    assert equal_bits(logits(ours), logits(theirs))


@pytest.mark.parametrize("name", ["tied Llama", "Qwen3-MoE", "DeepSeek-V3", "T5"])
def test_a_bfloat16_model_keeps_its_float32_islands_as_from_pretrained_does(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path, dtype=torch.bfloat16)
    assert differences(tensorferry.load_model(tmp_path), by_transformers(tmp_path)) == []


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_shards_make_the_same_model(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path, shard="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert differences(tensorferry.load_model(tmp_path), by_transformers(tmp_path)) == []


@pytest.mark.parametrize("name", ["tied Llama", "T5", "BERT"])
def test_a_torch_file_with_shared_tensors_makes_the_model_that_was_saved_with_its_ties(
    name: str, tmp_path: Path
) -> None:
    model = tiny(name)
    model.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [type(model).__name__]}))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    ours, state = tensorferry.load_model(tmp_path), model.state_dict()
    assert [n for n, t in ours.state_dict().items() if not equal_bits(t, state[n])] == []
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in model.named_parameters()]


@pytest.mark.parametrize("name", ["Qwen3-MoE", "tied Llama"])
def test_what_save_pretrained_writes_of_a_loaded_model_loads_again(name: str, tmp_path: Path) -> None:
    first: Any = tensorferry.load_model(saved(name, tmp_path / "a"))
    first.save_pretrained(tmp_path / "b")
    again = tensorferry.load_model(tmp_path / "b")
    assert [n for n, t in again.state_dict().items() if not equal_bits(t, first.state_dict()[n])] == []


def test_experts_are_read_straight_into_their_places_with_nothing_staged(tmp_path: Path) -> None:
    saved("Qwen3-MoE", tmp_path)
    _, report = tensorferry.load_model(tmp_path, return_report=True)
    assert report.bytes_read == report.bytes_needed == report.direct_bytes
    assert report.staging_peak == 0


def test_the_report_says_what_the_model_computed_and_what_is_tied(tmp_path: Path) -> None:
    saved("tied Llama", tmp_path)
    _, report = tensorferry.load_model(tmp_path, return_report=True)
    assert report.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "model.rotary_emb.inv_freq" in report.computed
    assert report.warnings == ()


def test_a_given_dtype_wins_over_the_configured_one(tmp_path: Path) -> None:
    saved("Llama", tmp_path)
    model = tensorferry.load_model(tmp_path, dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config.dtype == torch.bfloat16


def test_another_class_can_be_asked_for(tmp_path: Path) -> None:
    saved("Llama", tmp_path)
    model, report = tensorferry.load_model(tmp_path, auto_class="AutoModel", return_report=True)
    assert type(model).__name__ == "LlamaModel"
    assert report.unexpected == ("lm_head.weight",)


def test_a_base_model_fills_the_model_with_a_head_that_is_tied(tmp_path: Path) -> None:
    whole = tiny("tied Llama")
    whole.model.save_pretrained(tmp_path)
    model = tensorferry.load_model(tmp_path, auto_class="AutoModelForCausalLM")
    assert equal_bits(logits(model), logits(whole))


def test_a_head_that_the_checkpoint_lacks_is_missing_and_nothing_is_guessed(tmp_path: Path) -> None:
    tiny("Llama").model.save_pretrained(tmp_path)
    with pytest.raises(tensorferry.PlanError, match=r"missing: lm_head\.weight"):
        tensorferry.load_model(tmp_path, auto_class="AutoModelForCausalLM")


def test_a_missing_head_that_is_allowed_is_initialized_and_reported(tmp_path: Path) -> None:
    tiny("Llama").model.save_pretrained(tmp_path)
    model, report = tensorferry.load_model(
        tmp_path, auto_class="AutoModelForCausalLM", strict=Strictness(missing="warn"), return_report=True
    )
    assert report.missing == ("lm_head.weight",)
    assert "lm_head.weight" in report.computed
    assert bool(model.get_parameter("lm_head.weight").isfinite().all())


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_load_fills_an_instance_by_the_same_names_and_ties(device: str, tmp_path: Path) -> None:
    whole = tiny("Qwen3-MoE", tie_word_embeddings=True)
    whole.save_pretrained(tmp_path)
    with torch.device(device):
        model: Any = type(whole)(whole.config)
    report = tensorferry.load(model, tmp_path)
    assert equal_bits(logits(model), logits(whole))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert report.unexpected == report.missing == ()


def test_plan_of_an_instance_finds_no_problem_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    saved("Mixtral", tmp_path)
    with torch.device("meta"):
        model = type(tiny("Mixtral"))(tiny("Mixtral").config)
    before = dict(vars(model))
    assert tensorferry.plan(model, tmp_path).problems == ()
    assert vars(model) == before


def test_a_prefix_that_a_wrapper_left_is_stripped_and_told(tmp_path: Path) -> None:
    model = tiny("Llama")
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path)
    torch.save({"module." + n: t for n, t in model.state_dict().items()}, tmp_path / "pytorch_model.bin")
    ours, report = tensorferry.load_model(tmp_path, return_report=True)
    assert equal_bits(logits(ours), logits(model))
    assert any("module." in warning for warning in report.warnings)


def test_generation_settings_beside_the_weights_are_taken_over(tmp_path: Path) -> None:
    saved("Llama", tmp_path)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({**settings, "top_k": 7, "do_sample": True}))
    model: Any = tensorferry.load_model(tmp_path)
    assert (model.generation_config.top_k, model.generation_config.do_sample) == (7, True)
