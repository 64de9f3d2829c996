"""Models with their own ``load_weights(iterable)`` out of GGUF files: names and values of transformers, traced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

import tensorferry
from helpers.fused_llama import FusedLlama
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
from helpers.tiny_transformers import equal_bits, tiny
from tensorferry.loaders import LoadConfig, ModelConfig, get_model_loader
from tensorferry.loaders.translating import translate

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

MIXTRAL = {"expert_count": 12, "expert_used_count": 2}
QWEN3_MOE = {**MIXTRAL, "expert_feed_forward_length": 16, "attention.key_length": 8, "expert_weights_norm": False}
GPT_OSS = {"expert_count": 4, "expert_used_count": 4, "expert_feed_forward_length": 48, "attention.key_length": 8}
DEEPSEEK = {
    "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 16, "attention.kv_lora_rank": 16,
    "attention.q_lora_rank": 16, "rope.dimension_count": 8, "attention.key_length_mla": 16,
    "attention.head_count_kv": 1, "attention.value_length_mla": 8, "leading_dense_block_count": 1,
}  # fmt: skip


def rows(tensors: Tensors) -> Tensors:
    return interleaved(translated(tensors), 4, 2)


def fused(tensors: Tensors) -> Tensors:
    out = rows(tensors)
    for layer in ("0", "1"):
        out[f"blk.{layer}.attn_qkv.weight"] = torch.cat([out.pop(f"blk.{layer}.attn_{p}.weight") for p in "qkv"])
    return out


def gemma(tensors: Tensors) -> Tensors:
    return {n: t + 1 if n.endswith("norm.weight") else t for n, t in translated(tensors, GEMMA).items()}


CONVERTED: dict[str, tuple[str, str, Callable[[Tensors], Tensors], dict[str, Any]]] = {
    "llama": ("Llama", "llama", rows, {}),
    "llama fused": ("Llama", "llama", fused, {}),
    "mixtral": ("Mixtral", "llama", lambda t: stacked(rows(t)), MIXTRAL),
    "qwen2": ("Qwen2", "qwen2", translated, {}),
    "qwen3moe": ("Qwen3-MoE", "qwen3moe", lambda t: stacked(translated(t)), QWEN3_MOE),
    "qwen3moe fused": ("Qwen3-MoE", "qwen3moe", lambda t: stacked(translated(t), fused=True), QWEN3_MOE),
    "gemma2": ("Gemma2", "gemma2", gemma, {"attention.key_length": 8}),
    "gpt-oss": ("GPT-OSS", "gpt-oss", gpt_oss, GPT_OSS),
    "deepseek2": ("DeepSeek-V3", "deepseek2", lambda t: latent_attention(t, heads=4, keys=8), DEEPSEEK),
}
"""By a short name: the tiny model, its architecture, what its converter does to tensors, and more metadata."""


@pytest.mark.parametrize("name", CONVERTED)
def test_the_entries_are_those_of_the_checkpoint_that_was_converted(name: str, tmp_path: Path) -> None:
    kind, architecture, change, more = CONVERTED[name]
    model = tiny(kind)
    saved = checkpoint_of(model, tmp_path)
    file = write_gguf(tmp_path / "m.gguf", architecture, metadata_of(architecture, model.config, **more), change(saved))
    with tensorferry.open_checkpoint(file) as opened:
        checkpoint, dropped = translate(opened)
        got = dict(checkpoint.tensors())
    assert sorted(got) == sorted(saved)
    assert [
        n for n, t in saved.items() if not torch.allclose(got[n], t, rtol=0, atol=2e-7 if name == "gemma2" else 0)
    ] == []
    assert dropped == {}


def engine(config: Any, **how: Any) -> Callable[[Any], nn.Module]:
    return lambda _: FusedLlama(config, **how)


def filled(model: FusedLlama, tensors: Any) -> FusedLlama:
    with torch.no_grad():
        model.load_weights(iter(tensors))
    return model


def assert_filled(got: nn.Module, expected: nn.Module) -> None:
    state = got.state_dict()
    assert [n for n, t in expected.state_dict().items() if not equal_bits(state[n], t)] == []


PACKED = {"ffn_down.weight": "Q8_0", "attn_q.weight": "Q4_0", "attn_k.weight": "Q8_0", "ffn_up.weight": "Q4_1"}
WIDE = {"intermediate_size": 128, "hidden_size": 64, "head_dim": 16}


@pytest.mark.parametrize("load_format", ["gguf", "auto"])
@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_rank_of_an_engine_gets_its_part_decoded_and_reads_no_more(
    load_format: str, tp: int, rank: int, tmp_path: Path
) -> None:
    file, model = tiny_llama(tmp_path, changes=WIDE, packed=PACKED, more={"attention.key_length": 16})
    loader = get_model_loader(LoadConfig(load_format=load_format, options={}))
    got = loader.load_model(ModelConfig(str(file)), build=engine(model.config, tp=tp, rank=rank))
    numbers = tensorferry.load_model(file, dtype="float32").state_dict()
    assert_filled(got, filled(FusedLlama(model.config, tp, rank), numbers.items()))
    report = loader.report
    assert report is not None
    assert report.streamed == {}
    with tensorferry.open_checkpoint(file) as checkpoint:
        entries = checkpoint.catalogue.values()
        shared = sum(e.nbytes for e in entries if "norm" in e.name or not e.name.startswith("blk."))
        assert report.bytes_needed == shared + (sum(e.nbytes for e in entries) - shared) // tp


def test_what_a_loader_computes_gets_whole_tensors_and_the_rest_is_planned(tmp_path: Path) -> None:
    file, model = tiny_llama(tmp_path, changes=WIDE, packed=PACKED, more={"attention.key_length": 16})
    loader = get_model_loader(LoadConfig(load_format="gguf"))
    got = loader.load_model(ModelConfig(str(file)), build=engine(model.config, rounds=True))
    numbers = tensorferry.load_model(file, dtype="float32").state_dict()
    assert_filled(got, filled(FusedLlama(model.config), numbers.items()))
    assert loader.report is not None
    assert sorted(loader.report.streamed) == [f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 1)]


@pytest.mark.parametrize("strategy", ["lazy", "eager", "prefetch"])
def test_streaming_gives_the_same(strategy: Literal["lazy", "eager", "prefetch"], tmp_path: Path) -> None:
    file, model = tiny_llama(tmp_path, changes=WIDE, packed=PACKED, more={"attention.key_length": 16})
    loader = get_model_loader(LoadConfig(load_format="gguf", own_loader="stream", strategy=strategy))
    got = loader.load_model(ModelConfig(str(file)), build=engine(model.config))
    numbers = tensorferry.load_model(file, dtype="float32").state_dict()
    assert_filled(got, filled(FusedLlama(model.config), numbers.items()))


def test_numbers_are_rounded_once_to_the_type_of_the_parameter(tmp_path: Path) -> None:
    file, model = tiny_llama(tmp_path, changes=WIDE, packed=PACKED, more={"attention.key_length": 16})
    loader = get_model_loader(LoadConfig(load_format="gguf"))
    got = loader.load_model(ModelConfig(str(file), dtype="bfloat16"), build=engine(model.config))
    numbers = tensorferry.load_model(file, dtype="bfloat16").state_dict()
    assert_filled(got, filled(FusedLlama(model.config).bfloat16(), numbers.items()))


class Experts(nn.Module):
    """The gates of experts of one rank, in one tensor."""

    def __init__(self, mine: range, shape: tuple[int, int]) -> None:
        super().__init__()
        self.mine = mine
        self.w1 = nn.Parameter(torch.zeros(len(mine), *shape))

    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            parts = name.split(".")
            if "experts" in parts and parts[2] == "1" and parts[-2] == "gate_proj" and int(parts[5]) in self.mine:
                self.w1.data[int(parts[5]) - self.mine.start].copy_(weight)


def test_of_a_stack_of_experts_a_rank_reads_its_own(tmp_path: Path) -> None:
    model = tiny("Qwen3-MoE", moe_intermediate_size=32)
    saved = checkpoint_of(model, tmp_path)
    metadata = metadata_of("qwen3moe", model.config, **{**QWEN3_MOE, "expert_feed_forward_length": 32})
    packed = {"exps.weight": "Q8_0"}
    file = write_gguf(tmp_path / "m.gguf", "qwen3moe", metadata, stacked(translated(saved)), packed=packed)
    loader = get_model_loader(LoadConfig(load_format="gguf"))
    got = loader.load_model(ModelConfig(str(file)), build=lambda _: Experts(range(3, 6), (32, 32)))
    with tensorferry.open_checkpoint(file) as opened:
        checkpoint, _ = translate(opened)
        names = [f"model.layers.1.mlp.experts.{e}.gate_proj.weight" for e in range(3, 6)]
        expected = torch.stack([checkpoint.read(name) for name in names])
    assert equal_bits(got.get_parameter("w1"), expected)
    assert torch.allclose(expected[0], saved[names[0]], atol=1e-2)
    assert loader.report is not None
    assert loader.report.bytes_needed == 3 * 32 * 34


class Listening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, torch.dtype] = {}
        self.count = nn.Parameter(torch.zeros(1))

    def load_weights(self, weights: Any) -> None:
        self.seen.update((name, tensor.dtype) for name, tensor in weights)
        self.count.data.fill_(len(self.seen))


@pytest.mark.parametrize(
    ("options", "names"), [({"names": "gguf"}, "blk.0.attn_q.weight"), ({}, "model.layers.0.self_attn.q_proj.weight")]
)
def test_the_names_of_the_file_are_there_for_those_who_ask(options: dict[str, str], names: str, tmp_path: Path) -> None:
    file, _ = tiny_llama(tmp_path, changes=WIDE, packed=PACKED, more={"attention.key_length": 16})
    loader = get_model_loader(LoadConfig(load_format="gguf", options=options, own_loader="stream"))
    model = Listening()
    loader.load_model(ModelConfig(str(file)), build=lambda _: model)
    assert model.seen[names] is (torch.uint8 if options else torch.float32)


def test_an_architecture_that_is_not_known_keeps_the_names_of_the_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "falcon", {}, {"blk.0.attn_q.weight": torch.zeros(4, 4)})
    loader = get_model_loader(LoadConfig(load_format="gguf", own_loader="stream"))
    model = Listening()
    loader.load_model(ModelConfig(str(file)), build=lambda _: model)
    assert list(model.seen) == ["blk.0.attn_q.weight"]


def test_divisors_of_rotary_frequencies_are_left_out_and_the_report_says_why(tmp_path: Path) -> None:
    file, model = tiny_llama(tmp_path, extra={"rope_freqs.weight": torch.ones(4)})
    loader = get_model_loader(LoadConfig(load_format="gguf"))
    loader.load_model(ModelConfig(str(file)), build=engine(model.config))
    assert loader.report is not None
    assert "divisors of the rotary frequencies" in loader.report.dropped["rope_freqs.weight"]


def test_names_options_are_checked() -> None:
    with pytest.raises(tensorferry.ConfigError, match="names 'meta': hf or gguf is expected"):
        get_model_loader(LoadConfig(load_format="gguf", options={"names": "meta"}))
