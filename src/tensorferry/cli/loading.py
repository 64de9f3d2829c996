"""What ``tensorferry plan`` and ``tensorferry load`` do, with the model that config.json names. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from tensorferry.api import Prepared, prepare, refuse_misfit, run
from tensorferry.checkpoint import open_checkpoint
from tensorferry.compat.transformers import ClusterPlan, build_model, plan_cluster
from tensorferry.config import ParallelConfig
from tensorferry.core.plan import Plan, Strictness
from tensorferry.errors import ConfigError
from tensorferry.formats.download import local_path
from tensorferry.modules.surroundings import usable_device
from tensorferry.progress import Progress
from tensorferry.report import Report
from tensorferry.verify import verify_files

__all__ = ["WantedModel", "load_checkpoint", "plan_checkpoint", "plan_ranks", "refuse_unusable"]


@dataclass(frozen=True, slots=True)
class WantedModel:
    """A model that is to be loaded, and how strictly. path: as it was given: a path, an address, or a name on the Hub.

    auto_class: the class of transformers to build, instead of what config.json names. opening: options of
    `open_checkpoint`.
    """

    path: str | Path
    dtype: str | None
    auto_class: str | None
    revision: str | None
    strict: Strictness
    opening: Mapping[str, Any]


def plan_checkpoint(wanted: WantedModel) -> Plan:
    """Return the plan of loading what is `wanted`. Touches nothing."""
    with _prepared(wanted) as (_, prepared):
        return prepared.plan


def plan_ranks(wanted: WantedModel, *, tp: int, ep: int, pp: int, rank: str) -> ClusterPlan:
    """Return the plans of all ranks of such a cluster, or of the one whose number `rank` is. Touches nothing."""
    ranks = ParallelConfig.every_rank(tp_size=tp, ep_size=ep, pp_size=pp)
    if rank != "all":
        if not rank.isdecimal() or int(rank) >= len(ranks):
            raise ConfigError(f"--rank {rank}: all, or a number from 0 to {len(ranks) - 1}, is expected")
        ranks = ranks[int(rank) : int(rank) + 1]
    return plan_cluster(
        str(wanted.path), ranks, dtype=wanted.dtype, auto_class=wanted.auto_class, revision=wanted.revision,
        strict=wanted.strict, **wanted.opening,
    )  # fmt: skip


def load_checkpoint(wanted: WantedModel, *, device: str, verify: bool, progress: Progress) -> Report:
    """Load what is `wanted`, drop the model, and return the report."""
    refuse_unusable(device)
    with _prepared(wanted) as (model, prepared):
        refuse_misfit(prepared)
        if verify:
            prepared = replace(prepared, verified=verify_files(prepared.checkpoint, progress=progress).summary)
        return run(model, prepared, device=device, progress=progress)


def refuse_unusable(device: str) -> None:
    """Raise ConfigError for a device that torch does not know or this machine does not have."""
    usable_device(device)


@contextmanager
def _prepared(wanted: WantedModel) -> Iterator[tuple[nn.Module, Prepared]]:
    path = local_path(str(wanted.path), revision=wanted.revision, **wanted.opening)
    with open_checkpoint(path, **wanted.opening) as checkpoint:
        model, notes = build_model(
            path,
            checkpoint.catalogue,
            subfolder=wanted.opening.get("subfolder"),
            dtype=wanted.dtype,
            auto_class=wanted.auto_class,
        )
        prepared = prepare(model, checkpoint, strict=wanted.strict)
        yield model, replace(prepared, notes=(*notes, *prepared.notes))
