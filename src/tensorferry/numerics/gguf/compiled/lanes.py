"""Vectors of a few elements as values in numba code: kernels say what is done at once, and LLVM need not find it out.

`Lanes` are loaded from arrays, computed with by operators, and stored; only what the kernels here need is here. The
host may be any that LLVM knows: wider vectors than it has are split.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

__all__ = [
    "Lanes",
    "flipped",
    "floats",
    "half",
    "inline",
    "kernel",
    "look_up",
    "signed_floats",
    "spread",
    "store",
    "take",
    "wide",
    "word",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])
Lower = Callable[[Any, Any, Any, Any], Any]
_INT = {bits: ir.IntType(bits) for bits in (8, 16, 32)}
_HALF_TO_FLOAT = 112 << 23  # what the exponent bias of float32 is more, in place


def kernel(function: F) -> F:
    """Compile at the first call, for each type of destination, and keep the code on disk where there is a place."""
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        return cast("F", numba.njit(cache=True, **options)(function))
    except RuntimeError:  # no folder that can be written to
        return cast("F", numba.njit(**options)(function))


def inline(function: F) -> F:
    """Compile as a part of the kernels that call it."""
    return cast("F", numba.njit(inline="always", error_model="numpy")(function))


def instruction(typing: Callable[..., tuple[Any, Lower]]) -> Any:
    """Make a function of numba code of one that returns, for types of arguments, a signature and what emits LLVM IR."""
    return intrinsic(typing)


class Lanes(types.Type):
    """`count` elements: float32 where `bits` is 0, else unsigned integers of so many bits."""

    def __init__(self, bits: int, count: int) -> None:
        super().__init__(name=f"lanes({bits or 'float'} x {count})")
        self.bits, self.count = bits, count

    @property
    def scalar(self) -> Any:
        return {0: types.float32, 8: types.uint8, 16: types.uint16, 32: types.uint32}[self.bits]

    @property
    def vector(self) -> Any:
        return ir.VectorType(_INT[self.bits] if self.bits else ir.FloatType(), self.count)


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Lanes) -> None:
        super().__init__(manager, kind, kind.vector)


def _operator(symbol: Any, integers: str, numbers: str = "") -> None:
    """Let `symbol` work on lanes with equal lanes or a scalar, by the IR instructions of these names."""

    def typed(_context: Any) -> Any:
        def result(left: Any, right: Any) -> Any:
            fits = isinstance(left, Lanes) and (left == right or isinstance(right, types.Number | types.IntegerLiteral))
            return left if fits else None

        return result

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind, right = sig.args
        if not isinstance(right, Lanes):
            args = args[0], _splat(builder, kind.count, context.cast(builder, args[1], right, kind.scalar))
        return getattr(builder, integers if kind.bits else numbers)(*args)

    type_callable(symbol)(typed)
    for right in (Lanes, types.Number, types.IntegerLiteral):
        lower_builtin(symbol, Lanes, right)(lower)


_operator(operator.add, "add", "fadd")
_operator(operator.sub, "sub", "fsub")
_operator(operator.mul, "mul", "fmul")
_operator(operator.and_, "and_")
_operator(operator.or_, "or_")
_operator(operator.lshift, "shl")
_operator(operator.rshift, "lshr")


def take(count: int) -> Any:
    """Return the function (array of bytes, index) -> lanes of the `count` bytes there."""

    def typed(_context: Any, row: Any, at: Any) -> tuple[Any, Lower]:
        return Lanes(8, count)(row, at), lower

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(_pointer(context, builder, sig, args, sig.return_type.vector), align=1)

    return instruction(typed)


def word(bits: int) -> Any:
    """Return the function (array of bytes, index) -> the little-endian word of 16 or 32 bits there, as uint32."""

    def typed(_context: Any, row: Any, at: Any) -> tuple[Any, Lower]:
        return types.uint32(row, at), lower

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        loaded = builder.load(_pointer(context, builder, sig, args, _INT[bits]), align=1)
        return builder.zext(loaded, _INT[32])

    return instruction(typed)


@instruction
def half(_context: Any, bits: Any) -> tuple[Any, Lower]:
    """Return the float32 number of the 16 bits of a float16, by integers: not every host converts."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        i32, f32 = _INT[32], ir.FloatType()
        whole = context.cast(builder, args[0], sig.args[0], types.uint32)
        sign = builder.shl(builder.and_(whole, i32(0x8000)), i32(16))
        rest = builder.and_(whole, i32(0x7FFF))
        tiny = builder.fmul(builder.uitofp(rest, f32), f32(2.0**-24))
        special = builder.icmp_unsigned(">=", rest, i32(0x7C00))
        bias = builder.select(special, i32(2 * _HALF_TO_FLOAT), i32(_HALF_TO_FLOAT))
        normal = builder.add(builder.shl(rest, i32(13)), bias)
        is_tiny = builder.icmp_unsigned("<", rest, i32(0x400))
        return builder.bitcast(builder.or_(sign, builder.select(is_tiny, builder.bitcast(tiny, i32), normal)), f32)

    return types.float32(bits), lower


