"""The state of the restricted pickle interpreter: stack, memo, what it may still spend, and how it complains.

What each opcode does to it is in `pickles`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tensorferry.errors import CorruptFile, UnsafeFile, shown
from tensorferry.formats.pickle_values import BadValue, LeftOut, Maker, Refused
from tensorferry.formats.windows import Stream

__all__ = ["NO_STORAGES", "STOP", "Handler", "Machine", "Persistent"]

STOP = ord(".")
"""The opcode that ends a pickle."""

MAX_TEXT = 1 << 16
"""Text and bytes longer than this are passed over unread: no name of a tensor is that long."""

_BASE_COST = 500_000
_COST_PER_STORAGE = 200
"""What a pickle may cost, one per opcode and one per 64 bytes of text: a tensor takes about 40."""

_RENAMED = {"__builtin__": "builtins"}
_RENAMED_GLOBALS = {"builtins.unicode": "builtins.str", "builtins.long": "builtins.int"}


class Persistent(Protocol):
    """What answers a pickle's persistent ids, and says how many different ones it has met."""

    def __call__(self, pid: object) -> object: ...

    def __len__(self) -> int: ...


class _NoStorages:
    def __call__(self, pid: object) -> object:
        raise BadValue("a persistent id, where none belongs")

    def __len__(self) -> int:
        return 0


NO_STORAGES: Persistent = _NoStorages()
"""For pickles that refer to nothing outside themselves."""


class Machine:
    """The stack machine. `frames` are the stacks below the open marks, `stack` is the current one."""

    def __init__(self, stream: Stream, path: str, known: Mapping[str, object], persistent: Persistent) -> None:
        self.stream = stream
        self.path = path
        self.known = known
        self.persistent = persistent
        self.stack: list[object] = []
        self.frames: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self.spent = 0
        self.limit = _BASE_COST

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
        """Account for `cost` steps more. Raises BadValue where a pickle takes more than its storages explain."""
        self.spent += cost
        if self.spent > self.limit:
            self.raise_limit()

    def raise_limit(self) -> None:
        self.limit = _BASE_COST + _COST_PER_STORAGE * len(self.persistent)
        if self.spent > self.limit:
            raise BadValue(f"more than {self.limit:,} steps for {len(self.persistent):,} storages: no model")

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
        if length > MAX_TEXT:
            self.stream.skip(length)
            return None
        self.spend(length >> 6)
        return self.stream.take(length)

    def push_text(self, length: int) -> None:
        data = self.text(length)
        try:
            self.stack.append(LeftOut("long text") if data is None else data.decode())
        except UnicodeDecodeError:
            raise BadValue("text that is not UTF-8") from None

    def push_bytes(self, length: int) -> None:
        data = self.text(length)
        self.stack.append(LeftOut("long bytes") if data is None else data)

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
