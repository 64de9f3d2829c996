"""The attributes of all modules of a model at one moment, and putting them back. Values of tensors are not kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import nn

from tensorferry.modules.describe import places

__all__ = ["Snapshot", "attribute_tensors"]


class Snapshot:
    """What hangs on the modules and on the parameters of a model: attributes, and plain containers among them."""

    def __init__(self, model: nn.Module) -> None:
        holders: list[object] = [*model.modules(), *(p.tensor for p in places(model))]
        self._saved = [
            (vars(holder), dict(vars(holder)), [(v, v.copy()) for v in vars(holder).values() if _is_plain(v)])
            for holder in holders
        ]

    def restore(self) -> None:
        """Put every attribute back to the object that it was."""
        for attributes, saved, containers in self._saved:
            for container, items in containers:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(items)
            if attributes.keys() != saved.keys() or any(attributes[k] is not v for k, v in saved.items()):
                attributes.clear()
                attributes.update(saved)


def attribute_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor that hangs on a module in any way, in plain containers too, with a name."""
    for prefix, module in model.named_modules():
        dot = prefix + "." if prefix else ""
        for attribute, value in vars(module).items():
            if _has_memory(value):
                yield dot + attribute, value
            elif _is_plain(value):
                registered = attribute in ("_parameters", "_buffers")
                for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                    if _has_memory(item):
                        yield dot + (str(key) if registered else f"{attribute}[{key}]"), item


def _has_memory(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _is_plain(value: Any) -> bool:
    return type(value) in (dict, list, set)
