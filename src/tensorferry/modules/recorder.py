"""Watching a loader at work: every operation is seen, copies of checkpoint values are followed, nothing is written.

What single operations do is known in `operations`; what follows for a plan is decided in `trace`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tensorferry.core.catalogue import TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.errors import UnsupportedDtype, shown
from tensorferry.modules.contents import Contents, Patch
from tensorferry.modules.operations import MOVES, Sort, sort_of, tensors_in, with_row_numbers, written_by
from tensorferry.modules.views import Copy
from tensorferry.numerics.torch_dtypes import dtype_of, torch_dtype, torch_shape

__all__ = ["CannotFollow", "Guard", "Memory", "Recorder", "geometry", "key_of", "memory_like"]

Call = Callable[..., Any]


class CannotFollow(RuntimeError):
    """The loader does what cannot be followed without values; raised into the loader to stop it."""


@dataclass(slots=True)
class Memory:
    """A piece of memory under watch.

    labels: what of the model lies in it; empty for memory that the loader made. opaque: why its final values have
    to be made by the loader itself, None where they are known. during: entries that were at hand when an opaque
    write happened. log: every write, to compare two runs.
    """

    contents: Contents
    labels: tuple[str, ...] = ()
    opaque: str | None = None
    during: set[str] = field(default_factory=set)
    log: list[tuple[object, ...]] = field(default_factory=list)


def key_of(tensor: torch.Tensor) -> int:
    """Return what tells the memory of `tensor` from all other memory that is alive."""
    return int(tensor.untyped_storage()._cdata)


def memory_like(tensor: torch.Tensor) -> Memory:
    """Return what to watch the memory of `tensor` with; types that no checkpoint has are watched as bytes."""
    try:
        dtype = dtype_of(tensor.dtype)
    except UnsupportedDtype:
        return Memory(Contents(DTYPES["U8"], tensor.untyped_storage().nbytes()))
    return Memory(Contents(dtype, tensor.untyped_storage().nbytes() // tensor.element_size()))


def geometry(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Return offset and strides of `tensor` in its memory, in elements."""
    return int(tensor.storage_offset()), tuple(tensor.stride())


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, follows checkpoint values through torch operations and holds back writes to the model.

    owned: the memory of the model, which must stay alive. Operations on tensors that have nothing to do with the
    checkpoint run as they always do; results of those that have are on meta.
    unfollowed: why the run as a whole says nothing, None while it does. loose: memory that is neither the model's
    nor made by the loader, and was written. chose_device: whether numbers that the loader
    wanted on meta were made on the CPU, so that nobody knows where they belong.
    """

    def __init__(self, owned: Mapping[int, Memory]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory: dict[int, Memory] = dict(owned)
        self.unfollowed: str | None = None
        self.loose: list[Memory] = []
        self.chose_device = False
        self._current: str | None = None
        self._made: set[int] = set()
        self._alive: list[torch.Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps each call of a mode, which takes longer than the call

    def offer(self, entries: Iterable[TensorEntry]) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the name of each entry with a meta tensor that stands for it, to be iterated by the loader."""
        made = [(e.name, self._stand_in(e)) for e in entries]  # now, while nothing is under watch: that is quicker
        return self._offered(made)

    def _offered(self, made: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in made:
            self._current = name
            yield name, tensor
        self._current = None

    def _stand_in(self, entry: TensorEntry) -> torch.Tensor:
        dtype = torch_dtype(entry.dtype)
        tensor = torch.empty(torch_shape(entry.dtype, entry.shape), dtype=dtype, device="meta")
        contents = Contents.of_entry(entry, dtype_of(dtype), tensor.numel())
        if entry.dtype != contents.dtype or entry.dtype.block != 1:
            contents.lose(f"comes from packed {entry.dtype} values")
        self._watch(tensor, Memory(contents))
        return tensor

    @property
    def current(self) -> str | None:
        """The entry that the loader was given last, None before the first and after the last one."""
        return self._current

    def touched(self, tensor: torch.Tensor) -> bool:
        """Whether the values of `tensor` are not those that its memory shows."""
        memory = self.memory.get(key_of(tensor))
        return memory is not None and memory.contents.touched

    def taint(self, tensor: torch.Tensor) -> frozenset[str]:
        """Return the entries that the values of `tensor` come from; none for memory that was not seen here."""
        memory = self.memory.get(key_of(tensor))
        return frozenset() if memory is None else frozenset(memory.contents.taint)

    def refuse(self, why: str) -> None:
        """Stop the loader, which is about to look at values that are not there."""
        self.unfollowed = self.unfollowed or why
        raise CannotFollow(f"while the loader is traced there are no values: it {why}")

    def replaced(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """Note that the model's `tensor` is made to share the memory of `source`; it is not done."""
        memory = self.memory[key_of(tensor)]
        self._lose(memory, "is replaced by assigning to its data", "data", [source])

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        sort = sort_of(func)
        if sort is Sort.VIEW:
            return func(*args, **kwargs)
        if sort is Sort.COMPOSITE:
            with self:
                return func.decompose(*args, **kwargs)
        return self._handlers[sort](self, func, args, kwargs)

    def _copy(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        into, source = args[0], args[1]
        if not self._is_watched(into) and not self.touched(source):
            return func(*args, **kwargs)
        memory = self._memory_of(into)
        patches, why = self._read(into, source, memory)
        self._note(memory, "copy_", into, [source], why)
        if patches is None:
            self._lose(memory, why, "", [])
        else:
            memory.contents.write(patches)
        return into

    def _fill(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        into, value = args[0], args[1] if len(args) > 1 else 0.0
        if not self._is_watched(into) or isinstance(value, torch.Tensor) or into.is_complex():
            return self._write(func, args, kwargs)
        memory = self._memory_of(into)
        if not _as_stored(into, memory.contents):
            return self._write(func, args, kwargs)
        held = float(torch.tensor(value, dtype=into.dtype, device="cpu").item())
        self._note(memory, f"fill {held}", into, [], "")
        memory.contents.fill(_between(into, (0, (0,) * into.dim())), held)
        return into

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle operations that change tensors in a way that is not followed."""
        written, used = written_by(func, args, kwargs), list(tensors_in(args, kwargs))
        if not any(map(self._is_watched, written)) and not any(map(self.touched, used)):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        scalars = tuple(a for a in args if isinstance(a, int | float))
        for into in written:
            memory = self._memory_of(into)
            self._note(memory, name, into, used, repr(scalars))
            self._lose(memory, f"is changed in place by {name}", "", [])
        if not func._schema.returns:
            return None
        return written[0] if len(written) == 1 else tuple(written)

    def _value(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(map(self.touched, tensors_in(args, kwargs))):
            self.refuse(f"looks at values ({func.overloadpacket.__name__})")
        return func(*args, **kwargs)

    def _blank(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle operations that only take shape and type from a tensor."""
        return self._keep(func(*args, **kwargs))

    def _move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(map(self.touched, tensors_in(args, kwargs))):
            return self._keep(func(*args, **kwargs))
        args = with_row_numbers(func, args, self.touched)
        made: torch.Tensor = self._on_meta(func, args, kwargs)
        memory = memory_like(made)
        self._watch(made, memory)
        self._taint(memory, tensors_in(args, kwargs))
        found = MOVES[func.overloadpacket](made, args, kwargs, self.touched)
        if found is None:
            memory.contents.lose(f"is computed by {func.overloadpacket.__name__}")
            return made
        for into, source in found:
            patches, why = self._read(into, source, memory)
            if patches is None:
                memory.contents.lose(why)
            else:
                memory.contents.write(patches)
        return made

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle everything else: what comes out depends on what goes in, and is not followed."""
        used = list(tensors_in(args, kwargs))
        if not any(map(self.touched, used)):
            return self._keep(func(*args, **kwargs))
        name = func.overloadpacket.__name__
        made = self._on_meta(func, args, kwargs)
        for tensor in tensors_in((made,), {}):
            if key_of(tensor) not in self.memory:
                memory = memory_like(tensor)
                memory.contents.lose(f"is computed by {name}")
                self._watch(tensor, memory)
            self._taint(self.memory[key_of(tensor)], used)
        return made

    _handlers: Mapping[Sort, Callable[..., Any]] = {
        Sort.COPY: _copy, Sort.FILL: _fill, Sort.WRITE: _write, Sort.VALUE: _value, Sort.BLANK: _blank,
        Sort.MOVE: _move, Sort.COMPUTE: _compute,
    }  # fmt: skip

    def _on_meta(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func` without values, wherever its arguments are."""
        kwargs = {k: v for k, v in kwargs.items() if k not in ("pin_memory", "device")}
        if "device" in {a.name for a in func._schema.arguments}:
            kwargs["device"] = torch.device("meta")
        try:
            return func(*_without_values(args), **{k: _without_values(v) for k, v in kwargs.items()})
        except Exception as error:
            self.unfollowed = (
                self.unfollowed or f"needs values for {func.overloadpacket.__name__} ({shown(str(error))})"
            )
            raise

    def _read(self, into: torch.Tensor, source: torch.Tensor, memory: Memory) -> tuple[list[Patch] | None, str]:
        """Return what copying `source` to `into` brings there, or None and why that is not known."""
        held = self.memory.get(key_of(source))
        if held is None or not held.contents.touched:
            return None, "is written from a tensor that is not in the checkpoint"
        if held.contents.lost is not None:
            return None, held.contents.lost
        if not _as_stored(source, held.contents) or not _as_stored(into, memory.contents):
            return None, "is copied through a view of another type"
        wide = source if source.shape == into.shape else source.expand(into.shape)
        found = held.contents.read(_between(into, geometry(wide)))
        if found is None:
            return None, "is copied from memory that was filled in part or irregularly"
        moved = [p.written_as(memory.contents.dtype) for p in found]
        known = [p for p in moved if p is not None]
        if len(known) < len(moved):
            return None, f"is rounded twice on its way to {memory.contents.dtype}"
        return known, ""

    def _note(self, memory: Memory, what: str, into: torch.Tensor, used: Iterable[torch.Tensor], how: str) -> None:
        sources = self._taint(memory, used)
        if memory.labels or memory.opaque:
            where = (into.storage_offset(), tuple(into.shape), tuple(into.stride()))
            memory.log.append((what, *where, frozenset(sources), how))

    def _lose(self, memory: Memory, why: str, what: str, used: Iterable[torch.Tensor]) -> None:
        if what:
            memory.log.append((what, frozenset(self._taint(memory, used))))
        memory.contents.lose(why)
        if memory.labels:
            memory.opaque = memory.opaque or why
            memory.during |= {self._current} if self._current is not None else set()

    def _taint(self, memory: Memory, used: Iterable[torch.Tensor]) -> set[str]:
        names: set[str] = set()
        for tensor in used:
            held = self.memory.get(key_of(tensor))
            if held is not None:
                names |= held.contents.taint
        memory.contents.taint |= names
        return names

    def _is_watched(self, tensor: torch.Tensor) -> bool:
        memory = self.memory.get(key_of(tensor))
        return memory is not None and bool(memory.labels or memory.contents.touched)

    def _memory_of(self, tensor: torch.Tensor) -> Memory:
        """Return the memory of a tensor that is written, watching it from now on."""
        key = key_of(tensor)
        if key not in self.memory:
            memory = memory_like(tensor)
            if key not in self._made:
                memory.labels = ("a tensor that is no parameter",)
                self.loose.append(memory)
            self._watch(tensor, memory)
        return self.memory[key]

    def _watch(self, tensor: torch.Tensor, memory: Memory) -> None:
        self._alive.append(tensor)
        self.memory[key_of(tensor)] = memory

    def _keep(self, made: Any) -> Any:
        """Remember that the loader itself made these tensors."""
        for tensor in tensors_in((made,), {}):
            if key_of(tensor) not in self._made:
                self._alive.append(tensor)
                self._made.add(key_of(tensor))
        return made


class Guard(TorchFunctionMode):
    """Sees what torch does without an operation: handing values to Python, and replacing a parameter's memory."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _HANDS_OUT_VALUES and self.recorder.touched(args[0]):
            self.recorder.refuse(f"looks at values ({func.__name__})")
        if func == _SET_DATA:
            memory = self.recorder.memory.get(key_of(args[0]))
            if memory is not None and memory.labels:
                return self.recorder.replaced(args[0], args[1])
        if func is torch.Tensor.__getitem__:
            args = (args[0], _with_known_numbers(args[1]))
        if func in _MAKES_NUMBERS:
            kwargs = self._on_cpu(kwargs or {})
        return func(*args, **(kwargs or {}))

    def _on_cpu(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Let numbers that a loader makes for itself, to pick rows by, have values even where it builds on meta."""
        device = kwargs.get("device")
        if (torch.empty(0).device if device is None else torch.device(device)).type != "meta":
            return kwargs
        self.recorder.chose_device = True
        return kwargs | {"device": "cpu"}


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_HANDS_OUT_VALUES = {
    torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.data_ptr,
    torch.Tensor.__array__, torch.Tensor.__dlpack__,
}  # fmt: skip


_MAKES_NUMBERS = {torch.arange, torch.tensor, torch.randperm, torch.linspace}


def _with_known_numbers(index: Any) -> Any:
    """Return `index` with lists as tensors that have values; torch would put them on meta, and lose them."""
    if isinstance(index, tuple):
        return tuple(map(_with_known_numbers, index))
    if isinstance(index, list) and all(isinstance(i, int) for i in index):
        return torch.tensor(index, device="cpu")
    return index


def _between(into: torch.Tensor, source: tuple[int, Sequence[int]]) -> Copy:
    return Copy.of(into.shape, geometry(into), source)


def _as_stored(tensor: torch.Tensor, contents: Contents) -> bool:
    return dtype_of(tensor.dtype) == contents.dtype and not (tensor.is_conj() or tensor.is_neg())


def _without_values(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (
            value
            if value.is_meta
            else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        )
    if isinstance(value, list | tuple):
        return type(value)(map(_without_values, value))
    return value
