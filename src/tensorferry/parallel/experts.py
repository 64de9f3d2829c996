"""Experts of a mixture, divided among ranks: whole ones by expert parallelism, each of them by tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from tensorferry.config import ParallelConfig
from tensorferry.core.rules import Rule
from tensorferry.core.target import Layout, Slot
from tensorferry.errors import PlanError
from tensorferry.parallel.division import Placement
from tensorferry.parallel.expert_layout import (
    PROJECTIONS,
    Extent,
    StackedExperts,
    expert_of,
    inner_part,
    kind_of,
    placement_of,
    turns_of,
)
from tensorferry.parallel.expert_rules import ExpertRules
from tensorferry.parallel.groups import Ranks
from tensorferry.parallel.layer import ParallelLayer, taken_from
from tensorferry.parallel.linear import ALONE
from tensorferry.parallel.routing import Routing, sigmoid_routing, softmax_routing

__all__ = ["FusedMoE"]


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate) * up


class FusedMoE(ParallelLayer):
    """The experts of one layer: gate and up projections in ``w13_weight``, down projections in ``w2_weight``.

    ``w13_weight`` is ``[experts here, 2 * inner here, hidden]``, of each expert gate above up, and ``w2_weight`` is
    ``[experts here, hidden, inner here]``; with `transposed`, their last two dimensions are exchanged, as are those of
    the tensors in the checkpoint. The slots of expert 3 are "3.w1" (gate), "3.w3" (up) and "3.w2" (down); those of
    other ranks' experts are declared absent.

    experts, hidden_size, intermediate_size: of the model. top_k: experts of each token. shared: experts that every
    token uses besides, with a weight of one; they are numbered after the others and placed as these are. With expert
    parallelism each rank has some experts, dealt as `placement` says, whole where there are as many expert as tensor
    ranks; tensor ranks beyond these share the inner dimension of each. physical_to_logical: where experts are held
    more than once, which expert each place has, over all ranks; every place of an expert is filled, and the tokens
    take turns.
    router_bias: whether there is an ``e_score_correction_bias`` ``[experts]``, in float32 whatever the `dtype`.
    routing: from router logits, and the router bias if there is one, to experts; by default `softmax_routing`, or
    `sigmoid_routing` with a router bias. activate: from gate and up to what the down projection takes.
    reduce_results: whether to sum over the ranks; without it, the caller does.

    Raises ConfigError where ranks and sizes do not go together, with both numbers.
    """

    w13_weight: torch.Tensor
    w2_weight: torch.Tensor
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    e_score_correction_bias: torch.Tensor | None

    def __init__(
        self,
        experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        shared: int = 0,
        bias: bool = False,
        router_bias: bool = False,
        transposed: bool = False,
        placement: Placement = "linear",
        physical_to_logical: Sequence[int] | None = None,
        routing: Routing | None = None,
        activate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _swiglu,
        reduce_results: bool = True,
        parallel: ParallelConfig = ALONE,
        group: torch.distributed.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.experts, self.shared, self.top_k, self.transposed = experts, shared, top_k, transposed
        self.routing = routing or (sigmoid_routing if router_bias else softmax_routing)
        self.activate, self.reduce_results = activate, reduce_results
        self.placement = placement_of(experts + shared, parallel.ep_size, placement, physical_to_logical)
        self.here = self.placement[parallel.ep_rank]
        inner, self._adds_bias = inner_part(intermediate_size, parallel)
        self._stacks = StackedExperts(experts + shared, self.here, hidden_size, intermediate_size, inner, transposed)
        self._turns = turns_of(self.placement, parallel.ep_rank)
        by_number = parallel.ep_size > parallel.tp_size
        self.ranks = (
            Ranks(parallel.ep_size, parallel.ep_rank, group)
            if by_number
            else Ranks(parallel.tp_size, parallel.tp_rank, group)
        )
        self._extents: dict[str, Extent] = {}
        for name in ("w13_bias", "w2_bias", "e_score_correction_bias"):
            self.register_parameter(name, None)
        self.declare_stacks("weight", "matrix", dtype=dtype)
        if bias:
            self.declare_stacks("bias", "rows", dtype=dtype)
        if router_bias:
            whole = Layout({"": Slot.whole((experts,))})
            self.declare("e_score_correction_bias", (experts,), whole, dtype=torch.float32)

    def declare_stacks(self, leaf: str, extent: Extent, *, dtype: torch.dtype | None = None) -> None:
        """Register parameters ``w13_{leaf}`` and ``w2_{leaf}`` that have something of every projection, such as scales.

        extent: what each projection has: "matrix" as the weights, "rows" for a value for each of its outputs, or
        "one": a single value, in parameters ``[experts here, 2]`` and ``[experts here]``. `rules` send tensors whose
        names end in `leaf` there.
        """
        for stack in ("w13", "w2"):
            name = f"{stack}_{leaf}"
            self._extents[name] = extent
            self.declare(name, self._stacks.shape(stack, extent), self._stacks.layout(stack, extent), dtype=dtype)

    def forward(self, hidden: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """Return what the experts make of ``[..., hidden]``, with ``[..., experts]`` logits; summed over the ranks."""
        x = hidden.reshape(-1, hidden.shape[-1])
        bias = () if self.e_score_correction_bias is None else (self.e_score_correction_bias,)
        weights, chosen = self.routing(router_logits.reshape(x.shape[0], router_logits.shape[-1]), self.top_k, *bias)
        out = torch.zeros_like(x)
        for local, expert in enumerate(self.here):
            token, weight = self._used(local, expert, weights, chosen)
            if token.numel():
                made = self._expert(local, x[token]) * weight
                out.index_add_(0, token, made.to(out.dtype))
        return (self.ranks.sum(out) if self.reduce_results else out).reshape(hidden.shape)

    def rules(
        self,
        into: str,
        source: str,
        *,
        gate: str = "gate_proj",
        up: str = "up_proj",
        down: str = "down_proj",
        gate_up: str | None = None,
        shared: str | None = None,
    ) -> tuple[Rule, ...]:
        """Return rules for a checkpoint that has each expert by itself. Whatever a name ends in goes the same way.

        into: the name of this layer, or of all like it, with its dot. source: what comes before the name of a
        projection, with ``{e}`` for the expert, such as ``model.layers.{i}.mlp.experts.{e}.``. gate_up: the name of
        gate and up where they are one tensor. shared: what comes before the names of shared experts' projections;
        where there are several, they are one tensor of so many times the inner size.
        """
        names, rules = {"w1": gate, "w3": up, "w2": down}, self._rules
        found = [*rules.of_shared(into, shared, names)] if shared is not None and self.shared else []
        if gate_up is not None:
            found += rules.of_pairs(into, f"{source}{gate_up}")
        return (*found, *rules.of_each(into, source, names))

    def stacked_rules(
        self, into: str, gate_up: str, down: str, *, interleaved: bool = False, leaf: str = "weight"
    ) -> tuple[Rule, ...]:
        """Return rules for a checkpoint that stacks all experts in one tensor for gate and up and one for down.

        The tensors have the dimensions of this layer's parameters, with all experts and all of the inner dimension.
        into: as in `rules`. gate_up and down: their names. interleaved: whether gate and up lie row by row in turns.
        leaf: which parameters they are for, such as "bias".
        """
        rules = self._rules
        return tuple(
            rules.stacked(into, source, f"{stack}_{leaf}", interleaved=interleaved)
            for source, stack in ((gate_up, "w13"), (down, "w2"))
        )

    def weight_loader(
        self,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        loaded_shard_id: str | int | None = None,
        expert_id: int | None = None,
    ) -> None:
        """Copy this rank's part of a tensor of one expert into `param`; nothing where the expert is not here.

        loaded_shard_id: "w1", "w2" or "w3"; None for all that `param` has. expert_id: of which expert; None for a
        tensor that stacks all of them. Raises PlanError for what `param` has not, and for another shape.
        """
        name = self._name_of(param)
        if name not in self._extents:
            super().weight_loader(param, loaded_weight, loaded_shard_id)
            return
        self._refuse_unknown(name, loaded_shard_id, expert_id)
        what, alone = f"{type(self).__name__}.{name}", loaded_shard_id is not None
        for slot in self._layouts[name].slots:
            if loaded_shard_id not in (None, kind_of(slot)):
                continue
            if expert_id is None and expert_of(slot) < self.experts:
                via = self._rules.in_stack(name, slot, alone=alone)
                super().weight_loader(param, taken_from(loaded_weight, via, what), slot)
            elif expert_of(slot) == expert_id:
                via = self._stacks.half(kind_of(slot), self._extents[name], alone=alone)
                whole = via.region.view == self._layouts[name].slots[slot].logical
                super().weight_loader(param, loaded_weight if whole else taken_from(loaded_weight, via, what), slot)

    @property
    def _rules(self) -> ExpertRules:
        return ExpertRules(self._stacks, self._extents, self.experts, self.shared)

    def _refuse_unknown(self, name: str, shard: str | int | None, expert: int | None) -> None:
        kinds = [kind for kind, stack in PROJECTIONS.items() if name.startswith(f"{stack}_")]
        if shard is not None and shard not in kinds:
            raise PlanError(f"{type(self).__name__}.{name} has no slot {shard!r}: it has {', '.join(kinds)}")
        if expert is not None and not 0 <= expert < self.experts + self.shared:
            raise PlanError(
                f"{type(self).__name__}.{name} has no expert {expert}: there are {self.experts + self.shared}"
            )

    def _used(
        self, local: int, expert: int, weights: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which tokens the expert at place `local` works on, and the weight of each."""
        if expert >= self.experts:
            token, weight = torch.arange(len(chosen), device=chosen.device), weights.new_ones(len(chosen), 1)
        else:
            token, nth = torch.where(chosen == expert)
            weight = weights[token, nth, None]
        turn, turns = self._turns[local]
        mine = slice(None) if turns == 1 else token % turns == turn
        return token[mine], weight[mine]

    def _expert(self, local: int, x: torch.Tensor) -> torch.Tensor:
        w13, w2 = self.w13_weight[local], self.w2_weight[local]
        if self.transposed:
            w13, w2 = w13.t(), w2.t()
        b13 = None if self.w13_bias is None else self.w13_bias[local]
        b2 = None if self.w2_bias is None or not self._adds_bias else self.w2_bias[local]
        gate, up = functional.linear(x, w13, b13).chunk(2, dim=-1)
        return functional.linear(self.activate(gate, up), w2, b2)
