"""The loader that reads nothing: models with stand-in values, for trying out everything that needs no real ones."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tensorferry.config import ModelConfig
from tensorferry.core.target import Target
from tensorferry.errors import ConfigError
from tensorferry.formats.download import refuse_revision
from tensorferry.formats.file_names import is_side_file
from tensorferry.loaders import building
from tensorferry.loaders.base import BaseModelLoader
from tensorferry.loaders.dummy_values import fill
from tensorferry.modules.adapters import Derive, adapt
from tensorferry.modules.describe import describe
from tensorferry.modules.finalize import Completion, derive_buffers, refuse_unfilled
from tensorferry.modules.materialize import Materialized
from tensorferry.report import Report
from tensorferry.storage.hub import fetch_snapshot
from tensorferry.storage.object_uri import ObjectUri, is_uri
from tensorferry.timing import timed

__all__ = ["DummyModelLoader", "DummyOptions"]


@dataclass(frozen=True, slots=True)
class DummyOptions:
    """What the values of the dummy loader depend on, beside the names of the parameters."""

    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ConfigError(f"seed {self.seed!r}: a whole number is expected")


class DummyModelLoader(BaseModelLoader):
    """Fills parameters and persistent buffers with values drawn for each by its name; see `dummy_values.fill`.

    Equal for equal seeds, on every device, and whatever else is in the model. Ties are kept, and buffers that models
    compute are computed.
    """

    Options = DummyOptions

    def download_model(self, model_config: ModelConfig) -> None:
        """Fetch configuration and the like, and no weights, where the model is no folder here."""
        self._located(model_config)

    def build(self, model_config: ModelConfig) -> nn.Module:
        """Return the transformers model that config.json describes, on meta."""
        return building.from_config(self._located(model_config), model_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> Report:
        """Fill `model`, post-process it, and return the report."""
        source = _source(model_config)
        target, derive = _described(model)
        owned = [t.name for t in target.values() if t.alias_of is None]
        parameters = Materialized(model, target, self.device)
        completion = Completion(model, target, set(owned))
        seconds: dict[str, float] = {}
        with torch.no_grad():
            with timed(seconds, "load"):
                for name in owned:
                    fill(name, parameters[name], self.options.seed)
                    completion.ready(name)
            with timed(seconds, "finalize"):
                computed = derive(model, self.device)
                completion.finish()
                refuse_unfilled(model, {})
                model.eval()
        return self._report(source, target, tuple(computed), completion.processed, seconds)

    def _report(
        self,
        source: str,
        target: Target,
        computed: tuple[str, ...],
        processed: tuple[str, ...],
        seconds: dict[str, float],
    ) -> Report:
        ties = {t.name: t.alias_of for t in target.values() if t.alias_of is not None}
        return Report(
            source=source,
            format="dummy",
            files=(),
            selection=f"none: values are drawn from seed {self.options.seed} and the names of the parameters",
            ignored_files={},
            parameters=len(target) - len(ties),
            entries=0,
            bytes_needed=0,
            bytes_read=0,
            reads=0,
            direct_bytes=0,
            staging_peak=0,
            executor="none",
            fingerprint="",
            ties=ties,
            computed=computed,
            post_processed=processed,
            warnings=("the weights are not those of the model",),
            seconds=seconds,
        )

    def _located(self, model_config: ModelConfig) -> str | Path:
        if is_uri(model_config.model):
            refuse_revision(model_config.model, model_config.revision)
            return model_config.model
        path = Path(model_config.model).expanduser()
        if path.exists():
            return path
        snapshot = fetch_snapshot(
            os.fspath(model_config.model),
            lambda listing: [file.path for file in listing.files if is_side_file(file.path, file.size)],
            revision=model_config.revision,
            cache_dir=self.load_config.download_dir,
        )
        return snapshot.path


def _source(model_config: ModelConfig) -> str:
    """Return where the model is from as it may be told: without what signs an address. Raises ConfigError."""
    model = model_config.model
    if is_uri(model):
        refuse_revision(model, model_config.revision)
        return ObjectUri.parse(model).text
    return model


def _described(model: nn.Module) -> tuple[Target, Derive]:
    adapted = adapt(model, building.NO_WEIGHTS)
    return (describe(model), derive_buffers) if adapted is None else (adapted.target, adapted.derive)
