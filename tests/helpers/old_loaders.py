"""Models with their own ``load_weights(iterable)``, in the manner of small inference engines, and their checkpoints.

Rank and size are arguments. `load_both_ways` fills one by really running its loader and one by tracing it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from helpers.checkpoints import write_safetensors
from tensorferry.core.lower import lower
from tensorferry.execute.base import Counters
from tensorferry.execute.simple import read_entry
from tensorferry.execute.threaded import ThreadedExecutor
from tensorferry.formats.opening import Opened, open_files
from tensorferry.modules.trace import Traced, stream_opaque, trace

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, EXPERTS, LAYERS = 16, 8, 2, 4, 24, 4, 2
VOCAB, PADDED = 50, 64
Weights = Iterable[tuple[str, torch.Tensor]]


def default_weight_loader(parameter: nn.Parameter, weight: torch.Tensor) -> None:
    """What parameters without a loader of their own get."""
    assert parameter.shape == weight.shape
    parameter.data.copy_(weight)


class Merged(nn.Module):
    """Several matrices of rows behind each other, each cut by rank: gate and up."""

    def __init__(self, sizes: list[int], width: int, tp: int, rank: int) -> None:
        super().__init__()
        self.sizes, self.tp, self.rank = sizes, tp, rank
        self.weight = nn.Parameter(torch.empty(sum(sizes) // tp, width))
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: nn.Parameter, weight: torch.Tensor, which: int = 0) -> None:
        rows = self.sizes[which] // self.tp
        at = sum(self.sizes[:which]) // self.tp
        parameter.data.narrow(0, at, rows).copy_(weight.chunk(self.tp, 0)[self.rank])


class QKV(nn.Module):
    """Query, key and value rows; keys and values are shared by several ranks where there are fewer heads."""

    def __init__(self, tp: int, rank: int) -> None:
        super().__init__()
        self.heads, self.kv = HEADS // tp, max(1, KV_HEADS // tp)
        self.rank, self.sharing = rank, max(1, tp // KV_HEADS)
        self.weight = nn.Parameter(torch.empty((self.heads + 2 * self.kv) * HEAD, HIDDEN))
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: nn.Parameter, weight: torch.Tensor, which: str) -> None:
        at = {"q": 0, "k": self.heads, "v": self.heads + self.kv}[which] * HEAD
        rows = (self.heads if which == "q" else self.kv) * HEAD
        shard = self.rank if which == "q" else self.rank // self.sharing
        parameter.data.narrow(0, at, rows).copy_(weight.narrow(0, shard * rows, rows))


class RowParallel(nn.Module):
    """A matrix whose columns are cut by rank."""

    def __init__(self, height: int, width: int, tp: int, rank: int) -> None:
        super().__init__()
        self.tp, self.rank = tp, rank
        self.weight = nn.Parameter(torch.empty(height, width // tp))
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        size = parameter.shape[1]
        parameter.data.copy_(weight.narrow(1, self.rank * size, size))


class Vocabulary(nn.Module):
    """Rows of the vocabulary by rank, padded with zeros to a round number."""

    def __init__(self, tp: int, rank: int) -> None:
        super().__init__()
        self.rows = PADDED // tp
        self.first = rank * self.rows
        self.weight = nn.Parameter(torch.empty(self.rows, HIDDEN))
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        mine = weight[self.first : self.first + self.rows]
        parameter[: mine.shape[0]].data.copy_(mine)
        parameter[mine.shape[0] :].data.fill_(0)


class Experts(nn.Module):
    """Gate and up of this rank's experts in one tensor of three dimensions, down in another."""

    def __init__(self, tp: int, rank: int) -> None:
        super().__init__()
        self.count = EXPERTS // tp
        self.first = rank * self.count
        self.w13 = nn.Parameter(torch.empty(self.count, 2 * INNER, HIDDEN))
        self.w2 = nn.Parameter(torch.empty(self.count, HIDDEN, INNER))

    def load(self, expert: int, which: str, weight: torch.Tensor) -> None:
        local = expert - self.first
        if not 0 <= local < self.count:
            return
        if which == "down":
            self.w2.data[local] = weight
        else:
            self.w13.data[local].chunk(2, 0)[which == "up"].copy_(weight)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(HIDDEN))


class Layer(nn.Module):
    def __init__(self, tp: int, rank: int) -> None:
        super().__init__()
        self.norm = Norm()
        self.qkv_proj = QKV(tp, rank)
        self.o_proj = RowParallel(HIDDEN, HEADS * HEAD, tp, rank)
        self.gate_up_proj = Merged([INNER, INNER], HIDDEN, tp, rank)
        self.experts = Experts(tp, rank)


