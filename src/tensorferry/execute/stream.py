"""Entries as a stream of (name, tensor): read ahead within a memory bound, or views of mapped files."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator

import torch

from tensorferry.config import ReadOptions
from tensorferry.core.catalogue import TensorEntry
from tensorferry.errors import ReadError
from tensorferry.execute.base import Counters
from tensorferry.execute.blame import too_short
from tensorferry.execute.making import is_made, reads_of, room_of
from tensorferry.execute.pool import PATIENCE, Readers
from tensorferry.execute.simple import entry_in, read_entry, read_entry_through
from tensorferry.execute.ways import Ways
from tensorferry.storage.base import Storage, SupportsMap
from tensorferry.storage.reading import ReadInto
from tensorferry.waiting import Flag, Outcome

__all__ = ["mapped", "stream"]


def stream(
    storage: Storage, entries: Iterable[TensorEntry], options: ReadOptions, counters: Counters | None = None
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield each entry's name and values, in the order given, in memory of their own.

    At most ``options.max_staging`` bytes are read ahead of the consumer, or one entry where that is larger; what the
    consumer keeps is its own. Closing the iterator stops the readers within one read of ``options.max_read`` bytes,
    and waits a second for a read that hangs.

    Raises ReadError at the entry that fails. `counters` are counted up as entries are asked for.
    """
    counters = Counters() if counters is None else counters
    entries = list(entries)
    stopped = Flag()
    ways = Ways(storage, options.direct, options.keep_cache)
    ways.refuse_impossible(file for entry in entries for file in entry.files)
    read_into = _in_pieces(_counting(ways, counters), options.max_read, stopped)
    readers = Readers[torch.Tensor](options.workers)
    ahead: deque[tuple[TensorEntry, Outcome[torch.Tensor]]] = deque()
    held = 0
    try:
        for entry in entries:
            while ahead and held + room_of(entry) > options.max_staging:
                first, outcome = ahead.popleft()
                held -= room_of(first)
                yield first.name, outcome.result()
            ahead.append((entry, readers.submit(read_entry_through, read_into, entry)))
            held += room_of(entry)
            _count(counters, entry, held, options.max_read)
        while ahead:
            first, outcome = ahead.popleft()
            yield first.name, outcome.result()
    finally:
        stopped.set()
        readers.close(PATIENCE)


def _counting(ways: Ways, counters: Counters) -> ReadInto:
    lock = threading.Lock()

    def read(path: str, offset: int, out: memoryview) -> None:
        came = Counters()
        ways.read(path, offset, [out], came)
        with lock:
            counters.absorb(came)

    return read


def _in_pieces(read_into: ReadInto, most: int, stopped: Flag) -> ReadInto:
    def read(path: str, offset: int, out: memoryview) -> None:
        for at in range(0, len(out), most):
            if stopped.is_set():
                raise ReadError(f"{path}: nobody waits for what was to be read")
            read_into(path, offset + at, out[at : at + most])

    return read


def _count(counters: Counters, entry: TensorEntry, held: int, piece: int) -> None:
    lengths = [read.length for read in reads_of(entry)]
    counters.bytes_read += sum(lengths)
    counters.reads += sum(-(-length // piece) for length in lengths)
    counters.staging_peak = max(counters.staging_peak, held)


def mapped(storage: SupportsMap, entries: Iterable[TensorEntry]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each entry's name and values as views of the mapped file; nothing is read before it is looked at.

    The tensors must not be written to: that kills the process. Entries whose bytes are not aligned for their type, or
    lie in several chunks, come in memory of their own. Raises ReadError where a file is too short.
    """
    files: dict[str, torch.Tensor] = {}
    for entry in entries:
        span = None if is_made(entry) else entry.chunks[0].span
        if len(entry.chunks) != 1 or span is None or not span.length:
            yield entry.name, read_entry(storage, entry)
            continue
        if span.file not in files:
            files[span.file] = _bytes(storage.map(span.file))
        if span.offset + span.length > len(files[span.file]):
            raise too_short(span.file, entry.name)
        yield entry.name, entry_in(files[span.file][span.offset : span.offset + span.length], entry)


def _bytes(file: memoryview) -> torch.Tensor:
    if not len(file):  # which torch takes for a mistake
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(file, dtype=torch.uint8)
