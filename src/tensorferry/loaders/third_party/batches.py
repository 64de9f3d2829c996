"""Which files and names another library is to read for the entries that are needed. Reads headers only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tensorferry.core.boxes import Region
from tensorferry.core.catalogue import Catalogue, Chunk, Span, TensorEntry
from tensorferry.core.overlaps import shared_size
from tensorferry.core.plan import Plan
from tensorferry.errors import ConfigError, shown
from tensorferry.formats.opening import file_format
from tensorferry.storage.base import Storage, SupportsLocalPath

__all__ = ["FileBatch", "WantedTensor", "batches", "needed_by"]


@dataclass(frozen=True, slots=True)
class WantedTensor:
    """A tensor of a file: `region` of the entry, counted in its elements, or all of it."""

    entry: TensorEntry
    region: Region | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.entry.dtype.nbytes(self.entry.shape if self.region is None else self.region.shape)


@dataclass(slots=True)
class FileBatch:
    """Files that are read together, in which each wanted name is there once.

    paths: real ones, absolute. labels: what messages call the files. parts: what each wanted name in the files is.
    largest: most bytes of one wanted tensor or of one header.
    """

    paths: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    parts: dict[str, WantedTensor] = field(default_factory=dict)
    largest: int = 0
    names: set[str] = field(default_factory=set, repr=False)

    def fits(self, names: Iterable[str], wanted: Iterable[str]) -> bool:
        """Whether a file that holds `names`, of which some are `wanted`, makes no name of the batch ambiguous."""
        return self.names.isdisjoint(wanted) and self.parts.keys().isdisjoint(names)


def needed_by(plan: Plan) -> list[WantedTensor]:
    """Return what has to be read for `plan`, chunk by chunk; entries of which no element is needed are left out."""
    wanted: dict[str, tuple[TensorEntry, list[Region]]] = {}
    for step in plan.steps:
        for entry, region in step.sources:
            if region.size:
                wanted.setdefault(entry.name, (entry, []))[1].append(region)
    return [
        part
        for entry, regions in wanted.values()
        for part in parts_of(entry)
        if part.region is None or any(shared_size(part.region, some) for some in regions)
    ]


def parts_of(entry: TensorEntry) -> Iterator[WantedTensor]:
    """Yield the chunks of an entry. Raises ConfigError for one that lies in no file."""
    if not entry.chunks:
        raise ConfigError(
            f"tensor {shown(entry.name)!r} is made of others while it is read, which no other library does: let "
            "tensorferry read it, with another load_format"
        )
    for chunk in entry.chunks:
        yield WantedTensor(entry, _region(entry, chunk))


def batches(storage: Storage, parts: Sequence[WantedTensor], *, reader: str, dtypes: frozenset[str]) -> list[FileBatch]:
    """Return what is to be read for `parts`, files in their order.

    reader: what messages call the library. dtypes: the types that it knows; a file with another one is refused.

    Raises ConfigError for what no library can read: files that are not on this machine, or no safetensors; types.
    """
    by_file: dict[str, dict[tuple[int, int], WantedTensor]] = {}
    for part in parts:
        span = _span(part, reader)
        by_file.setdefault(span.file, {})[span.offset, span.length] = part
    found = [FileBatch()]
    for file, wanted in by_file.items():
        path = storage.local_path(file) if isinstance(storage, SupportsLocalPath) else None
        if path is None:
            raise ConfigError(
                f"{shown(file)} of {shown(storage.uri, 300)}: {reader} reads files of this machine, and this is none: "
                "download it, or take load_format 'safetensors'"
            )
        header = file_format("safetensors").catalogue(storage, storage.stat(file))
        _refuse_types(file, header, reader, dtypes)
        _add(found, file, path, header, wanted)
    return [batch for batch in found if batch.paths]


def _add(
    found: list[FileBatch], file: str, path: str, header: Catalogue, wanted: Mapping[tuple[int, int], WantedTensor]
) -> None:
    spans = {(e.span.offset, e.span.length): name for name, e in header.items() if e.span is not None}
    odd = next((part for at, part in wanted.items() if at not in spans), None)
    if odd is not None:
        raise ConfigError(
            f"{shown(file)}: tensor {shown(odd.entry.name)!r} is no whole tensor of a safetensors file: let "
            "tensorferry read it, with another load_format"
        )
    names = {spans[at]: part for at, part in wanted.items()}
    if not found[-1].fits(header, names):
        found.append(FileBatch())
    batch = found[-1]
    batch.paths.append(path)
    batch.labels.append(file)
    batch.parts.update(names)
    batch.names.update(header)
    start = min(offset for offset, _ in spans)
    batch.largest = max(batch.largest, start, *(length for _, length in wanted))


def _span(part: WantedTensor, reader: str) -> Span:
    """Return where the bytes of a part are, in one run."""
    chunk = next((c for c in part.entry.chunks if _region(part.entry, c) == part.region), None)
    if chunk is None or chunk.span is None or chunk.strides is not None:
        raise ConfigError(
            f"tensor {shown(part.entry.name)!r}: {reader} reads safetensors files, and it is not a tensor of one: let "
            "tensorferry read it, with another load_format"
        )
    return chunk.span


def _region(entry: TensorEntry, chunk: Chunk) -> Region | None:
    return None if chunk.box is None else Region(entry.shape, chunk.box)


def _refuse_types(file: str, header: Catalogue, reader: str, dtypes: frozenset[str]) -> None:
    """Libraries give up a whole file for a type that they do not know, even of a tensor that nobody wants."""
    odd = next((entry for entry in header.values() if entry.dtype.name not in dtypes), None)
    if odd is not None:
        raise ConfigError(
            f"{shown(file)}: tensor {shown(odd.name)!r} has the type {odd.dtype}, which {reader} does not know: take "
            "load_format 'safetensors'"
        )
