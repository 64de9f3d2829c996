"""Checkpoints of other names become those of transformers: GGUF, and Meta's and Mistral's own layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tensorferry
from helpers import consolidated_models, gguf_models
from helpers.checkpoints import ar
from helpers.gguf_bytes import STRING, T, gguf, kv
from helpers.tiny_transformers import equal_bits, tiny
from tensorferry import ConfigError, PlanError, Strictness, convert

pytestmark = pytest.mark.transformers

Tensors = dict[str, torch.Tensor]


def reloaded(folder: Path, **options: Any) -> Any:
    """Return what transformers loads, with nothing missing and nothing left."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    model, told = loaded
    assert not any(told.values()), told
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(torch.tensor([[1, 5, 9, 33, 2]])).logits
    return out


def differing(found: Tensors, expected: Tensors) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not equal_bits(found[name], tensor)]


def test_a_gguf_file_becomes_the_checkpoint_that_it_was_made_of(tmp_path: Path) -> None:
    path, model = gguf_models.tiny_llama(tmp_path, more={"vocab_size": 96})
    account = convert(path, tmp_path / "out")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert differing(load_file(tmp_path / "out" / "model.safetensors"), saved) == []
    assert account.renamed
    assert account.side_files["config.json"] == "made"
    assert torch.equal(logits(reloaded(tmp_path / "out")), logits(model))


def test_packed_blocks_become_the_numbers_that_loading_makes_of_them(tmp_path: Path) -> None:
    path, _ = gguf_models.tiny_llama(tmp_path, packed={"attn_q.weight": "Q8_0", "ffn_up.weight": "Q4_0"})
    convert(path, tmp_path / "out")
    loaded = tensorferry.load_model(path, dtype="float32").state_dict()
    assert differing(load_file(tmp_path / "out" / "model.safetensors"), loaded) == []
    account = convert(path, tmp_path / "half", dtype="bfloat16")
    half = {name: tensor.bfloat16() for name, tensor in loaded.items()}
    assert differing(load_file(tmp_path / "half" / "model.safetensors"), half) == []
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert account.casts == {"F32 -> BF16": 21}


def test_experts_that_are_stacked_become_single_ones(tmp_path: Path) -> None:
    model = tiny("Qwen3-MoE", norm_topk_prob=True)
    tensors = gguf_models.stacked(gguf_models.translated(gguf_models.checkpoint_of(model, tmp_path)))
    more = {"attention.key_length": 8, "expert_count": 12, "expert_used_count": 2, "expert_feed_forward_length": 16}
    metadata = gguf_models.metadata_of("qwen3moe", model.config, **more)
    path = gguf_models.write_gguf(tmp_path / "model.gguf", "qwen3moe", metadata, tensors)
    convert(path, tmp_path / "out")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert differing(load_file(tmp_path / "out" / "model.safetensors"), saved) == []
    assert torch.equal(logits(reloaded(tmp_path / "out")), logits(model))


