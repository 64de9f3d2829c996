"""Catalogues every file of a folder in a fresh process, and tells what that did beside: an audit hook watches it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

__all__ = ["Watched", "catalogue_watched"]

_CHILD = """
import sys, json, importlib, pathlib
from tensorferry.errors import TensorferryError
from tensorferry.formats.opening import file_format
from tensorferry.storage.local import LocalStorage
"".encode("unicode_escape")  # the codec that messages use; it is imported on first use
folder, events = pathlib.Path(sys.argv[1]).resolve(), []
reader = file_format(sys.argv[2])
sys.addaudithook(lambda name, args: events.append((name, args)))
refused = read = 0
storage = LocalStorage(folder)
for file in storage.list():
    try:
        reader.catalogue(storage, file)
        read += 1
    except TensorferryError:
        refused += 1
storage.close()
seen = list(events)
opened = [args[0] for name, args in seen if name in ("open", "os.listdir", "os.scandir")]
outside = [str(path) for path in opened if folder not in (pathlib.Path(path), *pathlib.Path(path).parents)]
harmless = {"open", "os.scandir", "object.__getattr__", "object.__setattr__", "sys._getframe", "array.__new__"}
libraries = sorted({"torch", "numpy", "nacl"} & {*sys.modules})
print(json.dumps([refused, read, outside, sorted({name for name, _ in seen} - harmless), libraries]))
"""


class Watched(NamedTuple):
    """How many files were refused and read; what was opened outside of the folder, what else was done, what imported.

    events: names of audit events, but for harmless ones. libraries: of torch, numpy and nacl.
    """

    refused: int
    read: int
    outside: list[str]
    events: list[str]
    libraries: list[str]


def catalogue_watched(folder: Path, name: str) -> Watched:
    """Let the reader of the format `name` look at every file of `folder`."""
    command = [sys.executable, "-c", _CHILD, str(folder), name]
    return Watched(*json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
