"""Checkpoints whose weights lie in parts, as codes with their scales beside: torchao's safetensors files and MLX's.

They are recognised by names, types and metadata, and told in words. The parts stay entries as they lie; making numbers
of them is no business of a format.

torchao (0.15 and later; those before have the other part names): the metadata names all tensors in ``tensor_names`` and
has for each JSON with its ``_type`` and, for a class of torchao's, ``_tensor_data_names``; part p of ``m.weight`` is
the entry ``m._weight_p``. MLX: ``m.weight`` is U32 with ``m.scales`` beside, and ``m.biases`` in the affine mode; how
many bits a code has and how many weights a scale is for only ``quantization`` of config.json tells.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tensorferry.core.amounts import counted, few
from tensorferry.core.catalogue import Catalogue
from tensorferry.core.dtypes import DTYPES
from tensorferry.errors import CorruptFile, TensorferryError, shown
from tensorferry.formats.strict_json import parse_json_object
from tensorferry.storage.base import Storage
from tensorferry.storage.reading import read_bytes

__all__ = ["QUANTIZED_BY", "describe_parts", "noted"]

QUANTIZED_BY = "quantized by "
"""What each note begins with, so that others can be told from them."""

_UNDONE = "the parts are listed as they lie, and no numbers are made of them here"
_PLAIN = "Tensor"
_LONGEST_JSON = 1 << 16
_MAX_CONFIG = 1 << 20
_FEW = 3


def noted(storage: Storage, catalogue: Catalogue) -> Catalogue:
    """Return `catalogue`, with notes where its weights lie in parts; config.json beside is read where that helps."""
    if catalogue.format != "safetensors":
        return catalogue
    config = _config(storage) if next(_mlx_modules(catalogue), None) is not None else None
    notes = describe_parts(catalogue, config)
    return catalogue.replacing(catalogue.values(), notes=notes) if notes else catalogue


def describe_parts(catalogue: Catalogue, config: Mapping[str, Any] | None = None) -> list[str]:
    """Return what `catalogue` holds in parts, one sentence for torchao and one for MLX, each where it applies.

    config: config.json of the model, as it was parsed, whatever is in it.
    """
    return [*_torchao(catalogue), *_mlx(catalogue, (config or {}).get("quantization"))]


def _config(storage: Storage) -> Mapping[str, Any] | None:
    """Return config.json of the folder, or None where there is none that can be read: it is only asked for words."""
    try:
        file = storage.stat("config.json")
        if not 0 < file.size <= _MAX_CONFIG:
            return None
        return parse_json_object(read_bytes(storage, file.path, 0, file.size), what=file.path)
    except TensorferryError:
        return None


def _torchao(catalogue: Catalogue) -> Iterator[str]:
    if "tensor_names" not in catalogue.metadata:
        return
    classes: Counter[str] = Counter()
    parts: defaultdict[str, dict[str, None]] = defaultdict(dict)
    absent: list[str] = []
    for tensor, text in catalogue.metadata.items():
        kind, names = _torchao_class(tensor, text)
        if kind is None:
            continue
        classes[kind] += 1
        parts[kind].update(dict.fromkeys(names))
        absent += [_torchao_part(tensor, p) for p in names if not _has_part(catalogue, tensor, p)]
    if classes:
        listed = "; ".join(
            f"{shown(k)} in {counted(n, 'weight')}{_in_parts(list(parts[k]))}" for k, n in classes.items()
        )
        yield f"{QUANTIZED_BY}torchao: {listed}{_lacking(absent)}; {_UNDONE}"


def _torchao_class(tensor: str, text: str) -> tuple[str | None, list[str]]:
    """Return the class of a tensor and the names of its parts, as the metadata tells; (None, []) for plain tensors."""
    if not text.startswith("{") or len(text) > _LONGEST_JSON:
        return None, []
    try:
        told = parse_json_object(text.encode(errors="replace"), what=tensor)
    except CorruptFile:
        return None, []
    kind, names = told.get("_type"), told.get("_tensor_data_names")
    if not isinstance(kind, str) or kind == _PLAIN or not isinstance(names, list):
        return None, []
    return kind, [name for name in names if isinstance(name, str)]


def _torchao_part(tensor: str, part: str) -> str:
    module, _, leaf = tensor.rpartition(".")
    return f"{module}._{leaf}_{part}"


def _has_part(catalogue: Catalogue, tensor: str, part: str) -> bool:
    return _torchao_part(tensor, part) in catalogue or f"{tensor}:{part}" in catalogue


class _Scheme(NamedTuple):
    """How MLX coded a weight. mode: affine, or a floating-point format of its own."""

    bits: int
    group: int
    mode: str

    def __str__(self) -> str:
        return f"{self.bits}-bit groups of {self.group} ({shown(self.mode)})"


def _mlx_modules(catalogue: Catalogue) -> Iterator[str]:
    """Yield the name of each module whose weight lies in parts, with its dot, or "" for a weight without a module."""
    codes = DTYPES["U32"]
    for name, entry in catalogue.items():
        if entry.dtype == codes and (name.endswith(".weight") or name == "weight"):
            module = name.removesuffix("weight")
            if f"{module}scales" in catalogue and entry.shape:
                yield module


def _mlx(catalogue: Catalogue, told: object) -> Iterator[str]:
    modules = list(_mlx_modules(catalogue))
    if not modules:
        return
    schemes = Counter(_fitting_scheme(catalogue, module, told) for module in modules)
    unknown = schemes.pop(None, 0)
    kinds = [f"{scheme} in {counted(n, 'weight')}" for scheme, n in schemes.items()]
    if unknown:
        why = "no config.json tells" if told is None else "config.json does not tell rightly"
        kinds.append(f"{counted(unknown, 'weight')} whose bits and groups {why}")
    biased = any(f"{module}biases" in catalogue for module in modules)
    parts = ["weight", "scales", *(["biases"] if biased else [])]
    yield f"{QUANTIZED_BY}MLX: {', '.join(kinds)}{_in_parts(parts)}; {_UNDONE}"


def _fitting_scheme(catalogue: Catalogue, module: str, told: object) -> _Scheme | None:
    """Return how the weight of a module is coded, if config.json tells and the sizes of the parts agree."""
    scheme = _scheme(told, module.removesuffix("."))
    codes, scales = catalogue[f"{module}weight"].shape, catalogue[f"{module}scales"].shape
    if scheme is None or not scales or codes[-1] * 32 != scales[-1] * scheme.group * scheme.bits:
        return None
    return scheme


def _scheme(told: object, module: str) -> _Scheme | None:
    if not isinstance(told, Mapping):
        return None
    own = told.get(module)
    merged = {**told, **own} if isinstance(own, Mapping) else told
    bits, group, mode = merged.get("bits"), merged.get("group_size"), merged.get("mode", "affine")
    if type(bits) is not int or type(group) is not int or not isinstance(mode, str):
        return None
    return _Scheme(bits, group, mode)


def _in_parts(names: Sequence[str]) -> str:
    return f", each in parts ({', '.join(map(shown, names))})"


def _lacking(absent: Sequence[str]) -> str:
    if not absent:
        return ""
    return f"; {counted(len(absent), 'part')} absent ({few(map(shown, absent), _FEW)})"
