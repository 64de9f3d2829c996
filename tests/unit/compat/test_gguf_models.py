"""Models of transformers out of GGUF files: the same tensors, whatever a converter did to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import tensorferry
from helpers.gguf_models import (
    GEMMA,
    Tensors,
    checkpoint_of,
    gpt_oss,
    interleaved,
    latent_attention,
    metadata_of,
    stacked,
    tiny_llama,
    translated,
    write_gguf,
)
from helpers.tiny_transformers import SIZES, equal_bits, logits, tiny

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

MIXTRAL = {"expert_count": 12, "expert_used_count": 2}
QWEN3_MOE = {**MIXTRAL, "expert_feed_forward_length": 16, "attention.key_length": 8}


def written(
    name: str, folder: Path, architecture: str, change: Callable[[Tensors], Tensors], **more: Any
) -> tuple[Path, Any]:
    model = tiny(name)
    tensors = change(checkpoint_of(model, folder))
    return write_gguf(folder / "m.gguf", architecture, metadata_of(architecture, model.config, **more), tensors), model


def loaded(file: Path, **options: Any) -> Any:
    return tensorferry.load_model(file, **options)


def reported(file: Path, **options: Any) -> tuple[Any, tensorferry.Report]:
    return tensorferry.load_model(file, return_report=True, **options)


def unequal(ours: Any, theirs: Any) -> list[str]:
    state, expected = ours.state_dict(), theirs.state_dict()
    assert list(state) == list(expected)
    return [name for name, tensor in expected.items() if not equal_bits(state[name], tensor)]


def assert_same(file: Path, model: Any) -> None:
    ours = loaded(file)
    assert type(ours) is type(model)
    assert unequal(ours, model) == []
    assert equal_bits(logits(ours), logits(model))


def test_llama_has_its_query_and_key_rows_put_back_in_order(tmp_path: Path) -> None:
    assert_same(*tiny_llama(tmp_path))


def test_a_file_beside_others_is_found_by_its_folder(tmp_path: Path) -> None:
    file, model = tiny_llama(tmp_path)
    assert_same(file.parent, model)


def test_biases_of_queries_and_keys_are_put_back_in_order(tmp_path: Path) -> None:
    file, model = tiny_llama(tmp_path, changes={"attention_bias": True, "mlp_bias": True})
    assert_same(file, model)


def test_qwen2_has_its_rows_in_order_already(tmp_path: Path) -> None:
    assert_same(*written("Qwen2", tmp_path, "qwen2", translated))


@pytest.mark.parametrize("fused", [False, True])
def test_stacked_experts_go_where_transformers_stacks_them(fused: bool, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        return stacked(translated(tensors), fused=fused)

    assert_same(*written("Qwen3-MoE", tmp_path, "qwen3moe", change, expert_weights_norm=False, **QWEN3_MOE))


@pytest.mark.parametrize("change", [lambda t: t, stacked], ids=["one by one", "stacked"])
def test_mixtral_calls_itself_llama(change: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    def both(tensors: Tensors) -> Tensors:
        return change(interleaved(translated(tensors), 4, 2))

    assert_same(*written("Mixtral", tmp_path, "llama", both, **MIXTRAL))


def test_queries_keys_and_values_in_one_tensor_are_taken_apart(tmp_path: Path) -> None:
    def fuse(tensors: Tensors) -> Tensors:
        out = interleaved(translated(tensors), 4, 2)
        for layer in ("0", "1"):
            parts = [out.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
            out[f"blk.{layer}.attn_qkv.weight"] = torch.cat(parts)
        return out

    assert_same(*written("Llama", tmp_path, "llama", fuse))


def test_what_was_added_to_gemmas_norms_is_taken_off_within_one_rounding(tmp_path: Path) -> None:
    model = tiny("Gemma2")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_()
    tensors = translated(checkpoint_of(model, tmp_path), GEMMA)
    added = {name: t + 1 if name.endswith("norm.weight") else t for name, t in tensors.items()}
    keys = {"attention.key_length": 8, "attention.sliding_window": 4096}
    file = write_gguf(tmp_path / "m.gguf", "gemma2", metadata_of("gemma2", model.config, **keys), added)
    state = loaded(file).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(state[name], tensor, rtol=0, atol=5e-7 if "norm" in name else 0), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_packed_rows_are_the_numbers_that_gguf_py_makes_of_them(kind: str, tmp_path: Path) -> None:
    file, model = tiny_llama(tmp_path, packed={"attn_q.weight": kind, "ffn_up.weight": kind})
    state = loaded(file).state_dict()
    number = gguf.GGMLQuantizationType[kind]
    for name, tensor in model.state_dict().items():
        expected = tensor
        if name.endswith(("q_proj.weight", "up_proj.weight")):
            blocks = gguf.quants.quantize(tensor.numpy(), number)
            expected = torch.from_numpy(gguf.quants.dequantize(blocks, number))
        assert equal_bits(state[name], expected), name


def test_of_packed_experts_each_is_read_once(tmp_path: Path) -> None:
    model = tiny("Qwen3-MoE", moe_intermediate_size=32)
    tensors = stacked(translated(checkpoint_of(model, tmp_path)))
    metadata = metadata_of("qwen3moe", model.config, **{**QWEN3_MOE, "expert_feed_forward_length": 32})
    packed = {"gate_exps.weight": "Q8_0", "up_exps.weight": "Q8_0", "down_exps.weight": "Q8_0"}
    file = write_gguf(tmp_path / "m.gguf", "qwen3moe", metadata, tensors, packed=packed)
    ours, report = reported(file)
    assert report.bytes_read < file.stat().st_size
    q8 = gguf.GGMLQuantizationType.Q8_0
    state = ours.state_dict()
    for name, tensor in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            numbers = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), q8), q8)
            assert equal_bits(state[name], torch.from_numpy(numbers)), name


@pytest.mark.parametrize("kind", ["F32", "MXFP4", "Q8_0"])
def test_gate_and_up_of_gpt_oss_alternate_again_and_are_transposed(kind: str, tmp_path: Path) -> None:
    model = tiny("GPT-OSS", intermediate_size=64)
    tensors = gpt_oss(checkpoint_of(model, tmp_path))
    keys = {"expert_feed_forward_length": 64, "expert_count": 4, "expert_used_count": 4, "attention.key_length": 8}
    packed = {} if kind == "F32" else {"exps.weight": kind}
    file = write_gguf(
        tmp_path / "m.gguf", "gpt-oss", metadata_of("gpt-oss", model.config, **keys), tensors, packed=packed
    )
    state = loaded(file, config=model.config).state_dict()
    for name, tensor in model.state_dict().items():
        expected = tensor
        if name.endswith(("gate_up_proj", "down_proj")) and kind != "F32":
            number = gguf.GGMLQuantizationType[kind]
            rows = tensor.transpose(1, 2).contiguous().numpy()
            numbers = gguf.quants.dequantize(gguf.quants.quantize(rows, number), number)
            expected = torch.from_numpy(numbers).transpose(1, 2)
        assert equal_bits(state[name], expected.contiguous()), name


def test_packed_latent_keys_are_transposed_into_their_part_of_each_head(tmp_path: Path) -> None:
    latent: dict[str, Any] = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 8}
    model = tiny("DeepSeek-V3", **latent)
    tensors = latent_attention(checkpoint_of(model, tmp_path), heads=4, keys=32)
    packed = {"attn_k_b.weight": "Q8_0", "attn_v_b.weight": "Q8_0"}
    file = write_gguf(tmp_path / "m.gguf", "deepseek2", {}, tensors, packed=packed)
    state = loaded(file, config=model.config).state_dict()
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, tensor in model.state_dict().items():
        if not name.endswith("kv_b_proj.weight"):
            assert equal_bits(state[name], tensor), name
            continue
        heads = tensor.view(4, 40, 32)
        rows = [heads[:, :32].transpose(1, 2), heads[:, 32:]]
        back = [
            torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(r.contiguous().numpy(), q8), q8)) for r in rows
        ]
        expected = torch.cat([back[0].transpose(1, 2), back[1]], 1).reshape(160, 32)
        assert equal_bits(state[name], expected), name


def test_an_expert_too_few_is_a_problem_before_anything_is_read(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        out = translated(tensors)
        del out["blk.1.ffn_up.7.weight"]
        return out

    file, _ = written("Qwen3-MoE", tmp_path, "qwen3moe", change, **QWEN3_MOE)
    with pytest.raises(tensorferry.PlanError, match=r"model\.layers\.1\.mlp\.experts\.7\.up_proj"):
        loaded(file)


def test_a_model_that_exists_already_is_filled_too(tmp_path: Path) -> None:
    file, model = tiny_llama(tmp_path)
    other = tiny("Llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    tensorferry.load(other, file)
    assert unequal(other, model) == []


def test_a_bare_base_model_is_filled_and_the_head_is_left_over(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaModel

    file, model = tiny_llama(tmp_path)
    bare: Any = LlamaModel(LlamaConfig(**SIZES))
    report = tensorferry.load(bare, file)
    assert report.unexpected == ("output.weight",)
    assert equal_bits(bare.layers[1].self_attn.q_proj.weight, model.model.layers[1].self_attn.q_proj.weight)


def test_a_given_configuration_wins_and_its_differences_are_told(tmp_path: Path) -> None:
    file, model = tiny_llama(tmp_path)
    model.config.rms_norm_eps = 1e-3
    ours, report = reported(file, config=model.config)
    assert ours.config.rms_norm_eps == 1e-3
    assert [w for w in report.warnings if "rms_norm_eps = 0.001, the file 1e-06" in w]


def test_a_configuration_beside_the_file_wins(tmp_path: Path) -> None:
    file, model = tiny_llama(tmp_path)
    model.config.max_position_embeddings = 48
    model.config.save_pretrained(tmp_path)
    ours, report = reported(file)
    assert ours.config.max_position_embeddings == 48
    assert [w for w in report.warnings if "max_position_embeddings = 48, the file 64" in w]


def test_llama_3_scaling_comes_back_from_its_divisors(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    # Waves of heads of 8 are 6.28, 62.8, … positions long. The first lies between 16 / 4 and 16 / 1: it is smoothed by
    # (16 / 6.28 - 1) / (4 - 1) = 0.5155, which makes 1 / ((1 - 0.5155) / 8 + 0.5155); the others are longer than 16.
    divisors = torch.tensor([1.735939, 8.0, 8.0, 8.0])
    file, model = tiny_llama(tmp_path, changes={"rope_parameters": rope}, extra={"rope_freqs.weight": divisors})
    ours = loaded(file)
    assert ours.config.rope_parameters == rope
    assert equal_bits(logits(ours), logits(model))


def test_divisors_that_no_scaling_makes_are_used_as_they_are(tmp_path: Path) -> None:
    divisors = torch.tensor([1.0, 3.0, 2.0, 5.0])
    file, _ = tiny_llama(tmp_path, extra={"rope_freqs.weight": divisors})
    rotary = loaded(file).model.rotary_emb
    usual = tiny("Llama").model.rotary_emb.inv_freq
    assert torch.allclose(rotary.inv_freq * divisors, usual)
    assert rotary.attention_scaling == 1.0


def test_more_layers_than_tensors_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    file, _ = tiny_llama(tmp_path, more={"block_count": 4_000_000_000})
    with pytest.raises(tensorferry.ConfigError, match=r"4,000,000,000 layers"):
        loaded(file)


def test_an_architecture_that_is_not_known_is_named(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "falcon", {}, {"token_embd.weight": torch.zeros(4, 4)})
    with pytest.raises(tensorferry.ConfigError, match=r"general\.architecture 'falcon'"):
        loaded(file)
