"""Experts of a mixture, divided among ranks: whole ones by expert parallelism, each of them by tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.nn import functional

from tensorferry.config import ParallelConfig
from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.rules import Part, Place, Rule, Split
from tensorferry.core.target import Layout, Slot
from tensorferry.core.transforms import Take
from tensorferry.errors import ConfigError
from tensorferry.parallel.division import Placement, even_part, placed_experts
from tensorferry.parallel.groups import Ranks
from tensorferry.parallel.layer import ParallelLayer, taken_from
from tensorferry.parallel.linear import ALONE

__all__ = ["FusedMoE", "Routing", "softmax_routing"]

Routing = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""From router logits ``[tokens, experts]`` and how many experts to use: their weights and numbers, ``[tokens, k]``."""


def softmax_routing(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `k` likeliest experts of each token, with their probabilities scaled to a sum of one; in float32."""
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), experts


class FusedMoE(ParallelLayer):
    """The experts of one layer: gate and up projections in ``w13_weight``, down projections in ``w2_weight``.

    ``w13_weight`` is ``[experts here, 2 * inner here, hidden]``, of each expert gate above up, and ``w2_weight`` is
    ``[experts here, hidden, inner here]``; with `transposed`, their last two dimensions are exchanged, as are those of
    the tensors in the checkpoint. The slots of expert 3 are "3.w1" (gate), "3.w3" (up) and "3.w2" (down); those of
    other ranks' experts are declared absent.

    experts, hidden_size, intermediate_size: of the model. top_k: experts of each token. With expert parallelism each
    rank has some experts, dealt as `placement` says, whole where there are as many expert as tensor ranks; tensor
    ranks beyond these share the inner dimension of each. physical_to_logical: where experts are held more than once,
    which expert each place has, over all ranks; every place of an expert is filled, and the tokens take turns.
    routing: from router logits to experts. activate: from gate and up to what the down projection takes.
    reduce_results: whether to sum over the ranks; without it, the caller does.

    Raises ConfigError where ranks and sizes do not go together, with both numbers.
    """

    w13_weight: torch.Tensor
    w2_weight: torch.Tensor
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None

    def __init__(
        self,
        experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        transposed: bool = False,
        placement: Placement = "linear",
        physical_to_logical: Sequence[int] | None = None,
        routing: Routing = softmax_routing,
        activate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda gate, up: functional.silu(gate) * up,
        reduce_results: bool = True,
        parallel: ParallelConfig = ALONE,
        group: torch.distributed.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.experts, self.top_k, self.transposed = experts, top_k, transposed
        self.routing, self.activate, self.reduce_results = routing, activate, reduce_results
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.placement = _placement(experts, parallel.ep_size, placement, physical_to_logical)
        self.here = self.placement[parallel.ep_rank]
        self._inner, self._adds_bias = _inner_part(intermediate_size, parallel)
        self.ranks = (
            Ranks(parallel.tp_size, parallel.tp_rank, group)
            if parallel.tp_size >= parallel.ep_size
            else Ranks(parallel.ep_size, parallel.ep_rank, group)
        )
        self._turns = _turns(self.placement, parallel.ep_rank)
        self._declare_experts(bias, dtype)

    def forward(self, hidden: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """Return what the experts make of ``[..., hidden]``, with ``[..., experts]`` logits; summed over the ranks."""
        x = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.routing(router_logits.reshape(x.shape[0], -1), self.top_k)
        out = torch.zeros_like(x)
        for local, expert in enumerate(self.here):
            token, nth = torch.where(chosen == expert)
            turn, turns = self._turns[local]
            if turns > 1:
                mine = token % turns == turn
                token, nth = token[mine], nth[mine]
            if token.numel():
                made = self._expert(local, x[token]) * weights[token, nth, None]
                out.index_add_(0, token, made.to(out.dtype))
        return (self.ranks.sum(out) if self.reduce_results else out).reshape(hidden.shape)

    def rules(
        self, into: str, source: str, *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
    ) -> tuple[Rule, ...]:
        """Return rules for a checkpoint that has each expert by itself.

        into: the name of this layer, or of all like it, with its dot. source: what comes before the name of a
        projection, with ``{e}`` for the expert, such as ``model.layers.{i}.mlp.experts.{e}.``.
        """
        found: list[Rule] = []
        for kind, name in (("w1", gate), ("w3", up), ("w2", down)):
            for leaf in self._leaves():
                parameter = f"{into}{'w2' if kind == 'w2' else 'w13'}_{leaf}"
                found += self._copied(f"{source}{name}.{leaf}", parameter, kind)
                found.append(Place(f"{source}{name}.{leaf}", parameter, slot=f"{{e}}.{kind}"))
        return tuple(found)

    def stacked_rules(self, into: str, gate_up: str, down: str, *, interleaved: bool = False) -> tuple[Rule, ...]:
        """Return rules for a checkpoint that stacks all experts in one tensor for gate and up and one for down.

        The tensors have the dimensions of this layer's parameters, with all experts and all of the inner dimension.
        into: as in `rules`. gate_up and down: their names. interleaved: whether gate and up lie row by row in turns.
        """
        w13, w2 = f"{into}w13_weight", f"{into}w2_weight"
        halves = [Part(w13, slot, self._stacked(slot, interleaved)) for slot in self._layouts["w13_weight"].slots]
        downs = [Part(w2, slot, self._stacked(slot)) for slot in self._layouts["w2_weight"].slots]
        return Split(gate_up, tuple(halves)), Split(down, tuple(downs))

    def weight_loader(
        self,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        loaded_shard_id: str | int | None = None,
        expert_id: int | None = None,
    ) -> None:
        """Copy this rank's part of a tensor of one expert into `param`; nothing where the expert is not here.

        loaded_shard_id: "w1", "w2" or "w3". expert_id: of which expert, or None for a tensor that stacks all of them.
        """
        name = self._name_of(param)
        slots = self._layouts[name].slots
        if expert_id is None:
            for slot in slots:
                if loaded_shard_id is None or _kind(slot) == loaded_shard_id:
                    via = self._stacked(slot, interleaved=False, alone=loaded_shard_id is not None)
                    super().weight_loader(param, taken_from(loaded_weight, via, f"{type(self).__name__}.{name}"), slot)
            return
        for slot in slots:
            if slot.partition("@")[0] == f"{expert_id}.{loaded_shard_id}":
                super().weight_loader(param, loaded_weight, slot)

    def _expert(self, local: int, x: torch.Tensor) -> torch.Tensor:
        w13, w2 = self.w13_weight[local], self.w2_weight[local]
        if self.transposed:
            w13, w2 = w13.t(), w2.t()
        b13 = None if self.w13_bias is None else self.w13_bias[local]
        b2 = None if self.w2_bias is None or not self._adds_bias else self.w2_bias[local]
        gate, up = functional.linear(x, w13, b13).chunk(2, dim=-1)
        return functional.linear(self.activate(gate, up), w2, b2)

    def _declare_experts(self, bias: bool, dtype: torch.dtype | None) -> None:
        here, inner, hidden = len(self.here), len(self._inner), self.hidden_size
        columns = self.transposed
        self._declare_stack("w13_weight", (here, hidden, 2 * inner) if columns else (here, 2 * inner, hidden), dtype)
        self._declare_stack("w2_weight", (here, inner, hidden) if columns else (here, hidden, inner), dtype)
        self.register_parameter("w13_bias", None)
        self.register_parameter("w2_bias", None)
        if bias:
            self._declare_stack("w13_bias", (here, 2 * inner), dtype)
            self._declare_stack("w2_bias", (here, hidden), dtype)

    def _declare_stack(self, name: str, shape: Shape, dtype: torch.dtype | None) -> None:
        kinds = ("w1", "w3") if name.startswith("w13") else ("w2",)
        slots = {}
        for local, (expert, copy) in enumerate(_numbered(self.here)):
            for kind in kinds:
                slots[f"{expert}.{kind}" + (f"@{copy}" if copy else "")] = self._slot(name, shape, local, kind)
        absent = frozenset(f"{e}.{kind}" for e in range(self.experts) if e not in self.here for kind in kinds)
        self.declare(name, shape, Layout(slots, absent=absent), dtype=dtype)

    def _slot(self, name: str, shape: Shape, local: int, kind: str) -> Slot:
        """Return the slot of one projection of one expert: which rows of which place, from which part of it."""
        low, high = [local, *(0 for _ in shape[1:])], [local + 1, *shape[1:]]
        logical = list(shape[1:])
        start, stop = [0] * len(logical), logical.copy()
        dim = self._inner_dim(name)
        if dim is not None:
            inner = len(self._inner)
            at = inner if kind == "w3" else 0
            low[1 + dim], high[1 + dim] = at, at + inner
            logical[dim], start[dim], stop[dim] = self.intermediate_size, self._inner.start, self._inner.stop
        whole = tuple(logical)
        return Slot(Region(shape, Box(tuple(low), tuple(high))), whole, Region(whole, Box(tuple(start), tuple(stop))))

    def _inner_dim(self, name: str) -> int | None:
        """Return along which dimension of one expert's tensor the inner dimension lies; None for the bias of w2."""
        if name.endswith("bias"):
            return 0 if name.startswith("w13") else None
        return int(name.startswith("w2") != self.transposed)

    def _leaves(self) -> Iterator[str]:
        yield "weight"
        if self.w13_bias is not None:
            yield "bias"

    def _copied(self, source: str, parameter: str, kind: str) -> Iterator[Rule]:
        """Yield rules of the experts that this rank has more than once."""
        slots = self._layouts[parameter.rpartition(".")[2]].slots
        for expert in dict.fromkeys(e for e, copy in _numbered(self.here) if copy):
            places = [s for s in slots if s.partition("@")[0] == f"{expert}.{kind}"]
            yield Split(source.replace("{e}", str(expert)), tuple(Part(parameter, slot) for slot in places))

    def _stacked(self, slot: str, interleaved: bool = False, *, alone: bool = False) -> Take:
        """Return where a slot lies in a stack of all experts; `alone` for one that has only gates, or only ups."""
        kind = _kind(slot)
        layout = self._layouts["w2_weight" if kind == "w2" else "w13_weight"].slots[slot]
        dim = int((kind == "w2") != self.transposed)
        view, halves = [self.experts, *layout.logical], 1 if kind == "w2" or alone else 2
        low, high = [int(slot.partition(".")[0]), 0, 0], [int(slot.partition(".")[0]) + 1, *layout.logical]
        if halves == 2:
            at = dim + 1 if not interleaved else dim + 2
            view.insert(at, 2)
            low.insert(at, int(kind == "w3"))
            high.insert(at, int(kind == "w3") + 1)
        return Take(Region(tuple(view), Box(tuple(low), tuple(high))), layout.logical)


def _kind(slot: str) -> str:
    return slot.partition(".")[2].partition("@")[0]


def _placement(
    experts: int, ranks: int, how: Placement, physical_to_logical: Sequence[int] | None
) -> tuple[tuple[int, ...], ...]:
    """Return which experts each rank has: the one table that filling and running both use."""
    if physical_to_logical is None:
        return tuple(placed_experts(experts, ranks, rank, how) for rank in range(ranks))
    if how != "linear":
        raise ConfigError(f"expert placement {how!r}: with redundant experts, places are dealt in blocks: 'linear'")
    lost = sorted(set(range(experts)) - set(physical_to_logical))
    if lost or any(not 0 <= e < experts for e in physical_to_logical):
        raise ConfigError(
            f"physical_to_logical must have every expert from 0 to {experts - 1}, and no other; lost: {lost}"
        )
    places = [placed_experts(len(physical_to_logical), ranks, rank) for rank in range(ranks)]
    return tuple(tuple(physical_to_logical[place] for place in mine) for mine in places)


def _inner_part(size: int, parallel: ParallelConfig) -> tuple[range, bool]:
    """Return which part of an expert's inner dimension is here, and whether this rank is the one that adds its bias."""
    tp, ep = parallel.tp_size, parallel.ep_size
    if ep > tp or tp % ep:
        if ep % tp:
            raise ConfigError(
                f"experts: of {tp} tensor-parallel and {ep} expert-parallel ranks, one must divide the other"
            )
        return range(size), True
    sharing = tp // ep
    if ep > 1 and parallel.ep_rank != parallel.tp_rank // sharing:
        raise ConfigError(
            f"experts: tensor-parallel rank {parallel.tp_rank} of {tp} is expert-parallel rank"
            f" {parallel.tp_rank // sharing} of {ep}, not {parallel.ep_rank}: ranks that share experts are neighbours"
        )
    rank = parallel.tp_rank % sharing
    return even_part(size, sharing, rank, what="experts: intermediate size"), rank == 0


def _numbered(experts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each expert with how many times it came before."""
    seen: dict[int, int] = {}
    for expert in experts:
        seen[expert] = seen.get(expert, -1) + 1
        yield expert, seen[expert]


def _turns(placement: Sequence[Sequence[int]], rank: int) -> Mapping[int, tuple[int, int]]:
    """Return, by local place, which of the places of its expert it is, and how many of them there are."""
    numbered = list(_numbered([expert for mine in placement for expert in mine]))
    total: dict[int, int] = {}
    for expert, copy in numbered:
        total[expert] = copy + 1
    first = sum(len(mine) for mine in placement[:rank])
    mine = numbered[first : first + len(placement[rank])]
    return {local: (copy, total[expert]) for local, (expert, copy) in enumerate(mine)}
