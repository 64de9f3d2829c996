"""Where a model's weights come from: sources, and one open checkpoint made of several. Reads headers only."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tensorferry.checkpoint import Checkpoint
from tensorferry.config import LoadConfig, ReadOptions, folders
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.errors import ConfigError, FormatError, shown
from tensorferry.formats.base import Selection
from tensorferry.formats.download import download, nothing_here, refuse_revision
from tensorferry.formats.opening import Opened, open_place
from tensorferry.formats.places import place_of
from tensorferry.formats.selection import Wanted
from tensorferry.storage.joined import JoinedStorage
from tensorferry.storage.object_uri import is_uri

__all__ = ["NameFilter", "Source", "locate", "open_source", "open_sources", "sieve"]

logger = logging.getLogger(__name__)

OpenSource = Callable[["Source", LoadConfig, str], Opened]

NameFilter = Callable[[str], bool]
"""Whether the entry of that name, its source's prefix included, is wanted. Those that are not are never read."""


@dataclass(frozen=True, slots=True)
class Source:
    """A place that weights come from.

    model_or_path: a folder, a weight file, an address such as ``s3://bucket/model``, or a name on the Hub.
    revision: a branch, tag or commit there. subfolder: where in it the weights are. prefix: put before every name, with
    its dot. fall_back_to_pt: whether torch files will do where there are no safetensors. allow_patterns_overrides: file
    name patterns that choose the files in place of names and index. variant: such as ``fp16``.
    """

    model_or_path: str | os.PathLike[str]
    revision: str | None = None
    subfolder: str | None = None
    prefix: str = ""
    fall_back_to_pt: bool = True
    allow_patterns_overrides: Sequence[str] | None = None
    variant: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.allow_patterns_overrides, str):
            raise ConfigError(
                f"allow_patterns_overrides {self.allow_patterns_overrides!r}: a list of patterns is expected, not one"
            )


def locate(source: Source, config: LoadConfig, load_format: str) -> str | Path:
    """Return the folder or file of `source` on this machine, or its address; what is neither is fetched from the Hub,
    weights only.

    Raises LocateError, AccessDenied, ConfigError: see `download`.
    """
    if isinstance(source.model_or_path, str) and is_uri(source.model_or_path):
        refuse_revision(source.model_or_path, source.revision)
        return source.model_or_path
    path = Path(source.model_or_path).expanduser()
    if path.exists() or path.is_symlink():
        return path
    name = os.fspath(source.model_or_path)
    with nothing_here(name):
        snapshot = download(
            name,
            revision=source.revision,
            cache_dir=config.download_dir,
            load_format=load_format,
            subfolder=source.subfolder,
            variant=source.variant,
            allow_patterns=source.allow_patterns_overrides,
            ignore_patterns=config.ignore_patterns,
            allow_pickle=source.fall_back_to_pt,
        )
    logger.info("%s is commit %s", snapshot.name, snapshot.commit)
    return snapshot.path


def open_source(
    source: Source,
    config: LoadConfig,
    load_format: str,
    encryption_keyfile: str | None = None,
    *,
    originals: bool = False,
) -> Opened:
    """Return what `source` holds, located and opened; the last two as in `open_files`."""
    wanted = Wanted(
        load_format,
        source.subfolder or "",
        source.variant,
        source.allow_patterns_overrides,
        config.ignore_patterns,
        source.fall_back_to_pt,
    )
    keyfile = None if encryption_keyfile is None else os.fspath(encryption_keyfile)
    path, links_to = locate(source, config, load_format), folders("links_to", config.links_to)
    place = place_of(path, subfolder=source.subfolder, links_to=links_to)
    if place.name is not None:
        wanted = replace(wanted, ignore_patterns=())
    return open_place(place, wanted, originals=originals, keyfile=keyfile)


