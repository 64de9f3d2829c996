"""Small layers that declare their slots, divided among some ranks, and values that say where they are from."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from tensorferry import ParallelConfig
from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.target import Layout, Slot
from tensorferry.loaders import LoadConfig, ModelConfig, get_model_loader
from tensorferry.modules.describe import describe
from tensorferry.numerics.memory import view_region
from tensorferry.report import Report

HIDDEN = 4


def ranks(size: int, *, experts: bool = True) -> list[ParallelConfig]:
    """Return the configurations of `size` ranks, which divide tensors and experts alike."""
    ep = {"ep_size": size} if experts else {}
    return [
        ParallelConfig(tp_size=size, tp_rank=rank, **ep, **({"ep_rank": rank} if experts else {}))
        for rank in range(size)
    ]


def part(local: Shape, at: int, logical: Shape, start: int, stop: int, dim: int = 0) -> Slot:
    """Return the slot that takes ``start:stop`` of dimension `dim` to position `at` of the parameter."""

    def box(shape: Shape, a: int, b: int) -> Region:
        low = tuple(a if d == dim else 0 for d in range(len(shape)))
        return Region(shape, Box(low, tuple(b if d == dim else n for d, n in enumerate(shape))))

    return Slot(box(local, at, at + stop - start), logical, box(logical, start, stop))


class Layer(nn.Module):
    """Registers parameters with what they are parts of."""

    weight: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.layouts: dict[str, Layout] = {}

    def declare(self, name: str, shape: Shape, layout: Layout) -> None:
        self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=False))
        self.layouts[name] = layout

    def tensor_slots(self) -> Mapping[str, Layout]:
        return self.layouts


class Split(Layer):
    """A weight of 12 x 12 that is divided by rows (0) or by columns (1)."""

    def __init__(self, ranks: ParallelConfig, dim: int) -> None:
        super().__init__()
        each, rank = 12 // ranks.tp_size, ranks.tp_rank
        shape = (each, 12) if dim == 0 else (12, each)
        self.declare("weight", shape, Layout({"": part(shape, 0, (12, 12), rank * each, (rank + 1) * each, dim)}))


class Attention(Layer):
    """Twelve query heads of one row each, divided, and one key and value head that every rank has."""

    def __init__(self, ranks: ParallelConfig) -> None:
        super().__init__()
        each, rank = 12 // ranks.tp_size, ranks.tp_rank
        shape = (each + 2, HIDDEN)
        slots = {
            "q": part(shape, 0, (12, HIDDEN), rank * each, (rank + 1) * each),
            "k": part(shape, each, (1, HIDDEN), 0, 1),
            "v": part(shape, each + 1, (1, HIDDEN), 0, 1),
        }
        self.declare("weight", shape, Layout(slots))


class Vocabulary(Layer):
    """Eight words, padded to twelve rows with -1: the last of four ranks has padding only."""

    def __init__(self, ranks: ParallelConfig) -> None:
        super().__init__()
        each, rank = 12 // ranks.tp_size, ranks.tp_rank
        shape = (each, HIDDEN)
        first, last = min(8, rank * each), min(8, (rank + 1) * each)
        self.declare("weight", shape, Layout({"": part(shape, 0, (8, HIDDEN), first, last)}, default=-1.0))


class Experts(Layer):
    """Five experts, the first ranks one more than the last; each is a gate and an up half of one parameter."""

    def __init__(self, ranks: ParallelConfig) -> None:
        super().__init__()
        least, more = divmod(5, ranks.ep_size)
        first = ranks.ep_rank * least + min(ranks.ep_rank, more)
        mine = range(first, first + least + (ranks.ep_rank < more))
        shape, slots = (len(mine), 4, HIDDEN), {}
        for at, expert in enumerate(mine):
            for half, row in (("gate", 0), ("up", 2)):
                local = Region(shape, Box((at, row, 0), (at + 1, row + 2, HIDDEN)))
                slots[f"{expert}.{half}"] = Slot.of(local, (2, HIDDEN))
        others = {f"{e}.{half}" for e in range(5) if e not in mine for half in ("gate", "up")}
        self.declare("weight", shape, Layout(slots, absent=others))


class Model(nn.Module):
    """All of them, and a norm that declares nothing."""

    def __init__(self, ranks: ParallelConfig) -> None:
        super().__init__()
        self.embed = Vocabulary(ranks)
        self.attention = Attention(ranks)
        self.rows = Split(ranks, 0)
        self.columns = Split(ranks, 1)
        self.experts = Experts(ranks)
        self.norm = nn.LayerNorm(HIDDEN)


def logical_values(name: str, shape: Shape) -> torch.Tensor:
    """Return the logical tensor of that name: its place in each of its values, after a number that the name gives."""
    base = 1000 * (sum(map(ord, name)) % 97)
    return (torch.arange(math.prod(shape), dtype=torch.float32) + base).reshape(shape)


def filled(model: nn.Module) -> nn.Module:
    """Fill `model` with its part of the logical tensors, by plain indexing, and padding with its default."""
    for name, tensor in describe(model).items():
        parameter = model.get_parameter(name).detach()
        parameter.fill_(0 if tensor.default is None else tensor.default)
        for key, slot in tensor.slots.items():
            into = view_region(parameter, slot.local)
            into.copy_(view_region(logical_values(f"{name}/{key}", slot.logical), slot.window).reshape(into.shape))
    return model


def load_rank(
    folder: object, model: nn.Module, parallel: ParallelConfig | None = None, **settings: object
) -> tuple[nn.Module, Report]:
    """Load the sharded state in `folder` into `model` as one rank; return both."""
    config = {"load_format": "sharded_state", "parallel": parallel or ParallelConfig(), **settings}
    quantization = config.pop("quantization", None)
    loader = get_model_loader(LoadConfig.from_dict(config))
    loaded = loader.load_model(ModelConfig(str(folder), quantization=quantization), lambda _: model)  # type: ignore[arg-type]
    assert loader.report is not None
    return loaded, loader.report


def on_meta(parallel: ParallelConfig) -> Model:
    """Return a model without values."""
    with torch.device("meta"):
        return Model(parallel)
