"""The small files beside the weights, on this machine, for libraries that read no other: where they lie, or copies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tensorferry.errors import LocateError, shown
from tensorferry.formats.file_names import is_side_file
from tensorferry.formats.places import place_of
from tensorferry.storage.base import Storage
from tensorferry.storage.local import LocalStorage
from tensorferry.storage.object_uri import is_uri
from tensorferry.storage.reading import read_bytes, seen

__all__ = ["Described", "described"]

_OF_A_MODEL = ("config.json", "generation_config.json")
_OF_A_TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
)  # fmt: skip


class Described(NamedTuple):
    """What describes a model. folder: with its small files. storage: where these lie, with the weights beside them."""

    folder: Path
    storage: Storage


@contextmanager
def described(
    path: str | os.PathLike[str], subfolder: str | None = None, *, tokenizer: bool = False
) -> Iterator[Described]:
    """Yield what lies beside the weights at `path`: a folder, a file, or an address, of which copies are made.

    The copies, of configuration and code, and with `tokenizer` of all small files, are gone when the block ends.
    Raises LocateError where nothing is there, and what reading raises.
    """
    if not (isinstance(path, str) and is_uri(path)):
        folder = _folder(path, subfolder)
        with closing(LocalStorage(folder)) as here:
            yield Described(folder, here)
        return
    with (
        closing(place_of(path, subfolder=subfolder).storage) as storage,
        TemporaryDirectory(prefix="tensorferry-") as copies,
    ):
        for name in _wanted(storage, tokenizer=tokenizer):
            Path(copies, name).write_bytes(read_bytes(storage, name, 0, storage.stat(name).size))
        yield Described(Path(copies), storage)


def _folder(path: str | os.PathLike[str], subfolder: str | None) -> Path:
    """Return the folder of config.json: `path`, or where the file `path` lies."""
    given = Path(path)
    if not given.exists():
        raise LocateError(f"{shown(os.fspath(path), 300)}: there is no such file or folder")
    return (given if given.is_dir() else given.parent) / (subfolder or "")


def _wanted(storage: Storage, *, tokenizer: bool) -> list[str]:
    files = seen(storage, (*_OF_A_MODEL, *(_OF_A_TOKENIZER if tokenizer else ())))
    small = [file.path for file in files if is_side_file(file.path, file.size)]
    return small if tokenizer else [name for name in small if name in _OF_A_MODEL or name.endswith(".py")]
