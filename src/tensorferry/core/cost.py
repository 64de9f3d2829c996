"""What reading costs, in bytes that could be read in the same time: stated numbers for each kind of storage. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["LOCAL", "NETWORK", "REMOTE", "STORAGE_COSTS", "ReadCost", "StorageCost"]

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class StorageCost:
    """What one more request costs on a kind of storage, with as many at a time as readers keep it busy with.

    request: bytes that come in the time that a request takes beside its bytes. page: bytes in which the storage is
    read whatever is asked for; 1 where exactly the range comes. best: bytes of a request above which larger ones are
    no faster.
    """

    request: int
    page: int
    best: int

    def of(self, offset: int, length: int, count: int = 1, stride: int = 0) -> int:
        """Return what `count` runs of `length` bytes cost, one every `stride` bytes from `offset` on.

        >>> LOCAL.of(0, 1000), LOCAL.of(4000, 1000), LOCAL.of(0, 2048, 100, 57344)
        (12288, 16384, 1228800)
        """
        first, last = offset // self.page, (offset + length - 1) // self.page
        bytes_moved = (last - first + 1) * self.page
        if count == 1 or stride % self.page == 0:
            return count * (self.request + bytes_moved)
        return count * (self.request + length + self.page - 1)

    @property
    def gap(self) -> int:
        """Largest hole, in bytes, that is no dearer to read than to skip.

        Skipping it takes a request, and the bytes before and after it that share a page with it come anyway.
        """
        return self.request + self.page * (self.page > 1)


LOCAL = StorageCost(request=8 * KIB, page=4 * KIB, best=8 * MIB)
"""A disk of this machine through its page cache. Measured on a virtual disk of 1.3 GB/s with two readers: a run of 2 to
8 KiB takes 13 to 17 us cold, pages announced, which is 10 to 12 KiB and its pages; and 1.5 to 1.9 us of a cached
file, which is 15 KiB of copying. A little less is stated, since ranks read beside each other, and holes are theirs."""

NETWORK = StorageCost(request=128 * KIB, page=4 * KIB, best=16 * MIB)
"""A file system on another machine: half a millisecond a request, eight at a time, of 2 GB/s. Not measured here."""

REMOTE = StorageCost(request=2 * MIB, page=1, best=4 * MIB)
"""Ranges over HTTP or of an object store: 30 ms to the first byte on a connection of 70 MB/s. Not measured here; but
obstore takes 1.4 s of a processor for a GiB in ranges of 1 to 2 MiB, 1.65 s in ranges of 8 and 1.96 s in ranges of 32,
and holds each once beside what it goes to."""

STORAGE_COSTS: Mapping[str, StorageCost] = MappingProxyType({"local": LOCAL, "network": NETWORK, "remote": REMOTE})
"""The kinds by name."""


@dataclass(frozen=True, slots=True)
class ReadCost:
    """What makes two runs of bytes one read.

    max_gap: largest hole, in bytes, that is read over. max_read: largest read, in bytes, where the data can be cut
    at all. waste: most bytes read for each byte needed.
    """

    max_gap: int
    max_read: int
    waste: float

    def joins(self, gap: int, length: int, needed: int) -> bool:
        """Whether a hole of `gap` bytes is read over in a read of `length` bytes of which `needed` are used."""
        return gap <= 0 or (gap <= self.max_gap and length <= self.waste * needed)
