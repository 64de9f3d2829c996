"""The loader of GGUF files, whole or split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tensorferry.checkpoint import Checkpoint
from tensorferry.errors import ConfigError
from tensorferry.loaders.default import DefaultModelLoader

__all__ = ["GGUFModelLoader", "GgufOptions"]


@dataclass(frozen=True, slots=True)
class GgufOptions:
    """What ``LoadConfig.options`` may hold for load_format gguf.

    names: which names and values a model's own ``load_weights(iterable)`` gets: hf, those of transformers' checkpoints,
    or gguf, those of the file, packed tensors as the bytes of their blocks. Raises ConfigError for anything else.
    """

    names: Literal["hf", "gguf"] = "hf"

    def __post_init__(self) -> None:
        if self.names not in ("hf", "gguf"):
            raise ConfigError(f"names {self.names!r}: hf or gguf is expected")


class GGUFModelLoader(DefaultModelLoader):
    """Loads GGUF files: load_format gguf. ``ModelConfig.model`` is a file, any part of a split one, or a folder.

    A model of transformers is filled under its own names; its configuration is made of the file where no config.json
    lies beside it. A model with `weight_rules` is planned by them, and packed blocks go as they are into parameters
    of a packed type, dequantized into others.

    What has a method ``load_weights(iterable)`` gets the tensors of the checkpoint of transformers that the file was
    made of: under those names, in float32 where they were packed, with rows in that order, experts one by one. It is
    traced, so that what it takes of them becomes reads of blocks, decoded straight into its parameters; what it does
    otherwise gets each tensor as a whole. It gets the names of GGUF where the architecture is not known here, and where
    ``options={"names": "gguf"}`` asks for them.
    """

    Options: ClassVar[type[Any]] = GgufOptions

    @property
    def _format(self) -> str:
        return "gguf"

    def _translated(self, checkpoint: Checkpoint) -> tuple[Checkpoint, Mapping[str, str]]:
        return (checkpoint, {}) if self.options.names == "gguf" else super()._translated(checkpoint)
