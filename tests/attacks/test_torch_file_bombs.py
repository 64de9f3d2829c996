"""Torch files made to cost: small ones that ask for much, and ones changed at random."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.checkpoints import ar
from helpers.torch_file_rules import GOOD, NAME, OLD, SAVED
from helpers.torch_files import (
    EMPTY_HOOKS,
    a_dict,
    a_global,
    a_storage,
    a_tensor,
    catalogue_of,
    legacy,
    number,
    pickled,
    saved,
    text,
    zip_file,
)
from helpers.watched_child import in_a_child
from tensorferry.core.catalogue import TensorEntry
from tensorferry.errors import TensorferryError

# Bombs: small files, or files with holes, that ask for much.


def in_pickle(bomb: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(zip_file(pickled(bomb)))

    return write


def hole(begin: bytes, size: int, end: bytes) -> Callable[[Path], None]:
    """Return a writer of a file with `size` zeros, that take no disk, between two pieces."""

    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.write(begin)
            file.seek(size, 1)
            file.write(end)

    return write


def void(_: object) -> None:
    """Drop a result where a function must have none."""


HUGE = 1 << 36
LIST = b"](" + b"N" * 100_000 + b"eq\1"

BOMBS: dict[str, Callable[[Path], None]] = {
    "dicts": in_pickle(b"}" * 4_000_000),
    "marks": in_pickle(b"(" * 4_000_000),
    "sets": in_pickle(b"\x8f" * 4_000_000),
    "memo": in_pickle(b"N" + b"".join(b"r" + struct.pack("<I", i) for i in range(400_000))),
    "memo with holes": in_pickle(b"N" + b"".join(b"r" + struct.pack("<I", 7 * i) for i in range(1_000_000))),
    "memo backwards": in_pickle(b"N" + b"".join(b"r" + struct.pack("<I", i) for i in range(1_000_000, 1, -1))),
    "dicts after storages": in_pickle(b"".join(a_storage(key=str(i)) + b"}" * 150 for i in range(20_000))),
    "dicts called": in_pickle(a_global("collections.OrderedDict") + b"q\0" + b"h\0)R" * 1_000_000),
    "wide texts": in_pickle(text("a" * 60_000 + "\U0001f600") * 1000),
    "long numbers": in_pickle((b"\x8a\xff" + b"\1" * 255) * 200_000),
    "long names of records": lambda path: void(
        path.write_bytes(zip_file(pickled(b"}"), **{"data/" + "x" * 60_000 + str(i): b"" for i in range(1000)}))
    ),
    "duplicates": in_pickle(b"N" + b"2" * 4_000_000),
    "lists copied": in_pickle(LIST + (a_global("builtins.list") + b"h\1\x85R") * 20_000),
    "dicts copied": in_pickle(
        b"}(" + b"".join(number(i) + b"N" for i in range(50_000)) + b"uq\1"
        + (a_global("builtins.dict") + b"h\1\x85R") * 9_000
    ),
    "text encoded": in_pickle(
        text("x" * 60_000) + b"q\1" + (a_global("_codecs.encode") + b"h\1" + text("latin1") + b"\x86R") * 20_000
    ),
    "text": in_pickle(text("x" * 60_000) * 1000),
    "a shape of a million": in_pickle(a_dict(w=a_tensor(shape=(1,) * 90_000, strides=(1,) * 90_000))),
    "shared dicts": in_pickle(
        b"0".join(
            [a_dict(w=a_tensor()) + b"q\0"]
            + [a_dict(a=b"h" + bytes([i]), b=b"h" + bytes([i])) + b"q" + bytes([i + 1]) for i in range(90)]
        )
    ),
    "a directory of 64 gigabytes": hole(
        b"PK\3\4", HUGE, struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 0, 0, 0, 0, 1 << 20, 1 << 20, HUGE, 4)
        + struct.pack("<4sLQL", b"PK\6\7", 0, HUGE + 4, 1)
        + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0),
    ),
    "text of 4 gigabytes": hole(OLD[:46] + b"\x80\2X\xff\xff\xff\xff", (1 << 32) - 1, b"."),
    "nothing in 64 gigabytes": hole(b"", HUGE, b"\0"),
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_before_it_grows(bomb: Callable[[Path], None], tmp_path: Path) -> None:
    bomb(tmp_path / NAME)
    found = in_a_child(tmp_path)
    ((said, cost, grown),) = found["results"].values()
    assert said != "accepted"
    assert cost < 1
    assert grown < 64
    assert found["seen"] == []


def test_a_value_beside_tensors_may_be_long(tmp_path: Path) -> None:
    merges = [(f"ab{i}", f"cd{i}") for i in range(100_000)]
    torch.save({"w": ar(2), "merges": merges, "vocab": {f"t{i}": i for i in range(150_000)}}, tmp_path / NAME)
    assert list(catalogue_of(tmp_path / NAME)) == ["w"]


@pytest.mark.parametrize("zipped", [True, False])
def test_many_tensors_may_share_one_storage(zipped: bool, tmp_path: Path) -> None:
    experts = ar(30_000, 2)
    state = {f"experts.{i}.w": experts[i] for i in range(30_000)}
    torch.save(state, tmp_path / NAME, _use_new_zipfile_serialization=zipped)
    found = catalogue_of(tmp_path / NAME)
    assert len(found) == 30_000
    assert len({entry.chunks[0].span for entry in found.values()}) == 30_000


OPCODES = [*(bytes([b]) for b in range(256)), b"h\0", b"q\0", a_tensor(), text("w"), EMPTY_HOOKS]
SMALL = [
    SAVED,
    OLD,
    GOOD,
    saved({"state_dict": {"w": ar(3, 2).t()}, "lr": 0.1, "n": [1, {2}]}, pickle_protocol=4),
    legacy({"w": torch.nn.Parameter(ar(2)), "v": ar(4)[1::2]}),
]


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(whole=st.sampled_from(SMALL), data=st.data())
def test_no_change_of_bytes_raises_anything_else(whole: bytes, data: st.DataObject, tmp_path: Path) -> None:
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try_to_read(tmp_path, bytes(changed))


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_of_a_pickle_with_a_right_checksum_raises_anything_else(data: st.DataObject, tmp_path: Path) -> None:
    state = a_dict(state_dict=a_dict(w=a_tensor(), v=a_tensor((2, 2), (1, 2))), lr=b"G" + struct.pack(">d", 0.1))
    changed = bytearray(pickled(state))
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try_to_read(tmp_path, zip_file(bytes(changed)))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(codes=st.lists(st.sampled_from(OPCODES)))
def test_no_sequence_of_opcodes_raises_anything_else(codes: list[bytes], tmp_path: Path) -> None:
    try_to_read(tmp_path, zip_file(pickled(*codes)))


def try_to_read(folder: Path, data: bytes) -> None:
    """Read a file that may be damaged: either each entry lies inside it, or an error names it."""
    (folder / NAME).write_bytes(data)
    said, entries = NAME, list[TensorEntry]()
    try:
        entries += catalogue_of(folder / NAME).values()
    except TensorferryError as error:
        said = str(error)
    assert NAME in said
    for entry in entries:
        (chunk,) = entry.chunks
        assert chunk.span is not None
        assert 0 <= chunk.span.offset <= chunk.span.offset + chunk.span.length <= len(data)
