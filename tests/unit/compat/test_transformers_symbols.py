"""Tensors without values: torch's rearranging functions on them say where each part of an entry goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensorferry.compat.transformers.symbols import Opaque, Symbol
from tensorferry.core.boxes import Region
from tensorferry.core.transforms import TensorSpec
from tensorferry.numerics.compute import compute
from tensorferry.numerics.torch_dtypes import dtype_of

Entries = dict[str, torch.Tensor]


def entries(*shapes: tuple[int, ...]) -> Entries:
    """Return tensors a, b, … whose values are all different."""
    made, at = {}, 0
    for name, shape in zip("abcdefgh", shapes, strict=False):
        count = int(torch.tensor(shape).prod())
        made[name] = torch.arange(at, at + count).reshape(shape).float()
        at += count
    return made


def performed(symbol: Symbol, tensors: Entries) -> torch.Tensor:
    """Return the tensor that a symbol stands for, put together from its pieces as a plan would do it."""
    out = torch.full(tuple(symbol.shape), -1.0)
    for piece in symbol.pieces:
        values = tensors[piece.entry]
        if piece.via is not None:
            spec = TensorSpec(dtype_of(values.dtype), piece.shape)
            whole = Region.whole(piece.via.infer([spec]).shape).box
            parts = [values[b.slices] for b in piece.via.pull(whole, [spec])]
            values = compute(piece.via, parts, [spec], whole)
        assert tuple(values.shape) == piece.made
        out[piece.into.slices] = values.reshape(piece.into.shape)
    return out


OPERATIONS: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., Any]]] = {
    "stack": (((2, 3), (2, 3)), lambda a, b: torch.stack([a, b])),
    "stack inside": (((2, 3), (2, 3)), lambda a, b: torch.stack([a, b], dim=1)),
    "stack at the end": (((2, 3), (2, 3)), lambda a, b: torch.stack([a, b], dim=-1)),
    "cat": (((2, 3), (4, 3)), lambda a, b: torch.cat([a, b], dim=0)),
    "cat of stacks": (((2, 3),) * 4, lambda a, b, c, d: torch.cat([torch.stack([a, b]), torch.stack([c, d])], dim=1)),
    "chunk": (((6, 2),), lambda a: torch.chunk(a, 3, dim=0)[1].contiguous()),
    "uneven chunk": (((5, 2),), lambda a: torch.chunk(a, 2, dim=0)[1]),
    "split of a cat": (((2, 3), (4, 3)), lambda a, b: torch.split(torch.cat([a, b]), [3, 3])[1]),
    "transpose": (((2, 3),), lambda a: torch.transpose(a, dim0=0, dim1=1).contiguous()),
    "transposed stack": (((2, 3), (2, 3)), lambda a, b: torch.stack([a, b]).transpose(1, 2)),
    "transpose of the stacked dimension": (((2, 3), (2, 3)), lambda a, b: torch.stack([a, b]).transpose(0, 2)),
    "permute": (((2, 3, 4),), lambda a: a.permute(2, 0, 1)),
    "part of a transpose": (((4, 6),), lambda a: a.transpose(0, 1)[1:4]),
    "unbind": (((3, 2, 2),), lambda a: torch.unbind(a, 0)[2]),
    "select of a transpose": (((3, 4),), lambda a: a.transpose(0, 1)[2]),
    "squeeze": (((1, 3),), lambda a: a.squeeze(0)),
    "unsqueeze": (((2, 3),), lambda a: a.unsqueeze(1)),
    "chunks stacked": (((4, 3),), lambda a: torch.stack(torch.chunk(a, 2, dim=0))),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_on_symbols_puts_the_values_where_torch_puts_them(name: str) -> None:
    shapes, operation = OPERATIONS[name]
    tensors = entries(*shapes)
    symbol = operation(*(Symbol.of_entry(n, tuple(t.shape)) for n, t in tensors.items()))
    expected = operation(*tensors.values())
    assert tuple(symbol.shape) == tuple(expected.shape)
    assert torch.equal(performed(symbol, tensors), expected)


@pytest.mark.parametrize(
    "operation",
    [
        lambda a: a.reshape(3, 2),
        lambda a: a + 1,
        lambda a: torch.exp(a),
        lambda a: a[:, ::2],
        lambda a: a.to(torch.float16),
        lambda a: torch.cat([a, a.transpose(0, 1)]),
    ],
)
def test_what_is_no_move_of_whole_boxes_is_opaque(operation: Callable[[Any], Any]) -> None:
    with pytest.raises((Opaque, TypeError)):
        operation(Symbol.of_entry("a", (2, 3)))
