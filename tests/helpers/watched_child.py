"""Reads torch files in a fresh process that notes everything it does, its time and its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CHILD = """
import json, resource, sys, time
from pathlib import Path
from tensorferry.errors import TensorferryError, shown
from tensorferry.formats.torch_file import TorchFileFormat
from tensorferry.storage.local import LocalStorage

folder = sys.argv[1]
shown("\\x1b")  # loads the codec that messages need
seen, watching = set(), False

def watch(event, arguments):
    if not watching:
        return
    if event == "builtins.id" or (event == "open" and str(arguments[0]).startswith(folder)):
        return
    seen.add(f"{event} {arguments!r}"[:200])

sys.addaudithook(watch)
storage = LocalStorage(folder)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
results = {}
for file in storage.list():
    watching, start = True, time.process_time()
    try:
        TorchFileFormat().catalogue(storage, file)
        said = "accepted"
    except TensorferryError as error:
        said = type(error).__name__
    watching, spent = False, time.process_time() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    results[file.path] = [said, spent, grown]
print(json.dumps({"results": results, "seen": sorted(seen)}))
"""


def in_a_child(folder: Path) -> dict[str, Any]:
    """Return what a fresh process says of the files in `folder`: result, CPU seconds, growth of its peak in MiB."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder)], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
