"""Stand-ins for what the plug-in takes of vLLM: its registry, its loader's stages, and its groups of ranks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import nn

__all__ = ["FakeVllm", "KvCacheMethod", "LoadConfig", "installed", "model_config"]


@dataclass
class LoadConfig:
    """vLLM's load configuration, as far as loaders look at it."""

    load_format: str = "tensorferry"
    model_loader_extra_config: Any = field(default_factory=dict)
    download_dir: str | None = None
    ignore_patterns: Any = field(default_factory=lambda: ["original/**/*"])
    safetensors_load_strategy: str | None = None
    use_tqdm_on_load: bool = True


def model_config(folder: Path) -> Any:
    """Return vLLM's model configuration, as far as loaders look at it."""
    return SimpleNamespace(model=str(folder), revision=None, model_weights="", quantization=None)


class KvCacheMethod:
    """The quantization method of attention layers that have scales for their cache."""


class BaseModelLoader:
    """vLLM's base class, with its stages; `process` is what it does after the weights."""

    process: Callable[[nn.Module], None] = staticmethod(lambda model: None)

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        model: nn.Module = vllm_config.build()
        self.load_weights(model, model_config)  # type: ignore[attr-defined]
        self.process(model)
        return model.eval()


@dataclass
class FakeVllm:
    """What a test may look at and set. loaders: what was registered, by load format, each time."""

    loaders: dict[str, list[type[Any]]] = field(default_factory=dict)
    config: Any = None
    groups: dict[str, Any] = field(default_factory=dict)

    def loader(self, config: LoadConfig | None = None) -> Any:
        """Return the loader that the plug-in registered."""
        return self.loaders["tensorferry"][-1](config or LoadConfig())

    def share(self, world_size: int, rank: int, group: Any = None) -> None:
        """Make this process a rank of vLLM's world."""
        self.groups["world"] = SimpleNamespace(world_size=world_size, rank_in_group=rank, cpu_group=group)

    def _register(self, load_format: str) -> Callable[[type[Any]], type[Any]]:
        def register(kind: type[Any]) -> type[Any]:
            self.loaders.setdefault(load_format, []).append(kind)
            return kind

        return register

    def _group(self, name: str) -> Any:
        assert name in self.groups, "not initialized"
        return self.groups[name]

    def _modules(self) -> Iterator[tuple[str, dict[str, Any]]]:
        layers = "vllm.model_executor.layers"
        for package in ("vllm", "vllm.model_executor", layers, f"{layers}.quantization"):
            yield package, {}
        yield "vllm.config", {"get_current_vllm_config_or_none": lambda: self.config}
        yield "vllm.logger", {"init_logger": logging.getLogger}
        yield "vllm.distributed", {}
        names = ("world", "tp", "pcp", "pp", "inner_dp_world")
        state = {f"get_{n}_group": (lambda name=n: self._group(name)) for n in names}
        yield "vllm.distributed.parallel_state", state
        yield "vllm.model_executor.model_loader", {"register_model_loader": self._register}
        yield "vllm.model_executor.model_loader.base_loader", {"BaseModelLoader": BaseModelLoader}
        yield f"{layers}.quantization.kv_cache", {"BaseKVCacheMethod": KvCacheMethod}


@contextmanager
def installed() -> Iterator[FakeVllm]:
    """Have the stand-ins imported as vLLM, and our plug-in registered with them, while this lasts."""
    fake, before = FakeVllm(), _ours_and_theirs()
    for name in before:
        del sys.modules[name]
    try:
        for name, contents in fake._modules():
            module = ModuleType(name)
            vars(module).update(contents, __path__=[])
            sys.modules[name] = module
            parent, _, leaf = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], leaf, module)
        from tensorferry.compat.vllm import register

        register()
        yield fake
    finally:
        for name in _ours_and_theirs():
            del sys.modules[name]
        sys.modules.update(before)


def _ours_and_theirs() -> dict[str, ModuleType]:
    roots = ("vllm", "tensorferry.compat.vllm")
    return {n: m for n, m in sys.modules.items() if any(n == r or n.startswith(f"{r}.") for r in roots)}