def test_what_is_not_written_of_a_tokenizer_is_said_and_its_template_is(tmp_path: Path) -> None:
    path, _ = gguf_models.tiny_llama(tmp_path)
    metadata = gguf_models.metadata_of("llama", tiny("Llama").config) | {"tokenizer.chat_template": "{{ messages }}"}
    names = gguf_models.interleaved(gguf_models.translated(load_file(tmp_path / "saved" / "model.safetensors")), 4, 2)
    gguf_models.write_gguf(path, "llama", metadata, names)
    account = convert(path, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert any(w.startswith("no tokenizer is written") and "gguf_file='model.gguf'" in w for w in account.warnings)
    assert any("assumed, for the file does not say" in w for w in account.warnings)


def test_a_config_beside_a_gguf_file_is_taken_along_without_its_quantization(tmp_path: Path) -> None:
    path, model = gguf_models.tiny_llama(tmp_path, packed={"attn_q.weight": "Q8_0"})
    config = {**model.config.to_dict(), "quantization_config": {"quant_method": "gguf"}, "mark": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    account = convert(path, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found["mark"] == 7
    assert "quantization_config" not in found
    assert account.side_files["config.json"] == "changed"


def test_names_are_kept_where_that_is_wanted(tmp_path: Path) -> None:
    path, _ = gguf_models.tiny_llama(tmp_path, packed={"attn_q.weight": "Q8_0"})
    account = convert(path, tmp_path / "out", names="keep")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert "blk.0.attn_q.weight" in found
    assert not account.renamed
    assert {t.dtype for t in found.values()} == {torch.float32}
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_tensor_that_no_rule_names_stops_it_unless_it_may_be_left_out(tmp_path: Path) -> None:
    path, _ = gguf_models.tiny_llama(tmp_path, extra={"blk.0.strange.weight": ar(3)})
    with pytest.raises(
        PlanError, match=r"no rule says what transformers calls blk\.0\.strange\.weight: keep all names"
    ):
        convert(path, tmp_path / "out")
    account = convert(path, tmp_path / "out", strict=Strictness(unexpected="warn"))
    assert account.dropped == {"blk.0.strange.weight": "no rule names it"}
    assert torch.isfinite(logits(reloaded(tmp_path / "out"))).all()


def test_what_rules_drop_is_told_with_the_reason(tmp_path: Path) -> None:
    path, _ = gguf_models.tiny_llama(tmp_path, extra={"rope_freqs.weight": torch.ones(4)})
    account = convert(path, tmp_path / "out")
    assert "rope_freqs.weight" in account.dropped


def test_an_architecture_that_is_not_known_says_how_to_convert_it_all_the_same(tmp_path: Path) -> None:
    tensors = [T("blk.0.attn_q.weight", (2,)), T("token_embd.weight", (2,))]
    (tmp_path / "m.gguf").write_bytes(gguf(tensors, [kv("general.architecture", STRING, "strange")]))
    with pytest.raises(ConfigError, match=r"m?.*strange.*or keep its names with names='keep'"):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert convert(tmp_path / "m.gguf", tmp_path / "out", names="keep").tensors == 2


def test_parts_of_metas_layout_become_the_checkpoint_that_they_were_made_of(tmp_path: Path) -> None:
    model = consolidated_models.tiny_llama()
    tensors = consolidated_models.native(model, tmp_path)
    params = consolidated_models.meta_params(model.config)
    convert(consolidated_models.write_parts(tmp_path / "src", tensors, params, 2), tmp_path / "out")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert differing(load_file(tmp_path / "out" / "model.safetensors"), saved) == []
    assert torch.equal(logits(reloaded(tmp_path / "out")), logits(model))


def test_consolidated_files_of_mistral_become_shards_of_transformers(tmp_path: Path) -> None:
    model = consolidated_models.tiny_mistral()
    tensors = consolidated_models.native(model, tmp_path)
    params = consolidated_models.mistral_params(model.config, sliding_window=5)
    src = consolidated_models.write_consolidated(tmp_path / "src", tensors, params, 2)
    account = convert(src, tmp_path / "out", max_shard_size="20kB", dtype="bfloat16")
    assert account.renamed
    assert account.left_behind["params.json"] == "says in another way what config.json does"
    again = reloaded(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    expected = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    assert differing(dict(again.state_dict()), expected) == []


def test_tied_tensors_of_a_torch_file_are_both_written_and_load_as_one(tmp_path: Path) -> None:
    model = tiny("tied Llama")
    model.config.save_pretrained(tmp_path / "src")
    torch.save(model.state_dict(), tmp_path / "src" / "pytorch_model.bin")
    account = convert(tmp_path / "src", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= found.keys()
    assert any("lm_head.weight" in w and "each has its own now" in w for w in account.warnings)
    again = reloaded(tmp_path / "out")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("name", ["GPT-2", "BERT", "T5", "Gemma2", "DeepSeek-V3"])
def test_what_transformers_saved_is_loaded_the_same_after_a_conversion_to_shards(tmp_path: Path, name: str) -> None:
    model = tiny(name)
    model.save_pretrained(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "out", max_shard_size="20kB")
    again = type(model).from_pretrained(tmp_path / "out").state_dict()
    assert differing(dict(again), dict(model.state_dict())) == []
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
