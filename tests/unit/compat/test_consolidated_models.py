"""Models of transformers out of Meta's and Mistral's own layout: the same tensors, however named, ordered and cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tensorferry
from helpers.consolidated_models import (
    Tensors,
    meta_params,
    mistral_params,
    native,
    tiny_llama,
    tiny_mistral,
    tiny_mixtral,
    write_consolidated,
    write_params,
    write_parts,
)
from helpers.tiny_transformers import equal_bits, logits
from tensorferry import ConfigError, PlanError
from tensorferry.loaders import LoadConfig, ModelConfig, get_model_loader

pytestmark = pytest.mark.transformers

MOE = {"num_experts": 12, "num_experts_per_tok": 2}
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta": 32, "alpha": 1, "apply_scale": False}


def unequal(ours: Any, theirs: Any) -> list[str]:
    state, expected = ours.state_dict(), theirs.state_dict()
    assert list(state) == list(expected)
    return [name for name, tensor in expected.items() if not equal_bits(state[name], tensor)]


def assert_same(folder: Path, model: Any, **options: Any) -> Any:
    ours = tensorferry.load_model(folder, **options)
    assert type(ours) is type(model)
    assert unequal(ours, model) == []
    assert equal_bits(logits(ours), logits(model))
    return ours


def changed(ours: Any, theirs: Any) -> set[str]:
    """Return which fields of two configurations differ, but for where the model is from."""
    one, other = ours.config.to_dict(), theirs.config.to_dict()
    return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)} - {"_name_or_path"}


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_mistral_with_a_window_and_a_head_size_of_its_own(tmp_path: Path, shards: int) -> None:
    model = tiny_mistral()
    params = mistral_params(model.config, sliding_window=5)
    ours = assert_same(write_consolidated(tmp_path / "m", native(model, tmp_path), params, shards), model)
    assert changed(ours, model) == set()


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_mixtral_has_its_experts_one_by_one(tmp_path: Path, shards: int) -> None:
    model = tiny_mixtral()
    params = mistral_params(model.config, moe=MOE)
    ours = assert_same(write_consolidated(tmp_path / "m", native(model, tmp_path), params, shards), model)
    assert changed(ours, model) == set()


def test_the_first_mixtral_has_its_experts_below_each_other(tmp_path: Path) -> None:
    model = tiny_mixtral()
    tensors = below_each_other(native(model, tmp_path))
    config = model.config
    params = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "rms_norm_eps": config.rms_norm_eps, "vocab_size": 96, "num_local_experts": 12,
        "num_experts_per_tok": 2, "rope_theta": 1e6, "sliding_window": "7",
    }  # fmt: skip
    folder = write_params(tmp_path / "m", params)
    names = list(tensors)
    for n in range(2):
        torch.save({name: tensors[name] for name in names[n::2]}, folder / f"consolidated.{n:02}.pt")
    ours = tensorferry.load_model(folder)
    assert unequal(ours, model) == []
    assert changed(ours, model) == {"sliding_window", "max_position_embeddings"}
    assert ours.config.sliding_window == 7


def below_each_other(tensors: Tensors) -> Tensors:
    made = {name: tensor for name, tensor in tensors.items() if ".feed_forward." not in name}
    for layer in range(2):
        ours, theirs = f"layers.{layer}.feed_forward.", f"layers.{layer}.block_sparse_moe."
        made[f"{theirs}gate.weight"] = tensors[f"{ours}gate.weight"]
        for leaf in ("w1", "w2", "w3"):
            each = [tensors[f"{ours}experts.{e}.{leaf}.weight"] for e in range(12)]
            made[theirs + leaf] = torch.cat([one.T if leaf == "w2" else one for one in each])
    return made


@pytest.mark.parametrize("words", [0, 1], ids=["by vocabulary", "by columns"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_llama_in_parts_however_its_embeddings_are_cut(tmp_path: Path, count: int, words: int) -> None:
    model = tiny_llama()
    folder = write_parts(tmp_path / "m", native(model, tmp_path), meta_params(model.config), count, words=words)
    assert changed(assert_same(folder, model), model) == {"max_position_embeddings"}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_mistral_in_parts(tmp_path: Path, count: int) -> None:
    model = tiny_mistral()
    params = mistral_params(model.config, sliding_window=5)
    folder = write_parts(tmp_path / "m", native(model, tmp_path), params, count)
    assert changed(assert_same(folder, model, load_format="mistral"), model) == set()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_mixtral_in_parts(tmp_path: Path, count: int) -> None:
    model = tiny_mixtral()
    params = mistral_params(model.config, moe=MOE)
    assert_same(write_parts(tmp_path / "m", native(model, tmp_path), params, count), model)


@pytest.mark.parametrize("count", [1, 2])
def test_llama_3_has_its_rotary_embedding_scaled(tmp_path: Path, count: int) -> None:
    model = tiny_llama(rope_parameters=LLAMA_3, max_position_embeddings=131072)
    params = meta_params(model.config, rope_theta=500000.0, use_scaled_rope=True)
    folder = write_parts(tmp_path / "m", native(model, tmp_path), params, count)
    assert changed(assert_same(folder, model), model) == set()


def test_the_small_llama_3_is_tied_and_scaled_by_more(tmp_path: Path) -> None:
    rope = {**LLAMA_3, "factor": 32.0}
    model = tiny_llama(rope_parameters=rope, max_position_embeddings=131072, tie_word_embeddings=True)
    tensors = native(model, tmp_path)
    assert "output.weight" not in tensors
    params = meta_params(model.config, rope_theta=500000.0, use_scaled_rope=True)
    assert changed(assert_same(write_parts(tmp_path / "a", tensors, params, 1), model), model) == set()
    folder = write_params(tmp_path / "b", params)
    torch.save({**tensors, "output.weight": tensors["tok_embeddings.weight"]}, folder / "consolidated.00.pth")
    assert changed(assert_same(folder, model), model) == set()


def test_ministral_alternates_between_layers_with_and_without_a_window(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention"]
    model = tiny_mistral("Ministral", layer_types=types)
    params = mistral_params(model.config, _sliding_window=[None, 5])
    folder = write_consolidated(tmp_path / "m", native(model, tmp_path), params)
    assert changed(assert_same(folder, model), model) == set()


def test_ministral_3_has_yarn_and_the_scaling_of_llama_4(tmp_path: Path) -> None:
    rope = {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip
    model = tiny_mistral("Ministral3", rope_parameters=rope, sliding_window=None, tie_word_embeddings=True)
    scaling = {"original_max_position_embeddings": 16, "beta": 0.1}
    params = mistral_params(model.config, yarn=YARN, llama_4_scaling=scaling, tied_embeddings=True)
    folder = write_consolidated(tmp_path / "m", native(model, tmp_path), params)
    assert changed(assert_same(folder, model), model) == {"pad_token_id"}


def test_a_model_loader_builds_and_fills_the_same_model(tmp_path: Path) -> None:
    model = tiny_mistral()
    params = mistral_params(model.config, sliding_window=5)
    folder = write_consolidated(tmp_path / "m", native(model, tmp_path), params)
    for load_format in ("mistral", "auto"):
        loader = get_model_loader(LoadConfig(load_format=load_format))
        assert unequal(loader.load_model(ModelConfig(str(folder))), model) == []


def test_a_model_that_is_there_is_filled_in_place(tmp_path: Path) -> None:
    model, other = tiny_llama(), tiny_llama()
    folder = write_parts(tmp_path / "m", native(model, tmp_path), meta_params(model.config), 2)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    tensorferry.load(other, folder)
    assert unequal(other, model) == []


def test_a_config_that_lies_beside_is_used_and_compared(tmp_path: Path) -> None:
    model = tiny_mistral()
    params = mistral_params(model.config, sliding_window=9)
    folder = write_consolidated(tmp_path / "m", native(model, tmp_path), params)
    model.config.save_pretrained(folder)
    ours, report = tensorferry.load_model(folder, return_report=True)
    assert unequal(ours, model) == []
    assert ours.config.sliding_window == 5
    assert report.warnings == ("the configuration says sliding_window = 5, the file 9: the configuration's is used",)


def test_what_the_file_does_not_say_is_told(tmp_path: Path) -> None:
    model = tiny_llama()
    params = meta_params(model.config, novelty=3, nothing=None)
    folder = write_parts(tmp_path / "m", native(model, tmp_path), params, 1)
    _, report = tensorferry.load_model(folder, return_report=True)
    told = "\n".join(report.warnings)
    assert "max_position_embeddings = 2048" in told
    assert "'rope_theta': 10000.0" in told
    assert "params.json says novelty, which is not known here and not used" in told
    assert "nothing" not in told


def test_the_rotary_frequencies_of_older_files_are_ignored(tmp_path: Path) -> None:
    model = tiny_llama()
    tensors = native(model, tmp_path)
    tensors["rope.freqs"] = torch.ones(4)
    tensors["layers.0.attention.inner_attention.rope.freqs"] = torch.ones(4)
    assert_same(write_parts(tmp_path / "m", tensors, meta_params(model.config), 2), model)


def test_a_model_of_more_than_text_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_mistral()
    tensors = {**native(model, tmp_path), "vision_encoder.ln_pre.weight": torch.ones(4)}
    params = mistral_params(model.config, vision_encoder={"hidden_size": 1024})
    folder = write_consolidated(tmp_path / "m", tensors, params)
    with pytest.raises(ConfigError, match=r"params\.json: vision_encoder: a vision encoder \(Pixtral"):
        tensorferry.load_model(folder)
    with pytest.raises(ConfigError, match=r"vision_encoder\.ln_pre\.weight: it belongs to a vision encoder"):
        tensorferry.load_model(folder, config=model.config)


def test_sizes_that_are_not_those_of_the_tensors_are_problems_of_the_plan(tmp_path: Path) -> None:
    model = tiny_mistral()
    params = mistral_params(model.config, sliding_window=5) | {"n_kv_heads": 4}
    folder = write_consolidated(tmp_path / "m", native(model, tmp_path), params)
    with pytest.raises(PlanError, match=r"self_attn\.k_proj\.weight"):
        tensorferry.load_model(folder)
