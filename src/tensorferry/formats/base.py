"""What a format does: says which files are its own, and turns headers into a catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tensorferry.core.catalogue import Catalogue
from tensorferry.storage.base import File, Storage

__all__ = ["ChecksSets", "FileFormat", "Selection", "Unlocks"]


class FileFormat(Protocol):
    """A reader of single files. Stateless; one instance serves all threads.

    name: what reports and errors call it, and `FILE_FORMATS`; a `load_format` may have another name, or be several.
    """

    name: str

    def catalogue(self, storage: Storage, file: File) -> Catalogue:
        """Read the header of `file`, validate it whole, and return what it holds; no tensor data is read.

        Raises CorruptFile, UnsafeFile, UnsupportedDtype or UnknownFormat with the file's name in the message.
        """
        ...


@runtime_checkable
class ChecksSets(Protocol):
    """Readers whose files say of which set they are a part."""

    def check_set(self, files: Sequence[File], parts: Sequence[Catalogue]) -> None:
        """Raise LocateError or CorruptFile unless `parts`, the catalogues of all `files`, are one whole checkpoint."""
        ...


@runtime_checkable
class Unlocks(Protocol):
    """Readers whose files may be encrypted."""

    def unlock(self, storage: Storage, files: Sequence[File], keyfile: str | None) -> Storage:
        """Return a storage that also reads what is encrypted in `files`; `storage` itself where nothing is.

        keyfile: a file with the key. Without one, reading what is encrypted raises AccessDenied; with a wrong one,
        this does. Raises ConfigError for a key that is not needed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Selection:
    """Which files are the checkpoint, and why.

    format: the file format's name. files: in natural order. index: name to file as the index says, if one was used.
    reason: one sentence. ignored: weight files that lie beside and were not chosen, with the reason of each.
    warnings: what the caller should be told (a fallback taken, a stale index).
    layout: how the files make up one checkpoint, a name of `opening.LAYOUTS`; "files": each tensor lies whole in one.
    """

    format: str
    files: tuple[File, ...]
    reason: str
    index: dict[str, str] | None = None
    index_file: str | None = None
    ignored: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    layout: str = "files"
