"""The state of the restricted pickle interpreter: stack, memo, what it may still spend, and how it complains.

What each opcode does to it is in `pickles`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from sys import getsizeof
from typing import Protocol

from tensorferry.errors import CorruptFile, UnsafeFile, shown
from tensorferry.formats.pickle_values import BadValue, LeftOut, Maker, Refused
from tensorferry.formats.windows import Stream

__all__ = ["NOTHING", "NO_STORAGES", "STOP", "Handler", "Machine", "Persistent"]

STOP = ord(".")
"""The opcode that ends a pickle."""

MAX_TEXT = 1 << 16
"""Text and bytes longer than this are passed over unread: no name of a tensor is that long."""

MAX_MARKS = 1000
"""Values that may be begun and not ended: they nest, and what nests deeper than `MAX_DEPTH` is refused anyway."""

BLOCK = 6
"""Binary digits of the 64 bytes of memory that cost as much as one step."""

DICT_COST = 3
"""What a dict costs beside its step; its memory is that of about three steps."""

_BASE_COST = 500_000
_BYTES_PER_COST = 2
_MAX_EARNED = 1 << 26
_MAX_TEXT_EARNED = 64
"""What a pickle may cost: so much, and one more for every two of its bytes, of which texts count in part only.

A tensor takes about 45 in 80 bytes and more, so files of many tensors are read, however many storages they have; a
byte that makes a dict earns nothing.
"""

NOTHING = object()
"""What is in no place of a memo."""

_RENAMED = {"__builtin__": "builtins"}
_RENAMED_GLOBALS = {"builtins.unicode": "builtins.str", "builtins.long": "builtins.int"}


class Persistent(Protocol):
    """What answers a pickle's persistent ids."""

    def __call__(self, pid: object) -> object: ...


class _NoStorages:
    def __call__(self, pid: object) -> object:
        raise BadValue("a persistent id, where none belongs")


NO_STORAGES: Persistent = _NoStorages()
"""For pickles that refer to nothing outside themselves."""


class Memo:
    """The values that a pickle has numbered to come back to. Writers number them one by one, from 0 or 1."""

    __slots__ = ("_count", "_others", "_row")

    def __init__(self) -> None:
        self._row: list[object] = []
        self._others: dict[int, object] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, index: int, value: object) -> bool:
        """Keep `value` under `index`; return whether that was the next number, which takes next to no memory."""
        behind = index - len(self._row)
        if self._others or not 0 <= behind <= 1:
            self._count += self.get(index) is NOTHING
            self._others[index] = value
            return False
        self._row += (value,) if not behind else (NOTHING, value)
        self._count += 1
        return True

    def get(self, index: int) -> object:
        """Return what was last put under `index`, or NOTHING."""
        if index in self._others:
            return self._others[index]
        return self._row[index] if index < len(self._row) else NOTHING


class Machine:
    """The stack machine. `frames` are the stacks below the open marks, `stack` is the current one."""

    def __init__(self, stream: Stream, path: str, known: Mapping[str, object], persistent: Persistent) -> None:
        self.stream = stream
        self.path = path
        self.known = known
        self.persistent = persistent
        self.stack: list[object] = []
        self.frames: list[list[object]] = []
        self.memo = Memo()
        self.spent = 0
        self.limit = _BASE_COST
        self.unpaid = stream.position

    def run(self, handlers: Sequence[Handler | None]) -> object:
        """Carry out one pickle and return the description of its object; `handlers` has one per opcode."""
        start = self.stream.position
        byte = self.stream.byte
        try:
            while (code := byte()) != STOP:
                self.spent += 1
                if self.spent > self.limit:
                    self.raise_limit()
                handler = handlers[code]
                if handler is None:
                    raise BadValue(f"opcode 0x{code:02x}, which torch files do not use")
                handler(self)
            if len(self.stack) != 1 or self.frames:
                raise BadValue("it ends with more or less than one object")
            return self.stack.pop()
        except IndexError:
            raise self.corrupt("it takes a value from an empty stack", start) from None
        except BadValue as problem:
            raise self.corrupt(str(problem), start) from None

    def corrupt(self, problem: str, start: int) -> CorruptFile:
        near = self.near()
        about = f" for {shown(near)!r}" if near is not None else ""
        where = f"at byte {self.stream.position - start:,} of the pickle that begins at {start:,}"
        return CorruptFile(f"{shown(self.path)}: damaged pickle{about}: {problem} ({where})")

    def spend(self, cost: int) -> None:
        """Account for `cost` steps more. Raises BadValue where a pickle takes more than its bytes explain."""
        self.spent += cost
        if self.spent > self.limit:
            self.raise_limit()

    def raise_limit(self) -> None:
        earned = min(self.stream.position - self.unpaid, _MAX_EARNED) // _BYTES_PER_COST
        self.limit = _BASE_COST + max(earned, 0)
        if self.spent > self.limit:
            raise BadValue(f"it takes more than {self.limit:,} steps, which is no model")

    def near(self) -> str | None:
        """Return the text below the value being built: in a dict, the key that it is for."""
        for stack in (self.stack, *reversed(self.frames)):
            for value in reversed(stack):
                if isinstance(value, str):
                    return value
                if not isinstance(value, Maker):
                    return None
        return None

    def pop_mark(self) -> list[object]:
        items, self.stack = self.stack, self.frames.pop()
        return items

    def text(self, length: int) -> bytes | None:
        """Return the next `length` bytes, or None after passing over them if they are too many."""
        self.unpaid += max(0, length - _MAX_TEXT_EARNED)
        if length > MAX_TEXT:
            self.stream.skip(length)
            return None
        self.spend(length >> BLOCK)
        return self.stream.take(length)

    def push_made(self, value: object) -> None:
        """Put a new value on the stack, and account for its own memory."""
        self.spend(getsizeof(value) >> BLOCK)
        self.stack.append(value)

    def push_text(self, length: int) -> None:
        data = self.text(length)
        try:
            self.push_made(LeftOut("long text") if data is None else data.decode())
        except UnicodeDecodeError:
            raise BadValue("text that is not UTF-8") from None

    def push_bytes(self, length: int) -> None:
        data = self.text(length)
        self.push_made(LeftOut("long bytes") if data is None else data)

    def push_python2_str(self, length: int) -> None:
        """Python 2 had one type for text and bytes."""
        self.push_bytes(length)
        if isinstance(data := self.stack[-1], bytes):
            with contextlib.suppress(UnicodeDecodeError):
                self.stack[-1] = data.decode()

    def push_global(self, module: str, name: str) -> None:
        full = f"{_RENAMED.get(module, module)}.{name}"
        full = _RENAMED_GLOBALS.get(full, full)
        if full.startswith("numpy._core."):
            full = "numpy.core." + full.removeprefix("numpy._core.")
        found = self.known.get(full)
        if found is None:
            raise self.unsafe(f"{module}.{name}")
        if isinstance(found, Refused):
            raise found.error(f"{shown(self.path)}{self._for_what()}: {found.words} ({full})")
        self.stack.append(found)

    def unsafe(self, full: str) -> UnsafeFile:
        return UnsafeFile(
            f"{shown(self.path)}{self._for_what()}: its pickle asks for {shown(full)!r}, which is not among the "
            f"tensors and plain containers that are read, and nothing in a checkpoint is ever run. If you trust the "
            f"file, load it with the program that wrote it and save its state_dict() alone, best as safetensors"
        )

    def _for_what(self) -> str:
        near = self.near()
        return "" if near is None else f": {shown(near)!r}"


Handler = Callable[[Machine], None]
"""What an opcode does."""
