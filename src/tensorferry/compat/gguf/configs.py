"""The configuration of a model from the metadata and the tensors of its GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tensorferry.compat.gguf.collecting import Collector
from tensorferry.compat.gguf.model_kinds import COMMON, MODEL_KINDS, ModelKind
from tensorferry.compat.gguf.rope import rotary
from tensorferry.compat.translation import InferredConfig
from tensorferry.core.catalogue import Catalogue
from tensorferry.errors import ConfigError, shown
from tensorferry.formats.gguf_metadata import GgufMetadata

__all__ = ["SMALL_TENSORS", "infer_config"]

SMALL_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors whose values are part of the configuration."""


def infer_config(
    metadata: GgufMetadata, catalogue: Catalogue, values: Mapping[str, Sequence[float]] | None = None
) -> InferredConfig:
    """Return the configuration of the model in a GGUF file, as transformers' config.json would have it.

    values: of those `SMALL_TENSORS` that the file has. Raises ConfigError where the architecture is not known here or
    a size is absent, CorruptFile where metadata are of a wrong type.
    """
    found = Collector(metadata, catalogue, values or {})
    kind = _kind(found)
    found.set("inferred", model_type=kind.model_type, architectures=[kind.class_name])
    for one in (*COMMON, *kind.fields):
        found.take(one)
    _refuse_impossible(found)
    found.set("assumed", **kind.assumed)
    _heads(found)
    _vocabulary(found)
    parameters, origin = rotary(found, theta=kind.theta)
    found.set(origin, rope_parameters=parameters)
    special = _SPECIAL.get(kind.model_type)
    if special is not None:
        special(found)
    return found.finish()


def _refuse_impossible(found: Collector) -> None:
    """Raise ConfigError for sizes that cannot be, before lists of that length are made."""
    layers = found.config["num_hidden_layers"]
    if not 0 < layers <= len(found.catalogue):
        raise ConfigError(f"{found.metadata!r}: {layers:,} layers, and {len(found.catalogue):,} tensors")
    for name in ("hidden_size", "num_attention_heads"):
        if found.config[name] <= 0:
            raise ConfigError(f"{found.metadata!r}: {name} = {found.config[name]:,}")


def _kind(found: Collector) -> ModelKind:
    name = found.architecture
    if name == "llama":
        name = _llama(found)
    kind = MODEL_KINDS.get(name)
    if kind is None:
        raise ConfigError(
            f"general.architecture {shown(name)!r}: no configuration is made from such files here, only from those of "
            f"{', '.join(MODEL_KINDS)}; give a configuration, or put a config.json beside the file"
        )
    if name == "deepseek2" and not _by_sigmoid(found):
        return replace(kind, model_type="deepseek_v2", class_name="DeepseekV2ForCausalLM")
    return kind


def _llama(found: Collector) -> str:
    """Tell what calls itself llama: Mixtral by its experts, Mistral by its name or its window."""
    if found.get("expert_count"):
        return "mixtral"
    said = " ".join(found.metadata.text(f"general.{key}") or "" for key in ("name", "basename"))
    return "mistral" if "mistral" in said.lower() or found.get("attention.sliding_window") else "llama"


def _by_sigmoid(found: Collector) -> bool:
    """Whether experts are chosen as DeepSeek-V3 does it, rather than by a softmax as DeepSeek-V2."""
    biased = any(".exp_probs_b" in name for name in found.catalogue)
    return biased or found.get("expert_gating_func") == 2


