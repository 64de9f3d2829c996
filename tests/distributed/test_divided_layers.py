"""Layers of several ranks that run together do what one of a rank alone does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from helpers.ranks import Ranks
from tensorferry import ParallelConfig
from tensorferry.parallel import (
    ColumnParallelLinear,
    FusedMoE,
    HeadParallelRMSNorm,
    MergedColumnParallelLinear,
    ParallelLMHead,
    RowParallelLinear,
    VocabParallelEmbedding,
)

Build = Callable[[ParallelConfig], nn.Module]


def gathered(p: ParallelConfig) -> nn.Module:
    return ColumnParallelLinear(5, 10, gather_output=True, pad=True, parallel=p)


def merged(p: ParallelConfig) -> nn.Module:
    return MergedColumnParallelLinear(5, [7, 3], gather_output=True, pad=True, parallel=p)


def split_input(p: ParallelConfig) -> nn.Module:
    return RowParallelLinear(5, 6, input_is_parallel=False, pad=True, parallel=p)


class ColumnThenRow(nn.Module):
    """A padded column-parallel layer feeds a padded row-parallel one: what is padded meets zeros."""

    def __init__(self, p: ParallelConfig) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(5, 10, pad=True, parallel=p)
        self.down = RowParallelLinear(10, 4, pad=True, parallel=p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(functional.silu(self.up(x)))
        return down


def embedding(p: ParallelConfig) -> nn.Module:
    return VocabParallelEmbedding(9, 4, padding_size=p.tp_size, parallel=p)


def head(p: ParallelConfig) -> nn.Module:
    return ParallelLMHead(9, 5, bias=True, padding_size=p.tp_size, added=2, parallel=p)


def filled(layer: nn.Module, seed: int = 0) -> nn.Module:
    """Push tensors that are the same for all ranks into every slot."""
    for path, module in layer.named_modules():
        for name, layout in module.tensor_slots().items() if hasattr(module, "tensor_slots") else ():
            slots = {s: slot.logical for s, slot in layout.slots.items()}
            for slot, shape in slots.items():
                key = f"{path}.{name}.{slot.partition('@')[0]}"
                generator = torch.Generator().manual_seed(seed + sum(map(ord, key)) * 31 + len(key))
                tensor = torch.randn(shape, generator=generator)
                parameter = module.get_parameter(name)
                if isinstance(module, FusedMoE) and slot:
                    expert, kind = slot.partition("@")[0].split(".")
                    module.weight_loader(parameter, tensor, kind, int(expert))
                else:
                    parameter.weight_loader(parameter, tensor, slot or None)
    return layer


def x_of(width: int, *, tokens: int = 6) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(1))


def ids() -> torch.Tensor:
    return torch.tensor([[0, 3, 8], [4, 5, 7]])


BUILDS: dict[str, tuple[Build, Callable[[], torch.Tensor]]] = {
    "gathered and padded columns": (gathered, lambda: x_of(5)),
    "several gathered and padded columns": (merged, lambda: x_of(5)),
    "padded rows of the whole input": (split_input, lambda: x_of(5)),
    "padded columns, then padded rows": (ColumnThenRow, lambda: x_of(5)),
    "embedding": (embedding, ids),
    "head with a bias and added tokens": (head, lambda: x_of(5)),
}


def ran(rank: int, size: int, name: str) -> torch.Tensor:
    build, given = BUILDS[name]
    made: torch.Tensor = filled(build(ParallelConfig(tp_size=size, tp_rank=rank)))(given())
    return made


@pytest.mark.parametrize("name", BUILDS)
def test_three_ranks_together_do_what_one_does(name: str, three_ranks: Ranks) -> None:
    expected = ran(0, 1, name)
    for found in three_ranks.run(ran, name):
        torch.testing.assert_close(found, expected)


def normed(rank: int, size: int, heads: int) -> tuple[int, torch.Tensor]:
    norm = filled(HeadParallelRMSNorm(heads, 3, parallel=ParallelConfig(tp_size=size, tp_rank=rank)))
    first = rank * heads // size * 3
    return first, norm(x_of(heads * 3)[:, first : first + norm.heads * 3])  # type: ignore[operator]


@pytest.mark.parametrize("heads", [2, 4, 8])
def test_a_norm_over_divided_heads_knows_all_of_them(heads: int, four_ranks: Ranks) -> None:
    _, expected = normed(0, 1, heads)
    weight = filled(HeadParallelRMSNorm(heads, 3)).weight
    assert isinstance(weight, torch.Tensor)
    torch.testing.assert_close(expected, functional.rms_norm(x_of(heads * 3), [heads * 3], weight, 1e-6))
    for first, found in four_ranks.run(normed, heads):
        torch.testing.assert_close(found, expected[:, first : first + found.shape[1]])


PLACES = [0, 1, 2, 3, 4, 4, 1, 1]


def experts(rank: int, size: int, ep: int, tp: int, places: list[int] | None) -> torch.Tensor:
    """Run four experts and a shared one, with biases, which ranks have once or more often."""
    config = ParallelConfig(tp, rank if tp > 1 else 0, ep, rank * ep // size)
    layer = FusedMoE(4, 2, 6, 8, shared=1, bias=True, router_bias=True, physical_to_logical=places, parallel=config)
    made: torch.Tensor = filled(layer)(x_of(6), x_of(4))
    return made


@pytest.mark.parametrize("places", [None, PLACES])
@pytest.mark.parametrize(("tp", "ep"), [(4, 1), (4, 2), (4, 4), (1, 4)])
def test_experts_of_four_ranks_do_what_those_of_one_do(
    tp: int, ep: int, places: list[int] | None, four_ranks: Ranks
) -> None:
    expected = experts(0, 1, 1, 1, None)
    for found in four_ranks.run(experts, ep, tp, places):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
