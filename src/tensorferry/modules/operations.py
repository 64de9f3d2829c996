"""What sort of thing each torch operation does to memory, and which of them only move elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any

import torch

__all__ = ["MOVES", "Sort", "sort_of", "tensors_in", "with_row_numbers", "written_by"]

aten = torch.ops.aten
MANY_RUNS = 256
"""Most runs of neighbouring rows that picking rows by number is followed for."""


class Sort(Enum):
    """The sorts of operation that tracing tells apart."""

    VIEW = "another look at the same memory"
    COMPOSITE = "made of other operations"
    COPY = "one tensor is copied to another"
    FILL = "one value is written everywhere"
    WRITE = "changes a tensor in another way"
    VALUE = "hands values to Python"
    BLANK = "new memory that has only shape and type of a tensor"
    MOVE = "new memory with elements of tensors, unchanged"
    COMPUTE = "anything else"


_BLANKS = {
    aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.new_empty, aten.new_zeros, aten.new_ones,
    aten.new_full, aten.new_empty_strided, aten.rand_like, aten.randn_like, aten.lift_fresh,
}  # fmt: skip
_SHAPE_ONLY = {aten.is_same_size, aten.sym_size, aten.sym_stride, aten.sym_numel, aten.sym_storage_offset}


@cache
def sort_of(func: Any) -> Sort:
    """Return what `func`, an overload of an operation, does; told from its schema where it is not known by name."""
    packet, schema = func.overloadpacket, func._schema
    if packet in (aten.copy_, aten.fill_, aten.zero_):
        return Sort.COPY if packet is aten.copy_ else Sort.FILL
    if any(a.is_write for a in schema.arguments):
        return Sort.WRITE
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return Sort.COMPOSITE
    if packet in MOVES or packet in _BLANKS:
        return Sort.MOVE if packet in MOVES else Sort.BLANK
    if packet is aten._unsafe_view or packet in _SHAPE_ONLY or any(r.alias_info is not None for r in schema.returns):
        return Sort.VIEW
    if not any("Tensor" in str(r.type) for r in schema.returns):
        return Sort.VALUE
    return Sort.COMPUTE


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of an operation, those in lists too."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value, {})


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that `func` changes."""
    found: list[torch.Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            found += tensors_in([args[i] if i < len(args) else kwargs.get(argument.name)], {})
    return found


Parts = Iterable[tuple[torch.Tensor, torch.Tensor]]
Unknown = Callable[[torch.Tensor], bool]


def _same(made: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], unknown: Unknown) -> Parts:
    return [(made, args[0])]


def _cat(made: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], unknown: Unknown) -> Parts:
    dim, at = _argument(args, kwargs, 1, "dim", 0), 0
    for tensor in args[0]:
        if tensor.dim() == made.dim():
            yield made.narrow(dim, at, tensor.shape[dim]), tensor
            at += tensor.shape[dim]


def _stack(made: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], unknown: Unknown) -> Parts:
    dim = _argument(args, kwargs, 1, "dim", 0)
    return [(made.select(dim, i), tensor) for i, tensor in enumerate(args[0])]


def _index_select(made: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], unknown: Unknown) -> Parts | None:
    return _rows(made, args[0], args[1], args[2], unknown)


def _index(made: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], unknown: Unknown) -> Parts | None:
    given = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
    if len(given) != 1 or given[0][1].dim() != 1:
        return None
    return _rows(made, args[0], *given[0], unknown)


def _rows(made: torch.Tensor, source: torch.Tensor, dim: int, index: torch.Tensor, unknown: Unknown) -> Parts | None:
    """Return the copies that pick the rows of `source` that `index` names; None where its values are not known."""
    if index.is_meta or index.dtype == torch.bool or unknown(index):
        return None
    numbers = index.flatten().tolist()
    runs: list[list[int]] = []
    for n in (n % source.shape[dim] for n in numbers):
        if runs and n == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([n, 1])
    if len(runs) > MANY_RUNS:
        return None
    return list(_narrowed(made, source, dim, runs))


def _narrowed(made: torch.Tensor, source: torch.Tensor, dim: int, runs: Sequence[Sequence[int]]) -> Parts:
    at = 0
    for first, count in runs:
        yield made.narrow(dim, at, count), source.narrow(dim, first, count)
        at += count


def _repeat(made: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], unknown: Unknown) -> Parts:
    times = args[1]
    source = args[0][(None,) * (len(times) - args[0].dim())]
    shape = [n for pair in zip(times, source.shape, strict=True) for n in pair]
    once = source
    for dim in range(source.dim()):
        once = once.unsqueeze(2 * dim)
    return [(made.view(shape), once.expand(shape))]


def with_row_numbers(func: Any, args: tuple[Any, ...], unknown: Unknown) -> tuple[Any, ...]:
    """Return `args` with masks that pick elements as numbers, so that the shape of the result follows from shapes."""
    if func.overloadpacket is not aten.index:
        return args
    return (args[0], [_row_numbers(i, unknown) for i in args[1]], *args[2:])


def _row_numbers(index: torch.Tensor | None, unknown: Unknown) -> torch.Tensor | None:
    if index is None or index.dtype != torch.bool or index.dim() != 1 or index.is_meta or unknown(index):
        return index
    return index.nonzero().flatten()


MOVES: Mapping[Any, Callable[..., Parts | None]] = {
    aten.clone: _same,
    aten._to_copy: _same,
    aten.cat: _cat,
    aten.stack: _stack,
    aten.index_select: _index_select,
    aten.index: _index,
    aten.repeat: _repeat,
}
"""Operations that only move elements: the views of what they make, each with the tensor that is copied there."""


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)
