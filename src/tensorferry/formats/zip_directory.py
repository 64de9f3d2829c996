"""A strict reader of zip directories: records that lie unpacked and whole where two accounts of them agree.

Layout: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT. Only what torch writes is accepted: one disk,
stored (never compressed or encrypted) records, no comment, nothing behind the directory.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tensorferry.errors import CorruptFile, shown
from tensorferry.formats.windows import Window
from tensorferry.storage.base import File, Storage
from tensorferry.storage.reading import bring

__all__ = ["CentralDirectory", "Listed", "ZipRecord", "checksum", "list_records", "locate_records"]

MAX_RECORDS = 100_000
"""More records than a checkpoint's file has tensors, and few enough to refuse the last of them cheaply."""
MAX_NAME = 1 << 12
"""Bytes that the name of a record, or what is said beside it in the directory, may take."""

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")

_BLOCK = 1 << 16
_LOCAL_BLOCK = 1 << 10
_BEFORE = 24  # bytes of what may lie between the data of a record and the next header
_UTF8, _DEFERRED = 0x800, 0x8
"""Flags of a record: its name is UTF-8; its sizes and checksum follow its data instead of preceding them."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A record as the central directory has it. packed: its bytes in the file, as `method` left them."""

    name: bytes
    flags: int
    method: int
    crc: int
    packed: int
    size: int
    header: int


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One record. header: where its local header begins; offset, size: its bytes in the file; crc: as declared."""

    name: str
    header: int
    offset: int
    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class CentralDirectory:
    """What the central directory says. directory: where it begins."""

    directory: int
    records: tuple[Listed, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all records, which may still be anything."""
        return tuple(record.name.decode(errors="replace") for record in self.records)


def list_records(storage: Storage, file: File) -> CentralDirectory:
    """Return the central directory of a zip archive, in the order in which its records lie; nothing in it is trusted.

    Raises CorruptFile where it is not there, incomplete, or malformed.
    """
    window = Window(storage, file, block=_BLOCK)
    begin, length, count = _find_directory(window)
    return CentralDirectory(
        begin, tuple(sorted(_entries(window, begin, length, count), key=lambda record: record.header))
    )


def locate_records(storage: Storage, file: File, listing: CentralDirectory) -> Mapping[str, ZipRecord]:
    """Return all records by name, in the order in which they lie, after comparing each with its own header.

    Raises CorruptFile where one is compressed, encrypted, there twice, outside the file or inside another, or where
    the two accounts of it differ.
    """
    _refuse_twins(file, listing.records)
    for entry in listing.records:
        _refuse_packed(file, entry)
    ends = (listing.directory, *(entry.header for entry in listing.records))
    bring(storage, file.path, ((at - _BEFORE, _BEFORE + _LOCAL_BLOCK) for at in ends))
    window = Window(storage, file, block=_LOCAL_BLOCK)
    records, free = {}, 0
    for entry in listing.records:
        if entry.header < free:
            raise _bad(file, entry, f"begins at {entry.header:,}, inside the record before it, which ends at {free:,}")
        record, free = _locate(window, entry, listing.directory)
        records[record.name] = record
    return records


def checksum(storage: Storage, file: File, record: ZipRecord) -> int:
    """Read a record's bytes and return their CRC-32."""
    crc, buffer = 0, memoryview(bytearray(min(record.size, 1 << 20)))
    for start in range(0, record.size, 1 << 20):
        piece = buffer[: min(record.size - start, 1 << 20)]
        storage.read_into(file.path, record.offset + start, piece)
        crc = zlib.crc32(piece, crc)
    return crc


