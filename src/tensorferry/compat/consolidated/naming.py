"""From the names of Meta and Mistral to those of transformers' checkpoints: rules as data, made for a model's sizes.

Source: the reference implementations and the published models in both layouts. The rows of a query or key head
alternate between the halves that transformers rotates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from tensorferry.compat.translation import Naming, Sizes
from tensorferry.core.boxes import Box, Region
from tensorferry.core.rules import Ignore, Part, Place, Rule, Split, compiled, sources
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.transforms import Chain, Permute, Take, Transform, Transpose
from tensorferry.errors import ConfigError, shown

__all__ = ["MODEL_TYPES", "OTHER_SENSES", "has_native_names", "naming", "rules_for"]

MODEL_TYPES = ("llama", "mistral", "ministral", "ministral3", "mixtral")
"""Kinds of transformers' models, by ``model_type``, whose weights are published in this layout."""

OTHER_SENSES: Mapping[str, str] = MappingProxyType(
    {
        "vision_encoder.": "a vision encoder", "vision_language_adapter.": "a vision encoder",
        "patch_merger.": "a vision encoder", "pre_mm_projector_norm.": "a vision encoder",
        "vision_model.": "a vision encoder", "mm_whisper_embeddings.": "an audio encoder",
        "mm_streams_embeddings.": "an audio encoder",
    }
)  # fmt: skip
"""Beginnings of names that belong to models of more than text."""

_TOP = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_DENSE = {"feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj"}
_EXPERTS = ("w1", "w2", "w3")
_HF = "model.layers.{i}."
_COMPUTED = "rotary frequencies, which the model computes from its configuration"
_UNUSED = ("rope.freqs", "layers.{i}.attention.inner_attention.rope.freqs")
_NATIVE = re.compile(r"layers\.\d+\.attention\.wq\.weight")


def has_native_names(names: Iterable[str]) -> bool:
    """Whether tensors have the names of Meta and Mistral.

    >>> has_native_names(["tok_embeddings.weight", "layers.0.attention.wq.weight"])
    True
    """
    return any(_NATIVE.fullmatch(name) for name in names)


def rules_for(config: Mapping[str, Any], names: Iterable[str] | None = None) -> RuleSet:
    """Return rules from the names of Meta and Mistral to those of transformers' checkpoints, for any engine that takes
    the latter.

    config: the sizes of the model, under the names of config.json. names: the entries there are; without them, all
    rules are one to one and ``.inverse()`` leads back, row orders included. Raises ConfigError where a size is absent.

    >>> sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    >>> rules = rules_for(sizes)
    >>> rules.explain(["layers.0.attention.wo.weight", "layers.1.attention.wo.weight"])
    ['layers.{0,1}.attention.wo.weight -> model.layers.*.self_attn.o_proj.weight']
    >>> rules.inverse().route("model.layers.7.self_attn.k_proj.weight").to[0].into
    'layers.7.attention.wk.weight'
    """
    return naming(config, names).rules


def naming(config: Mapping[str, Any], names: Iterable[str] | None = None) -> Naming:
    """Return what `rules_for` does, as the naming of a checkpoint.

    Raises ConfigError, too, where `names` has those of a vision or audio encoder.
    """
    sizes = Sizes.of(config)
    rules = list(_one_to_one(sizes))
    if names is None:
        return Naming(RuleSet(*rules))
    given = list(names)
    _refuse_other_senses(given)
    stems = {re.sub(r"\.[0-9]+(?=\.)", ".0", name) for name in given}
    older = _first_mixtral(sizes) if "layers.0.block_sparse_moe.w1" in stems else ()
    return Naming(RuleSet(*(rule for rule in (*rules, *older) if _matches(rule, stems))))


def _refuse_other_senses(names: Iterable[str]) -> None:
    for name in names:
        what = next((what for start, what in OTHER_SENSES.items() if name.startswith(start)), None)
        if what is not None:
            raise ConfigError(
                f"{shown(name)}: it belongs to {what}, and only models of text are read in this layout: take the "
                "checkpoint that transformers wrote, or pass rules="
            )


def _matches(rule: Rule, stems: Iterable[str]) -> bool:
    pattern = compiled(sources(rule)[0])
    return any(pattern.fullmatch(stem) for stem in stems)


def _one_to_one(sizes: Sizes) -> Iterator[Rule]:
    for stem, name in _TOP.items():
        yield Place(f"{stem}.weight", f"{name}.weight")
    for stem, name in {**_LAYER, **({} if sizes.experts else _DENSE)}.items():
        yield Place(f"layers.{{i}}.{stem}.weight", f"{_HF}{name}.weight", via=_of_rows(stem, sizes))
    if sizes.experts:
        yield Place("layers.{i}.feed_forward.gate.weight", f"{_HF}block_sparse_moe.gate.weight")
        for leaf in _EXPERTS:
            name = f"experts.{{e}}.{leaf}.weight"
            yield Place(f"layers.{{i}}.feed_forward.{name}", f"{_HF}block_sparse_moe.{name}")
    for name in _UNUSED:
        yield Ignore(name, _COMPUTED)


def _of_rows(stem: str, sizes: Sizes) -> Transform | None:
    """Return what puts the rows of a query or key projection into the order of halves."""
    heads = {"attention.wq": sizes.heads, "attention.wk": sizes.kv_heads}.get(stem)
    return None if heads is None else Permute((heads, sizes.key // 2, 2, sizes.width), (0, 2, 1, 3))


def _first_mixtral(sizes: Sizes) -> Iterator[Rule]:
    """Yield rules for the first Mixtral: experts below each other in one matrix, those of w2 turned over."""
    yield Place("layers.{i}.block_sparse_moe.gate.weight", f"{_HF}block_sparse_moe.gate.weight")
    for leaf in _EXPERTS:
        parts = tuple(_expert(e, leaf, sizes) for e in range(sizes.experts))
        yield Split(f"layers.{{i}}.block_sparse_moe.{leaf}", parts)


def _expert(e: int, leaf: str, sizes: Sizes) -> Part:
    shape = (sizes.expert_width, sizes.width)
    rows = Box((e * shape[0], 0), ((e + 1) * shape[0], shape[1]))
    taken = Take(Region((sizes.experts * shape[0], shape[1]), rows), shape)
    via: Transform = Chain((taken, Transpose((1, 0)))) if leaf == "w2" else taken
    return Part(f"{_HF}block_sparse_moe.experts.{e}.{leaf}.weight", via=via)
