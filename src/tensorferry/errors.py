"""Every error that tensorferry raises on purpose, and how it is put into words.

The tree; each class is also the nearest builtin, so ordinary ``except`` clauses work::

    TensorferryError
    ├── ConfigError     (ValueError)         an option is unknown, of the wrong type, or contradicts another
    ├── LocateError     (FileNotFoundError)  no checkpoint there, or one of its files is absent
    │   └── AccessDenied                     it is there, but not for us: no token, no right, gated
    ├── FormatError     (ValueError)         a file is there and cannot be believed
    │   ├── CorruptFile                      truncated, overlapping, contradicting itself
    │   ├── UnsafeFile                       would execute something, or leads out of its folder
    │   ├── UnsupportedDtype                 a data type that the format or this torch does not have
    │   └── UnknownFormat                    not a checkpoint that we know; says what it looks like
    ├── RuleError       (ValueError)         a naming rule is malformed or cannot be inverted
    ├── PlanError       (ValueError)         checkpoint and model do not fit; carries every problem
    ├── ReadError       (OSError)            bytes could not be read, or changed while they were read
    ├── WriteError      (OSError)            a file could not be written: a full disk, or another who writes it
    └── FinalizeError   (RuntimeError)       something was left empty, on meta, or overflowed

Every message names what is known of file, tensor and rank, what was expected and found, and what to do.
``error.touched`` tells whether a parameter of the model may have been written before the error:
it is False until a load has begun to write. Names that come out of files pass through `shown`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tensorferry.problems import Problem

__all__ = [
    "AccessDenied",
    "ConfigError",
    "CorruptFile",
    "FinalizeError",
    "FormatError",
    "LocateError",
    "PlanError",
    "ReadError",
    "RuleError",
    "TensorferryError",
    "UnknownFormat",
    "UnsafeFile",
    "UnsupportedDtype",
    "WriteError",
    "shown",
]


_CREDENTIALS = re.compile(r"(?i)([a-z][a-z0-9+.-]{0,20}:/{1,2})(?:[^/?#\s]*|[^/?#\s:@]*:[^\s@]*)@")
_QUERY = re.compile(r"(?i)([a-z][a-z0-9+.-]{0,20}:/{1,2}[^\s?#]*)\?[^\s#]*")
_OF_AN_ADDRESS = re.compile(r"(?i)(\s*[a-z][a-z0-9+.-]{0,20}:/{1,2})(?:(?:[^/?#]*|[^/?#:@]*:[^@]*)@)?")
_HALF = re.compile(r"[^/?#:@]*:(?!\d{1,5}/)")  # of a credential, whose "?" is no beginning of a query
_LONGEST_URL = 2048  # characters, of which the end of a credential may be searched


class TensorferryError(Exception):
    """Base of every error raised on purpose; see the tree in the module's docstring."""

    touched: bool = False
    """True when parameters of a model may already have been written."""


class ConfigError(TensorferryError, ValueError):
    """An option is unknown, of the wrong type, or contradicts another one."""


class LocateError(TensorferryError, FileNotFoundError):
    """No checkpoint at that place, or one of the files that make it up is absent."""


class AccessDenied(LocateError):
    """The place exists but refuses us: no token, a wrong one, or terms not accepted."""


class FormatError(TensorferryError, ValueError):
    """A file exists and cannot be taken for what it should be."""


class CorruptFile(FormatError):
    """A file contradicts itself or its size: truncated, overlapping, malformed."""


class UnsafeFile(FormatError):
    """Reading the file as it asks would execute something or leave its folder."""


class UnsupportedDtype(FormatError):
    """A tensor has a data type that the format does not define or this torch lacks."""


class UnknownFormat(FormatError):
    """The file or folder is not a checkpoint that tensorferry reads."""


class RuleError(TensorferryError, ValueError):
    """A naming rule is malformed, or has no inverse where one was asked for."""


class PlanError(TensorferryError, ValueError):
    """Checkpoint and model do not fit. ``problems`` holds every one that planning found."""

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class ReadError(TensorferryError, OSError):
    """Bytes could not be read whole, or their file changed while it was being read."""


class WriteError(TensorferryError, OSError):
    """A file could not be written whole, and nothing of it is left. ``errno`` is what the system said, if anything."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class FinalizeError(TensorferryError, RuntimeError):
    """After the bytes: something is still empty, on meta, or lost its value in a cast."""


def shown(text: str, limit: int = 120) -> str:
    """Return `text` from a file or a caller made safe for a terminal or a log: escaped and at most `limit` long.

    Credentials and queries of URLs are left out.

    >>> shown("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    >>> shown("s3://key:secret@host/model?signature=secret")
    's3://…@host/model?…'
    """
    text = text[: limit + _LONGEST_URL]
    if ":/" in text:
        text = _bare(text)
        text = _QUERY.sub(r"\1?…", _CREDENTIALS.sub(r"\1…@", text))
    safe = text[: limit + 1]
    if not safe.isprintable():
        safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in safe)
    return safe if len(safe) <= limit else safe[: limit - 1] + "…"


def _bare(text: str) -> str:
    """Return text that is an address without credentials and query, which may have blanks in them; other text as it is.

    >>> _bare("https://host/my models/m?signature=a b"), _bare("see https://host/m?n=1 for more")
    ('https://host/my models/m?…', 'see https://host/m?n=1 for more')
    """
    address, mark, query = text.partition("?")
    begin = _OF_AN_ADDRESS.match(address)
    if begin is None:
        return text
    scheme, credentials, rest = begin[1], address[begin.end(1) : begin.end()], address[begin.end() :]
    if "@" in query and not credentials and _HALF.match(rest):
        return f"{scheme}…"
    return f"{scheme}{'…@' if credentials else ''}{rest}{'?…' if mark else ''}"
