"""What torch puts into its pickles: element types, storages and tensors, as descriptions that know no bytes.

The functions and classes are those that ``torch.save`` names: `torch/_utils.py`, `torch/storage.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from tensorferry.core.dtypes import DTYPES, DType
from tensorferry.errors import FormatError, UnsupportedDtype, shown
from tensorferry.formats.pickle_values import BadValue, Composite, LeftOut, Maker, Refused
from tensorferry.formats.plain_globals import PLAIN_GLOBALS, Arguments

__all__ = ["TORCH_GLOBALS", "ElementType", "StorageRef", "StorageType", "Storages", "TensorRef"]

MAX_NUMBER = (1 << 63) - 1
"""Sizes, strides and offsets are signed 64-bit numbers in torch."""


@dataclass(frozen=True, slots=True)
class ElementType:
    """A torch dtype by its name there; `dtype` is None for those that tensorferry does not read."""

    name: str
    dtype: DType | None


@dataclass(frozen=True, slots=True)
class StorageType:
    """A class of storages: what its elements are. UntypedStorage counts bytes."""

    name: str
    element: ElementType
    itemsize: int


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage as a pickle refers to it, or the part of one that a legacy file calls a view.

    numel: of the whole storage, in elements of `type`. view: first element and number of elements.
    """

    key: str
    type: StorageType
    numel: int
    location: str
    view: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole storage."""
        return self.numel * self.type.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef(Composite):
    """A strided view of a storage, as the pickle says it; not yet checked against the storage.

    offset and strides: in elements. hooks: what must be empty. flags: lazy conjugation or negation.
    attached: attributes of a Parameter or subclass.
    """

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element: ElementType
    hooks: tuple[object, ...]
    flags: object = None
    attached: object = None

    def parts(self) -> Iterator[tuple[str, object]]:
        for hook in self.hooks:
            yield "hooks", hook
        yield "flags", self.flags
        yield "attributes", self.attached


class Storages:
    """Answers the persistent ids of one pickle and keeps the storages that it named, in order.

    legacy: whether ids carry a sixth field, the view.
    """

    def __init__(self, *, legacy: bool) -> None:
        self.found: dict[str, StorageRef] = {}
        self._legacy = legacy

    def __call__(self, pid: object) -> StorageRef:
        if not isinstance(pid, tuple) or len(pid) != 5 + self._legacy or _text(pid[0]) != "storage":
            raise BadValue("a persistent id that is not the five fields of a storage (six in old files)")
        kind, numel, key, location = pid[1], pid[4], _text(pid[2]), _text(pid[3])
        if not isinstance(kind, StorageType) or not _is_size(numel) or key is None or location is None:
            raise BadValue("a storage whose class, key, location or size is none")
        ref = StorageRef(key, kind, numel, location)
        if (first := self.found.setdefault(key, ref)).nbytes != ref.nbytes:
            raise BadValue(
                f"storage {shown(key)!r} has {first.nbytes:,} bytes in one place and {ref.nbytes:,} in another"
            )
        return replace(ref, view=_view(pid[5], numel)) if self._legacy and pid[5] is not None else ref


def _view(metadata: object, numel: int) -> tuple[int, int]:
    match metadata:
        case (str() | bytes(), int() as offset, int() as size) if _is_size(offset) and _is_size(size):
            if offset + size <= numel:
                return offset, size
            raise BadValue(f"a view of elements {offset:,} to {offset + size:,} of a storage of {numel:,}")
    raise BadValue("a view of a storage that is not a key, an offset and a size")


def _text(value: object) -> str | None:
    """Return text as such; Python 2 wrote ASCII text as bytes."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return value if isinstance(value, str) else None


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_NUMBER


def _integers(value: object) -> tuple[int, ...]:
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, tuple) and all(type(n) is int and abs(n) <= MAX_NUMBER for n in value):
        return value
    raise BadValue("a shape or strides that are not 64-bit integers")


def _tensor(storage: object, offset: object, shape: object, strides: object) -> TensorRef:
    if not isinstance(storage, StorageRef):
        raise BadValue("a tensor of something that is no storage")
    if type(offset) is not int or abs(offset) > MAX_NUMBER:
        raise BadValue("a tensor whose offset is not a 64-bit integer")
    return TensorRef(storage, offset, _integers(shape), _integers(strides), storage.type.element, ())


def _rebuild_v0(args: Arguments) -> TensorRef:
    if len(args) != 4:
        raise BadValue(f"a tensor of {len(args)} fields instead of 4")
    return _tensor(*args)


