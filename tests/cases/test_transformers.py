"""Ties, dtypes, draft layers and composite models as people met them, with models of transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tensorferry
from helpers.checkpoints import ar, write_index, write_safetensors
from helpers.tiny_transformers import equal_bits, logits, saved, tiny

pytestmark = pytest.mark.transformers

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def edited(folder: Path, *, drop: str = "", add: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    """Change the weights and config.json of a saved model; a config value of None takes the key out."""
    path = folder / "model.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if n != drop}
    save_file({**tensors, **(add or {})}, path, metadata={"format": "pt"})
    data = {**json.loads((folder / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in data.items() if v is not None}))
    return folder


def test_keys_04_a_different_head_is_kept_untied_with_a_warning_and_the_config_says_so(tmp_path: Path) -> None:
    head = ar(96, 32, start=50)
    edited(saved("tied Llama", tmp_path), add={HEAD: head})
    model, report = tensorferry.load_model(tmp_path, return_report=True)
    embeddings = model.get_parameter(EMBEDDINGS)
    assert torch.equal(model.get_parameter(HEAD), head)
    assert model.get_parameter(HEAD).data_ptr() != embeddings.data_ptr()
    assert torch.equal(embeddings, load_file(tmp_path / "model.safetensors")[EMBEDDINGS])
    assert any("untied" in warning and HEAD in warning for warning in report.warnings)
    loaded: Any = model
    assert loaded.config.tie_word_embeddings is False
    loaded.tie_weights()
    assert torch.equal(model.get_parameter(HEAD), head)


def test_keys_04_the_kept_head_survives_saving_and_loading(tmp_path: Path) -> None:
    edited(saved("tied Llama", tmp_path / "a"), add={HEAD: ar(96, 32, start=50)})
    model: Any = tensorferry.load_model(tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    assert torch.equal(tensorferry.load_model(tmp_path / "b").get_parameter(HEAD), ar(96, 32, start=50))


def test_keys_07_untied_by_config_and_no_head_is_a_missing_tensor(tmp_path: Path) -> None:
    edited(saved("Llama", tmp_path), drop=HEAD)
    with pytest.raises(tensorferry.PlanError, match=rf"missing: {re.escape(HEAD)}"):
        tensorferry.load_model(tmp_path)


def test_keys_08_tied_by_config_and_no_head_shares_the_storage_of_the_embeddings(tmp_path: Path) -> None:
    saved("tied Llama", tmp_path)
    assert HEAD not in load_file(tmp_path / "model.safetensors")
    model, report = tensorferry.load_model(tmp_path, return_report=True)
    assert model.get_parameter(HEAD) is model.get_parameter(EMBEDDINGS)
    assert report.missing == ()


def test_keys_08_the_head_alone_fills_the_embeddings_too(tmp_path: Path) -> None:
    saved("tied Llama", tmp_path)
    values = load_file(tmp_path / "model.safetensors")[EMBEDDINGS]
    edited(tmp_path, drop=EMBEDDINGS, add={HEAD: values})
    model = tensorferry.load_model(tmp_path)
    assert model.get_parameter(HEAD) is model.get_parameter(EMBEDDINGS)
    assert torch.equal(model.get_parameter(EMBEDDINGS), values)


def test_keys_09_a_redundant_equal_head_is_skipped_and_there_is_one_storage(tmp_path: Path) -> None:
    saved("tied Llama", tmp_path)
    values = load_file(tmp_path / "model.safetensors")[EMBEDDINGS]
    edited(tmp_path, add={HEAD: values.clone()})
    model, report = tensorferry.load_model(tmp_path, return_report=True)
    assert model.get_parameter(HEAD) is model.get_parameter(EMBEDDINGS)
    assert report.dropped == {HEAD: f"tied to {EMBEDDINGS}"}


class Sinks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.empty(1, dtype=torch.float32))
        self.weight = nn.Parameter(torch.empty(2, 2, dtype=torch.bfloat16))


def test_dtype_08_a_float32_part_of_a_bfloat16_model_is_not_rounded(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2**-20])
    write_safetensors(tmp_path / "model.safetensors", {"sinks": value, "weight": ar(2, 2)})
    model = Sinks()
    report = tensorferry.load(model, tmp_path)
    assert torch.equal(model.sinks.detach(), value)
    assert model.weight.dtype == torch.bfloat16
    assert report.casts == {"F32 -> BF16": 1}


def test_dtype_08_the_float32_parts_that_a_class_of_transformers_names_are_not_rounded(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    value = torch.full((8,), 1 + 2**-20)
    saved("DeepSeek-V3", tmp_path, dtype=torch.bfloat16)
    edited(tmp_path, drop=name, add={name: value})
    model = tensorferry.load_model(tmp_path)
    assert torch.equal(model.get_buffer(name), value)
    assert model.get_parameter(EMBEDDINGS).dtype == torch.bfloat16


def test_dtype_11_without_a_configured_dtype_the_one_of_most_bytes_is_taken_and_a_mixture_told(tmp_path: Path) -> None:
    saved("Llama", tmp_path, dtype=torch.bfloat16)
    norm = load_file(tmp_path / "model.safetensors")["model.norm.weight"].float()
    edited(tmp_path, drop="model.norm.weight", add={"model.norm.weight": norm}, dtype=None)
    model, report = tensorferry.load_model(tmp_path, return_report=True)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    (warning,) = report.warnings
    assert re.search(r"BF16 [\d,]+ bytes, F32 128 bytes.*bfloat16", warning)


def test_dtype_11_a_tie_goes_to_the_wider_type(tmp_path: Path) -> None:
    from tensorferry.compat.transformers.configs import chosen_dtype

    write_safetensors(tmp_path / "w.safetensors", {"a": ar(4, 4, dtype=torch.bfloat16), "b": ar(8)})
    with tensorferry.open_checkpoint(tmp_path / "w.safetensors") as checkpoint:
        dtype, notes = chosen_dtype("auto", None, checkpoint.catalogue)
    assert dtype == torch.float32
    assert len(notes) == 1


class Draft(nn.Module):
    """A model and its draft, which uses the embeddings of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(3, 2, device="meta")
        self.draft = nn.Module()
        self.draft.embed_tokens = nn.Embedding(3, 2, device="meta")
        self.draft.embed_tokens.weight = self.embed_tokens.weight
        self.mtp = nn.Linear(2, 2, bias=False, device="meta")


