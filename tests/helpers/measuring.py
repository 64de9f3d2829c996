"""Loads in a child process that samples its own memory, for what must hold whatever the allocator does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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
