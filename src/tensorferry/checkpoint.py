"""An open checkpoint: its catalogue, and reading from it. Importing this does not import torch; reading does."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, overload

from tensorferry.config import Folders, ReadOptions, folders
from tensorferry.core.catalogue import TensorEntry, refuse_unknown
from tensorferry.core.dtypes import Kind
from tensorferry.core.names import nearest
from tensorferry.errors import AccessDenied, ConfigError, LocateError, PlanError, shown
from tensorferry.formats.opening import Opened, open_files
from tensorferry.storage.base import SupportsMap
from tensorferry.storage.object_uri import is_uri
from tensorferry.storage.reading import kind_of

if TYPE_CHECKING:
    import torch

    from tensorferry.numerics.packed import PackedTensor

__all__ = ["Checkpoint", "OpeningOptions", "open_checkpoint", "refuse_unknown_options"]


Names = Collection[str] | Callable[[str], bool]
"""Which entries: by name, or those for whose name a function returns true."""


class OpeningOptions(TypedDict, total=False):
    """The options of `open_checkpoint` that choose files, as other functions take them, too."""

    load_format: str
    subfolder: str | None
    variant: str | None
    allow_patterns: Sequence[str] | None
    ignore_patterns: Sequence[str]
    links_to: Folders
    encryption_keyfile: str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Checkpoint(Opened):
    """A checkpoint whose headers have been read and validated. Close it, or use it as a context manager.

    Fields as in `Opened`, and options: how its tensors are read.
    """

    options: ReadOptions = field(default_factory=ReadOptions)

    @classmethod
    def of(cls, opened: Opened, options: ReadOptions) -> Self:
        """Return what was opened, to be read with `options`, as suits the kind of storage of its first file."""
        storage, files = opened.storage, opened.selection.files
        settled = options.settled(kind_of(storage, files[0].path) if files else "local")
        return cls(storage, opened.selection, opened.catalogue, settled)

    @property
    def uri(self) -> str:
        """Where the checkpoint is, in words."""
        return self.storage.uri

    @overload
    def tensors(
        self, names: Names | None = None, *, mapped: bool = False, packed: Literal[False] = False
    ) -> Generator[tuple[str, torch.Tensor], None, None]: ...

    @overload
    def tensors(
        self, names: Names | None = None, *, mapped: bool = False, packed: bool
    ) -> Generator[tuple[str, torch.Tensor | PackedTensor], None, None]: ...

    def tensors(
        self, names: Names | None = None, *, mapped: bool = False, packed: bool = False
    ) -> Generator[tuple[str, Any], None, None]:
        """Yield (name, tensor) in storage order, as models' ``load_weights`` take them.

        names: only these, or those for which it returns true; what is left out is not read. Tensors own their
        memory and have the checkpoint's dtype; those that torch lacks come as bytes (uint8). Reading is ahead of the
        consumer by at most ``options.max_staging`` bytes.

        mapped: yield views of the mapped files instead, which share their pages with other processes and are read
        when they are looked at. They must not be written to, and a file that is truncated meanwhile kills the process.

        packed: yield a `PackedTensor`, which knows its type and its shape in elements, for each entry of a packed type,
        and tensors as ever for the others.

        Raises PlanError for a name that is not there, UnsupportedDtype for a type that is not known and ConfigError
        where the storage cannot map, all at once; ReadError while reading, or at the end where a file changed
        meanwhile. Reading stops when the iterator is closed or forgotten.
        """
        from tensorferry.execute.stream import mapped as map_all
        from tensorferry.execute.stream import stream

        chosen = self._chosen(names)
        refuse_unknown(chosen)
        if not mapped:
            return self._checked(stream(self.storage, chosen, self.options), packed)
        if not isinstance(self.storage, SupportsMap):
            raise ConfigError(f"files of {self.uri} cannot be mapped: read them")
        return self._checked(map_all(self.storage, chosen), packed)

    @overload
    def read(self, name: str, *, packed: Literal[False] = False) -> torch.Tensor: ...

    @overload
    def read(self, name: str, *, packed: bool) -> torch.Tensor | PackedTensor: ...

    def read(self, name: str, *, packed: bool = False) -> torch.Tensor | PackedTensor:
        """Return the values of one entry in memory of their own, in the checkpoint's dtype.

        packed: as in `tensors`. Raises PlanError where there is no such entry, UnsupportedDtype where its type is not
        known here, ReadError.
        """
        from tensorferry.execute.simple import read_entry

        (entry,) = self._chosen([name])
        values = read_entry(self.storage, entry)
        return _with_type(entry, values) if packed else values

    def __repr__(self) -> str:
        return f"<Checkpoint {shown(self.uri, 300)}: {self.catalogue!r}>"

    def _checked(
        self, tensors: Iterator[tuple[str, torch.Tensor]], packed: bool
    ) -> Generator[tuple[str, torch.Tensor | PackedTensor], None, None]:
        if packed:
            yield from ((name, _with_type(self.catalogue[name], values)) for name, values in tensors)
        else:
            yield from tensors
        self.storage.check_unchanged()

    def _chosen(self, names: Names | None) -> Sequence[TensorEntry]:
        entries = list(self.catalogue.values())
        if names is None:
            return entries
        if callable(names):
            return [e for e in entries if names(e.name)]
        wanted = {names} if isinstance(names, str) else set(names)
        if odd := [name for name in wanted if not isinstance(name, str)]:
            raise ConfigError(f"{odd[0]!r}: the name of a tensor is expected, not {type(odd[0]).__name__}")
        for name in sorted(wanted - self.catalogue.keys()):
            if set("*?[") & set(name):
                raise ConfigError(
                    f"{shown(name)!r}: names are taken whole, and {self.uri} has none like this; pass a function "
                    "from names to whether they are wanted, such as lambda name: name.startswith('model.norm')"
                )
            near = nearest(name, self.catalogue)
            hint = f"; did you mean {', '.join(map(shown, near))}?" if near else ""
            raise PlanError(f"{self.uri} holds no tensor {shown(name)!r}{hint}")
        return [e for e in entries if e.name in wanted]


def _with_type(entry: TensorEntry, values: torch.Tensor) -> torch.Tensor | PackedTensor:
    from tensorferry.numerics.packed import PackedTensor

    return PackedTensor(values, entry.dtype) if entry.dtype.kind is Kind.PACKED else values


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    load_format: str = "auto",
    subfolder: str | None = None,
    variant: str | None = None,
    allow_patterns: Sequence[str] | None = None,
    ignore_patterns: Sequence[str] = (),
    links_to: Folders = (),
    encryption_keyfile: str | os.PathLike[str] | None = None,
    options: ReadOptions | None = None,
) -> Checkpoint:
    """Open the checkpoint at `path`: a folder, a weight file or a shard index, or the address of one. Reads headers
    only.

    Addresses are those of object stores (``s3://bucket/model``, ``gs://``, ``az://``, ``abfss://``), and of files over
    HTTP; credentials and endpoints come from the environment.

    load_format: auto, hf, safetensors, mistral, pt, gguf, npcache and others. variant: such as ``fp16`` in
    ``model.fp16.safetensors``. allow_patterns: file name patterns that override the choice; ignore_patterns: files that
    are not looked at.
    links_to: a folder or several that links may lead into, such as a store that several checkpoints share; without it,
    links that lead out of the checkpoint's folder are refused. encryption_keyfile: a file with the key, or the
    passphrase, of encrypted Tensorizer files; without it, only reading their tensors is refused.

    Raises LocateError (nothing there, or a shard is absent), FormatError (damaged, unsafe, unknown), ConfigError.
    """
    _refuse_absent(path)
    if not isinstance(options, ReadOptions | None):
        raise ConfigError(f"options {options!r}: ReadOptions are expected, not {type(options).__name__}")
    opened = open_files(
        path,
        load_format=load_format,
        subfolder=subfolder,
        variant=variant,
        allow_patterns=allow_patterns,
        ignore_patterns=ignore_patterns,
        links_to=folders("links_to", links_to),
        encryption_keyfile=encryption_keyfile,
    )
    return Checkpoint.of(opened, options or ReadOptions())


def refuse_unknown_options(function: Callable[..., Any], given: Collection[str]) -> None:
    """Raise ConfigError for an option that neither `function` nor `open_checkpoint` has, naming what was meant."""
    unknown = [name for name in given if name not in OpeningOptions.__annotations__]
    if not unknown:
        return
    from inspect import signature  # not at the top: it is slow to import, and listing a checkpoint is quick

    own = [p.name for p in signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    known = (*own, *OpeningOptions.__annotations__)
    near = nearest(unknown[0], known)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{function.__name__}() has no option {shown(unknown[0])!r}{hint} (it takes {', '.join(known)})")


def _refuse_absent(path: str | os.PathLike[str]) -> None:
    given = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(given, str) or not given:
        found = "an empty text" if path == "" else type(path).__name__
        raise ConfigError(f"path: a file or folder is expected, as text or a Path, not {found}")
    where = shown(given, 300)
    if is_uri(path):
        return
    _refuse_spoiled(path, given)
    try:
        there = Path(path).exists() or Path(path).is_symlink()
    except OSError as error:
        kind = AccessDenied if isinstance(error, PermissionError) else LocateError
        raise kind(f"{where}: {error.strerror}") from None
    if not there:
        like_a_name = given.count("/") == 1
        hint = "; names on the Hub are for load_model and get_model_loader, and convert, as text" if like_a_name else ""
        raise LocateError(f"{where}: there is no such file or folder{hint}")


def _refuse_spoiled(path: str | os.PathLike[str], given: str) -> None:
    """Raise ConfigError for a Path that was made of an address: it has lost a slash, and means nothing."""
    found = re.match(r"(s3a?|gs|azure|az|abfss?|https?):/", given)
    if found and not isinstance(path, str):
        raise ConfigError(f"{shown(given, 300)}: a Path takes a slash from an address: pass {found[1]}://… as text")
