"""What ``tensorferry plan`` and ``tensorferry load`` do, with the model that config.json names. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensorferry.api import Prepared, prepare, run
from tensorferry.checkpoint import open_checkpoint
from tensorferry.compat.transformers import build_model
from tensorferry.core.plan import Plan, Strictness
from tensorferry.errors import ConfigError
from tensorferry.progress import Progress
from tensorferry.report import Report
from tensorferry.verify import verify_files

__all__ = ["load_checkpoint", "plan_checkpoint", "refuse_unusable"]


def plan_checkpoint(path: Path, *, dtype: str | None, strict: Strictness, **opening: Any) -> Plan:
    """Return the plan of loading `path` into the model that its config.json names. Touches nothing."""
    with _prepared(path, dtype, strict, opening) as (_, prepared):
        return prepared.plan


def load_checkpoint(
    path: Path, *, device: str, dtype: str | None, strict: Strictness, verify: bool, progress: Progress, **opening: Any
) -> Report:
    """Load `path` into the model that its config.json names, drop the model, and return the report."""
    refuse_unusable(device)
    with _prepared(path, dtype, strict, opening) as (model, prepared):
        prepared.plan.raise_for_problems()
        if verify:
            prepared = replace(prepared, verified=verify_files(prepared.checkpoint, progress=progress).summary)
        return run(model, prepared, device=device, strict=strict, progress=progress)


def refuse_unusable(device: str) -> None:
    """Raise ConfigError for a device that torch does not know or this machine does not have."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for CUDA
        raise ConfigError(f"device {device!r} cannot be used: {str(error).partition(chr(10))[0]}") from None


@contextmanager
def _prepared(
    path: Path, dtype: str | None, strict: Strictness, opening: dict[str, Any]
) -> Iterator[tuple[nn.Module, Prepared]]:
    with open_checkpoint(path, **opening) as checkpoint:
        model, notes = build_model(path, checkpoint.catalogue, subfolder=opening.get("subfolder"), dtype=dtype)
        prepared = prepare(model, checkpoint, strict=strict)
        yield model, replace(prepared, notes=(*notes, *prepared.notes))
