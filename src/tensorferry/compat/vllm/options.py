"""``--model-loader-extra-config`` and the other options of vLLM that say how weights are loaded, as a `LoadConfig`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from tensorferry.checks import expect
from tensorferry.config import Folders, LoadConfig, LoaderUse, Strategy, options_of
from tensorferry.errors import ConfigError
from tensorferry.formats.file_names import LOAD_FORMATS
from tensorferry.parallel import Ranks

__all__ = ["FORMATS", "VllmOptions", "assumed", "load_config", "options_for"]

FORMATS = tuple(name for name in LOAD_FORMATS if name not in ("npcache", "sharded_state", "tensorizer"))
"""What `VllmOptions.format` may be."""

_IGNORED_BY_DEFAULT = ["original/**/*"]
"""What vLLM leaves out where nobody says otherwise: the same as we do, in other words."""

_STRATEGIES = ("lazy", "eager", "prefetch")


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """What ``model_loader_extra_config`` may hold. Checked when it is made; raises ConfigError.

    weights: where the weights of the served model are, if not with its configuration: a folder, a file, an address.
    format: which files count, as `load_format` elsewhere. strategy, threads, own_loader, links_to, read, strictness:
    as in `tensorferry.LoadConfig`; the last two are mappings. borrow: whether parameters on the CPU have the pages of
    files until vLLM has post-processed them, where these lie on a disk of this machine.
    """

    weights: str | None = None
    format: str = "auto"
    strategy: Strategy | None = None
    threads: int = 0
    own_loader: LoaderUse = "trace"
    links_to: Folders = ()
    read: Mapping[str, Any] = field(default_factory=dict)
    strictness: Mapping[str, Any] = field(default_factory=dict)
    borrow: bool = True

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"format {self.format!r}: one of {', '.join(FORMATS)} is expected")
        if self.weights is not None and (not isinstance(self.weights, str | os.PathLike) or not str(self.weights)):
            raise ConfigError(f"weights {self.weights!r}: the path of a folder or file is expected")
        expect("borrow", self.borrow, bool, "true or false")


def options_for(config: Any) -> VllmOptions:
    """Return the options in vLLM's load configuration. Raises ConfigError; for an unknown key, naming those known."""
    given = config.model_loader_extra_config
    if not isinstance(given, Mapping):
        raise ConfigError(f"model_loader_extra_config: a mapping is expected, not {type(given).__name__}")
    return options_of(VllmOptions, given, what="model_loader_extra_config")


def load_config(config: Any) -> LoadConfig:
    """Return vLLM's load configuration as ours. Raises ConfigError for what makes no sense."""
    options = options_for(config)
    taken = {f.name: getattr(options, f.name) for f in fields(LoadConfig) if hasattr(options, f.name)}
    taken |= {
        "load_format": options.format,
        "strategy": options.strategy or _strategy(config),
        "download_dir": config.download_dir,
        "ignore_patterns": _ignored(config),
        "read": options.read,
    }
    try:
        return LoadConfig.from_dict(taken)
    except ConfigError as error:
        raise ConfigError(f"model_loader_extra_config: {error}") from None


def assumed(config: LoadConfig, ranks: Ranks) -> LoadConfig:
    """Return the configuration of one of several ranks, as long as it is not known whether they share files.

    Ranks of an engine load at once, and mostly on one machine. Where there is but one, other engines may load, too.
    """
    if config.read.turn is not None or config.read.shared is False:
        return config
    return replace(config, read=replace(config.read, shared=True, turn=(ranks.rank, ranks.size)))


def _strategy(config: Any) -> Strategy:
    asked = getattr(config, "safetensors_load_strategy", None) or "lazy"
    if asked not in _STRATEGIES:
        raise ConfigError(
            f"safetensors_load_strategy {asked!r}: load format tensorferry knows {', '.join(_STRATEGIES)}; "
            "what torchao has saved in parts is loaded by load format auto"
        )
    return cast("Strategy", asked)


def _ignored(config: Any) -> Any:
    patterns = config.ignore_patterns
    return LoadConfig().ignore_patterns if patterns == _IGNORED_BY_DEFAULT else patterns
