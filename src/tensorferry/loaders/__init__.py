"""The Model Loader face: choosing a loader by `load_format`, and loading models with it."""

from tensorferry.config import LoadConfig, ModelConfig
from tensorferry.loaders.base import BaseModelLoader, Build, NoOptions
from tensorferry.loaders.default import DefaultModelLoader
from tensorferry.loaders.dummy import DummyModelLoader
from tensorferry.loaders.npcache import build_npcache
from tensorferry.loaders.registry import get_model_loader, known_formats, register_model_loader

__all__ = [
    "BaseModelLoader",
    "Build",
    "DefaultModelLoader",
    "DummyModelLoader",
    "LoadConfig",
    "ModelConfig",
    "NoOptions",
    "build_npcache",
    "get_model_loader",
    "known_formats",
    "register_model_loader",
]
