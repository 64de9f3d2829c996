"""Reading from storages that can do more than the least, and from those that cannot."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from helpers.memory_storage import MemoryStorage
from tensorferry.errors import ReadError
from tensorferry.storage.reading import read_bytes, scatter


class Scattering(MemoryStorage):
    def read_vector(self, path: str, offset: int, outs: Sequence[memoryview]) -> None:
        whole = memoryview(bytearray(sum(out.nbytes for out in outs)))
        self.read_into(path, offset, whole)
        for out in outs:
            out[:], whole = whole[: out.nbytes], whole[out.nbytes :]


def test_bytes_are_read_exactly() -> None:
    assert read_bytes(MemoryStorage({"f": b"abcdef"}), "f", 2, 3) == b"cde"
    with pytest.raises(ReadError):
        read_bytes(MemoryStorage({"f": b"abcdef"}), "f", 4, 3)


@pytest.mark.parametrize(
    ("storage", "reads"),
    [
        (MemoryStorage({"f": b"abcdef"}), [("f", 1, 2), ("f", 3, 3)]),
        (Scattering({"f": b"abcdef"}), [("f", 1, 5)]),
    ],
    ids=["piece by piece", "at once"],
)
def test_buffers_are_filled_one_after_the_other(storage: MemoryStorage, reads: list[tuple[str, int, int]]) -> None:
    outs = [bytearray(2), bytearray(3)]
    scatter(storage, "f", 1, [memoryview(out) for out in outs])
    assert (bytes(outs[0]), bytes(outs[1])) == (b"bc", b"def")
    assert storage.reads == reads
