"""What a loader has hung on a model, as something that two runs of it can be compared by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, NoneType
from typing import Any

import torch
from torch import nn

from tensorferry.modules.containers import FUNCTIONS, held_in, inside_function, is_a, items_in
from tensorferry.modules.describe import ORDINARY, walked_once
from tensorferry.modules.recorder import Memory, Recorder, geometry, key_of
from tensorferry.modules.snapshot import attribute_tensors

__all__ = ["Likeness"]

_VALUES = (bool, int, str, bytes, Enum, NoneType, torch.dtype, torch.device, torch.Size)
_DEEPEST = 50
_THEMSELVES = (type, BuiltinFunctionType, CodeType)


class Likeness:
    """Describes things after one run of a loader, so that those of another run of it on the same model compare equal.

    modules: what the model had before. owned: the memory of its tensors.
    """

    def __init__(
        self, modules: Iterable[tuple[str, nn.Module]], recorder: Recorder, owned: Mapping[int, Memory]
    ) -> None:
        self._there = {module for _, module in modules}
        self._recorder, self._owned = recorder, owned

    def behind(self, item: torch.Tensor | nn.Module) -> frozenset[str]:
        """Return the entries that the values of a tensor, or of a module, come from, if it was not there before."""
        if isinstance(item, torch.Tensor):
            is_made = item.layout is torch.strided and key_of(item) not in self._owned
            return self._recorder.taint(item) if is_made else frozenset()
        inner = () if item in self._there else attribute_tensors(walked_once(item))
        return frozenset[str]().union(*(self.behind(tensor) for _, tensor in inner))

    def of(self, value: Any) -> object:
        """Return what is equal for the same things of the model, and for new ones that were made in the same way.

        Other objects are told apart by their class, and by the tensors and modules in them; what lies very deep is not.
        """
        return self._of(value, {}, _DEEPEST)

    def _of(self, value: Any, known: dict[int, int], depth: int) -> object:
        if is_a(value, torch.Tensor):
            return self._of_tensor(value)
        if is_a(value, _VALUES):
            return type(value), value
        if is_a(value, (float, complex)):
            return repr(value)  # one that is no number is equal to itself so
        if is_a(value, _THEMSELVES):
            return value
        if depth == 0:
            return type(value), "what is in it lies too deep"
        if is_a(value, nn.Module) and value in self._there:
            return "there", id(value)
        if not is_a(value, (tuple, frozenset)):  # Python may have equal ones of these be the same object, or not
            if id(value) in known:
                return "again", known[id(value)]
            known[id(value)] = len(known)
        return type(value), *self._inside(value, known, depth - 1)

    def _inside(self, value: Any, known: dict[int, int], depth: int) -> tuple[object, ...]:
        """Return what is in something that holds other things."""
        items = items_in(value)
        if isinstance(items, dict):
            if is_a(value, OrderedDict) and all(type(key) is int for key in items):
                items = dict(enumerate(items.values()))  # hooks, to which torch gives other numbers each time
            return tuple((self._of(key, known, depth), self._of(item, known, depth)) for key, item in items.items())
        if isinstance(items, set | frozenset):
            return tuple(sorted(repr(self._of(item, known, depth)) for item in items))
        if is_a(value, nn.Module):
            return (self._of(vars(value), known, depth),)
        if is_a(value, FUNCTIONS):
            code = value.__code__ if is_a(value, FunctionType) else None
            return code, *(self._of(item, known, depth) for item in inside_function(value))
        inner = held_in([value]) if items is None else items
        return tuple(self._of(item, known, depth) for item in inner)

    def _of_tensor(self, tensor: torch.Tensor) -> object:
        what = type(tensor), tensor.dtype, tuple(tensor.shape), tensor.layout
        if tensor.layout is not torch.strided:
            return what
        if key_of(tensor) in self._owned:
            return what, key_of(tensor), geometry(tensor)
        taint, has_values = self._recorder.taint(tensor), type(tensor) in ORDINARY and not tensor.is_meta
        if taint or self._recorder.touched(tensor) or not has_values:
            return what, taint
        return what, tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
