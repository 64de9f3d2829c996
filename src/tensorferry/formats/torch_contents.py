"""What a torch file holds before anyone asks for names: its object, described, and the places of its storages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tensorferry.core.catalogue import Span
from tensorferry.errors import CorruptFile, shown
from tensorferry.formats.pickle_values import BadValue, survey
from tensorferry.formats.torch_values import TensorRef
from tensorferry.storage.base import File

__all__ = ["TorchContents", "tensors_of"]

Tensors = tuple[tuple[str, TensorRef], ...]


@dataclass(frozen=True, slots=True)
class TorchContents:
    """top: the described object. tensors: all in it, each once, by dotted path.

    places: the bytes of each storage by its key. notes: one sentence each.
    """

    top: object
    tensors: Tensors
    places: Mapping[str, Span]
    notes: tuple[str, ...] = ()


def tensors_of(file: File, top: object) -> Tensors:
    """Return all tensors in a described object. Raises CorruptFile where it holds itself or nests too deep."""
    try:
        return tuple(survey(top, TensorRef))
    except BadValue as problem:
        raise CorruptFile(f"{shown(file.path)}: {problem}") from None
