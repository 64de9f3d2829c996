"""Torch files since 1.6: a zip archive with one folder, `data.pkl` in it and a record per storage under `data/`.

Layout: `torch/serialization.py` (_save, _load) and `caffe2/serialize/inline_container.h` of PyTorch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tensorferry.core.amounts import few
from tensorferry.core.catalogue import Span
from tensorferry.errors import CorruptFile, FormatError, UnknownFormat, shown
from tensorferry.formats.pickles import read_pickle
from tensorferry.formats.torch_contents import TorchContents, tensors_of
from tensorferry.formats.torch_values import TORCH_GLOBALS, Storages
from tensorferry.formats.windows import Stream, Window
from tensorferry.formats.zip_directory import ZipRecord, checksum, list_records, locate_records
from tensorferry.storage.base import File, Storage

__all__ = ["differing_records", "read_zip"]

MAX_PICKLE = 1 << 27
"""The largest `data.pkl` that is looked at, in bytes: a tensor takes about 200."""
_SMALL = 1 << 16
"""Records beside the storages, up to this many bytes, have their checksums verified whenever the file is opened."""

_OTHERS = (
    (("constants.pkl", "code/"), "a TorchScript archive, which holds a program: load it with torch.jit.load"),
    ((".data/extern_modules", ".data/python_version"), "a torch.package archive, which holds Python code"),
    (("archive_format", "models/", "serialized_exported_program.json"), "a program saved by torch.export"),
)


def read_zip(storage: Storage, file: File) -> TorchContents:
    """Return what a zip torch file describes, and where its storages lie; storages themselves are not read.

    Raises UnknownFormat for other archives under this name, CorruptFile, UnsafeFile and FormatError.
    """
    listing = list_records(storage, file)
    root = _root(file, listing.names)
    _refuse_others(file, [name.removeprefix(root) for name in listing.names])
    located = locate_records(storage, file, listing)
    records = {name.removeprefix(root): record for name, record in located.items()}
    summed = any(record.crc for record in records.values())
    _check_sizes_and_sums(storage, file, records, summed=summed)
    _refuse_big_endian(storage, file, records.get("byteorder"))
    pickle = records["data.pkl"]
    stream = Stream(Window(storage, file, block=1 << 16), pickle.offset, pickle.offset + pickle.size)
    storages = Storages(legacy=False)
    top = read_pickle(stream, file.path, TORCH_GLOBALS, storages)
    if stream.remaining:
        raise CorruptFile(f"{shown(file.path)}: {stream.remaining:,} bytes follow the pickle in 'data.pkl'")
    places = {
        key: Span(file.path, record.offset, record.size)
        for key in storages.found
        if (record := records.get(f"data/{key}")) is not None
    }
    notes = () if summed else (f"{shown(file.path)} was written without checksums: none can be verified",)
    return TorchContents(top, tensors_of(file, top), places, notes)


def differing_records(storage: Storage, file: File) -> tuple[int, list[str]]:
    """Read every record of a zip torch file; return the bytes compared and the records whose checksum differs.

    A file that was written without checksums compares nothing.
    """
    records = list(locate_records(storage, file, list_records(storage, file)).values())
    if not any(record.crc for record in records):
        return 0, []
    differing = [record.name for record in records if checksum(storage, file, record) != record.crc]
    return sum(record.size for record in records), differing


def _root(file: File, names: Collection[str]) -> str:
    """Return the one folder that holds all records, with its slash."""
    roots = {name.partition("/")[0] + "/" for name in names}
    if len(roots) != 1 or not all("/" in name for name in names):
        raise UnknownFormat(
            f"{shown(file.path)}: a zip archive that torch.save did not write: its records are not in one folder: "
            f"{_some(names)}"
        )
    return roots.pop()


def _refuse_others(file: File, names: Collection[str]) -> None:
    for signs, words in _OTHERS:
        if any(name.startswith(sign) if sign.endswith("/") else name == sign for sign in signs for name in names):
            raise UnknownFormat(f"{shown(file.path)}: {words}; it is no checkpoint")
    if "data.pkl" not in names:
        raise UnknownFormat(
            f"{shown(file.path)}: a zip archive without the record 'data.pkl' that torch.save writes: {_some(names)}"
        )


def _some(names: Collection[str]) -> str:
    return few((repr(shown(name, 40)) for name in names), 3)


def _check_sizes_and_sums(storage: Storage, file: File, records: Mapping[str, ZipRecord], *, summed: bool) -> None:
    """Check the records that are no storages: each is small, and what is in it is what was written."""
    pickle = records["data.pkl"].size
    if pickle > MAX_PICKLE:
        raise CorruptFile(f"{shown(file.path)}: 'data.pkl' has {pickle:,} bytes, more than {MAX_PICKLE:,} is no model")
    for name, record in records.items():
        small = name == "data.pkl" or (record.size <= _SMALL and not name.startswith("data/"))
        if summed and small and (found := checksum(storage, file, record)) != record.crc:
            raise CorruptFile(
                f"{shown(file.path)}: record {shown(name)!r} is damaged: its checksum is {found:08x}, "
                f"the directory says {record.crc:08x}"
            )


def _refuse_big_endian(storage: Storage, file: File, record: ZipRecord | None) -> None:
    if record is None:
        return
    order = Window(storage, file, block=0).read(record.offset, min(record.size, 16))
    if order == b"big":
        raise FormatError(
            f"{shown(file.path)}: its values are in big-endian byte order; load and save it once with torch on a "
            f"little-endian machine"
        )
    if order != b"little":
        raise CorruptFile(f"{shown(file.path)}: record 'byteorder' is {shown(repr(order))}, not 'little' or 'big'")
