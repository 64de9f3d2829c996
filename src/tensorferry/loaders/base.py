"""The Model Loader face: the stages from a configuration to a model that is ready to use. Reads nothing itself."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from tensorferry.config import LoadConfig, ModelConfig, options_of
from tensorferry.errors import ConfigError, shown
from tensorferry.modules.describe import describe
from tensorferry.modules.finalize import Completion
from tensorferry.modules.surroundings import building, usable_device
from tensorferry.progress import SILENT, Progress, for_stream
from tensorferry.report import Report
from tensorferry.timing import timed

__all__ = ["BaseModelLoader", "Build", "NoOptions", "checked"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

Build = Callable[[ModelConfig], nn.Module]
"""Makes a model, empty or with values that loading will replace. Called with the dtype and the device set."""


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Of a loader that takes no options of its own."""


class BaseModelLoader(ABC):
    """A way of loading models. Subclasses say where weights come from and how they get into a model.

    Options: a dataclass that checks itself, made of ``LoadConfig.options``. report: of the last `load_model`.
    """

    Options: ClassVar[type[Any]] = NoOptions

    def __init__(self, load_config: LoadConfig | None = None) -> None:
        self.load_config = LoadConfig() if load_config is None else checked("load_config", load_config, LoadConfig)
        what = f"load_format {self.load_config.load_format!r}"
        self.options: Any = options_of(self.Options, self.load_config.options, what=what)
        self.report: Report | None = None

    @abstractmethod
    def download_model(self, model_config: ModelConfig) -> None:
        """Bring what `load_model` needs onto this machine, so that it can be called offline."""

    @abstractmethod
    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> Report:
        """Fill `model`, which may be on meta in part, and return what was done.

        Modules whose ``process_weights_after_loading`` has been run are named in ``Report.post_processed``.
        """

    def build(self, model_config: ModelConfig) -> nn.Module:
        """Return an empty model where the caller of `load_model` does not give one; refused here."""
        raise ConfigError(
            f"{type(self).__name__} does not build models: pass build=, which is called with {model_config}"
        )

    def load_model(self, model_config: ModelConfig, build: Build | None = None) -> nn.Module:
        """Return the model, filled, post-processed and in eval mode, and leave the account of it in `report`.

        The stages: with the dtype of `model_config` as the default and the device of the load configuration as the
        current one, `build` is called (by default `self.build`) → `load_weights` → ``process_weights_after_loading``
        of each module that has not run it → ``eval()``.
        """
        checked("model_config", model_config, ModelConfig)
        seconds: dict[str, float] = {}
        dtype = None if model_config.dtype is None else getattr(torch, model_config.dtype)
        with timed(seconds, "initialize"), building(dtype), self.device:
            model = _built(build or self.build, model_config)
        report = self.load_weights(model, model_config)
        seconds.update(report.seconds)
        with timed(seconds, "post-process"):
            processed = _post_processed(model, report)
            model.eval()
        self.report = replace(report, post_processed=processed, seconds=seconds)
        phases = ", ".join(f"{phase} {s:.2f} s" for phase, s in seconds.items())
        logger.info("%s by %s: %s", shown(model_config.model, 300), type(self).__name__, phases)
        return model

    @property
    def device(self) -> torch.device:
        """Where models are built, and where tensors get memory. Raises ConfigError where nothing can be put there."""
        return usable_device(self.load_config.device)

    @property
    def progress(self) -> Progress:
        """What is told of the load: nothing, unless that was configured."""
        parallel = self.load_config.parallel
        first = parallel.rank == parallel.ep_rank == 0
        return for_stream() if self.load_config.progress and first else SILENT


def checked(name: str, value: object, kind: type[_T]) -> _T:
    """Return `value`, or raise ConfigError where it is no `kind`, which is made by hand or of plain data."""
    if isinstance(value, kind):
        return value
    hint = ""
    if isinstance(value, Mapping):
        hint = f": {kind.__name__}.from_dict(...) takes plain data"
    elif kind is ModelConfig and isinstance(value, str | os.PathLike):
        hint = f": ModelConfig({os.fspath(value)!r})"
    raise ConfigError(f"{name}: a {kind.__name__} is expected, not {type(value).__name__}{hint}")


def _built(build: Build, model_config: ModelConfig) -> nn.Module:
    model: object = build(model_config)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"build({model_config}) returned {type(model).__name__}, where an nn.Module is expected")
    return model


def _post_processed(model: nn.Module, report: Report) -> tuple[str, ...]:
    """Run what has not been run, children first; return the names of all modules that it was run of."""
    completion = Completion(model, describe(model), set(), done=report.post_processed)
    with torch.no_grad():
        completion.finish()
    return completion.processed
