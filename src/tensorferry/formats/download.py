"""Brings the chosen files of a checkpoint from the Hugging Face Hub, and nothing else of its repository."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence

from tensorferry.formats.file_names import is_side_file, matches_any
from tensorferry.formats.index import check_index_size, parse_index
from tensorferry.formats.selection import Wanted, choose
from tensorferry.storage.base import File
from tensorferry.storage.hub import Listing, Snapshot, fetch_snapshot

__all__ = ["download"]

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
    if matches_any(file.path, wanted.ignore_patterns) or not is_side_file(file.path, file.size):
        return False
    return posixpath.dirname(file.path) in ("", wanted.subfolder) or file.path.endswith(_NESTED_SIDE_FILES)
