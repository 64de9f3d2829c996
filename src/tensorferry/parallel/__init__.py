"""Layers that are divided among ranks: one declaration of who has what, from which everything else follows."""

from tensorferry.parallel.agreement import Agreement
from tensorferry.parallel.division import Heads, Placement, even_part, padded, placed_experts, split_heads
from tensorferry.parallel.experts import FusedMoE
from tensorferry.parallel.groups import Ranks
from tensorferry.parallel.layer import ParallelLayer
from tensorferry.parallel.linear import (
    ColumnParallelLinear,
    FusedOrder,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from tensorferry.parallel.norms import HeadParallelRMSNorm
from tensorferry.parallel.routing import Routing, sigmoid_routing, softmax_routing
from tensorferry.parallel.vocabulary import ParallelLMHead, VocabParallelEmbedding

__all__ = [
    "Agreement",
    "ColumnParallelLinear",
    "FusedMoE",
    "FusedOrder",
    "HeadParallelRMSNorm",
    "Heads",
    "MergedColumnParallelLinear",
    "ParallelLMHead",
    "ParallelLayer",
    "Placement",
    "QKVParallelLinear",
    "Ranks",
    "ReplicatedLinear",
    "Routing",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "even_part",
    "padded",
    "placed_experts",
    "sigmoid_routing",
    "softmax_routing",
    "split_heads",
]
