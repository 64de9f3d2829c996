"""Opens a checkpoint: finds its files, reads their headers in parallel, makes one catalogue."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import TracebackType
from typing import Self, cast

from tensorferry.collector import collector_paused
from tensorferry.core.amounts import few
from tensorferry.core.catalogue import Catalogue
from tensorferry.errors import ConfigError, FormatError, UnknownFormat, shown
from tensorferry.formats.base import ChecksSets, FileFormat, Selection, Unlocks
from tensorferry.formats.file_names import FAMILIES, LOAD_FORMATS, what_else
from tensorferry.formats.places import Place, place_of
from tensorferry.formats.quantized_parts import noted
from tensorferry.formats.selection import Wanted, select, select_file
from tensorferry.formats.sniff import SNIFF_BYTES, describe_foreign
from tensorferry.storage.base import File, Storage
from tensorferry.storage.reading import nested, read_bytes

__all__ = ["CACHES", "FILE_FORMATS", "LAYOUTS", "Opened", "file_format", "open_files", "open_place", "open_selection"]

logger = logging.getLogger(__name__)

Merge = Callable[[Storage, Selection, Sequence[Catalogue]], Catalogue]
SelectCache = Callable[[Storage, Callable[[], Selection]], Selection]

FILE_FORMATS = {
    "safetensors": "tensorferry.formats.safetensors:SafetensorsFormat",
    "torch": "tensorferry.formats.torch_file:TorchFileFormat",
    "gguf": "tensorferry.formats.gguf:GgufFormat",
    "npy": "tensorferry.formats.npy:NpyFormat",
    "tensorizer": "tensorferry.formats.tensorizer:TensorizerFormat",
}
"""Readers of single files by name, as module and class; imported when one is first needed."""

LAYOUTS = {
    "files": "tensorferry.formats.merge:merge",
    "model-parallel": "tensorferry.formats.model_parallel:join",
    "npcache": "tensorferry.formats.npcache:catalogue_of",
    "sharded-rank": "tensorferry.formats.sharded_state:one_rank",
    "sharded-state": "tensorferry.formats.sharded_state:join",
}
"""What makes one catalogue of those of a checkpoint's files, as module and function; see `Selection.layout`.

Called with storage, selection and the catalogue of each file in order; what several files hold of one tensor becomes
the chunks of one entry.
"""

CACHES = {
    "npcache": "tensorferry.formats.npcache:select_npcache",
    "sharded_state": "tensorferry.formats.sharded_state:select_state",
}
"""What chooses the files of each `load_format` that reads something made of the checkpoint's files, kept beside them.

