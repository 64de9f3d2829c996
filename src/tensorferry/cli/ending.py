"""How a command ends: which exit status, and which words on standard error. Never with a traceback."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import click.exceptions

from tensorferry.cli.wording import in_options
from tensorferry.errors import ConfigError, FormatError, TensorferryError, shown

__all__ = ["TRACEBACK", "ending_well", "printable"]

TRACEBACK = "TENSORFERRY_TRACEBACK"
"""Environment variable; when it is set, an error that nobody foresaw ends in its traceback after all."""

FAULT, USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141

_EXTRAS = {"torch": "transformers", "transformers": "transformers", "huggingface_hub": "hub"}
"""Package to the extra of tensorferry that brings it; the command line needs torch only for what extra it is in."""


@contextmanager
def ending_well() -> Iterator[None]:
    """Run the body of a command, and turn whatever it raises into words and an exit status.

    0: it did what it was told. 1: the checkpoint or the model is at fault. 2: the call is. 130: Ctrl-C. 141: whoever
    read standard output stopped, of which nothing is said.
    """
    try:
        yield
        sys.stdout.flush()
    except click.exceptions.Exit:
        raise
    except BrokenPipeError:
        _let_go_of_stdout()
        raise click.exceptions.Exit(BROKEN_PIPE) from None
    except KeyboardInterrupt:
        _say("interrupted")
        raise click.exceptions.Exit(INTERRUPTED) from None
    except Exception as error:
        _let_go_of_stdout()  # if that is what is full, nothing else can be done with it
        words = _words(error)
        if words is None and os.environ.get(TRACEBACK):
            raise
        _say(words or _unforeseen(error))
        raise click.exceptions.Exit(_status(error)) from None


def _status(error: Exception) -> int:
    """Return whose fault an error is; what a configuration in the checkpoint asks for is the checkpoint's."""
    is_usage = isinstance(error, ConfigError | ModuleNotFoundError) and not isinstance(error, FormatError)
    return USAGE if is_usage else FAULT


def printable(text: str) -> str:
    """Return lines of `text` with all that is no letter or sign escaped, however long they are."""
    return "\n".join(shown(line, len(line) + 1) for line in text.split("\n"))


def _say(words: str) -> None:
    paragraph = "\n".join(line for line in printable(words).split("\n") if line.strip())
    with suppress(OSError, ValueError):  # standard error may be gone, too
        sys.stderr.write(f"tensorferry: {paragraph}\n")
        sys.stderr.flush()


def _words(error: Exception) -> str | None:
    """Return what to say of an error that is no surprise, or None."""
    if isinstance(error, TensorferryError):
        touched = "; parts of the model had been written when this happened" if error.touched else ""
        return f"{in_options(str(error))}{touched}"
    if isinstance(error, ModuleNotFoundError) and (package := (error.name or "").partition(".")[0]) in _EXTRAS:
        return f"this needs {package}, which is not installed: pip install 'tensorferry[{_EXTRAS[package]}]'"
    if isinstance(error, OSError) and error.strerror:
        where = f"{shown(os.fsdecode(error.filename), 300)}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return "there is not enough memory for this" if isinstance(error, MemoryError) else None


def _unforeseen(error: Exception) -> str:
    said = shown(str(error), 500) or "no message"
    return (
        f"an error that was not foreseen: {type(error).__name__}: {said} (set {TRACEBACK}=1 to see where it came from)"
    )


def _let_go_of_stdout() -> None:
    """Point standard output nowhere if it takes nothing more, so that flushing it at exit is no second error."""
    with suppress(OSError):
        sys.stdout.flush()
        return
    with suppress(OSError, io.UnsupportedOperation):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
