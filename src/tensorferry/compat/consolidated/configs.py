"""The configuration of a model from params.json and the tensors beside it, as transformers writes it in config.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tensorferry.compat.consolidated.refusals import refuse_unsupported
from tensorferry.compat.consolidated.rope import rotary
from tensorferry.compat.translation import InferredConfig, Origin
from tensorferry.core.catalogue import Catalogue
from tensorferry.errors import ConfigError, shown
from tensorferry.formats.params_json import Params

__all__ = ["infer_config"]

_CLASSES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM", "mixtral": "MixtralForCausalLM",
}  # fmt: skip
_CONTEXT = 32_768
_WORDS_OF_LLAMA_3 = 128_256

_Windows = list[int | None]


def infer_config(params: Params, catalogue: Catalogue) -> InferredConfig:
    """Return the configuration of the model that `params` describes and whose tensors `catalogue` holds.

    read: params.json says so. inferred: it follows, from what the file leaves out or from shapes. assumed: what such
    models usually have. Raises ConfigError, naming the field, for what is no plain model of text of the kinds that are
    known here, and where a size is absent or not that of the tensors; CorruptFile for a field of a wrong kind.
    """
    refuse_unsupported(params)
    found = _Found(params, catalogue)
    windows = _windows(params)
    kind = _kind(params, windows)
    found.set("inferred", model_type=kind, architectures=[_CLASSES[kind]])
    _sizes(found)
    _vocabulary(found)
    _context(found)
    if kind != "llama":
        _window(found, windows)
    if kind == "mixtral":
        _experts(found)
    windowed = bool(found.config.get("sliding_window"))
    parameters, origin = rotary(params, kind, windowed=windowed, tied=found.config["tie_word_embeddings"])
    found.set(origin, rope_parameters=parameters)
    return InferredConfig(MappingProxyType(found.config), MappingProxyType(found.origin))


@dataclass
class _Found:
    """The fields found so far, each with where it comes from."""

    params: Params
    catalogue: Catalogue
    config: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, Origin] = field(default_factory=dict)

    def set(self, origin: Origin, **fields: Any) -> None:
        self.config.update(fields)
        self.origin.update(dict.fromkeys(fields, origin))

    def needed(self, name: str, key: str, params: Params | None = None) -> int:
        """Take a size from its key. Raises ConfigError where it is absent."""
        source = params or self.params
        value = source.size(key)
        if value is None:
            raise ConfigError(f"{source.where}: no {key}, without which there is no {name}: give a configuration")
        self.set("read", **{name: value})
        return value

    def take(self, name: str, said: Any, origin: Origin, otherwise: Any) -> None:
        """Take what the file says, or `otherwise` as of `origin` where it says nothing."""
        self.set(origin if said is None else "read", **{name: otherwise if said is None else said})

    def rows(self, *names: str) -> int | None:
        """Return the rows of the first of the tensors that is there."""
        entry = next((self.catalogue[name] for name in names if name in self.catalogue), None)
        return entry.shape[0] if entry is not None and entry.shape else None


def _kind(params: Params, windows: _Windows) -> str:
    """Return the ``model_type``: that of Meta's models where no width is said, else one of Mistral's."""
    if params.part("moe") is not None:
        return "mixtral"
    if params.part("llama_4_scaling") is not None:
        return "ministral3"
    if len(set(windows)) > 1:
        return "ministral"
    return "mistral" if "hidden_dim" in params else "llama"


def _sizes(found: _Found) -> None:
    params = found.params
    width = found.needed("hidden_size", "dim")
    layers = found.needed("num_hidden_layers", "n_layers")
    heads = found.needed("num_attention_heads", "n_heads")
    if layers > len(found.catalogue):
        raise ConfigError(f"{params.where}: {layers:,} layers, and {len(found.catalogue):,} tensors")
    shared = params.size("n_kv_heads")
    if shared is not None and heads % shared:
        raise ConfigError(f"{params.where}: {shared:,} heads of keys for {heads:,} of queries")
    found.take("num_key_value_heads", shared, "inferred", heads)
    found.take("head_dim", params.size("head_dim"), "inferred", width // heads)
    if found.config["head_dim"] < 2 or found.config["head_dim"] % 2:
        raise ConfigError(f"{params.where}: heads of {found.config['head_dim']:,} elements cannot be rotated in pairs")
    found.take("rms_norm_eps", params.number("norm_eps"), "assumed", 1e-5)
    found.take("hidden_act", params.word("activation"), "assumed", "silu")
    _inner_width(found)


def _inner_width(found: _Found) -> None:
    """Take the width of the feed-forward network, and hold it against that of a tensor."""
    said, made = found.params.size("hidden_dim"), found.params.hidden_dim()
    rows = found.rows("layers.0.feed_forward.w1.weight", "layers.0.feed_forward.experts.0.w1.weight")
    width = made if made is not None else rows
    if width is None or rows not in (None, width):
        how = "says" if said is not None else "makes"
        raise ConfigError(
            f"{found.params.where}: {how} hidden_dim {width}, and the tensors have {rows}: give a configuration"
        )
    found.take("intermediate_size", said, "inferred", width)


def _vocabulary(found: _Found) -> None:
    rows = found.rows("tok_embeddings.weight")
    if rows is None:
        raise ConfigError(f"{found.params.where}: no tok_embeddings.weight among {len(found.catalogue):,} tensors")
    said = found.params.integer("vocab_size")
    found.set("read" if said == rows else "inferred", vocab_size=rows)
    keys = ("tied_embeddings", "tie_embeddings", "tie_word_embeddings")
    tied = next((flag for key in keys if (flag := found.params.flag(key)) is not None), None)
    found.take("tie_word_embeddings", tied, "inferred", _one_tensor(found.catalogue))
    first, last = (128_000, 128_001) if _is_llama_3(found) else (1, 2)
    for name, usual in (("bos_token_id", first), ("eos_token_id", last)):
        found.take(name, found.params.integer(name), "assumed", usual if usual < rows else None)


def _one_tensor(catalogue: Catalogue) -> bool:
    """Whether the embeddings serve as output too: that is absent, or the same bytes."""
    output = catalogue.get("output.weight")
    return output is None or output.chunks == catalogue["tok_embeddings.weight"].chunks


def _is_llama_3(found: _Found) -> bool:
    return bool(found.config["model_type"] == "llama" and found.config["vocab_size"] >= _WORDS_OF_LLAMA_3)


def _context(found: _Found) -> None:
    said = found.params.size("max_position_embeddings") or found.params.size("max_seq_len")
    found.take("max_position_embeddings", said, "assumed", _usual_context(found))


def _usual_context(found: _Found) -> int:
    """Return for how many positions a model was made, by what tells its generation."""
    params = found.params
    if found.config["model_type"] != "llama":
        return _CONTEXT
    if params.flag("use_scaled_rope"):
        return 131_072
    if _is_llama_3(found):
        return 8192
    if (params.number("rope_theta") or 0) > 10_000:
        return 16_384  # Code Llama
    return 4096 if found.config["rms_norm_eps"] > 1e-6 else 2048


def _windows(params: Params) -> _Windows:
    """Return how far attention looks back, for each layer of a pattern that repeats; None for all the way."""
    key = "sliding_window" if "sliding_window" in params else "_sliding_window"
    value = params.data.get(key)
    if not isinstance(value, list):
        return [params.size(key)]
    return [Params(params.where, {key: one}).size(key) for one in value] or [None]


def _window(found: _Found, windows: Sequence[int | None]) -> None:
    layers, sizes = found.config["num_hidden_layers"], {size for size in windows if size is not None}
    if layers % len(windows) or len(sizes) > 1:
        raise ConfigError(
            f"{found.params.where}: sliding_window {shown(str(list(windows)))} for {layers:,} layers: a pattern that "
            "fits them, of one window, is expected; give a configuration"
        )
    found.take("sliding_window", next(iter(sizes), None), "inferred", None)
    if len(set(windows)) > 1:
        types = ["full_attention" if size is None else "sliding_attention" for size in windows]
        found.set("read", layer_types=types * (layers // len(windows)))


def _experts(found: _Found) -> None:
    moe = found.params.part("moe")
    found.needed("num_local_experts", "num_experts", moe)
    found.needed("num_experts_per_tok", "num_experts_per_tok", moe)
    width = moe.size("expert_hidden_dim") if moe is not None else None
    if width not in (None, found.config["intermediate_size"]):
        raise ConfigError(f"{found.params.where}: moe: experts of {width} beside hidden_dim: give a configuration")
    if found.config["head_dim"] == found.config["hidden_size"] // found.config["num_attention_heads"]:
        del found.config["head_dim"], found.origin["head_dim"]  # as its configurations are written
