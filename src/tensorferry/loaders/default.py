"""The loader of ordinary checkpoints: files of one kind in a folder, here or on the Hub, and in several if need be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from tensorferry import api
from tensorferry.checkpoint import Checkpoint
from tensorferry.config import LoadConfig, ModelConfig
from tensorferry.core.plan import Strictness
from tensorferry.core.ruleset import RuleSet
from tensorferry.errors import ConfigError
from tensorferry.execute.base import Counters
from tensorferry.formats.file_names import LOAD_FORMATS
from tensorferry.loaders import building, sources
from tensorferry.loaders.base import BaseModelLoader
from tensorferry.loaders.own_loader import brings_own_loader, prepare_own
from tensorferry.loaders.reading import OwnReading, Reading
from tensorferry.loaders.sources import NameFilter, locate, open_sources, sieve
from tensorferry.loaders.strategies import halved
from tensorferry.loaders.translating import translate
from tensorferry.modules.describe import places
from tensorferry.report import Report
from tensorferry.timing import timed

__all__ = ["DefaultModelLoader"]


class DefaultModelLoader(BaseModelLoader):
    """Loads safetensors and torch checkpoints: load_format auto, hf, safetensors, mistral, pt.

    A model says how it is filled. One with `weight_rules` (a RuleSet) is planned by them; else one with a method
    ``load_weights(iterable)`` is traced or streamed, as configured; any other is planned by the names of its
    parameters, or as the library that it comes from names them. Its own loader gets the names of transformers, where a
    checkpoint has others and these are known (GGUF, Meta, Mistral). Other attributes of a model that are honoured:

    * secondary_weights: a list of `Source`, whose entries join those of the primary one under their prefixes.
    * allow_patterns_overrides, fall_back_to_pt_during_load: as in `Source`, for the primary one.
    * weight_name_filter: a function from the name of an entry to whether it is wanted; the others are not read.
    * not_in_checkpoint, of a module or its `quant_method`: local names of parameters that no checkpoint can carry.
    """

    Source = sources.Source

    def __init__(self, load_config: LoadConfig | None = None, *, weight_name_filter: NameFilter | None = None) -> None:
        super().__init__(load_config)
        self.weight_name_filter = weight_name_filter

    def download_model(self, model_config: ModelConfig) -> None:
        """Fetch the primary source from the Hub, unless it is a folder or a file here."""
        locate(_primary(model_config), self.load_config, self._format)

    def build(self, model_config: ModelConfig) -> nn.Module:
        """Return the transformers model that config.json describes, on meta."""
        primary = _primary(model_config)
        path = locate(primary, self.load_config, self._format)
        with self._opened([primary]) as checkpoint:
            return building.from_config(path, model_config, checkpoint.catalogue)

    def sources_of(self, model_config: ModelConfig, model: nn.Module) -> list[sources.Source]:
        """Return where the weights of `model` come from, the primary source first."""
        secondary = list(getattr(model, "secondary_weights", None) or ())
        for source in secondary:
            if not isinstance(source, sources.Source):
                raise ConfigError(
                    f"secondary_weights of {type(model).__name__} holds {type(source).__name__}, not a Source"
                )
        primary = replace(
            _primary(model_config),
            fall_back_to_pt=getattr(model, "fall_back_to_pt_during_load", True),
            allow_patterns_overrides=getattr(model, "allow_patterns_overrides", None),
        )
        return [primary, *secondary]

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of all sources, each under its prefix and in storage order; unwanted ones are not read.

        Tensors own their memory; reading is ahead by at most the staging bound. Raises what `load_weights` raises.
        """
        checkpoint, _ = self._wanted(model_config, model)
        with checkpoint:
            entries = list(checkpoint.catalogue.values())
            yield from self.reading.stream(checkpoint.storage, entries, Counters())
            checkpoint.storage.check_unchanged()

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> Report:
        """Fill `model` from its sources, post-process it, and return the report.

        Raises LocateError, FormatError, PlanError with every problem, ReadError, FinalizeError. Before anything is
        written for a model that is planned; a model that is streamed is checked when its loader is done.
        """
        seconds: dict[str, float] = {}
        with timed(seconds, "open"):
            checkpoint, dropped = self._wanted(model_config, model)
        with checkpoint:
            strict = _lenient(self.load_config.strictness, model)
            if brings_own_loader(model):
                report = self._through_its_own_loader(model, checkpoint, strict)
            else:
                report = self._planned(model, checkpoint, strict)
        return replace(report, dropped={**dropped, **report.dropped}, seconds={**seconds, **report.seconds})

    def _planned(self, model: nn.Module, checkpoint: Checkpoint, strict: Strictness) -> Report:
        prepared = api.prepare(model, checkpoint, rules=_rules(model), strict=strict)
        executor = self.reading.executor
        return api.run(model, prepared, device=self.load_config.device, executor=executor, progress=self.progress)

    def _through_its_own_loader(self, model: nn.Module, checkpoint: Checkpoint, strict: Strictness) -> Report:
        own = prepare_own(model, checkpoint, self.load_config, strict, self.reading)
        report = api.run(
            model, own.prepared, device=self.load_config.device, executor=own.executor, progress=self.progress
        )
        return own.account(report)

    def _wanted(self, model_config: ModelConfig, model: nn.Module) -> tuple[Checkpoint, Mapping[str, str]]:
        """Return the entries that `model` is to get, by the names that it knows, and why it does not get others."""
        filters = [f for f in (self.weight_name_filter, getattr(model, "weight_name_filter", None)) if f is not None]
        checkpoint = self._opened(self.sources_of(model_config, model))
        try:
            whole, untold = self._translated(checkpoint) if brings_own_loader(model) else (checkpoint, {})
            if not filters:
                return whole, untold
            sieved, dropped = sieve(whole, lambda name: all(wanted(name) for wanted in filters))
        except BaseException:
            checkpoint.close()
            raise
        return sieved, {**untold, **dropped}

    def _translated(self, checkpoint: Checkpoint) -> tuple[Checkpoint, Mapping[str, str]]:
        """Return the checkpoint with the names that models with their own loader know, and what is left out."""
        return translate(checkpoint)

    def _opened(self, wanted: list[sources.Source]) -> Checkpoint:
        return open_sources(wanted, self.load_config, self._format, halved(self.load_config))

    @property
    def reading(self) -> Reading:
        """How bytes are read: by the strategy that is configured."""
        return OwnReading(self.load_config)

    @property
    def _format(self) -> str:
        # A subclass may be registered under a name that says nothing of files.
        return self.load_config.load_format if self.load_config.load_format in LOAD_FORMATS else "auto"


def _primary(model_config: ModelConfig) -> sources.Source:
    return sources.Source(
        model_config.model, model_config.revision, subfolder=model_config.subfolder, variant=model_config.variant
    )


def _rules(model: nn.Module) -> RuleSet | None:
    rules = getattr(model, "weight_rules", None)
    if rules is not None and not isinstance(rules, RuleSet):
        raise ConfigError(f"weight_rules of {type(model).__name__} is {type(rules).__name__}, not a RuleSet")
    return rules


def _lenient(strict: Strictness, model: nn.Module) -> Strictness:
    """Return `strict` without what the model itself says that no checkpoint can carry."""
    exempt = [place.name for place in places(model) if place.leaf in _not_in_checkpoint(place.module)]
    return replace(strict, may_miss=(*strict.may_miss, *exempt))


def _not_in_checkpoint(module: nn.Module) -> set[str]:
    owners = (module, getattr(module, "quant_method", None))
    return {name for owner in owners for name in getattr(owner, "not_in_checkpoint", ())}
