"""load_format runai_streamer_sharded: sharded states, whose files the Run:ai Model Streamer reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tensorferry.config import LoadConfig, ModelConfig
from tensorferry.loaders.base import Build
from tensorferry.loaders.sharded_state import ShardedStateLoader, ShardedStateOptions
from tensorferry.loaders.third_party.library import Library
from tensorferry.loaders.third_party.loader import refuse_own_reading
from tensorferry.loaders.third_party.runai import RunaiExecutor, RunaiLoader, RunaiOptions
from tensorferry.report import Report

__all__ = ["RunaiShardedLoader", "RunaiShardedOptions"]


@dataclass(frozen=True, slots=True)
class RunaiShardedOptions(ShardedStateOptions):
    """What `ShardedStateOptions` and `RunaiOptions` say; each rank reads for itself."""

    concurrency: int | None = None
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        ShardedStateOptions.__post_init__(self)
        RunaiOptions(self.concurrency, self.memory_limit)


class RunaiShardedLoader(ShardedStateLoader):
    """Loads sharded states through the Run:ai Model Streamer: load_format runai_streamer_sharded.

    States of other ranks are resharded where each part of a tensor is a tensor of a file; parts of fused ones, which
    lie apart in it, are refused.
    """

    Options = RunaiShardedOptions
    library: Library = RunaiLoader.library

    def __init__(self, load_config: LoadConfig | None = None) -> None:
        super().__init__(load_config)
        refuse_own_reading(self.load_config, self.library)

    @property
    def reading(self) -> RunaiExecutor:
        """What runs the library. Raises ConfigError where it is not there."""
        self.library.imported()
        options = RunaiOptions(self.options.concurrency, self.options.memory_limit)
        return RunaiExecutor(self.device, self.load_config.read.max_staging, options)

    def load_model(self, model_config: ModelConfig, build: Build | None = None) -> nn.Module:
        """Return the model as `BaseModelLoader.load_model` does; see `reading` for what is refused before."""
        self.reading  # noqa: B018 - raises
        return super().load_model(model_config, build)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> Report:
        """Fill `model` as `ShardedStateLoader.load_weights` does; see `reading` for what is refused before."""
        self.reading  # noqa: B018 - raises
        return super().load_weights(model, model_config)
