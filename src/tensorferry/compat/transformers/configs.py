"""What config.json says, checked before anything is built from it: class, dtype, and whether it can be right."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from tensorferry.config import DTYPES
from tensorferry.core.catalogue import Catalogue
from tensorferry.core.dtypes import Kind
from tensorferry.errors import ConfigError, CorruptFile, FormatError, LocateError, UnsafeFile, shown
from tensorferry.numerics.torch_dtypes import torch_dtype
from tensorferry.storage.folder import located

__all__ = ["ConfigFile", "chosen_class", "chosen_dtype", "loaded_config", "refuse_impossible"]

MAX_BYTES = 16 << 20
MAX_LABELS = 1_000_000
MAX_EXPERTS = 100_000
_LAYERS = re.compile(r"(^|_)(layers?|depth|blocks)$|^(n|num)_(hidden_)?layers?(_|$)")


class UnfitConfig(FormatError, ConfigError):
    """What a config.json asks for cannot be built here: a matter of configuration, and the checkpoint's fault."""


class ConfigFile:
    """The config.json of a checkpoint as plain data, already refused where it asks for what is not done here.

    where: what messages call it, if not by its place in `folder`.
    """

    def __init__(self, folder: Path, where: str | None = None) -> None:
        self.folder = folder
        self.path = where or str(folder / "config.json")
        self.data = _read(folder / "config.json", self.path)
        self._refuse_quantization()

    def _refuse_quantization(self) -> None:
        for key, value in _walk(self.data):
            if key in ("quantization_config", "compression_config") and value:
                method = value.get("quant_method", "an unnamed method") if isinstance(value, dict) else value
                raise UnfitConfig(
                    f"{self.path}: the weights are quantized with {shown(str(method))!r}, which load_model does not "
                    "decode: take an unquantized checkpoint, or load it with the library that wrote it"
                )

    def refuse_impossible(self, catalogue: Catalogue) -> None:
        """Raise ConfigError where building the model would take time or memory that no such checkpoint can fill."""
        refuse_impossible(self.data, catalogue, self.path)

    @property
    def custom_code(self) -> Mapping[str, str]:
        """Which classes the checkpoint brings code for: kind of class to where its code is."""
        named = self.data.get("auto_map")
        return named if isinstance(named, dict) else {}


def refuse_impossible(data: Mapping[str, Any], catalogue: Catalogue, where: str) -> None:
    """Raise ConfigError for a configuration with numbers that no checkpoint like `catalogue` can fill."""
    most = max(1_000, 4 * len(catalogue))
    for key, value in _walk(data):
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        if _LAYERS.search(key) and value > most:
            raise _impossible(where, key, value, f"and the checkpoint holds {len(catalogue):,} tensors")
        if "expert" in key and value > MAX_EXPERTS:
            raise _impossible(where, key, value, f"which is over the limit of {MAX_EXPERTS:,}")
        if key in ("num_labels", "_num_labels") and value > MAX_LABELS:
            raise _impossible(where, key, value, f"which is over the limit of {MAX_LABELS:,}")


def _impossible(where: str, key: str, value: int, why: str) -> UnfitConfig:
    return UnfitConfig(f"{where} asks for {shown(key)} = {value:,}, {why}: correct it, nothing was built")


def _read(path: Path, where: str) -> dict[str, Any]:
    if not path.is_file():
        raise LocateError(f"{where} is missing: it says which class the weights are of; give auto_class and config")
    if path.stat().st_size > MAX_BYTES:
        raise CorruptFile(f"{where} has {path.stat().st_size:,} bytes: no config.json is larger than {MAX_BYTES:,}")
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise located(error, shown(where, 300)) from None
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{where} is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise CorruptFile(f"{where}: a JSON object is expected, found a {type(data).__name__}")
    return data


