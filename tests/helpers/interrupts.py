"""Interrupts at a chosen step: at each moment at which Python looks whether there was a Ctrl-C, one could come."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Steps", "interrupted_at"]

_LOOKS = {dis.opmap[n] for n in ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD") if n in dis.opmap}
"""After these instructions the interpreter looks for signals (`CHECK_EVAL_BREAKER`), and after hardly any other."""


class Steps:
    """Counts the steps of one thread in files whose path has one of `parts`, and interrupts it `at` one of them."""

    def __init__(self, at: int, parts: tuple[str, ...]) -> None:
        self.seen = 0
        self._at, self._parts = at, parts
        self._last: dict[FrameType, int] = {}

    def called(self, frame: FrameType, event: str, _: Any) -> Any:
        """Trace a function that is called."""
        if not any(part in frame.f_code.co_filename for part in self._parts):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._traced

    def _traced(self, frame: FrameType, event: str, _: Any) -> Any:
        if event in ("return", "exception"):  # a call that raises ends without a look
            self._last.pop(frame, None)
        elif event == "opcode":
            before = self._last.get(frame)
            self._last[frame] = frame.f_code.co_code[frame.f_lasti]
            if before in _LOOKS:
                self.seen += 1
                if self.seen == self._at:
                    sys.settrace(None)
                    self._last.clear()
                    raise KeyboardInterrupt
        return self._traced


@contextmanager
def interrupted_at(at: int, *parts: str) -> Iterator[Steps]:
    """Raise KeyboardInterrupt in this thread at its step number `at` in files whose path has one of `parts`."""
    steps = Steps(at, parts)
    sys.settrace(steps.called)
    try:
        yield steps
    finally:
        sys.settrace(None)