def _find_directory(window: Window) -> tuple[int, int, int]:
    """Return where the central directory begins, its length, and how many records it lists."""
    file, name = window.file, shown(window.file.path)
    end = file.size - _END.size
    fields = _END.unpack(window.read(end, _END.size)) if end >= 0 else (b"",)
    if fields[0] != b"PK\5\6":
        raise CorruptFile(
            f"{name}: the zip directory that belongs at its end is not there, the file has {file.size:,} bytes: "
            f"incomplete download?"
        )
    _, disk, first_disk, here, count, length, begin, comment = fields
    last = end
    if end >= _LOCATOR.size and window.read(end - _LOCATOR.size, 4) == b"PK\6\7":
        disk, first_disk, here, count, length, begin, last = _zip64(window, end, (here, count, length, begin))
    if disk or first_disk or here != count or comment:
        raise CorruptFile(f"{name}: a zip archive in several parts or with a comment, which torch does not write")
    if begin + length != last:
        raise CorruptFile(
            f"{name}: the zip directory should lie at bytes {begin:,} to {begin + length:,} and end at {last:,}: "
            f"bytes are missing or added"
        )
    if count > MAX_RECORDS:
        raise CorruptFile(f"{name}: {count:,} records, the limit is {MAX_RECORDS:,}: split the checkpoint into shards")
    if count > length // _CENTRAL.size:
        raise CorruptFile(
            f"{name}: the zip directory has {length:,} bytes, too few (or too many) for {count:,} records"
        )
    return begin, length, count