def test_arch_02_a_draft_whose_embeddings_are_absent_shares_those_of_its_target(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"embed_tokens.weight": ar(3, 2), "mtp.weight": ar(2, 2)})
    model = Draft()
    tensorferry.load(model, tmp_path)
    assert torch.equal(model.get_parameter("draft.embed_tokens.weight"), ar(3, 2))
    assert model.get_parameter("draft.embed_tokens.weight") is model.embed_tokens.weight


def test_arch_04_draft_layers_are_skipped_and_layers_beyond_them_are_unexpected(tmp_path: Path) -> None:
    saved("DeepSeek-V3", tmp_path)
    draft = {f"model.layers.{n}.eh_proj.weight": ar(2, 2) for n in (2, 3)}
    beyond = {f"model.layers.{n}.eh_proj.weight": ar(2, 2) for n in (4, 20, 61)}
    edited(tmp_path, add={**draft, **beyond}, num_nextn_predict_layers=2)
    _, report = tensorferry.load_model(tmp_path, return_report=True)
    assert {n: why.partition(":")[0] for n, why in report.dropped.items()} == dict.fromkeys(draft, "draft")
    assert sorted(report.unexpected) == sorted(beyond)


def test_what_a_class_of_transformers_knows_to_be_of_no_use_is_dropped_with_that_reason(tmp_path: Path) -> None:
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    edited(saved("T5", tmp_path), add={name: ar(2, 2)})
    _, report = tensorferry.load_model(tmp_path, return_report=True)
    assert report.unexpected == ()
    assert report.dropped == {name: "T5ForConditionalGeneration of transformers has no use for it"}


def test_arch_06_text_weights_behind_language_model_make_the_same_state_from_one_file_and_from_shards(
    tmp_path: Path,
) -> None:
    import transformers

    text = {**tiny("Llama").config.to_dict(), "num_hidden_layers": 1}
    vision: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": 8, "patch_size": 4, "model_type": "clip_vision_model"}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=5)
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "new")
    whole = load_file(tmp_path / "new" / "model.safetensors")
    assert any(name.startswith("language_model.model.") for name in whole)
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "config.json").write_text((tmp_path / "new" / "config.json").read_text())
    halves = [dict(list(whole.items())[n::2]) for n in range(2)]
    for n, half in enumerate(halves):
        write_safetensors(folder / f"model-{n}.safetensors", half)
    write_index(
        folder / "model.safetensors.index.json",
        {name: f"model-{n}.safetensors" for n, half in enumerate(halves) for name in half},
    )
    one, several = (tensorferry.load_model(f).state_dict() for f in (tmp_path / "new", folder))
    assert list(one) == list(several)
    assert [name for name in one if not equal_bits(one[name], several[name])] == []


def test_a_tied_checkpoint_gives_the_logits_of_the_model_that_was_saved(tmp_path: Path) -> None:
    saved("tied Llama", tmp_path)
    assert equal_bits(logits(tensorferry.load_model(tmp_path)), logits(tiny("tied Llama")))
