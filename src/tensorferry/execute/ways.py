"""Which way bytes come, read by read: past the page cache, or through it. The storage does the reading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property

from tensorferry.config import Direct
from tensorferry.core.plan import Plan
from tensorferry.core.schedule import Batch, Read
from tensorferry.errors import ConfigError, TensorferryError
from tensorferry.execute.base import Counters
from tensorferry.storage.base import Storage, SupportsKind, SupportsLease, SupportsUncached
from tensorferry.storage.reading import read_runs, scatter

__all__ = ["OWN", "Ways", "reads_in_part"]

_LEAST = 256 << 10
"""Bytes below which a read goes through the page cache: a look, and bytes on either side, would cost too much of it."""
_MOST_LENT = 32 << 20
"""Bytes of a read that is lent at most: who wants to write to the file waits until they are copied."""
_PIECE = 16 << 10
"""Bytes that the buffers of a direct read have at least, on average: each of them costs us more than the kernel."""
_CACHED = 0.5
"""Share of a range from which on it counts as cached."""
_NONE_WAITS = 0.9
"""Share of what is looked at from which on threads do not wait for a disk."""
OWN = 0.75
"""Share of a read from which on it counts as this rank's own."""
_LOOKS = 8
"""Reads that are looked at to tell whether a load waits for a disk."""
_DIRECT, _FETCHED = "direct", "fetched"


def reads_in_part(plan: Plan, batch: Batch) -> set[int]:
    """Return the numbers of those reads of `batch` of which a good part is not needed: other ranks need that.

    They make the same reads, and storage that ranks share gives the bytes once where these go through its cache.
    """
    needed = dict.fromkeys(range(len(batch.reads)), 0)
    for task in batch.tasks:
        for part in task.inputs:
            block = plan.steps[task.step].sources[part.source].entry.dtype.block_bytes
            for piece in part.pieces:
                needed[piece.read] += piece.box.size * block
    return {n for n, nbytes in needed.items() if nbytes < OWN * batch.reads[n].length}


@dataclass(frozen=True)
class Ways:
    """Reads from `storage` as is best for each read, or as is asked for; may be used from several threads.

    direct: "always" past the page cache, "never", or "auto": where the file system suits it, and the bytes are not in
    the cache already. keep_cache: whether what is brought into the page cache stays there. shared: whether other ranks
    on this machine read the same files.
    """

    storage: Storage
    direct: Direct = "auto"
    keep_cache: bool = True
    shared: bool = False
    _kinds: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def refuse_impossible(self, files: Iterable[str]) -> None:
        """Raise ConfigError for the first of `files` that cannot be read as is asked for."""
        for file in dict.fromkeys(files) if self.direct == "always" else ():
            found = self._cache.uncached(file) if self._cache else None
            if found is None or not found.possible:
                why = found.why if found else "its storage knows no such reads"
                raise ConfigError(f"direct 'always': {file} cannot be read past the page cache: {why}; use 'auto'")

    def find_cached(self, reads: Sequence[Read]) -> bool:
        """Whether nearly all of `reads` lies in the page cache; some of them, from all over, are looked at."""
        cache, looked = self._cache, reads[:: -(-len(reads) // _LOOKS) or 1]
        if cache is None or self.direct == "always" or not looked:
            return False
        with suppress(TensorferryError):  # whoever reads says it better
            shares = [cache.cached_share(r.file, r.offset, r.stride * (r.times - 1) + r.run) for r in looked]
            return sum(shares) >= _NONE_WAITS * len(shares)
        return False

    def may_lend(self, path: str, length: int) -> bool:
        """Whether so long a read of `path` may be lent: it lies on a local disk, and no other way is asked for."""
        if not _LEAST <= length <= _MOST_LENT or self.direct != "auto" or self._cache is None:
            return False
        return isinstance(self.storage, SupportsLease) and not self._cache.uncached(path).why

    def lend(self, path: str, offset: int, length: int) -> AbstractContextManager[memoryview | None]:
        """Lend a range of `path`, where `may_lend`, to be copied from within the block; see `SupportsLease`."""
        assert isinstance(self.storage, SupportsLease)
        return self.storage.lend(path, offset, length)

    def splits_freely(self, file: str) -> bool:
        """Whether several requests for a part of `file` take no longer than one: nothing far away answers them."""
        return self._kind(file) == "local"

    def is_far(self, file: str) -> bool:
        """Whether each request for a part of `file` goes to a store of objects, which keeps nothing for the next."""
        return self._kind(file) == "remote"

    def _kind(self, file: str) -> str:
        """Return which kind of storage `file` lies on; "" where nobody knows."""
        if file not in self._kinds:
            self._kinds[file] = self.storage.kind(file) if isinstance(self.storage, SupportsKind) else ""
        return self._kinds[file]

    def best(self, path: str, offset: int, length: int, *, buffers: int = 1, in_part: bool = False) -> str:
        """Look which way a range of `path` is to be read, and return it in the words of a report.

        in_part: whether a good part of the range is not needed, so that other ranks make the same read.
        """
        way = self._way(path, offset, length, buffers)
        shared = in_part and self.shared and self.direct == "auto" and self.keep_cache
        return "buffered: shared" if shared and way == _DIRECT else way

    def read(
        self,
        path: str,
        offset: int,
        outs: Sequence[memoryview],
        counters: Counters,
        *,
        in_part: bool = False,
        way: str = "",
    ) -> None:
        """Fill `outs` from one range of `path`, and count how it was read. Raises ReadError.

        in_part: see `best`. way: what `best` said of a longer range that this one is part of.
        """
        length = sum(out.nbytes for out in outs)
        way = way or self.best(path, offset, length, buffers=len(outs), in_part=in_part)
        cache, copied = self._cache, None
        if way == _DIRECT and cache is not None:
            copied = cache.read_uncached(path, offset, outs)
        if copied is None:
            way = "buffered: refused" if way == _DIRECT else way
            with self._leaving_no_trace(path, offset, length):
                scatter(self.storage, path, offset, outs)
        counters.copied_bytes += copied or 0
        counters.came(way, length)

    def read_runs(self, path: str, offset: int, stride: int, run: int, out: memoryview, counters: Counters) -> None:
        """Fill `out` with runs of bytes at equal distances, through a page cache if there is one. Raises ReadError."""
        with self._leaving_no_trace(path, offset, stride * (len(out) // run - 1) + run):
            read_runs(self.storage, path, offset, stride, run, out)
        counters.came(_FETCHED if self._kind(path) == "remote" else "buffered: short runs", len(out))

    def _way(self, path: str, offset: int, length: int, buffers: int) -> str:
        if length and self._kind(path) == "remote":
            return _FETCHED
        if self._cache is None or self.direct == "never" or not length:
            return "buffered"
        if self.direct == "always":
            return _DIRECT
        if length < _LEAST or length < buffers * _PIECE:
            return "buffered: small"
        if why := self._cache.uncached(path).why:
            return f"buffered: {why}"
        return "cached" if self._cache.cached_share(path, offset, length) >= _CACHED else _DIRECT

    @contextmanager
    def _leaving_no_trace(self, path: str, offset: int, length: int) -> Iterator[None]:
        """Have the page cache let go of what it gets inside, where that is asked for."""
        if self.keep_cache or self._cache is None or not length:
            yield
            return
        absent = self._cache.absent_ranges(path, offset, length) or ()
        try:
            yield
        finally:
            for first, pages in absent:
                self._cache.forget(path, first, pages)

    @cached_property
    def _cache(self) -> SupportsUncached | None:
        return self.storage if isinstance(self.storage, SupportsUncached) else None