As module and function, called with storage and a function that returns the selection of the checkpoint's own files.
"""

_SHOWN_ERRORS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A checkpoint whose headers have been read and validated. Close it, or use it as a context manager.

    storage: where the bytes are read from. selection: which files are the checkpoint, and why. catalogue: the entries,
    in storage order, which stay when it is closed. Reading them is for `tensorferry.checkpoint.Checkpoint`, which is
    one of these with options for reading.
    """

    storage: Storage
    selection: Selection
    catalogue: Catalogue

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the caller should be told: about the choice of files, then about what they hold."""
        return (*self.selection.warnings, *self.catalogue.notes)

    def close(self) -> None:
        """Release the files; idempotent."""
        self.storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_files(
    path: str | os.PathLike[str],
    *,
    load_format: str = "auto",
    subfolder: str | None = None,
    variant: str | None = None,
    allow_patterns: Sequence[str] | None = None,
    ignore_patterns: Sequence[str] = (),
    links_to: Sequence[str | os.PathLike[str]] = (),
    allow_pickle: bool = True,
    originals: bool = False,
    encryption_keyfile: str | os.PathLike[str] | None = None,
    max_workers: int = 8,
) -> Opened:
    """Return the checkpoint at `path`: a folder, a weight file, or a shard index, here or at an address. Only headers
    are read.

    The options are those of `selection.Wanted`. links_to: folders that links may lead into, beside the checkpoint's
    own. originals: open the checkpoint's own files where `load_format` names a cache of them. encryption_keyfile: a
    file with the key of encrypted tensors. max_workers: how many headers are read at a time.

    Raises LocateError (nothing there, a shard is absent), FormatError (damaged, unsafe, unknown or ambiguous) and
    ConfigError (options that contradict each other or the file), AccessDenied (a wrong key); each names the file.
    """
    keyfile = None if encryption_keyfile is None else os.fspath(encryption_keyfile)
    if max_workers < 1:
        raise ConfigError(f"max_workers {max_workers}: at least 1 is expected")
    wanted = Wanted(load_format, subfolder or "", variant, allow_patterns, ignore_patterns, allow_pickle)
    place = place_of(path, subfolder=subfolder, links_to=links_to)
    return open_place(place, wanted, originals=originals, keyfile=keyfile, max_workers=max_workers)


@collector_paused()
def open_place(
    place: Place, wanted: Wanted, *, originals: bool = False, keyfile: str | None = None, max_workers: int = 8
) -> Opened:
    """Return the checkpoint at `place`, whose storage is closed where this raises. The rest is as in `open_files`."""
    storage, name = place
    try:
        if name is not None:
            _refuse_for_a_file(name, wanted)
        selection = _selected(storage, wanted, name, originals)
        return open_selection(storage, selection, keyfile=keyfile, max_workers=max_workers)
    except BaseException:
        storage.close()
        raise


def file_format(name: str) -> FileFormat:
    """Return the reader of single files called `name`. Raises UnknownFormat if there is none."""
    if name not in FILE_FORMATS:
        raise UnknownFormat(f"file format {name!r} is not known; there are {', '.join(FILE_FORMATS)}")
    kind = cast("type[FileFormat]", _imported(FILE_FORMATS[name]))
    return kind()


def _imported(where: str) -> object:
    module, _, attribute = where.partition(":")
    return getattr(import_module(module), attribute)


def open_selection(
    storage: Storage,
    selection: Selection,
    *,
    merge: Merge | None = None,
    keyfile: str | None = None,
    max_workers: int = 8,
) -> Opened:
    """Return the checkpoint that the chosen files are; only headers are read. Where it raises, `storage` stays open.

    merge: what makes one catalogue of those of the files, in place of what the layout says. Raises FormatError.
    """
    where = shown(storage.uri, 300)
    logger.info("%s: %s", where, selection.reason)
    for left_out, why in selection.ignored:
        logger.info("%s: %s is left out: %s", where, shown(left_out), why)
    parts = _headers(storage, selection, max_workers)
    merge = merge or cast("Merge", _imported(LAYOUTS[selection.layout]))
    catalogue = noted(storage, merge(storage, selection, parts))
    opened = Opened(_unlocked(storage, selection, keyfile), selection, catalogue)
    for warning in opened.warnings:
        logger.warning("%s: %s", where, warning)
    return opened


def _unlocked(storage: Storage, selection: Selection, keyfile: str | None) -> Storage:
    reader = file_format(selection.format)
    if isinstance(reader, Unlocks):
        return reader.unlock(storage, selection.files, keyfile)
    if keyfile is not None:
        raise ConfigError(f"encryption_keyfile was given, and no {selection.format} file is encrypted: leave it out")
    return storage


def _selected(storage: Storage, wanted: Wanted, name: str | None, originals: bool) -> Selection:
    cache = CACHES.get(wanted.load_format)
    if cache is None or originals:
        return _chosen(storage, wanted, name)
    return cast("SelectCache", _imported(cache))(storage, lambda: _chosen(storage, wanted, name))


def _chosen(storage: Storage, wanted: Wanted, name: str | None) -> Selection:
    if name is None:
        return select(storage, replace(wanted, subfolder=""), nested=lambda: nested(storage))
    selection = select_file(storage, name)
    if not selection.format:
        selection = replace(selection, format=_format_inside(storage, selection.files[0]))
    formats = {FAMILIES[family].format for family in LOAD_FORMATS[wanted.load_format]}
    if selection.format not in formats:
        raise ConfigError(
            f"{shown(name)} is a {selection.format} file, which load_format {wanted.load_format!r} does not take"
        )
    return selection


def _refuse_for_a_file(name: str, wanted: Wanted) -> None:
    given = {
        "subfolder": wanted.subfolder,
        "variant": wanted.variant,
        "allow_patterns": wanted.allow_patterns,
        "ignore_patterns": wanted.ignore_patterns,
    }
    for option, value in given.items():
        if value:
            raise ConfigError(f"{option} chooses among the files of a folder, and {shown(name)} is one file")


def _format_inside(storage: Storage, file: File) -> str:
    """Return the name of the format that a file's first bytes tell, where its name does not."""
    head = read_bytes(storage, file.path, 0, min(file.size, SNIFF_BYTES))
    if head[8:9] == b"{" and head[:1] != b"{":
        return "safetensors"
    if head[:4] == b"GGUF":
        return "gguf"
    if head[:5] == b"|TZR|":
        return "tensorizer"
    if head[:4] == b"PK\x03\x04" or head[:1] == b"\x80":
        return "torch"
    found = describe_foreign(head) or what_else(file.path) or "of a format that is not known here"
    raise UnknownFormat(f"{shown(file.path)}: not a checkpoint that tensorferry reads: it is {found}")


def _headers(storage: Storage, selection: Selection, max_workers: int) -> list[Catalogue]:
    """Return the catalogue of each selected file, in order, or raise what is wrong with all of them at once."""
    reader = file_format(selection.format)

    def read(file: File) -> Catalogue | FormatError:
        try:
            return reader.catalogue(storage, file)
        except FormatError as error:
            return error

    if len(selection.files) <= 1 or max_workers == 1:
        results = [read(file) for file in selection.files]
    else:
        from tensorferry.in_threads import in_threads  # not at the top: one file never needs it

        results = in_threads(read, selection.files, max_workers)
    faults = [result for result in results if isinstance(result, FormatError)]
    if faults:
        raise _together(faults)
    parts = [result for result in results if isinstance(result, Catalogue)]
    if isinstance(reader, ChecksSets):
        reader.check_set(selection.files, parts)
    return parts


def _together(faults: Sequence[FormatError]) -> FormatError:
    """Return one error that says what is wrong with every file, of the class of the first."""
    if len(faults) == 1:
        return faults[0]
    lines = few(map(str, faults), _SHOWN_ERRORS, between="\n  ", what="file")
    return type(faults[0])(f"{len(faults)} files cannot be believed:\n  {lines}")