@instruction
def floats(_context: Any, lanes: Any) -> tuple[Any, Lower]:
    """Return the integers as float32."""

    def lower(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.uitofp(args[0], sig.return_type.vector)

    return Lanes(0, lanes.count)(lanes), lower


@instruction
def signed_floats(_context: Any, lanes: Any) -> tuple[Any, Lower]:
    """Return the integers, whose highest bit is a sign, as float32."""

    def lower(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.sitofp(args[0], sig.return_type.vector)

    return Lanes(0, lanes.count)(lanes), lower


@instruction
def wide(_context: Any, lanes: Any) -> tuple[Any, Lower]:
    """Return bytes as integers of 16 bits."""

    def lower(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.zext(args[0], sig.return_type.vector)

    return Lanes(16, lanes.count)(lanes), lower


def spread(step: int, count: int) -> Any:
    """Return the function (integer of up to 32 bits) -> bytes, each of which begins `step` bits above the last."""

    def typed(_context: Any, bits: Any) -> tuple[Any, Lower]:
        return Lanes(8, count)(bits), lower

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        whole = context.cast(builder, args[0], sig.args[0], types.uint32)
        shifts = ir.Constant(ir.VectorType(_INT[32], count), [step * lane for lane in range(count)])
        return builder.trunc(builder.lshr(_splat(builder, count, whole), shifts), sig.return_type.vector)

    return instruction(typed)


@instruction
def flipped(_context: Any, lanes: Any, signs: Any) -> tuple[Any, Lower]:
    """Return float32 lanes with the sign of each turned whose bit in `signs` is set, lowest bit first."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = sig.args[0]
        integers = ir.VectorType(_INT[32], kind.count)
        whole = _splat(builder, kind.count, context.cast(builder, args[1], sig.args[1], types.uint32))
        lifted = builder.shl(whole, ir.Constant(integers, [31 - lane for lane in range(kind.count)]))
        tops = builder.and_(lifted, ir.Constant(integers, [1 << 31] * kind.count))
        return builder.bitcast(builder.xor(builder.bitcast(args[0], integers), tops), kind.vector)

    return lanes(lanes, signs), lower


def look_up(levels: Sequence[int]) -> Any:
    """Return the function (bytes below 16) -> bytes: the one of 16 `levels` that each stands for."""
    table = ir.Constant(ir.VectorType(_INT[8], 16), [level & 255 for level in levels])
    shuffles = llvmlite.binding.get_host_cpu_features().get("ssse3", False)

    def typed(_context: Any, codes: Any) -> tuple[Any, Lower]:
        return codes(codes), lower

    def lower(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return (_shuffled if shuffles else _picked)(builder, table, args[0], sig.return_type)

    return instruction(typed)


def _shuffled(builder: Any, table: Any, codes: Any, kind: Lanes) -> Any:
    instruction = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(table.type, [table.type] * 2), "llvm.x86.ssse3.pshuf.b.128"
    )
    padded = builder.shuffle_vector(codes, codes, _lanes_constant([i % kind.count for i in range(16)]))
    found = builder.call(instruction, [table, padded])
    return builder.shuffle_vector(found, found, _lanes_constant(range(kind.count)))


def _picked(builder: Any, table: Any, codes: Any, kind: Lanes) -> Any:
    found = ir.Constant(kind.vector, ir.Undefined)
    for lane in range(kind.count):
        code = builder.extract_element(codes, _INT[32](lane))
        found = builder.insert_element(found, builder.extract_element(table, code), _INT[32](lane))
    return found


@instruction
def store(_context: Any, row: Any, at: Any, lanes: Any) -> tuple[Any, Lower]:
    """Put float32 lanes into an array from an index on: as they are, or into uint16 as bits of bfloat16."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        values = args[2] if sig.args[0].dtype == types.float32 else _bfloat16(builder, args[2], sig.args[2].count)
        where = _pointer(context, builder, sig, args, values.type)
        builder.store(values, where, align=sig.args[0].dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(row, at, lanes), lower


def _bfloat16(builder: Any, values: Any, count: int) -> Any:
    """Return the upper halves of float32 bits, rounded to nearest and to even between two; one pattern for all NaN."""
    kind = ir.VectorType(_INT[32], count)

    def all_of(value: int) -> Any:
        return ir.Constant(kind, [value] * count)

    bits = builder.bitcast(values, kind)
    odd = builder.and_(builder.lshr(bits, all_of(16)), all_of(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, all_of(0x7FFF))), all_of(16))
    rounded = builder.select(builder.fcmp_unordered("uno", values, values), all_of(0x7FC0), rounded)
    return builder.trunc(rounded, ir.VectorType(_INT[16], count))


def _pointer(context: Any, builder: Any, sig: Any, args: Any, pointee: Any) -> Any:
    kind = sig.args[0]
    data = context.make_array(kind)(context, builder, value=args[0]).data
    at = context.cast(builder, args[1], sig.args[1], types.intp)
    where = builder.gep(data, [at])
    return builder.bitcast(where, pointee.as_pointer())


def _splat(builder: Any, count: int, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, _INT[32](0))
    return builder.shuffle_vector(one, one, _lanes_constant([0] * count))


def _lanes_constant(lanes: Sequence[int]) -> Any:
    return ir.Constant(ir.VectorType(_INT[32], len(lanes)), list(lanes))