def _walk(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every key and value, those of inner objects too."""
    inner: list[Mapping[str, Any]] = [data]
    while inner:
        for key, value in inner.pop().items():
            yield key, value
            if isinstance(value, dict):
                inner.append(value)


def loaded_config(file: ConfigFile, auto_class: type | str | None = None, *, trust_remote_code: bool) -> Any:
    """Return the configuration that transformers makes of the file; its class is of transformers' many.

    Which one follows from ``model_type``, or from the class to be built where that is of an inner kind.
    Raises UnsafeFile where that takes code from the checkpoint and `trust_remote_code` is not set; ConfigError.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    said = file.data.get("model_type")
    kind = said if isinstance(said, str) else None
    if kind not in CONFIG_MAPPING and file.custom_code and not trust_remote_code:
        raise _needs_code(file)
    remote = trust_remote_code and bool(file.custom_code)
    maker: Any = AutoConfig if remote or kind in CONFIG_MAPPING else _config_class(file, auto_class) or AutoConfig
    try:
        config = maker.from_pretrained(os.fspath(file.folder), trust_remote_code=remote, local_files_only=True)
    except Exception as error:  # its many configurations validate with errors of their own
        raise UnfitConfig(f"{file.path}: transformers does not take it: {shown(str(error), 500)}") from error
    if not trust_remote_code:
        _refuse_kernels(config, file)
    return config


def _refuse_kernels(config: Any, file: ConfigFile) -> None:
    """Raise UnsafeFile where attention or experts are to be computed by code that transformers would fetch and run.

    The object is asked, and not the file, for a file can give its attributes other names.
    """
    seen: set[int] = set()
    left = [config]
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        for name, value in vars(part).items():
            if "implementation" in name and "/" in str(value):
                raise UnsafeFile(
                    f"{file.path}: asks to fetch and run the code {shown(str(value))!r} ({shown(name)}): take that out "
                    "of it, or pass trust_remote_code=True if you trust it"
                )
            if hasattr(value, "to_diff_dict"):
                left.append(value)


def _config_class(file: ConfigFile, auto_class: type | str | None) -> Any:
    """Return the kind of configuration that the class to be built takes; None where that is not known by its name."""
    import transformers

    names = file.data.get("architectures")
    known: list[Any] = [auto_class] if auto_class is not None else names if isinstance(names, list) else []
    kinds: Iterator[Any] = (getattr(transformers, one, None) if isinstance(one, str) else one for one in known)
    return next((k.config_class for k in kinds if getattr(k, "config_class", None) is not None), None)


def _needs_code(file: ConfigFile) -> UnsafeFile:
    code = ", ".join(shown(str(where)) for where in file.custom_code.values())
    return UnsafeFile(
        f"{file.path}: auto_map asks to run code that came with the checkpoint ({code}): read it, and pass "
        "trust_remote_code=True if you trust it"
    )


def chosen_class(
    config: Any, file: ConfigFile | None, auto_class: type | str | None, *, trust_remote_code: bool
) -> type[nn.Module]:
    """Return the class to build: that of `auto_class` for this configuration, else the one that `architectures` names.

    auto_class: an ``AutoModelFor…`` class of transformers or its name, or a concrete class. Raises ConfigError,
    or UnsafeFile where the class is in code of the checkpoint that is not trusted.
    """
    import transformers

    if isinstance(auto_class, str):
        auto_class = _attribute(transformers, auto_class)
    if auto_class is not None and not hasattr(auto_class, "_model_mapping"):
        return cast("type[nn.Module]", auto_class)
    custom = dict(file.custom_code) if file is not None else {}
    if trust_remote_code and file is not None:
        remote = _remote_class(custom, file.folder, auto_class)
        if remote is not None:
            return remote
    if auto_class is not None:
        return _mapped(auto_class, config)
    names = [n for n in getattr(config, "architectures", None) or () if isinstance(n, str)]
    for name in names:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, nn.Module):
            return found
    if custom and file is not None:
        raise _needs_code(file)
    where, kind = (file.path, UnfitConfig) if file is not None else ("the configuration", ConfigError)
    said = f"names {', '.join(map(shown, names))}, which transformers {transformers.__version__} does not have"
    raise kind(f"{where} {said if names else 'names no architectures'}: give auto_class, or a newer transformers")


def _attribute(transformers: Any, name: str) -> type:
    found = getattr(transformers, name, None)
    if not isinstance(found, type):
        raise ConfigError(f"auto_class: transformers {transformers.__version__} has no class {shown(name)!r}")
    return found


def _mapped(auto_class: Any, config: Any) -> type[nn.Module]:
    try:
        found = auto_class._model_mapping[type(config)]
    except KeyError:
        raise ConfigError(f"{auto_class.__name__} has no class for a {type(config).__name__}") from None
    if isinstance(found, list | tuple):
        wanted = getattr(config, "architectures", None) or ()
        found = next((kind for kind in found if kind.__name__ in wanted), found[0])
    return cast("type[nn.Module]", found)


def _remote_class(custom: Mapping[str, str], folder: Path, auto_class: Any) -> type[nn.Module] | None:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    wanted = [auto_class.__name__] if auto_class is not None else [k for k in custom if k.startswith("AutoModel")]
    preferred = sorted((k for k in wanted if k in custom), key=lambda k: k == "AutoModel")
    if not preferred:
        return None
    return cast("type[nn.Module]", get_class_from_dynamic_module(custom[preferred[0]], os.fspath(folder)))


def chosen_dtype(
    asked: torch.dtype | str | None, config: Any, catalogue: Catalogue
) -> tuple[torch.dtype, tuple[str, ...]]:
    """Return the dtype of the model and what to tell of it: as asked, as configured, or that of most of the bytes."""
    if isinstance(asked, str) and asked != "auto":
        name = asked.removeprefix("torch.")
        asked = getattr(torch, DTYPES.get(name, name), asked)
    if isinstance(asked, torch.dtype):
        return _floating(asked), ()
    if asked not in (None, "auto"):
        raise ConfigError(f"dtype must be a torch dtype, or one of auto, {', '.join(DTYPES)}, not {asked!r}")
    configured = getattr(config, "dtype", None)
    if isinstance(configured, str):
        configured = getattr(torch, configured, None)
    if isinstance(configured, torch.dtype):
        return _floating(configured), ()
    if any(entry.dtype.kind is Kind.PACKED for entry in catalogue.values()):
        return torch.float32, ("nothing says a dtype, and packed weights are dequantized: float32 is used",)
    return _most_bytes(catalogue)


def _floating(dtype: torch.dtype) -> torch.dtype:
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ConfigError(f"a model cannot be built in {dtype}: give float32, bfloat16, float16 or float64")
    return dtype


def _most_bytes(catalogue: Catalogue) -> tuple[torch.dtype, tuple[str, ...]]:
    sizes: Counter[str] = Counter()
    kinds = {e.dtype.name: e.dtype for e in catalogue.values() if e.dtype.name in ("F16", "BF16", "F32", "F64")}
    for entry in catalogue.values():
        if entry.dtype.name in kinds:
            sizes[entry.dtype.name] += entry.nbytes
    if not sizes:
        return torch.float32, ("neither config.json nor the weights say a floating-point dtype: float32 is used",)
    chosen = max(sizes, key=lambda name: (sizes[name], kinds[name].nbytes((1,))))
    dtype = torch_dtype(kinds[chosen])
    if len(sizes) == 1:
        return dtype, ()
    told = ", ".join(f"{name} {size:,} bytes" for name, size in sizes.most_common())
    return dtype, (f"config.json gives no dtype, and the weights are mixed ({told}): {dtype} is used",)