def _heads(found: Collector) -> None:
    heads, width = found.config["num_attention_heads"], found.config["hidden_size"]
    shared = found.get("attention.head_count_kv")
    if shared is not None and not 0 < shared <= heads:
        raise ConfigError(f"{found.metadata!r}: {shared:,} heads of keys for {heads:,} of queries")
    found.set("inferred" if shared is None else "read", num_key_value_heads=heads if shared is None else shared)
    extent = found.get("attention.key_length")
    found.set("inferred" if extent is None else "read", head_dim=width // heads if extent is None else extent)


def _vocabulary(found: Collector) -> None:
    rows = found.extent("token_embd.weight", 0)
    if rows is None:
        raise ConfigError(f"{found.metadata!r}: no token_embd.weight among {len(found.catalogue)} tensors")
    found.set("read" if found.get("vocab_size") == rows else "inferred", vocab_size=rows)
    found.set("inferred", tie_word_embeddings=not found.has("output.weight"))
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = found.metadata.integer(f"tokenizer.ggml.{key}_token_id")
        if token is not None and token >= rows:
            token = None
        found.set("assumed" if token is None else "read", **{f"{name}_token_id": token})


def _has_biases(found: Collector) -> bool:
    return found.has("blk.0.attn_q.bias") or found.has("blk.0.attn_qkv.bias")


def _biases(found: Collector) -> None:
    found.set("inferred", attention_bias=_has_biases(found))
    if found.config["model_type"] == "llama":
        found.set("inferred", mlp_bias=found.has("blk.0.ffn_gate.bias"))


def _mistral(found: Collector) -> None:
    """The converter leaves the window out; only the first version has one."""
    window = found.get("attention.sliding_window")
    if window:
        found.set("read", sliding_window=window)
    else:
        said = " ".join(found.metadata.text(f"general.{key}") or "" for key in ("name", "version", "finetune"))
        found.set("assumed", sliding_window=4096 if "v0.1" in said.lower() else None)


def _mixtral(found: Collector) -> None:
    if found.config["head_dim"] == found.config["hidden_size"] // found.config["num_attention_heads"]:
        _without(found, "head_dim")  # as its configurations are written


def _without(found: Collector, name: str) -> None:
    found.config.pop(name)
    found.origin.pop(name)


def _expert_sizes(found: Collector) -> None:
    width = found.get("expert_feed_forward_length")
    if width is None:
        found.set("inferred", moe_intermediate_size=_first(found, "ffn_down_exps.weight", 2, "ffn_down.0.weight", 1))
    else:
        found.set("read", moe_intermediate_size=width)
    layers = range(found.config["num_hidden_layers"])
    dense = [n for n in layers if not found.has(f"blk.{n}.ffn_gate_inp.weight")]
    if found.config["model_type"] in ("qwen2_moe", "qwen3_moe"):
        found.set("inferred", mlp_only_layers=dense)
        wide = found.get("feed_forward_length")
        of_experts = found.config["moe_intermediate_size"]
        found.set("inferred" if wide is None else "read", intermediate_size=of_experts if wide is None else wide)


def _first(found: Collector, stem: str, dim: int, other: str, other_dim: int) -> int:
    for n in range(found.config["num_hidden_layers"]):
        for name, d in ((stem, dim), (other, other_dim)):
            extent = found.extent(f"blk.{n}.{name}", d)
            if extent is not None:
                return extent
    raise ConfigError(f"{found.metadata!r}: no width of experts, and no {stem} among the tensors")


def _qwen2_moe(found: Collector) -> None:
    _expert_sizes(found)
    shared = found.get("expert_shared_feed_forward_length")
    if shared is None:
        found.set("inferred", shared_expert_intermediate_size=_first(
            found, "ffn_down_shexp.weight", 1, "ffn_down_shexp.weight", 1))  # fmt: skip
    else:
        found.set("read", shared_expert_intermediate_size=shared)


def _qwen3_moe(found: Collector) -> None:
    _expert_sizes(found)
    _biases(found)


def _scaled_queries(found: Collector, largest: int) -> None:
    """The largest model of a Gemma generation scales by the width per head, the others by the extent of a head."""
    heads, width = found.config["num_attention_heads"], found.config["hidden_size"]
    by_width = found.config["num_hidden_layers"] == largest
    found.set("assumed", query_pre_attn_scalar=width // heads if by_width else found.config["head_dim"])


def _gemma2(found: Collector) -> None:
    _scaled_queries(found, 46)
    _layer_types(found, 2)


def _gemma3(found: Collector) -> None:
    _scaled_queries(found, 62)
    _layer_types(found, 6)
    local = found.get("rope.freq_base_swa", "number")
    rope = {
        "full_attention": found.config["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0 if local is None else local},
    }
    found.set("assumed" if local is None else found.origin["rope_parameters"], rope_parameters=rope)


def _layer_types(found: Collector, usual: int) -> None:
    """Take which layers look at a window: as the file lists them, or all but every n-th."""
    layers = found.config["num_hidden_layers"]
    key = f"{found.architecture}.attention.sliding_window_pattern"
    listed = None
    if key in found.metadata and found.metadata.typed(key).element is not None:
        listed = [bool(one) for one in found.metadata[key]]
    every = None if listed is not None else found.get("attention.sliding_window_pattern")
    sliding = listed or [(n + 1) % (every or usual) != 0 for n in range(layers)]
    types = ["sliding_attention" if one else "full_attention" for one in sliding[:layers]]
    found.set("assumed" if listed is None and every is None else "read", layer_types=types)


def _phi3(found: Collector) -> None:
    found.set("read", sliding_window=found.get("attention.sliding_window") or None)
    rope = dict(found.config["rope_parameters"])
    original = found.get("rope.scaling.original_context_length") or found.config["max_position_embeddings"]
    rope["original_max_position_embeddings"] = original
    rotated = found.get("rope.dimension_count")
    if rotated is not None and rotated != found.config["head_dim"]:
        rope["partial_rotary_factor"] = rotated / found.config["head_dim"]
    found.set(found.origin["rope_parameters"], rope_parameters=rope)
    found.set("inferred", original_max_position_embeddings=original)


def _deepseek(found: Collector) -> None:
    rotated, latent = found.config["qk_rope_head_dim"], found.config["kv_lora_rank"]
    keys = found.get("attention.key_length_mla") or found.get("attention.key_length")
    values = found.get("attention.value_length_mla") or found.get("attention.value_length")
    if keys is None or values is None:
        raise ConfigError(f"{found.metadata!r}: no attention.key_length, so the extents of heads are not known")
    found.set("read", qk_nope_head_dim=keys - rotated, v_head_dim=values, kv_lora_rank=latent)
    found.set("inferred", num_key_value_heads=found.config["num_attention_heads"])
    _without(found, "head_dim")
    _expert_sizes(found)
    found.set("inferred", attention_bias=found.has("blk.0.attn_q_a.bias"))
    rope = dict(found.config["rope_parameters"])
    multiplier = found.get("rope.scaling.yarn_log_multiplier", "number")
    if rope["rope_type"] == "yarn" and multiplier is not None:
        scale = round(multiplier * 10, 6)
        rope |= {"mscale": scale, "mscale_all_dim": scale}
        found.set(found.origin["rope_parameters"], rope_parameters=rope)
    if found.config["model_type"] == "deepseek_v2":
        several = found.config["n_group"] > 1
        found.set("assumed", topk_method="group_limited_greedy" if several else "greedy")


def _gpt_oss(found: Collector) -> None:
    _layer_types(found, 2)
    rope = found.config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        usual = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        found.set("assumed" if usual.keys() - rope.keys() else "read", rope_parameters={**usual, **rope})
    found.set("inferred", attention_bias=_has_biases(found))


_SPECIAL: Mapping[str, Callable[[Collector], Any]] = {
    "llama": _biases, "mistral": _mistral, "mixtral": _mixtral, "qwen3": _biases, "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe, "gemma2": _gemma2, "gemma3_text": _gemma3, "phi3": _phi3, "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek, "gpt_oss": _gpt_oss,
}  # fmt: skip
