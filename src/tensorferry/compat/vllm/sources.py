"""Where the weights of a vLLM model come from, and opening them under the names that its loader knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from tensorferry.checkpoint import Checkpoint
from tensorferry.compat.vllm import engine
from tensorferry.config import LoadConfig
from tensorferry.loaders.sources import Source, open_sources
from tensorferry.loaders.strategies import halved
from tensorferry.loaders.translating import translate
from tensorferry.storage.object_uri import is_uri

__all__ = ["open_for", "sources_of"]


def sources_of(model_config: Any, model: nn.Module | None, weights: str | None) -> list[Source]:
    """Return the sources of `model`, the primary one first. weights: where that one is, if elsewhere."""
    primary = Source(
        weights or _place(model_config),
        None if weights else model_config.revision,
        fall_back_to_pt=getattr(model, "fall_back_to_pt_during_load", True),
        allow_patterns_overrides=getattr(model, "allow_patterns_overrides", None),
    )
    return [primary, *map(_source, getattr(model, "secondary_weights", None) or ())]


def open_for(sources: list[Source], config: LoadConfig) -> Checkpoint:
    """Return one checkpoint of all `sources`, under the names of transformers where these are known for its files."""
    opened = open_sources(sources, config, config.load_format, halved(config))
    try:
        return translate(opened)[0]
    except BaseException:
        opened.close()
        raise


def _place(model_config: Any) -> str:
    elsewhere = getattr(model_config, "model_weights", "") or ""
    name = str(elsewhere or model_config.model)
    if is_uri(name) or Path(name).exists():
        return name
    return engine.from_modelscope(name, model_config.revision) or name


def _source(given: Any) -> Source:
    """Return a secondary source of vLLM as one of ours."""
    return Source(
        given.model_or_path,
        given.revision,
        subfolder=getattr(given, "subfolder", None),
        prefix=getattr(given, "prefix", ""),
        fall_back_to_pt=getattr(given, "fall_back_to_pt", True),
        allow_patterns_overrides=getattr(given, "allow_patterns_overrides", None),
    )
