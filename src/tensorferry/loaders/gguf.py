"""The loader of GGUF files, whole or split."""

from __future__ import annotations

from tensorferry.loaders.default import DefaultModelLoader

__all__ = ["GGUFModelLoader"]


class GGUFModelLoader(DefaultModelLoader):
    """Loads GGUF files: load_format gguf. ``ModelConfig.model`` is a file, any part of a split one, or a folder.

    A model of transformers is filled under its own names; its configuration is made of the file where no config.json
    lies beside it. A model with `weight_rules` is planned by them, and packed blocks go as they are into parameters
    of a packed type, dequantized into others. What has a method ``load_weights(iterable)`` gets the names of GGUF.
    """

    @property
    def _format(self) -> str:
        return "gguf"
