"""From the names of a GGUF file to those of transformers' checkpoints: rules as data, made for the sizes of a model.

Where the converter of llama.cpp changed values or took tensors apart, the rules say how that is undone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from tensorferry.compat.gguf.architectures import ARCHITECTURES, TOP, UNUSED, Architecture
from tensorferry.compat.translation import Naming, Sizes
from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.catalogue import Catalogue
from tensorferry.core.mapped import Laid
from tensorferry.core.rules import Drop, Ignore, Part, Place, Rule, Split, sources
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Slot
from tensorferry.core.transforms import Add, Chain, Permute, Take, Transform, Transpose
from tensorferry.errors import ConfigError, shown

__all__ = ["architecture_of", "naming"]

_GGUF, _HF = "blk.{i}.", "model.layers.{i}."
_PARTS = ("gate", "up", "down")


def architecture_of(catalogue: Catalogue) -> str | None:
    """Return ``general.architecture`` of a GGUF file whose tensors have GGUF's names; None for any other checkpoint."""
    if catalogue.format != "gguf":
        return None
    ours = any(name.startswith("blk.") or name == "token_embd.weight" for name in catalogue)
    return catalogue.metadata.get("general.architecture", "") if ours else None


def naming(architecture: str, config: Mapping[str, Any], names: Iterable[str] | None = None) -> Naming:
    """Return the names of tensors for ``general.architecture``, for a model of the sizes in `config`.

    config: as transformers writes it. names: the entries there are; rules that none of them matches are left out.
    Without them, no rule for fused tensors is made, and then ``rules.inverse()`` leads back where all is one to one.

    Raises ConfigError for an architecture that is not known here.
    """
    known = ARCHITECTURES.get(architecture)
    if known is None:
        raise ConfigError(
            f"general.architecture {shown(architecture)!r}: the names of its tensors are not known here, only those "
            f"of {', '.join(ARCHITECTURES)}; pass rules="
        )
    sizes = Sizes.of(config)
    rules = [*_whole(known, sizes), *_split_up(architecture, known, sizes)]
    if names is None:
        return Naming(RuleSet(*_one_to_one(rules)), _laid(architecture, sizes, True))
    stems = frozenset(_folded(name) for name in names)
    matched = [rule for rule in rules if _matches(rule, stems)]
    return Naming(RuleSet(*matched), _laid(architecture, sizes, "blk.0.attn_k_b.weight" in stems))


def _one_to_one(rules: Iterable[Rule]) -> Iterator[Rule]:
    return (rule for rule in rules if isinstance(rule, Place | Ignore))


def _folded(name: str) -> str:
    """Return the name that stands for all that differ from `name` in numbers."""
    return re.sub(r"\.[0-9]+(?=\.)", ".0", name)


def _matches(rule: Rule, stems: Collection[str]) -> bool:
    return any(re.sub(r"\{[a-z_:]+\}", "0", source) in stems for source in sources(rule))


def _whole(known: Architecture, sizes: Sizes) -> Iterator[Rule]:
    """Yield rules for tensors that are one and the same on both sides."""
    for stem, name in TOP.items():
        yield Place(f"{stem}.weight", f"{name}.weight", via=_of_norm(known, stem))
        if stem == "output":
            yield Place(f"{stem}.bias", f"{name}.bias")
    for stem, name in known.blocks.items():
        for ending in ("weight", "bias"):
            via = _of_rows(known, sizes, stem, ending)
            yield Place(f"{_GGUF}{stem}.{ending}", f"{_HF}{name}.{ending}", via=via or _of_norm(known, stem))
    for stem, name in known.bare.items():
        yield Place(_GGUF + stem, _HF + name)
    for part, name in known.experts.items():
        yield Place(f"{_GGUF}ffn_{part}.{{e}}.weight", _HF + name)
    for name, why in UNUSED.items():
        yield Ignore(name, why)
    stacks = ("attn_qkv", *(f"ffn_{part}_exps" for part in (*_PARTS, "gate_up")))
    for stem in (*TOP, *(_GGUF + stem for stem in (*known.blocks, *stacks))):
        yield Drop(f"{stem}.input_scale", "a factor of activations, for products with activations of four bits")


def _of_norm(known: Architecture, stem: str) -> Transform | None:
    return Add(-known.norms) if known.norms and stem.endswith("norm") else None