def _zip64(window: Window, end: int, small: tuple[int, int, int, int]) -> tuple[int, int, int, int, int, int, int]:
    """Return the end record in its 64-bit form and where it lies; it must agree with the `small` one."""
    name = shown(window.file.path)
    at = end - _LOCATOR.size
    _, disk, where, disks = _LOCATOR.unpack(window.read(at, _LOCATOR.size))
    if where != at - _END64.size or disk or disks > 1:
        raise CorruptFile(f"{name}: the 64-bit end of its zip directory is declared at {where:,} and ends at {at:,}")
    magic, rest, _, _, disk, first_disk, here, count, length, begin = _END64.unpack(window.read(where, _END64.size))
    limits = (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
    agree = all(s in (b, m) for s, b, m in zip(small, (here, count, length, begin), limits, strict=True))
    if magic != b"PK\6\6" or rest != _END64.size - 12 or not agree:
        raise CorruptFile(f"{name}: the two ends of its zip directory contradict each other")
    return disk, first_disk, here, count, length, begin, where


def _entries(window: Window, begin: int, length: int, count: int) -> Iterator[Listed]:
    at, stop = begin, begin + length
    for index in range(count):
        if at + _CENTRAL.size > stop:
            raise CorruptFile(f"{shown(window.file.path)}: the zip directory ends inside record {index + 1} of {count}")
        fields = _CENTRAL.unpack(window.read(at, _CENTRAL.size))
        name, extra, comment = fields[10:13]
        at += _CENTRAL.size
        if fields[0] != b"PK\1\2" or at + name + extra + comment > stop or max(name, extra) > MAX_NAME:
            raise CorruptFile(f"{shown(window.file.path)}: record {index + 1} of the zip directory is malformed")
        text = window.read(at, name + extra)
        yield _listed(window.file, fields, text[:name], text[name:])
        at += name + extra + comment
    if at != stop:
        raise CorruptFile(
            f"{shown(window.file.path)}: the zip directory has {stop - at:,} bytes behind its last record"
        )


def _listed(file: File, fields: tuple[int, ...], name: bytes, extra: bytes) -> Listed:
    _, _, _, flags, method, _, _, crc, packed, size, _, _, _, disk, _, _, header = fields
    size, packed, header, disk = _widened(file, name, extra, (size, packed, header, disk))
    if disk:
        raise CorruptFile(f"{shown(file.path)}: a zip archive in several parts, which torch does not write")
    return Listed(name, flags, method, crc, packed, size, header)


def _refuse_packed(file: File, entry: Listed) -> None:
    if entry.method or entry.packed != entry.size:
        raise _bad(file, entry, "is compressed; torch stores its records as they are")
    if entry.flags & ~(_UTF8 | _DEFERRED):
        raise _bad(file, entry, f"is encrypted or marked (flags 0x{entry.flags:x}) as torch marks none")
    if entry.header + _LOCAL.size + len(entry.name) + entry.size > file.size:
        raise _bad(file, entry, f"has {entry.size:,} bytes after {entry.header:,}, the file has {file.size:,} in all")


def _widened(file: File, name: bytes, extra: bytes, fields: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Return `fields` (size, packed size, header offset, disk) with those too long for their place from `extra`."""
    wide = _extra_field(extra, 1) or b""
    values = []
    for value, limit, width in zip(fields, (0xFFFFFFFF,) * 3 + (0xFFFF,), (8, 8, 8, 4), strict=True):
        if value == limit:
            if len(wide) < width:
                raise CorruptFile(f"{shown(file.path)}: zip record {_text(name)} lacks its 64-bit size or place")
            value, wide = int.from_bytes(wide[:width], "little"), wide[width:]
        values.append(value)
    size, packed, header, disk = values
    return size, packed, header, disk


def _extra_field(extra: bytes, wanted: int) -> bytes | None:
    while len(extra) >= 4:
        kind, length = struct.unpack("<HH", extra[:4])
        if kind == wanted:
            return extra[4 : 4 + length]
        extra = extra[4 + length :]
    return None


def _refuse_twins(file: File, listed: Sequence[Listed]) -> None:
    """Refuse names that are equal, or equal but for case: readers differ in which of them they take."""
    seen: set[bytes] = set()
    for entry in listed:
        folded = entry.name.lower()
        if folded in seen:
            raise _bad(file, entry, "is there twice")
        seen.add(folded)


def _locate(window: Window, entry: Listed, directory: int) -> tuple[ZipRecord, int]:
    """Compare a record's local header with the directory; return the record and where what belongs to it ends."""
    file = window.file
    fields = _LOCAL.unpack(window.read(entry.header, _LOCAL.size))
    magic, _, flags, method, _, _, crc, packed, size, name, extra = fields
    if magic != b"PK\3\4" or (flags, method, name) != (entry.flags, 0, len(entry.name)):
        raise _bad(file, entry, f"has no header at {entry.header:,} that agrees with the directory")
    text = window.read(entry.header + _LOCAL.size, name + extra)
    if text[:name] != entry.name:
        raise _bad(file, entry, f"is called {_text(text[:name])} by its own header")
    if 0xFFFFFFFF in (packed, size):
        size, packed, _, _ = _widened(file, entry.name, text[name:], (size, packed, 0, 0))
    begin = entry.header + _LOCAL.size + name + extra
    end = begin + entry.size
    if flags & _DEFERRED and not any((crc, packed, size)):
        end += _check_descriptor(window, entry, end)
    elif (crc, packed, size) != (entry.crc, entry.size, entry.size):
        raise _bad(file, entry, f"has {size:,} bytes by its own header and {entry.size:,} by the directory")
    if end > directory:
        raise _bad(file, entry, f"ends at {end:,}, inside the zip directory, which begins at {directory:,}")
    return ZipRecord(_name(file, entry), entry.header, begin, entry.size, entry.crc), end


def _check_descriptor(window: Window, entry: Listed, at: int) -> int:
    """Compare what follows a record's data with the directory; return its length."""
    if not entry.size and not entry.crc:
        return 0  # torch writes none behind an empty record
    for width in (8,) if entry.size >> 32 else (4, 8):
        wanted = b"PK\7\x08" + entry.crc.to_bytes(4, "little") + entry.size.to_bytes(8, "little")[:width] * 2
        if at + len(wanted) <= window.file.size and window.read(at, len(wanted)) == wanted:
            return len(wanted)
    raise _bad(window.file, entry, "has sizes or a checksum behind its data that contradict the directory")


def _name(file: File, entry: Listed) -> str:
    try:
        name = entry.name.decode("utf-8" if entry.flags & _UTF8 else "ascii")
    except UnicodeDecodeError:
        raise _bad(file, entry, "has a name that is not UTF-8") from None
    parts = name.split("/")
    if "\0" in name or "\\" in name or not all(parts) or not {".", ".."}.isdisjoint(parts):
        raise _bad(file, entry, "has a name that is no plain relative path")
    return name


def _bad(file: File, entry: Listed, problem: str) -> CorruptFile:
    return CorruptFile(f"{shown(file.path)}: zip record {_text(entry.name)} {problem}")


def _text(name: bytes) -> str:
    return repr(shown(name.decode(errors="replace")))
