"""Brings the chosen files of a checkpoint from the Hugging Face Hub, and nothing else of its repository."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tensorferry.errors import ConfigError, LocateError, shown
from tensorferry.formats.file_names import is_side_file, matches_any, relative
from tensorferry.formats.index import check_index_size, parse_index
from tensorferry.formats.selection import Wanted, choose
from tensorferry.storage.base import File
from tensorferry.storage.hub import Listing, Snapshot, fetch_snapshot
from tensorferry.storage.object_uri import is_uri

__all__ = ["download", "local_path", "nothing_here", "refuse_revision"]

_HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9._-]+")
_CHOOSING = ("load_format", "subfolder", "variant", "allow_patterns", "ignore_patterns")
_NESTED_SIDE_FILES = (".py", ".jinja")


def download(
    name: str,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | None = None,
    local_files_only: bool | None = None,
    load_format: str = "auto",
    subfolder: str | None = None,
    variant: str | None = None,
    allow_patterns: Sequence[str] | None = None,
    ignore_patterns: Sequence[str] = (),
    allow_pickle: bool = True,
) -> Snapshot:
    """Return a folder of the Hub's cache that holds the checkpoint of the repository `name`, fetched where needed.

    The weights are chosen from the listing and the index as `open_files` chooses them from a folder, before a byte
    of them is fetched; with them come the small files that a model needs: configuration, tokenizer, templates, code.

    The first options and the errors are those of `hub.fetch_snapshot`, the others and theirs those of `Wanted`.
    """
    wanted = Wanted(load_format, subfolder or "", variant, allow_patterns, ignore_patterns, allow_pickle)
    return fetch_snapshot(
        name,
        lambda listing: _chosen(listing, wanted),
        revision=revision,
        cache_dir=cache_dir,
        token=token,
        local_files_only=local_files_only,
    )


def local_path(path: str | os.PathLike[str], *, revision: str | None = None, **choosing: Any) -> str | os.PathLike[str]:
    """Return `path` where something lies there or it is an address, else the folder of the Hub's cache for the
    repository of that name.

    Only text that could be a name is one: ``owner/model``, not a Path, nor what begins with a dot or a
    slash. choosing: options of `download`, and of `open_files`, of which those that choose files are used.
    Raises ConfigError for a revision of what lies here, and what `download` raises.
    """
    here = os.path.lexists(path) if isinstance(path, str | os.PathLike) else True
    if not isinstance(path, str) or here or not _HUB_NAME.fullmatch(path):
        refuse_revision(path, revision)
        return path
    used = {key: value for key, value in choosing.items() if key in _CHOOSING and value is not None}
    with nothing_here(path):
        return download(path, revision=revision, **used).path


def refuse_revision(path: str | os.PathLike[str], revision: str | None) -> None:
    """Raise ConfigError where there is a `revision`, of `path`, which is an address or lies here."""
    if revision is not None:
        what = "an address" if is_uri(path) else "a path here"
        raise ConfigError(
            f"revision {shown(revision)!r}: of a name on the Hub, and {shown(str(path), 300)} is {what}: leave it out"
        )


@contextmanager
def nothing_here(name: str) -> Iterator[None]:
    """Have a LocateError say that `name` may have been meant for a path: nothing lies there."""
    try:
        yield
    except LocateError as error:
        taken = f"nothing lies at {shown(name)!r} here, so that it was taken for a name on the Hub"
        raise type(error)(f"{error}; {taken}") from error


def _chosen(listing: Listing, wanted: Wanted) -> list[str]:
    """Return the weights, their index and the side files, as paths of the listing."""

    def read_index(file: File) -> dict[str, str]:
        check_index_size(file)
        return parse_index(listing.read(file.path), what=file.path)

    selection = choose(listing.files, read_index, wanted, where=listing.where)
    weights = [file.path for file in selection.files]
    index = [selection.index_file] if selection.index_file is not None else []
    return [*weights, *index, *(file.path for file in listing.files if _is_beside(file, wanted))]


def _is_beside(file: File, wanted: Wanted) -> bool:
    seen_from_there = relative(file.path, wanted.subfolder)
    if matches_any(seen_from_there, wanted.ignore_patterns) or not is_side_file(file.path, file.size):
        return False
    return posixpath.dirname(file.path) in ("", wanted.subfolder) or file.path.endswith(_NESTED_SIDE_FILES)
