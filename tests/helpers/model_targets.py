"""What one rank needs of well-known models: fused, tensor-parallel and expert-parallel parameters with their slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from helpers.model_shapes import DeepSeek, Tensor
from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.rules import Place
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Slot, TargetTensor

FUSED = RuleSet(
    *(Place(f"{{l:path}}.self_attn.{s}_proj.weight", "{l}.self_attn.qkv_proj.weight", s) for s in "qkv"),
    *(
        Place(f"{{l:path}}.mlp.experts.{{e}}.{s}_proj.{what}", f"{{l}}.mlp.experts.w13_{what}", f"{{e}}.{s}")
        for s in ("gate", "up")
        for what in ("weight", "weight_scale_inv")
    ),
    *(
        Place(f"{{l:path}}.mlp.experts.{{e}}.down_proj.{what}", f"{{l}}.mlp.experts.w2_{what}", "{e}")
        for what in ("weight", "weight_scale_inv")
    ),
    *(
        Place(f"{{l:path}}.{s}_proj.{what}", f"{{l}}.gate_up_proj.{what}", s)
        for s in ("gate", "up")
        for what in ("weight", "weight_scale_inv")
    ),
)
"""q, k and v become one parameter, so do gate and up, and so do all experts of a layer."""


def catalogue_of_tensors(tensors: Iterable[Tensor], *, shards: int = 1) -> Catalogue:
    """Return a catalogue of `tensors`, in `shards` files of about as many tensors each."""
    every = list(tensors)
    per = -(-len(every) // shards)
    entries = []
    for n in range(shards):
        at = 0
        for name, dtype, shape in every[n * per : (n + 1) * per]:
            entries.append(TensorEntry.at(name, DTYPES[dtype], shape, f"{n + 1:05d}.safetensors", at))
            at += entries[-1].nbytes
    return Catalogue(entries, format="safetensors", files=[f"{n + 1:05d}.safetensors" for n in range(shards)])


def share(shape: Shape, dim: int, rank: int, size: int) -> Region:
    """Return the even share of `rank` along `dim`."""
    part = shape[dim] // size
    start = tuple(rank * part if d == dim else 0 for d in range(len(shape)))
    stop = tuple((rank + 1) * part if d == dim else n for d, n in enumerate(shape))
    return Region(shape, Box(start, stop))


def fused(name: str, dtype: str, parts: Iterable[tuple[str, Shape, Region]]) -> TargetTensor:
    """Return a parameter made of windows of several logical tensors, one above the other."""
    parts = list(parts)
    rows, width = sum(w.shape[0] for _, _, w in parts), parts[0][2].shape[1]
    slots, at = {}, 0
    for slot, logical, window in parts:
        local = Region((rows, width), Box((at, 0), (at + window.shape[0], width)))
        slots[slot] = Slot(local, logical, window)
        at += window.shape[0]
    return TargetTensor(name, DTYPES[dtype], (rows, width), slots)


def llama_rank(tensors: Iterable[Tensor], rank: int, size: int, *, tied: bool = False) -> dict[str, TargetTensor]:
    """Return the parameters of one rank of a Llama: q, k, v and gate, up fused, rows and columns shared."""
    out: dict[str, TargetTensor] = {}
    shapes = {name: shape for name, _, shape in tensors}
    for name, shape in shapes.items():
        module = name.split(".")[-2]
        if module in ("k_proj", "v_proj", "up_proj"):
            continue
        if module in ("q_proj", "gate_proj"):
            kinds, into = (("q", "k", "v"), "qkv") if module == "q_proj" else (("gate", "up"), "gate_up")
            logical = {k: shapes[name.replace(module, k + "_proj")] for k in kinds}
            parts = [(k, s, share(s, 0, rank, size)) for k, s in logical.items()]
            tensor = fused(name.replace(module, into + "_proj"), "BF16", parts)
        elif module in ("o_proj", "down_proj", "embed_tokens", "lm_head"):
            tensor = sharded(name, "BF16", shape, 1 if module in ("o_proj", "down_proj") else 0, rank, size)
        else:
            tensor = TargetTensor.plain(name, DTYPES["BF16"], shape)
        out[tensor.name] = tensor
    if tied:
        shape = out["model.embed_tokens.weight"].shape
        out["lm_head.weight"] = TargetTensor(
            "lm_head.weight", DTYPES["BF16"], shape, alias_of="model.embed_tokens.weight"
        )
    return out


def sharded(name: str, dtype: str, shape: Shape, dim: int, rank: int, size: int) -> TargetTensor:
    """Return one rank's share of one logical tensor."""
    window = share(shape, dim, rank, size)
    return TargetTensor(name, DTYPES[dtype], window.shape, {"": Slot(Region.whole(window.shape), shape, window)})


def deepseek_rank(model: DeepSeek, rank: int, size: int) -> dict[str, TargetTensor]:
    """Return the parameters of one rank of a DeepSeek: a share of each matrix, and whole experts of its own."""
    return {t.name: t for t in _deepseek(model, rank, size)}


def _deepseek(model: DeepSeek, rank: int, size: int) -> Iterator[TargetTensor]:
    by_row = ("q_b_proj", "kv_b_proj", "embed_tokens", "lm_head")
    for name, dtype, shape in model.tensors():
        module = name.split(".")[-2]
        if ".experts." in name:
            if ".experts.0.gate_proj." in name or ".experts.0.down_proj." in name:
                yield _experts(model, name, dtype, shape, rank, size)
        elif module == "gate_proj":
            window = share(shape, 0, rank, size)
            yield fused(name.replace("gate_proj", "gate_up_proj"), dtype, [(s, shape, window) for s in ("gate", "up")])
        elif module in by_row:
            yield sharded(name, dtype, shape, 0, rank, size)
        elif module in ("o_proj", "down_proj"):
            yield sharded(name, dtype, shape, 1, rank, size)
        elif module != "up_proj":
            yield TargetTensor.plain(name, DTYPES[dtype], shape)


def _experts(model: DeepSeek, name: str, dtype: str, shape: Shape, rank: int, size: int) -> TargetTensor:
    """Return the stacked weights (or scales) of this rank's experts; the slots of the others are absent."""
    kinds = ("gate", "up") if "gate_proj" in name else ()
    mine = range(rank * model.experts // size, (rank + 1) * model.experts // size)
    full = (len(mine), len(kinds) or 1, *shape)
    slots, names = {}, [[f"{e}.{k}" for k in kinds] or [str(e)] for e in range(model.experts)]
    for i, e in enumerate(mine):
        for k, slot in enumerate(names[e]):
            local = Region(full, Box((i, k, 0, 0), (i + 1, k + 1, *shape)))
            slots[slot] = Slot(local, shape, Region.whole(shape))
    into = name.replace("0.gate_proj.", "w13_").replace("0.down_proj.", "w2_")
    absent = frozenset(s for e in range(model.experts) if e not in mine for s in names[e])
    stacked = (len(mine), prod(full[1:3]), shape[1])
    return TargetTensor(into, DTYPES[dtype], stacked, slots, absent=absent)
