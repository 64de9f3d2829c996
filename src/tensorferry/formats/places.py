"""What a path or an address means: a storage, and the file of it that was named, if one was. Opens no file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tensorferry.errors import AccessDenied, LocateError
from tensorferry.formats.file_names import format_of, parse_index_name
from tensorferry.storage.base import Storage
from tensorferry.storage.local import LocalStorage
from tensorferry.storage.object_uri import ObjectUri, is_uri
from tensorferry.storage.reading import is_there

__all__ = ["Place", "place_of"]


class Place(NamedTuple):
    """A storage, which is to be closed, and the file in it that was named; None where all of it was."""

    storage: Storage
    name: str | None


def place_of(
    path: str | os.PathLike[str], *, subfolder: str | None = None, links_to: Sequence[str | os.PathLike[str]] = ()
) -> Place:
    """Return what lies at `path`: a folder or a file of this machine, or an address such as ``s3://bucket/model``.

    subfolder: where below a folder; it has to belong to it. links_to: folders that links of this machine may lead into.

    An address is that of a file where its name says so and there is such an object, or where there is nothing below it.
    Raises LocateError, AccessDenied and UnsafeFile; of an address ConfigError, and ReadError where nobody answers.
    """
    if isinstance(path, str) and is_uri(path):
        return _elsewhere(ObjectUri.parse(path), subfolder or "")
    if Path(path).is_file():
        return Place(LocalStorage(Path(path).parent, links_to=links_to), Path(path).name)
    inside = path if subfolder else None
    return Place(LocalStorage(Path(path, subfolder or ""), inside=inside, links_to=links_to), None)


def _elsewhere(uri: ObjectUri, subfolder: str) -> Place:
    from tensorferry.storage.object_store import ObjectStorage  # not at the top: what lies here never needs it

    if subfolder or not uri.name:
        return Place(ObjectStorage.at(uri.below(subfolder)), None)
    if uri.service == "http":
        return Place(ObjectStorage.at(uri, only=uri.name) if uri.query else ObjectStorage.at(uri.parent), uri.name)
    if _is_called_like_a_file(uri.name) and (found := _file(uri)) is not None:
        return found
    folder = ObjectStorage.at(uri)
    try:
        folder.list()
    except AccessDenied:
        raise
    except LocateError:
        if (found := _file(uri)) is not None:
            return found
        raise
    return Place(folder, None)


def _file(uri: ObjectUri) -> Place | None:
    from tensorferry.storage.object_store import ObjectStorage

    storage = ObjectStorage.at(uri.parent)
    return Place(storage, uri.name) if is_there(storage, uri.name) else None


def _is_called_like_a_file(name: str) -> bool:
    return format_of(name) is not None or parse_index_name(name) is not None