class NanoModel(nn.Module):
    """A decoder with every sort of layer that small engines shard."""

    def __init__(self, tp: int = 1, rank: int = 0) -> None:
        super().__init__()
        self.embed = Vocabulary(tp, rank)
        self.layers = nn.ModuleList(Layer(tp, rank) for _ in range(LAYERS))
        self.norm = Norm()
        self.lm_head = Vocabulary(tp, rank)

    def load_weights(self, weights: Weights) -> set[str]:
        parameters, loaded = dict(self.named_parameters()), set()
        for name, weight in weights:
            if name.endswith("inv_freq"):
                continue
            if found := re.match(r"(.*)\.(q|k|v)_proj\.(.*)", name):
                name = f"{found[1]}.qkv_proj.{found[3]}"
                parameters[name].weight_loader(parameters[name], weight, found[2])  # type: ignore[attr-defined]
            elif found := re.match(r"(.*experts)\.(\d+)\.(gate|up|down)_proj", name):
                self.get_submodule(found[1]).load(int(found[2]), found[3], weight)  # type: ignore[operator]
                name = f"{found[1]}.{'w2' if found[3] == 'down' else 'w13'}"
            elif found := re.match(r"(.*)\.(gate|up)_proj\.(.*)", name):
                name = f"{found[1]}.gate_up_proj.{found[3]}"
                which = ["gate", "up"].index(found[2])
                parameters[name].weight_loader(parameters[name], weight, which)  # type: ignore[attr-defined]
            else:
                loader = getattr(parameters[name], "weight_loader", default_weight_loader)
                loader(parameters[name], weight)
            loaded.add(name)
        return loaded


def nano_checkpoint(path: Path) -> Path:
    """Write the checkpoint of a `NanoModel`, entries of layers in an order of its own."""
    random = torch.Generator().manual_seed(3)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    tensors = {"lm_head.weight": some(VOCAB, HIDDEN), "embed.weight": some(VOCAB, HIDDEN), "norm.weight": some(HIDDEN)}
    for layer in range(LAYERS):
        p = f"layers.{layer}."
        tensors |= {f"{p}norm.weight": some(HIDDEN), f"{p}rotary.inv_freq": some(2)}
        tensors |= {f"{p}{n}_proj.weight": some(KV_HEADS * HEAD, HIDDEN) for n in "kv"}
        tensors |= {f"{p}q_proj.weight": some(HEADS * HEAD, HIDDEN), f"{p}o_proj.weight": some(HIDDEN, HEADS * HEAD)}
        tensors |= {f"{p}{n}_proj.weight": some(INNER, HIDDEN) for n in ("up", "gate")}
        for e in range(EXPERTS):
            tensors |= {f"{p}experts.{e}.{n}_proj.weight": some(INNER, HIDDEN) for n in ("gate", "up")}
            tensors[f"{p}experts.{e}.down_proj.weight"] = some(HIDDEN, INNER)
    return write_safetensors(path / "model.safetensors", tensors).parent


@dataclass
class Loaded:
    """A model filled by its own loader, the same filled by tracing, and how."""

    expected: nn.Module
    got: nn.Module
    traced: Traced
    counters: Counters

    def assert_equal(self) -> None:
        """Every parameter and buffer has the same bits both ways."""
        expected, got = self.expected.state_dict(), self.got.state_dict()
        assert expected.keys() == got.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensor, got[name]), name


def load_both_ways(make: Callable[[], nn.Module], folder: Path, *, on_meta: bool = True) -> Loaded:
    """Fill a model from `make` by its loader with all entries, and another by the traced plan and what is opaque.

    on_meta: whether a twin on meta is traced, or the model itself.
    """
    expected, got = poisoned(make()), poisoned(make())
    with open_files(folder) as opened:
        expected.load_weights(whole_entries(opened, opened.catalogue))  # type: ignore[operator]
        traced = trace(twin(make) if on_meta else got, opened.catalogue)
        traced.plan.raise_for_problems()
        counters = execute(traced, opened, got)
        stream_opaque(got, traced, whole_entries(opened, traced.stream))
    return Loaded(expected, got, traced, counters)


def execute(traced: Traced, opened: Opened, model: nn.Module) -> Counters:
    """Run the plan on `model`, reading no byte that it does not need."""
    schedule = lower(traced.plan, max_gap=0, max_read=1 << 20, max_staging=1 << 22, waste=1.0)
    parameters = {n: t.data for n, t in (*model.named_parameters(), *model.named_buffers())}
    return ThreadedExecutor(2).run(schedule, opened.storage, parameters)


def twin(make: Callable[[], nn.Module]) -> nn.Module:
    """Return the model of `make` on meta."""
    with torch.device("meta"):
        return make()


def poisoned(model: nn.Module) -> nn.Module:
    """Set every value of `model` to a number that no checkpoint here has."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(77)
    return model


def whole_entries(opened: Opened, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the entries of an open checkpoint, read whole."""
    for name in names:
        yield name, read_entry(opened.storage, opened.catalogue[name])
