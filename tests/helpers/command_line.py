"""Running the command line: in this process, or in one of its own where exit codes and pipes are the point."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tensorferry.cli.main import main


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended, and what it wrote."""

    status: int
    out: str
    err: str


class CommandLine:
    """Runs commands in this process."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *arguments: str | Path) -> Ran:
        """Run `tensorferry` with `arguments`."""
        self._capture.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        out, err = self._capture.readouterr()
        assert "Traceback" not in err
        return Ran(int(ended.value.code or 0), out, err)


def command(*arguments: str | Path) -> list[str]:
    """Return the words that start the command line as a process."""
    return [sys.executable, "-m", "tensorferry", *map(str, arguments)]


def in_a_process(*arguments: str | Path, variables: dict[str, str] | None = None, **options: Any) -> Ran:
    """Run `tensorferry` with `arguments` as a process. options: of `subprocess.run`."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(command(*arguments), check=False, text=True, env=environment, **options)
    return Ran(done.returncode, done.stdout or "", done.stderr or "")
