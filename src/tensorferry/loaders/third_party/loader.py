"""The loader of safetensors files that another library reads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import nn

from tensorferry.config import LoadConfig, ModelConfig
from tensorferry.errors import ConfigError
from tensorferry.loaders.base import Build
from tensorferry.loaders.default import DefaultModelLoader
from tensorferry.loaders.sources import NameFilter
from tensorferry.loaders.third_party.executor import LibraryExecutor
from tensorferry.loaders.third_party.library import Library
from tensorferry.report import Report

__all__ = ["ThirdPartyLoader", "refuse_own_reading"]


class ThirdPartyLoader(DefaultModelLoader):
    """Loads safetensors files through another library, after the same plan and with the same report.

    What the library and this machine lack is found before a model is built or a checkpoint is opened. A library reads
    whole tensors, so a rank that needs a part of one reads all of it. Models with their own ``load_weights`` are traced
    and planned as ever; those that are streamed get the tensors in the order in which the library hands them on.
    """

    library: ClassVar[Library]

    def __init__(self, load_config: LoadConfig | None = None, *, weight_name_filter: NameFilter | None = None) -> None:
        super().__init__(load_config, weight_name_filter=weight_name_filter)
        refuse_own_reading(self.load_config, self.library)

    @property
    @abstractmethod
    def reading(self) -> LibraryExecutor:
        """What runs the library. Raises ConfigError where it, or what it needs of this machine, is not there."""

    def load_model(self, model_config: ModelConfig, build: Build | None = None) -> nn.Module:
        """Return the model as `BaseModelLoader.load_model` does; see `reading` for what is refused before."""
        self.reading  # noqa: B018 - raises
        return super().load_model(model_config, build)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> Report:
        """Fill `model` as `DefaultModelLoader.load_weights` does; see `reading` for what is refused before."""
        self.reading  # noqa: B018 - raises
        return super().load_weights(model, model_config)

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what `DefaultModelLoader.get_all_weights` does, in the order of the library."""
        self.reading  # noqa: B018 - raises
        return super().get_all_weights(model_config, model)

    @property
    def _format(self) -> str:
        return "safetensors"


def refuse_own_reading(config: LoadConfig, library: Library) -> None:
    """Raise ConfigError for options that say how tensorferry reads, where a library does."""
    for option, given in (("strategy", config.strategy != "lazy"), ("threads", config.reading.threads)):
        if given:
            raise ConfigError(
                f"{option} says how tensorferry reads, and with load_format {config.load_format!r} "
                f"{library.distribution} does: leave it out"
            )
