"""Linear layers whose weights are divided among ranks by rows, by columns, or not at all.

Weights are ``[output, input]``, as torch's. Column-parallel layers have rows of it: a part of the outputs, from all of
the input. Row-parallel layers have columns: from a part of the input, a summand of all outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch.nn import functional

from tensorferry.config import ParallelConfig
from tensorferry.core.boxes import Shape
from tensorferry.core.target import Layout, Slot
from tensorferry.core.transforms import Take
from tensorferry.errors import ConfigError
from tensorferry.parallel.division import even_part, padded, part_of, part_slot, split_heads
from tensorferry.parallel.groups import Ranks
from tensorferry.parallel.layer import ParallelLayer

__all__ = [
    "ColumnParallelLinear",
    "FusedOrder",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "ReplicatedLinear",
    "RowParallelLinear",
]

FusedOrder = Literal["blocks", "interleaved"]
"""How q, k and v lie in one tensor on disk: one after the other, or, for each key-value head, its q heads, k and v."""

ALONE = ParallelConfig()


class ReplicatedLinear(ParallelLayer):
    """A linear layer that every rank has whole. input: ``[..., input_size]``, output: ``[..., output_size]``."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self, input_size: int, output_size: int, bias: bool = True, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        shape = (output_size, input_size)
        self.declare("weight", shape, Layout({"": Slot.whole(shape)}), dtype=dtype)
        self.register_parameter("bias", None)
        if bias:
            self.declare("bias", (output_size,), Layout({"": Slot.whole((output_size,))}), dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T + bias``."""
        return functional.linear(x, self.weight, self.bias)


class MergedColumnParallelLinear(ParallelLayer):
    """Several linear layers of the same input in one, the outputs of each divided among the ranks.

    output_sizes: of each, whole. names: of their slots, such as ("gate", "up"); by default "0", "1" and so on. pad:
    give each part rows of zeros, so that the ranks divide it, instead of refusing; the outputs then have these rows,
    too, unless they are gathered. gather_output: join the outputs of all ranks, each part by itself.
    input: ``[..., input_size]``, output: ``[..., sum of this rank's parts]``, or of all with gather_output.

    Raises ConfigError where the ranks do not divide an output size, with both numbers.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = True,
        *,
        names: Sequence[str] | None = None,
        gather_output: bool = False,
        pad: bool = False,
        parallel: ParallelConfig = ALONE,
        group: torch.distributed.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        names = tuple(map(str, range(len(output_sizes)))) if names is None else tuple(names)
        if len(names) != len(output_sizes):
            raise ConfigError(f"{len(output_sizes)} output sizes and {len(names)} names: each needs one of its own")
        if len(set(names)) != len(names):
            raise ConfigError(f"the names {', '.join(map(repr, names))} of the slots are not all different")
        self.input_size, self.output_sizes, self.gather_output = input_size, tuple(output_sizes), gather_output
        self.ranks = Ranks(parallel.tp_size, parallel.tp_rank, group)
        sizes = [padded(size, self.ranks.size) if pad else size for size in output_sizes]
        what = f"{type(self).__name__}: output size"
        parts = [even_part(size, self.ranks.size, self.ranks.rank, what=what) for size in sizes]
        self._rows = [len(part) for part in parts]
        taken = dict(zip(names, zip(output_sizes, parts, strict=True), strict=True))
        default = 0.0 if pad else None
        self.declare_rows("weight", taken, (input_size,), default=default, dtype=dtype)
        self.register_parameter("bias", None)
        if bias:
            self.declare_rows("bias", taken, default=default, dtype=dtype)

    def fused_parts(self, parameter: str = "weight") -> Sequence[tuple[str, Take]]:
        """Return where each part lies in one tensor that holds them all, one after the other."""
        rest = (self.input_size,) if parameter == "weight" else ()
        return _blocks(list(self._layouts[parameter].slots), self.output_sizes, rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs, part after part, or those of all ranks with `gather_output`."""
        out = functional.linear(x, self.weight, self.bias)
        if not self.gather_output or self.ranks.size == 1:
            return out
        joined = (self.ranks.join(part) for part in torch.split(out, self._rows, dim=-1))
        return torch.cat([part[..., :size] for part, size in zip(joined, self.output_sizes, strict=True)], dim=-1)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """A linear layer whose outputs are divided among the ranks. Its only slot is the unnamed one.

    input: ``[..., input_size]``, output: ``[..., output_size / ranks]``, or ``[..., output_size]`` with gather_output.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        pad: bool = False,
        parallel: ParallelConfig = ALONE,
        group: torch.distributed.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size, [output_size], bias, names=[""], gather_output=gather_output, pad=pad, parallel=parallel,
            group=group, dtype=dtype,
        )  # fmt: skip

    def fused_parts(self, parameter: str = "weight") -> Sequence[tuple[str, Take]]:
        """Return nothing: the tensor on disk is the only slot's."""
        return ()


class QKVParallelLinear(ParallelLayer):
    """The projections of attention in one, divided by heads; slots q, k and v, in this order.

    Where there are more ranks than key-value heads, several ranks have the same ones. v_head_size: where it is another
    than that of q and k. fused: how one tensor on disk that holds all three is laid out.
    input: ``[..., hidden_size]``, output: ``[..., q | k | v of this rank's heads]``, for `split` to take apart.

    Raises ConfigError where heads and ranks do not go together; see `split_heads`.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        heads: int,
        kv_heads: int | None = None,
        bias: bool = True,
        *,
        v_head_size: int | None = None,
        fused: FusedOrder = "blocks",
        parallel: ParallelConfig = ALONE,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads, v_head_size = kv_heads or heads, v_head_size or head_size
        mine = split_heads(heads, kv_heads, parallel.tp_size, parallel.tp_rank)
        self.hidden_size, self.head_size, self.v_head_size = hidden_size, head_size, v_head_size
        self.heads, self.kv_heads, self.replicas = len(mine.query), len(mine.kv), mine.replicas
        self._all = {"q": (heads, head_size), "k": (kv_heads, head_size), "v": (kv_heads, v_head_size)}
        self._fused_order = fused
        taken = {
            slot: (count * size, range(part.start * size, part.stop * size))
            for (slot, (count, size)), part in zip(self._all.items(), (mine.query, mine.kv, mine.kv), strict=True)
        }
        self._widths = [len(part) for _, part in taken.values()]
        self.declare_rows("weight", taken, (hidden_size,), dtype=dtype)
        self.register_parameter("bias", None)
        if bias:
            self.declare_rows("bias", taken, dtype=dtype)

    def fused_parts(self, parameter: str = "weight") -> Sequence[tuple[str, Take]]:
        """Return where q, k and v lie in one tensor, in the order that the layer was told."""
        rest = (self.hidden_size,) if parameter == "weight" else ()
        sizes = [count * size for count, size in self._all.values()]
        if self._fused_order == "blocks":
            return _blocks(list(self._all), sizes, rest)
        groups = self._all["k"][0]
        rows = [size // groups for size in sizes]
        view = (groups, sum(rows), *rest)
        return [
            (slot, Take(part_of(view, 1, at, at + n), (size, *rest)))
            for slot, size, n, at in zip(self._all, sizes, rows, accumulate(rows, initial=0), strict=False)
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return q, k and v of this rank's heads, one after the other."""
        return functional.linear(x, self.weight, self.bias)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v of what `forward` returned, as views: ``[..., heads * head_size]`` and so on."""
        q, k, v = torch.split(qkv, self._widths, dim=-1)
        return q, k, v


class RowParallelLinear(ParallelLayer):
    """A linear layer whose inputs are divided among the ranks; their outputs are summed.

    The bias is whole on every rank and is added once, after the sum. input_is_parallel: whether the input is this
    rank's part already. reduce_results: whether to sum; without it a bias is refused, as it would be added by every
    rank. pad: give the weight columns of zeros, so that the ranks divide it, instead of refusing.
    input: ``[..., input_size / ranks]``, or ``[..., input_size]``; output: ``[..., output_size]``.

    Raises ConfigError where the ranks do not divide the input size, with both numbers.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        reduce_results: bool = True,
        pad: bool = False,
        parallel: ParallelConfig = ALONE,
        group: torch.distributed.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.ranks = Ranks(parallel.tp_size, parallel.tp_rank, group)
        if bias and not reduce_results and self.ranks.size > 1:
            raise ConfigError("RowParallelLinear: without reduce_results every rank would add the bias: leave it out")
        self.input_size, self.output_size = input_size, output_size
        self.input_is_parallel, self.reduce_results = input_is_parallel, reduce_results
        size = padded(input_size, self.ranks.size) if pad else input_size
        self._part = even_part(size, self.ranks.size, self.ranks.rank, what="RowParallelLinear: input size")
        local = (output_size, len(self._part))
        slot = part_slot(local, 0, (output_size, input_size), self._part, 1)
        self.declare("weight", local, Layout({"": slot}, default=0.0 if pad else None), dtype=dtype)
        self.register_parameter("bias", None)
        if bias:
            self.declare("bias", (output_size,), Layout({"": Slot.whole((output_size,))}), dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all ranks together, the bias added once."""
        if not self.input_is_parallel and self.ranks.size > 1:
            x = functional.pad(x, (0, max(0, self._part.stop - x.shape[-1])))[..., self._part.start : self._part.stop]
        if not self.reduce_results:
            return functional.linear(x, self.weight, self.bias)
        out = self.ranks.sum(functional.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


def _blocks(names: Sequence[str], sizes: Sequence[int], rest: Shape) -> list[tuple[str, Take]]:
    """Return where tensors of so many rows each lie in one that holds them one after the other."""
    view, bounds = (sum(sizes), *rest), pairwise(accumulate(sizes, initial=0))
    return [
        (name, Take(part_of(view, 0, start, stop), (stop - start, *rest)))
        for name, (start, stop) in zip(names, bounds, strict=True)
    ]
