"""Loading small models through the plug-in for vLLM, and what the tests of it look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from helpers.fake_vllm import FakeVllm, LoadConfig, model_config
from helpers.old_loaders import NanoModel, poisoned, whole_entries
from tensorferry.formats.opening import open_files

__all__ = ["filled_by_itself", "is_untouched", "load", "rewrite"]


def filled_by_itself(folder: Path, tp: int = 1, rank: int = 0) -> dict[str, torch.Tensor]:
    """Return what the model's own loader makes of the checkpoint on a rank."""
    model = poisoned(NanoModel(tp, rank))
    with open_files(folder) as opened:
        model.load_weights(whole_entries(opened, opened.catalogue))  # type: ignore[operator]
    return model.state_dict()


def load(vllm: FakeVllm, folder: Path, model: nn.Module | None = None, **extra: Any) -> Any:
    """Fill a model (poisoned, so that what nothing wrote shows) and return the loader."""
    loader = vllm.loader(LoadConfig(model_loader_extra_config=extra))
    loader.load_weights(poisoned(NanoModel()) if model is None else model, model_config(folder))
    return loader


def rewrite(folder: Path, **renamed: str | None) -> None:
    """Write the checkpoint again, with tensors under other names, or without them; ``__`` stands for a dot."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for old, new in renamed.items():
        value = tensors.pop(old.replace("__", "."))
        if new is not None:
            tensors[new] = value
    save_file(tensors, file)


def is_untouched(model: nn.Module) -> bool:
    """Whether `model` is as `poisoned` left it."""
    return all(bool((tensor == 77).all()) for tensor in model.state_dict().values())
