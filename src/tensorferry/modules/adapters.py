"""Letting a library's models say how they are filled, without importing the library or what knows it.

An adapter is looked up by the packages that a model's classes come from; what it knows lives in its own module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import nn

from tensorferry.core.catalogue import Catalogue
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Target
from tensorferry.modules.finalize import derive_buffers

__all__ = ["Adapted", "Adapter", "Derive", "adapt"]

Derive = Callable[[nn.Module, torch.device], list[str]]
"""Computes, when all bytes are there, what no checkpoint holds and is on meta; returns the names of it."""


@dataclass(frozen=True, slots=True)
class Adapted:
    """How one model is filled from one checkpoint.

    may_miss: names of parameters that the library lets be missing, because `derive` gives them values.
    notes: what the user should be told, one sentence each; they become warnings of the report. catalogue: what the
    rules are for, where that is not the checkpoint's own but one made of it.
    """

    target: Target
    rules: RuleSet
    derive: Derive = derive_buffers
    may_miss: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    catalogue: Catalogue | None = None


class Adapter(Protocol):
    """A module with this function adapts the models of one library."""

    def adapt(self, model: nn.Module, catalogue: Catalogue) -> Adapted | None:
        """Return how `model` is filled from `catalogue`, or None for a class that needs no adapting.

        Decides from names, shapes and types alone and leaves the values of `model` as they are.
        """
        ...


_ADAPTERS = {"transformers": "tensorferry.compat.transformers"}
"""Top-level package of a model's classes to the module that adapts them."""


def adapt(model: nn.Module, catalogue: Catalogue) -> Adapted | None:
    """Return how the library that `model` comes from fills it, or None for a model of no known library."""
    for package in dict.fromkeys(kind.__module__.partition(".")[0] for kind in type(model).__mro__):
        if package in _ADAPTERS:
            return cast("Adapter", import_module(_ADAPTERS[package])).adapt(model, catalogue)
    return None
