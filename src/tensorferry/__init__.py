"""Loads the weights of language models into any PyTorch model: planned first, strict, with bounded memory.

The names below are the public interface. Importing this package does not import torch; what needs torch is
imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tensorferry.checkpoint import Checkpoint, open_checkpoint
from tensorferry.config import LoadConfig, ModelConfig, ParallelConfig, ReadOptions
from tensorferry.core import (
    Add,
    Box,
    Catalogue,
    Chain,
    Concat,
    Custom,
    Dequantize,
    Drop,
    Ignore,
    Join,
    Layout,
    Part,
    Permute,
    Place,
    Plan,
    Region,
    RuleSet,
    Slot,
    Split,
    Stack,
    Strictness,
    Take,
    TensorEntry,
    Transpose,
)
from tensorferry.errors import (
    AccessDenied,
    ConfigError,
    CorruptFile,
    FinalizeError,
    FormatError,
    LocateError,
    PlanError,
    ReadError,
    RuleError,
    TensorferryError,
    UnknownFormat,
    UnsafeFile,
    UnsupportedDtype,
    WriteError,
)
from tensorferry.problems import Problem, ProblemKind
from tensorferry.report import Report
from tensorferry.verify import Verified, verify

if TYPE_CHECKING:
    from tensorferry.api import load, plan
    from tensorferry.compat.transformers import load_model
    from tensorferry.conversion import Conversion, convert
    from tensorferry.execute import Feeder
    from tensorferry.loaders import BaseModelLoader, DefaultModelLoader, get_model_loader, register_model_loader
    from tensorferry.loaders.saving import save_sharded_state
    from tensorferry.modules.packed import PackedParameter, keep_packed, packed_types
    from tensorferry.modules.trace import stream_opaque, trace
    from tensorferry.numerics.packed import PackedTensor
    from tensorferry.reload import Reloader

__version__ = "0.1.0"

__all__ = [
    "AccessDenied",
    "Add",
    "BaseModelLoader",
    "Box",
    "Catalogue",
    "Chain",
    "Checkpoint",
    "Concat",
    "ConfigError",
    "Conversion",
    "CorruptFile",
    "Custom",
    "DefaultModelLoader",
    "Dequantize",
    "Drop",
    "Feeder",
    "FinalizeError",
    "FormatError",
    "Ignore",
    "Join",
    "Layout",
    "LoadConfig",
    "LocateError",
    "ModelConfig",
    "PackedParameter",
    "PackedTensor",
    "ParallelConfig",
    "Part",
    "Permute",
    "Place",
    "Plan",
    "PlanError",
    "Problem",
    "ProblemKind",
    "ReadError",
    "ReadOptions",
    "Region",
    "Reloader",
    "Report",
    "RuleError",
    "RuleSet",
    "Slot",
    "Split",
    "Stack",
    "Strictness",
    "Take",
    "TensorEntry",
    "TensorferryError",
    "Transpose",
    "UnknownFormat",
    "UnsafeFile",
    "UnsupportedDtype",
    "Verified",
    "WriteError",
    "convert",
    "get_model_loader",
    "keep_packed",
    "load",
    "load_model",
    "open_checkpoint",
    "packed_types",
    "plan",
    "register_model_loader",
    "save_sharded_state",
    "stream_opaque",
    "trace",
    "verify",
]

_LAZY = {
    "BaseModelLoader": "tensorferry.loaders",
    "Conversion": "tensorferry.conversion",
    "DefaultModelLoader": "tensorferry.loaders",
    "Feeder": "tensorferry.execute",
    "PackedParameter": "tensorferry.modules.packed",
    "PackedTensor": "tensorferry.numerics.packed",
    "Reloader": "tensorferry.reload",
    "convert": "tensorferry.conversion",
    "get_model_loader": "tensorferry.loaders",
    "keep_packed": "tensorferry.modules.packed",
    "load": "tensorferry.api",
    "load_model": "tensorferry.compat.transformers",
    "packed_types": "tensorferry.modules.packed",
    "plan": "tensorferry.api",
    "register_model_loader": "tensorferry.loaders",
    "save_sharded_state": "tensorferry.loaders.saving",
    "stream_opaque": "tensorferry.modules.trace",
    "trace": "tensorferry.modules.trace",
}

_EXTRAS = {"torch", "transformers"}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'tensorferry' has no attribute {name!r}")
    try:
        value = getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        needs = f"tensorferry.{name} needs {error.name}: pip install 'tensorferry[{error.name}]'"
        raise ModuleNotFoundError(needs, name=error.name) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
