"""What happens to a transformers model when its bytes are there: what it computes itself, and its ties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tensorferry.compat.transformers import internals
from tensorferry.core.amounts import few
from tensorferry.core.names import fold
from tensorferry.errors import FinalizeError
from tensorferry.modules.describe import Place, places
from tensorferry.modules.distributed import around, is_dtensor, memory_of

__all__ = ["finish"]


def finish(mapping: Sequence[Any], model: nn.Module, device: torch.device) -> list[str]:
    """Give values to everything that is still on meta, settle the ties, and return the names of what was computed.

    On meta are the non-persistent buffers, and parameters that were allowed to be missing; the model's own
    initialization fills both, and leaves alone what came from the checkpoint. `mapping`: the conversions by which
    names were found. Raises FinalizeError for a tensor that the initialization leaves out.
    """
    internals.keep_conversions(model, mapping)
    hanging = {place.name: place for place in places(model)}
    _note_untied(model, hanging)
    empty = [place for place in hanging.values() if place.tensor.device.type == "meta"]
    for place in hanging.values():
        if place.tensor.device.type != "meta":
            internals.flag_filled(place.tensor)
    if empty:
        _materialize(empty, device)
        internals.initialize(model)
        _refuse_uncomputed(model, {place.name for place in empty})
    internals.retie(model, internals.tied_names(model))
    return [place.name for place in empty]


def _materialize(empty: list[Place], device: torch.device) -> None:
    made: dict[int, torch.Tensor] = {}
    for place in empty:
        tensor = made.get(id(place.tensor))
        if tensor is None:
            tensor = torch.empty_like(memory_of(place.tensor).detach(), device=device)
            tensor.fill_(_unlikely(tensor.dtype))
            if is_dtensor(place.tensor):
                tensor = around(tensor, place.tensor)
            elif place.is_parameter:
                tensor = nn.Parameter(tensor, requires_grad=place.tensor.requires_grad)
            made[id(place.tensor)] = tensor
        hung: dict[str, Any] = place.module._parameters if place.is_parameter else place.module._buffers
        hung[place.leaf] = tensor


def _unlikely(dtype: torch.dtype) -> float | int:
    """Return a value by which a tensor is known that nothing was computed for."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).max - 5


def _refuse_uncomputed(model: nn.Module, names: set[str]) -> None:
    left = []
    for place in places(model):
        tensor, unlikely = memory_of(place.tensor), _unlikely(place.tensor.dtype)
        if place.name in names and tensor.numel() and tensor.dtype != torch.bool:
            untouched = tensor.isnan() if unlikely != unlikely else tensor == unlikely
            if bool(untouched.all()):
                left.append(place.name)
    if left:
        folded = few((f.text for f in fold(left)), 8)
        raise FinalizeError(
            f"no checkpoint holds {folded}, and {type(model).__name__} does not compute it when it initializes its "
            "weights: build the model on a real device and use tensorferry.load"
        )


def _note_untied(model: nn.Module, hanging: dict[str, Place]) -> None:
    """Let configuration and model say what is: names that the checkpoint holds with different values are not tied."""
    ties = internals.tied_names(model)
    apart = [a for a, b in ties.items() if a in hanging and b in hanging and not _shared(hanging[a], hanging[b])]
    internals.untie(model, apart)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    if weight is not None and any(hanging[name].tensor is weight for name in apart):
        for config in {id(c): c for c in _configs(model)}.values():
            if getattr(config, "tie_word_embeddings", False):
                config.tie_word_embeddings = False


def _configs(model: nn.Module) -> list[Any]:
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    return [c for c in (config, text) if c is not None]


def _shared(a: Place, b: Place) -> bool:
    return a.tensor is b.tensor or "meta" in (a.tensor.device.type, b.tensor.device.type)
