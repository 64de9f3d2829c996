"""The loader of torch checkpoints through a NumPy cache, and building such a cache. Its layout: `formats.npcache`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tensorferry.checkpoint import Checkpoint
from tensorferry.config import Folders, LoadConfig, ReadOptions, folders
from tensorferry.errors import ConfigError, FormatError, LocateError, TensorferryError, shown
from tensorferry.formats.npcache import sources_of
from tensorferry.formats.npcache_record import FOLDER
from tensorferry.formats.npcache_write import one_builder, write_npcache
from tensorferry.formats.opening import Opened, open_files
from tensorferry.formats.writing import NewTensor
from tensorferry.loaders import sources
from tensorferry.loaders.default import DefaultModelLoader
from tensorferry.loaders.sources import open_source, open_sources
from tensorferry.loaders.strategies import halved
from tensorferry.numerics.memory import bytes_of
from tensorferry.storage.object_uri import is_uri

__all__ = ["NpcacheLoader", "build_npcache"]

logger = logging.getLogger(__name__)

_FORMAT = "npcache"


class NpcacheLoader(DefaultModelLoader):
    """Loads ``.bin`` and ``.pt`` checkpoints through their NumPy caches: load_format npcache.

    A cache that is absent, stale, damaged or half-written is built first, in ``np/`` of the checkpoint's folder. Where
    that cannot be written to, the files themselves are loaded, and the report says so.
    """

    @property
    def _format(self) -> str:
        return _FORMAT

    def _opened(self, wanted: list[sources.Source]) -> Checkpoint:
        options = halved(self.load_config)
        return open_sources(wanted, self.load_config, self._format, options, open_one=_opened_through_cache)


def build_npcache(
    path: str | os.PathLike[str],
    *,
    subfolder: str | None = None,
    variant: str | None = None,
    links_to: Folders = (),
    options: ReadOptions | None = None,
) -> Path:
    """Return the NumPy cache of the torch checkpoint at `path`, which is built unless it is there and current.

    The options are those of `open_checkpoint`. Raises what that raises; ReadError where a file changed meanwhile;
    UnsafeFile where ``np/`` is something else; OSError where it cannot be written.
    """
    opening = partial(
        open_files,
        path,
        load_format=_FORMAT,
        subfolder=subfolder,
        variant=variant,
        links_to=folders("links_to", links_to),
    )
    if isinstance(path, str) and is_uri(path):
        raise ConfigError(f"{shown(path, 300)}: a NumPy cache is built on disks of this machine: fetch the files first")
    with opening(originals=True) as originals:
        _current(originals, opening, options or ReadOptions()).close()
        return Path(originals.storage.uri, FOLDER)


def _opened_through_cache(source: sources.Source, config: LoadConfig, load_format: str) -> Opened:
    """Return the cache of `source`, built if need be; the source itself where the cache cannot be written."""
    opening = partial(open_source, source, config, load_format)
    if (opened := _usable(opening)) is not None:
        return opened
    with ExitStack() as until_it_is_returned:
        originals = until_it_is_returned.enter_context(opening(originals=True))
        if is_uri(originals.storage.uri):
            until_it_is_returned.pop_all()
            return _instead(originals, "it lies in an object store")
        try:
            return _current(originals, opening, halved(config))
        except TensorferryError:
            raise
        except OSError as error:
            until_it_is_returned.pop_all()
            return _instead(originals, str(error.strerror or error))


def _current(originals: Opened, opening: Callable[[], Opened], options: ReadOptions) -> Opened:
    """Return the open cache of `originals`, which is built unless another process has done that by now."""
    folder = Path(originals.storage.uri)
    with one_builder(folder):
        if (opened := _usable(opening)) is not None:
            return opened
        _build(originals, folder, options)
        return opening()


def _usable(opening: Callable[[], Opened]) -> Opened | None:
    """Return the open cache, or None where there is none that can be believed."""
    try:
        return opening()
    except (LocateError, FormatError) as error:
        logger.info("the NumPy cache has to be built: %s", error)
        return None


def _build(originals: Opened, folder: Path, options: ReadOptions) -> None:
    catalogue, storage = originals.catalogue, originals.storage
    with closing(Checkpoint.of(originals, options).tensors()) as values:
        tensors = {e.name: NewTensor(e.dtype, e.shape, _bytes_of_next(values)) for e in catalogue.values()}
        write_npcache(
            folder,
            tensors,
            metadata=catalogue.metadata,
            sources=sources_of(storage, originals.selection),
            confirm=storage.check_unchanged,
        )
    logger.info("%s: built %s/ of %s bytes", shown(str(folder), 300), FOLDER, f"{catalogue.nbytes:,}")


def _bytes_of_next(values: Generator[tuple[str, torch.Tensor], None, None]) -> Iterator[memoryview]:
    """Yield the bytes of the tensor that comes next, when they are asked for."""
    _, tensor = next(values)
    yield bytes_of(tensor.contiguous())


def _instead(originals: Opened, why: str) -> Opened:
    """Return `originals` with a warning that says why it is them that are loaded, and what to do."""
    names: Sequence[str] = [shown(file.path) for file in originals.selection.files[:3]]
    where = shown(f"{originals.storage.uri}/{FOLDER}", 300)
    warning = (
        f"the NumPy cache {where} could not be written ({why}), so {', '.join(names)} is loaded"
        " itself: make the folder writable, or leave load_format npcache out"
    )
    selection = replace(originals.selection, warnings=(*originals.selection.warnings, warning))
    return replace(originals, selection=selection)
