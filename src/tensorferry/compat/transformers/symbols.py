"""Tensors without values that remember where each of their parts comes from.

transformers describes conversions by operations that are run on tensors. Run on these, an operation says which part
of which entry goes where, and the plan can read it straight into place. Only rearrangements that keep parts whole
boxes are known; anything else raises `Opaque`, and the operation has to be run on real values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.transforms import Chain, Take, Transform, Transpose

__all__ = ["Inlay", "Opaque", "Symbol"]


class Opaque(Exception):
    """An operation is not one that only moves whole boxes."""


class Inlay(NamedTuple):
    """A box of an entry that lies in a box of a tensor.

    into: where, in the tensor. entry: its name. shape: of the whole entry. taken: which part of the entry.
    dims: for each dimension of the entry, the one of the tensor that it has become; None where its extent is 1 and
    it was dropped. Other dimensions of `into` have the extent 1.
    """

    into: Box
    entry: str
    shape: Shape
    taken: Box
    dims: tuple[int | None, ...]

    @property
    def via(self) -> Transform | None:
        """What to do with the entry, so that its elements are in the order of `into`."""
        order = sorted(range(len(self.dims)), key=lambda d: -1 if self.dims[d] is None else self.dims[d] or 0)
        steps: list[Transform] = []
        if self.taken != Box.whole(self.shape):
            steps.append(Take(Region(self.shape, self.taken), self.taken.shape))
        if order != sorted(order):
            steps.append(Transpose(tuple(order)))
        if len(steps) > 1:
            return Chain(tuple(steps))
        return steps[0] if steps else None

    @property
    def made(self) -> Shape:
        """The shape that `via` makes of the entry."""
        order = sorted(range(len(self.dims)), key=lambda d: -1 if self.dims[d] is None else self.dims[d] or 0)
        return tuple(self.taken.shape[d] for d in order)


@dataclass(frozen=True)
class Symbol:
    """A tensor of `shape` made up of `pieces`; parts without a piece are nowhere in the checkpoint.

    Answers to the functions and methods of torch that its table knows, and to a few attributes.
    """

    shape: torch.Size
    pieces: tuple[Inlay, ...]

    @classmethod
    def of_entry(cls, name: str, shape: Shape) -> Symbol:
        """Return the tensor that is all of one entry."""
        whole = Box.whole(shape)
        return cls(torch.Size(shape), (Inlay(whole, name, tuple(shape), whole, tuple(range(len(shape)))),))

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch on symbols; raises Opaque for one that is not known."""
        known = _KNOWN.get(function.__name__)
        if known is None:
            raise Opaque(f"torch.{function.__name__}")
        return known(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        known = _KNOWN.get(name)
        if known is None:
            raise AttributeError(name) if name.startswith("__") else Opaque(f"Tensor.{name}")
        return lambda *args, **kwargs: known(self, *args, **kwargs)

    def __getitem__(self, index: Any) -> Symbol:
        if index is Ellipsis:
            return self
        if isinstance(index, slice) and index.step in (None, 1):
            start, stop, _ = index.indices(self.shape[0])
            return _narrow(self, 0, start, max(0, stop - start))
        if isinstance(index, int):
            return _select(self, 0, index)
        raise Opaque("indexing")

    @property
    def ndim(self) -> int:
        return len(self.shape)


def _axis(tensor: Symbol, dim: int, extra: int = 0) -> int:
    return dim % (tensor.ndim + extra)


def _cat(tensors: Sequence[Symbol], dim: int = 0) -> Symbol:
    d, at, pieces = _axis(tensors[0], dim), 0, []
    for tensor in tensors:
        if tensor.ndim != tensors[0].ndim:
            raise Opaque("tensors of different rank")
        by = [0] * tensor.ndim
        by[d] = at
        pieces += [p._replace(into=p.into.shift(by)) for p in tensor.pieces]
        at += tensor.shape[d]
    if len({(*t.shape[:d], *t.shape[d + 1 :]) for t in tensors}) > 1:
        raise Opaque("tensors of different shape")
    return Symbol(torch.Size((*tensors[0].shape[:d], at, *tensors[0].shape[d + 1 :])), tuple(pieces))


def _stack(tensors: Sequence[Symbol], dim: int = 0) -> Symbol:
    return _cat([_unsqueeze(t, dim) for t in tensors], dim)


def _unsqueeze(tensor: Symbol, dim: int) -> Symbol:
    d = _axis(tensor, dim, 1)

    def widened(p: Inlay) -> Inlay:
        into = Box((*p.into.start[:d], 0, *p.into.start[d:]), (*p.into.stop[:d], 1, *p.into.stop[d:]))
        return p._replace(into=into, dims=tuple(k if k is None or k < d else k + 1 for k in p.dims))

    return Symbol(torch.Size((*tensor.shape[:d], 1, *tensor.shape[d:])), tuple(map(widened, tensor.pieces)))


def _squeeze(tensor: Symbol, dim: int) -> Symbol:
    d = _axis(tensor, dim)
    if tensor.shape[d] != 1:
        return tensor

    def narrowed(p: Inlay) -> Inlay:
        into = Box((*p.into.start[:d], *p.into.start[d + 1 :]), (*p.into.stop[:d], *p.into.stop[d + 1 :]))
        return p._replace(into=into, dims=tuple(None if k is None or k == d else k - (k > d) for k in p.dims))

    return Symbol(torch.Size((*tensor.shape[:d], *tensor.shape[d + 1 :])), tuple(map(narrowed, tensor.pieces)))


def _narrow(tensor: Symbol, dim: int, start: int, length: int) -> Symbol:
    d = _axis(tensor, dim)
    kept = (_cut(p, d, start, start + length) for p in tensor.pieces)
    shape = (*tensor.shape[:d], length, *tensor.shape[d + 1 :])
    return Symbol(torch.Size(shape), tuple(p for p in kept if p is not None))


def _cut(piece: Inlay, d: int, start: int, stop: int) -> Inlay | None:
    """Return what is left of a piece between `start` and `stop` of dimension `d`, seen from `start`."""
    a, b = max(piece.into.start[d], start), min(piece.into.stop[d], stop)
    if a >= b:
        return None
    into, taken = _with(piece.into, d, a - start, b - start), piece.taken
    if d in piece.dims:
        k = piece.dims.index(d)
        first = taken.start[k] + a - piece.into.start[d]
        taken = _with(taken, k, first, first + b - a)
    return piece._replace(into=into, taken=taken)


def _with(box: Box, d: int, start: int, stop: int) -> Box:
    return Box((*box.start[:d], start, *box.start[d + 1 :]), (*box.stop[:d], stop, *box.stop[d + 1 :]))


def _split(tensor: Symbol, sizes: int | Sequence[int], dim: int = 0) -> tuple[Symbol, ...]:
    total = tensor.shape[_axis(tensor, dim)]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - at) for at in range(0, total, sizes)]
    if sum(sizes) != total:
        raise Opaque("splitting into parts that do not add up")
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    return tuple(_narrow(tensor, dim, at, n) for at, n in zip(starts, sizes, strict=True))