def open_sources(
    sources: Sequence[Source],
    config: LoadConfig,
    load_format: str,
    options: ReadOptions,
    *,
    encryption_keyfile: str | None = None,
    open_one: OpenSource | None = None,
) -> Checkpoint:
    """Return one checkpoint that holds the entries of all `sources`, each under its prefix, in their order.

    encryption_keyfile: a file with the key that all of them are encrypted with. open_one: opens a source, in place of
    `open_source`.

    Raises what `locate` and `open_files` raise, and FormatError where a name comes from two sources.
    """
    opening = open_one or partial(open_source, encryption_keyfile=encryption_keyfile)
    with ExitStack() as until_all_are_open:
        opened = []
        for source in sources:
            one = opening(source, config, load_format)
            until_all_are_open.callback(one.close)
            opened.append(one)
        joined = _joined(sources, opened)
        until_all_are_open.pop_all()
    return Checkpoint.of(joined, options)


def sieve(checkpoint: Checkpoint, wanted: NameFilter) -> tuple[Checkpoint, dict[str, str]]:
    """Return the checkpoint without the entries that are not `wanted`, and why each of those was dropped."""
    kept = [entry for entry in checkpoint.catalogue.values() if wanted(entry.name)]
    names = {entry.name for entry in kept}
    dropped = dict.fromkeys((n for n in checkpoint.catalogue if n not in names), "left out by weight_name_filter")
    return replace(checkpoint, catalogue=checkpoint.catalogue.replacing(kept)), dropped


def _joined(sources: Sequence[Source], opened: Sequence[Opened]) -> Opened:
    if len(opened) == 1 and not sources[0].prefix:
        return opened[0]
    names = ["primary", *(f"secondary-{n}" for n in range(1, len(opened)))]
    entries: dict[str, TensorEntry] = {}
    for name, source, one in zip(names, sources, opened, strict=True):
        for entry in one.catalogue.values():
            moved = _moved(entry, name, source.prefix)
            if entries.setdefault(moved.name, moved) is not moved:
                raise _twice(entries[moved.name], moved)
    storage = JoinedStorage(dict(zip(names, (one.storage for one in opened), strict=True)))
    selection = _selection(names, opened)
    catalogue = Catalogue(
        entries.values(),
        format=selection.format,
        files=[f"{name}/{file}" for name, one in zip(names, opened, strict=True) for file in one.catalogue.files],
        metadata={k: v for one in reversed(opened) for k, v in one.catalogue.metadata.items()},
        notes=dict.fromkeys(note for one in opened for note in one.catalogue.notes),
    )
    return Opened(storage, selection, catalogue)


def _moved(entry: TensorEntry, part: str, prefix: str) -> TensorEntry:
    chunks = (c._replace(span=c.span and c.span._replace(file=f"{part}/{c.span.file}")) for c in entry.chunks)
    made = entry.made and entry.made._replace(inputs=tuple(_moved(one, part, "") for one in entry.made.inputs))
    return replace(entry, name=prefix + entry.name, chunks=tuple(chunks), made=made)


def _twice(one: TensorEntry, other: TensorEntry) -> FormatError:
    where = " and ".join(dict.fromkeys(map(shown, (*one.files, *other.files))))
    return FormatError(
        f"duplicate name: two of the model's sources hold a tensor {shown(one.name)!r}, in {where}: give one of them a "
        "prefix, or leave one out with weight_name_filter"
    )


def _selection(names: Sequence[str], opened: Sequence[Opened]) -> Selection:
    chosen = list(zip(names, (one.selection for one in opened), strict=True))
    return Selection(
        format=" + ".join(dict.fromkeys(selection.format for _, selection in chosen)),
        files=tuple(replace(f, path=f"{name}/{f.path}") for name, selection in chosen for f in selection.files),
        reason="; ".join(f"{name}: {selection.reason}" for name, selection in chosen),
        ignored=tuple((f"{name}/{file}", why) for name, selection in chosen for file, why in selection.ignored),
        warnings=tuple(f"{name}: {warning}" for name, selection in chosen for warning in selection.warnings),
    )
