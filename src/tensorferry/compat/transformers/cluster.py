"""Planning every rank of a cluster on one machine, from headers alone: what each would read, hold and stage."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import nn

from tensorferry.api import prepare
from tensorferry.checkpoint import Checkpoint, OpeningOptions, open_checkpoint, refuse_unknown_options
from tensorferry.compat.transformers.adapting import adapt
from tensorferry.compat.transformers.dividing import divide
from tensorferry.compat.transformers.loading import build_model
from tensorferry.config import ParallelConfig, ReadOptions
from tensorferry.core.amounts import counted, human_bytes
from tensorferry.core.lower import lower
from tensorferry.core.plan import Plan, Strictness
from tensorferry.core.stages import on_stage
from tensorferry.errors import ConfigError
from tensorferry.formats.download import local_path
from tensorferry.modules.adapters import Adapted

__all__ = ["ClusterPlan", "RankPlan", "plan_cluster"]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank would do. Sizes are in bytes.

    memory: of its parameters. needed: of the checkpoint, for them. read: with what lies between and is read over.
    staging: the most that one batch of reads needs beside the parameters.
    """

    parallel: ParallelConfig
    plan: Plan
    memory: int
    needed: int
    read: int
    reads: int
    staging: int


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The plans of some or all ranks. whole: bytes that one rank would need that had all of the model."""

    ranks: tuple[RankPlan, ...]
    whole: int

    @property
    def replication(self) -> float:
        """How often the ranks together need each byte of the model, on average."""
        return sum(rank.needed for rank in self.ranks) / self.whole if self.whole else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: `ranks` with their sizes, `whole` and `replication`."""
        return {
            "whole": self.whole,
            "replication": self.replication,
            "ranks": [
                {
                    **{name: getattr(rank.parallel, name) for name in _NUMBERS},
                    **{name: getattr(rank, name) for name in ("memory", "needed", "read", "reads", "staging")},
                    "fingerprint": rank.plan.fingerprint,
                }
                for rank in self.ranks
            ],
        }

    def __str__(self) -> str:
        rows = [_HEADS]
        for number, rank in enumerate(self.ranks):
            p, over = rank.parallel, rank.read - rank.needed
            sizes = (human_bytes(n) for n in (rank.memory, rank.needed, over))
            where = (f"{p.tp_rank}/{p.tp_size}", f"{p.ep_rank}/{p.ep_size}", f"{p.pp_rank}/{p.pp_size}")
            rows.append((str(number), *where, *sizes, f"{rank.reads:,}", human_bytes(rank.staging)))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        together = sum(rank.needed for rank in self.ranks)
        return "\n".join(
            [
                *lines,
                f"{counted(len(self.ranks), 'rank')}: {human_bytes(together)} to read, {self.replication:.2f} times the"
                f" {human_bytes(self.whole)} of the model",
            ]
        )


_HEADS: tuple[str, ...] = ("rank", "tp", "ep", "stage", "memory", "to read", "read over", "reads", "staging")
_NUMBERS = ("tp_size", "tp_rank", "ep_size", "ep_rank", "pp_size", "pp_rank")


def plan_cluster(
    path: str | os.PathLike[str],
    ranks: Sequence[ParallelConfig],
    *,
    dtype: torch.dtype | str | None = None,
    auto_class: type | str | None = None,
    revision: str | None = None,
    strict: Strictness | None = None,
    options: ReadOptions | None = None,
    **opening: Unpack[OpeningOptions],
) -> ClusterPlan:
    """Return what each of `ranks` would do to load its part of the transformers model that `path` describes.

    Reads headers only, and needs no memory for the model and no other machine. ranks: such as
    ``ParallelConfig.every_rank(tp_size=8)``. The other options are those of `load_model`.

    Raises ConfigError where the ranks do not divide the model, with everything that they do not; PlanError where
    checkpoint and model do not fit; and what opening raises.
    """
    refuse_unknown_options(plan_cluster, opening)
    path = local_path(path, revision=revision, **opening)
    with open_checkpoint(path, options=options, **opening) as checkpoint:
        subfolder = opening.get("subfolder")
        model, _ = build_model(path, checkpoint.catalogue, subfolder=subfolder, dtype=dtype, auto_class=auto_class)
        how = adapt(model, checkpoint.catalogue)
        if how is None:
            raise ConfigError(
                f"{type(model).__name__} is no model of transformers, so there is no plan to divide it by"
            )
        whole = prepare(model, checkpoint, strict=strict, adapted=how).plan
        whole.raise_for_problems()
        planned = tuple(_planned(copy.deepcopy(model), checkpoint, how, parallel, strict) for parallel in ranks)
    return ClusterPlan(planned, whole.bytes_needed)


def _planned(
    model: nn.Module, checkpoint: Checkpoint, how: Adapted, parallel: ParallelConfig, strict: Strictness | None
) -> RankPlan:
    divided = replace(parallel, pp_size=1, pp_rank=0) != ParallelConfig()
    target = divide(model, parallel).of(how.target) if divided else how.target
    target = on_stage(target, parallel.pp_size, parallel.pp_rank)
    plan = prepare(model, checkpoint, strict=strict, adapted=replace(how, target=target)).plan
    plan.raise_for_problems()
    read = checkpoint.options
    schedule = lower(plan, max_gap=read.max_gap, max_read=read.max_read, max_staging=read.max_staging, waste=read.waste)
    memory = sum(spec.dtype.nbytes(spec.shape) for spec in plan.parameters.values())
    return RankPlan(
        parallel, plan, memory, plan.bytes_needed, schedule.bytes_read, schedule.reads, schedule.largest_batch
    )
