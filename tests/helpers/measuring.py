"""What things cost: memory and time of the processor within a block, and loads in a child process.

The child samples its own memory, for what must hold whatever the allocator does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tensorferry.errors import CorruptFile, FormatError
from tensorferry.formats.base import FileFormat
from tensorferry.storage.local import LocalStorage

MIB = 1 << 20

CHILD = """
import json, sys, threading
import torch
torch.set_num_threads(1)
import tensorferry, tensorferry.api
from tensorferry import ReadOptions

def anonymous():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024

class Peak:
    # Samples in a thread; `of` runs a function and returns (most held meanwhile, held afterwards), above before.
    def of(self, action):
        before, stop = anonymous(), threading.Event()
        most = before
        def watch():
            nonlocal most
            while not stop.wait(0.001):
                most = max(most, anonymous())
        thread = threading.Thread(target=watch)
        thread.start()
        try:
            self.result = action()
        finally:
            stop.set()
            thread.join()
        after = anonymous()
        return max(most, after) - before, after - before

peak, told = Peak(), {}
folder = sys.argv[1]
"""


def measured(code: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run `code`, which fills the dict `told`, after the lines above in a child; return what it told."""
    script = CHILD + code + "\nprint(json.dumps(told))\n"
    command = [sys.executable, "-c", script, str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def little_memory(most: int = 64 * MIB) -> Iterator[None]:
    """Assert that Python holds at most `most` bytes more at any time within the block."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= most


@contextmanager
def little_time(most: float = 1.0) -> Iterator[None]:
    """Assert that the block takes at most `most` seconds of the processor, however busy the machine is."""
    before = time.process_time()
    yield
    assert time.process_time() - before < most


def refused(reader: FileFormat, path: Path, says: str = "", kind: type[FormatError] = CorruptFile) -> int:
    """Assert that `reader` refuses the file at `path` by name, saying `says`; return how many bytes it read."""
    with LocalStorage(path.parent) as storage:
        file = storage.stat(path.name)
        with pytest.raises(kind) as refusal:
            reader.catalogue(storage, file)
        assert path.name in str(refusal.value)
        assert says in str(refusal.value)
        return storage.counters.bytes_read