def _of_rows(known: Architecture, sizes: Sizes, stem: str, ending: str) -> Transform | None:
    """Return what puts the rows of a query or key projection into the order of halves."""
    if not known.interleaved or stem not in ("attn_q", "attn_k"):
        return None
    heads = sizes.heads if stem == "attn_q" else sizes.kv_heads
    view = (heads, sizes.key // 2, 2, sizes.width)
    return Permute(view, (0, 2, 1, 3)) if ending == "weight" else Permute(view[:3], (0, 2, 1))


def _split_up(architecture: str, known: Architecture, sizes: Sizes) -> Iterator[Rule]:
    """Yield rules for entries of which tensors are parts, and for those that are part of a tensor."""
    if architecture == "gpt-oss":
        yield from _of_gpt_oss()
    elif architecture == "deepseek2":
        yield from _of_latent_attention()
    elif "attn_qkv" not in known.blocks:
        yield from (_fused_attention(known, sizes, ending) for ending in ("weight", "bias"))
    if known.experts and sizes.experts:
        yield from _stacked_experts(known, sizes)


def _fused_attention(known: Architecture, sizes: Sizes, ending: str) -> Rule:
    """Return the rule for rows of queries, keys and values in one tensor."""
    counts = (sizes.heads * sizes.key, sizes.kv_heads * sizes.key, sizes.kv_heads * sizes.value)
    inner = (sizes.width,) if ending == "weight" else ()
    parts, at = [], 0
    for stem, count in zip(("attn_q", "attn_k", "attn_v"), counts, strict=True):
        rows = _rows((sum(counts), *inner), 0, at, at + count)
        after = _of_rows(known, sizes, stem, ending)
        taken = Take(rows, rows.shape)
        via: Transform = taken if after is None else Chain((taken, after))
        parts.append(Part(f"{_HF}{known.blocks[stem]}.{ending}", via=via))
        at += count
    return Split(f"{_GGUF}attn_qkv.{ending}", tuple(parts))


def _rows(shape: Shape, dim: int, start: int, stop: int) -> Region:
    whole = Box.whole(shape)
    return Region(shape, Box(_with(whole.start, dim, start), _with(whole.stop, dim, stop)))


def _with(numbers: Shape, dim: int, value: int) -> Shape:
    return (*numbers[:dim], value, *numbers[dim + 1 :])


def _stacked_experts(known: Architecture, sizes: Sizes) -> Iterator[Rule]:
    """Yield rules for the experts of a layer behind each other in one tensor, gate and up apart or in one."""
    wide, narrow = (sizes.expert_width, sizes.width), (sizes.width, sizes.expert_width)
    for part in _PARTS:
        shape = (sizes.experts, *(narrow if part == "down" else wide))
        parts = _members(known.experts[part], shape, 0, shape[1])
        yield Split(f"{_GGUF}ffn_{part}_exps.weight", tuple(parts))
    both = (sizes.experts, 2 * sizes.expert_width, sizes.width)
    halves = [
        *_members(known.experts["gate"], both, 0, sizes.expert_width),
        *_members(known.experts["up"], both, sizes.expert_width, both[1]),
    ]
    yield Split(f"{_GGUF}ffn_gate_up_exps.weight", tuple(halves))


def _members(name: str, shape: Shape, start: int, stop: int) -> Iterator[Part]:
    """Yield where each expert of a stack goes: rows `start` to `stop` of it."""
    for e in range(shape[0]):
        box = Box((e, start, 0), (e + 1, stop, shape[2]))
        yield Part(_HF + name.replace("{e}", str(e)), via=Take(Region(shape, box), (stop - start, shape[2])))


def _of_latent_attention() -> Iterator[Rule]:
    into = f"{_HF}self_attn.kv_b_proj.weight"
    yield Place(f"{_GGUF}attn_k_b.weight", into, "k", Transpose((0, 2, 1)))
    yield Place(f"{_GGUF}attn_v_b.weight", into, "v")


def _of_gpt_oss() -> Iterator[Rule]:
    experts = f"{_HF}mlp.experts."
    for part in ("gate", "up"):
        yield Place(f"{_GGUF}ffn_{part}_exps.weight", f"{experts}gate_up_proj", part, Transpose((0, 2, 1)))
        yield Place(f"{_GGUF}ffn_{part}_exps.bias", f"{experts}gate_up_proj_bias", part)
    yield Place(f"{_GGUF}ffn_down_exps.weight", f"{experts}down_proj", via=Transpose((0, 2, 1)))
    yield Place(f"{_GGUF}ffn_down_exps.bias", f"{experts}down_proj_bias")


def _laid(architecture: str, sizes: Sizes, split_keys: bool) -> Mapping[str, Laid]:
    """Return how tensors of parts are laid out. split_keys: latent keys and values are in two tensors."""
    if architecture == "qwen2moe":
        shape = (1, sizes.width)  # older files hold a vector
        slot = Slot.whole(shape, also=(shape[1:],))
        return {f"{_HF}mlp.shared_expert_gate.weight": Laid(shape, {"": slot})}
    if architecture == "deepseek2" and split_keys:
        view = (sizes.heads, sizes.nope + sizes.value, sizes.latent)
        keys, values = _rows(view, 1, 0, sizes.nope), _rows(view, 1, sizes.nope, view[1])
        slots = {"k": Slot.of(keys, keys.shape), "v": Slot.of(values, values.shape)}
        return {f"{_HF}self_attn.kv_b_proj.weight": Laid((view[0] * view[1], view[2]), slots)}
    if architecture == "gpt-oss":
        experts = f"{_HF}mlp.experts."
        weight = (sizes.experts, sizes.width, sizes.expert_width, 2)
        bias = (sizes.experts, sizes.expert_width, 2)
        return {f"{experts}gate_up_proj": _alternating(weight), f"{experts}gate_up_proj_bias": _alternating(bias)}
    return {}


def _alternating(view: Shape) -> Laid:
    """Return the layout of a tensor in which elements of gate and up alternate along the last dimension."""
    last = len(view) - 1
    slots = {part: Slot.of(_rows(view, last, n, n + 1), view[:-1]) for n, part in enumerate(("gate", "up"))}
    return Laid((*view[:-2], 2 * view[-2]), slots)