def _rebuild_v2(args: Arguments) -> TensorRef:
    if len(args) not in (6, 7):
        raise BadValue(f"a tensor of {len(args)} fields instead of 6 or 7")
    return replace(_tensor(*args[:4]), hooks=(args[5],), flags=args[6] if len(args) == 7 else None)


def _rebuild_v3(args: Arguments) -> TensorRef:
    if len(args) not in (7, 8) or not isinstance(element := args[6], ElementType):
        raise BadValue("a tensor of version 3 without its dtype")
    flags = args[7] if len(args) == 8 else None
    return replace(_tensor(*args[:4]), hooks=(args[5],), element=element, flags=flags)


def _rebuild_parameter(args: Arguments) -> TensorRef:
    if len(args) not in (3, 4) or not isinstance(data := args[0], TensorRef):
        raise BadValue("a Parameter of something that is no tensor")
    return replace(data, hooks=(*data.hooks, args[2]), attached=(data.attached, *args[3:]))


def _rebuild_from_type(args: Arguments) -> TensorRef:
    match args:
        case (Maker(make=make), TensorClass(), tuple() as inner, state) if make in _REBUILDS.values():
            made = make(inner)
            if isinstance(made, TensorRef):
                return replace(made, attached=(made.attached, state))
    raise BadValue("a tensor with attributes that is made of something else")


@dataclass(frozen=True, slots=True)
class TensorClass:
    """``torch.Tensor`` or ``Parameter``, named as a type; it cannot be called."""

    name: str


def _size(args: Arguments) -> tuple[int, ...]:
    if len(args) != 1:
        raise BadValue("a torch.Size of more than one value")
    return _integers(args[0])


_REBUILDS = {
    "torch._utils._rebuild_tensor": _rebuild_v0,
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
}

_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float4_e2m1fn_x2": "F4",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex32": "C32",
    "complex64": "C64",
    "complex128": "C128",
}
_UNREAD_DTYPES = (
    *("quint8", "qint8", "qint32", "quint4x2", "quint2x4"),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
)
_ELEMENTS = {torch: ElementType(torch, DTYPES[ours]) for torch, ours in _DTYPES.items()} | {
    name: ElementType(name, None) for name in _UNREAD_DTYPES
}

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QUInt8Storage": "quint8",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}


def _storage_type(name: str, element: ElementType) -> StorageType:
    itemsize = element.dtype.block_bytes if element.dtype else {"qint32": 4}.get(element.name, 1)
    return StorageType(name, element, itemsize)


def _unsupported(what: str) -> Refused:
    return Refused(FormatError, f"{what}, which is no strided tensor; save a dense copy of it in its place")


_UNTYPED = StorageType("UntypedStorage", _ELEMENTS["uint8"], 1)

TORCH_GLOBALS: Mapping[str, object] = MappingProxyType(
    {
        **PLAIN_GLOBALS,
        **{f"torch.{name}": element for name, element in _ELEMENTS.items()},
        **{f"torch.{name}": _storage_type(name, _ELEMENTS[torch]) for name, torch in _STORAGES.items()},
        **dict.fromkeys(("torch.storage.UntypedStorage", "torch.storage._UntypedStorage"), _UNTYPED),
        **{name: Maker(name, make) for name, make in _REBUILDS.items()},
        **{name: TensorClass(name) for name in ("torch.Tensor", "torch.nn.parameter.Parameter")},
        "torch._tensor._rebuild_from_type_v2": Maker("_rebuild_from_type_v2", _rebuild_from_type),
        "torch.Size": Maker("torch.Size", _size),
        "torch.device": Maker("torch.device", lambda args: LeftOut("torch.device", list(args))),
        "torch.serialization._get_layout": Maker("_get_layout", lambda args: LeftOut("torch.layout", list(args))),
        "torch._utils._rebuild_sparse_tensor": _unsupported("a sparse tensor"),
        "torch._utils._rebuild_nested_tensor": _unsupported("a nested tensor"),
        "torch._utils._rebuild_wrapper_subclass": _unsupported("a tensor of a subclass without storage"),
        "torch._utils._rebuild_meta_tensor_no_storage": Refused(
            FormatError, "a tensor on the meta device, which has no values: the file was saved before it was filled"
        ),
        "torch._utils._rebuild_qtensor": Refused(
            UnsupportedDtype, "a tensor of one of torch's own quantized dtypes; save its dequantize() instead"
        ),
    }
)
"""Full name to what a torch file's pickle gets for it."""