def _chunk(tensor: Symbol, chunks: int, dim: int = 0) -> tuple[Symbol, ...]:
    return _split(tensor, max(1, -(-tensor.shape[_axis(tensor, dim)] // chunks)), dim)


def _select(tensor: Symbol, dim: int, index: int) -> Symbol:
    d = _axis(tensor, dim)
    return _squeeze(_narrow(tensor, d, index % tensor.shape[d], 1), d)


def _unbind(tensor: Symbol, dim: int = 0) -> tuple[Symbol, ...]:
    return tuple(_select(tensor, dim, n) for n in range(tensor.shape[_axis(tensor, dim)]))


def _permute(tensor: Symbol, *dims: Any) -> Symbol:
    order = [_axis(tensor, d) for d in (dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)]

    def moved(p: Inlay) -> Inlay:
        into = Box(tuple(p.into.start[d] for d in order), tuple(p.into.stop[d] for d in order))
        return p._replace(into=into, dims=tuple(None if k is None else order.index(k) for k in p.dims))

    return Symbol(torch.Size(tensor.shape[d] for d in order), tuple(map(moved, tensor.pieces)))


def _transpose(tensor: Symbol, dim0: int, dim1: int) -> Symbol:
    order = list(range(tensor.ndim))
    a, b = _axis(tensor, dim0), _axis(tensor, dim1)
    order[a], order[b] = b, a
    return _permute(tensor, order)


def _size(tensor: Symbol, dim: int | None = None) -> Any:
    return tensor.shape if dim is None else tensor.shape[dim]


def _same(tensor: Symbol, *_: Any, **__: Any) -> Symbol:
    return tensor


_KNOWN: dict[str, Callable[..., Any]] = {
    "cat": _cat, "concat": _cat, "stack": _stack, "unsqueeze": _unsqueeze, "squeeze": _squeeze, "narrow": _narrow,
    "split": _split, "chunk": _chunk, "select": _select, "unbind": _unbind, "permute": _permute,
    "transpose": _transpose, "contiguous": _same, "clone": _same, "size": _size, "dim": lambda t: t.ndim,
    "detach": _same, "data_ptr": lambda t: 0,  # aligned, as the memory of parameters is
}  # fmt: skip
