"""Every rule of Tensorizer files: what breaks it is refused by name, its neighbour is read; and what that costs."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.memory_storage import MemoryStorage
from helpers.tensorizer_bytes import T, crypt, file_of, hashes, macs
from helpers.watched_reader import catalogue_watched
from tensorferry.core.catalogue import Catalogue
from tensorferry.errors import CorruptFile, TensorferryError, UnknownFormat, UnsupportedDtype
from tensorferry.formats.tensorizer import TensorizerFormat
from tensorferry.formats.tensorizer_hashes import verify_hashes
from tensorferry.formats.tensorizer_header import MAX_TENSORS

NAME = "model.tensors"
HUGE = 2**40


@dataclass(frozen=True)
class Rule:
    what: str
    refused: bytes
    says: str
    accepted: bytes = file_of()
    error: type[TensorferryError] = CorruptFile

    def __str__(self) -> str:
        return self.what


def catalogue(data: bytes) -> Catalogue:
    storage = MemoryStorage({NAME: data})
    return TensorizerFormat().catalogue(storage, storage.stat(NAME))


def one(**changes: object) -> bytes:
    return file_of([T(**changes)])  # type: ignore[arg-type]


def indexed(**index: object) -> bytes:
    return one(index=index)


def sealed(after: bytes, data: bytes = bytes(8), **more: int) -> bytes:
    return file_of([T(after=after, data=data, dims=(len(data) // 4,))], version=3, **more)  # type: ignore[arg-type]


BOX = macs(2048, 1)
ARGON = (1, struct.pack("<HQQiH", 1, 3, 1 << 20, 2, 16) + bytes(16))


def argon(method: int = 1, operations: int = 3, memory: int = 1 << 20, algorithm: int = 2, salt: int = 16) -> bytes:
    part = 1, struct.pack("<HQQiH", method, operations, memory, algorithm, salt) + bytes(salt)
    return sealed(crypt(part, BOX))


WHOLE = file_of()
SEALED = sealed(crypt(BOX))
RULES = [
    Rule("no bytes", b"", "it is empty"),
    Rule("an unfinished start", WHOLE[:72], "at least 73 bytes, this one 72", file_of(())),
    Rule("another magic", file_of(magic=b"|TZR!"), "not a Tensorizer file", error=UnknownFormat),
    Rule("a GGUF file", b"GGUF" + bytes(100), "it is a GGUF file", error=UnknownFormat),
    Rule("a web page", b"<!DOCTYPE html>" + bytes(100), "an HTML page", error=UnknownFormat),
    Rule("version 0", file_of(version=0), "version 0: 1 to 5", error=UnknownFormat),
    Rule("version 6", file_of(version=6), "version 6: 1 to 5", file_of(version=5), UnknownFormat),
    Rule("a flag that is not known", file_of(version=5, flags=4), "feature flags 0x4", error=UnknownFormat),
    Rule("flags before there were any", file_of(version=2, flags=1), "flags 0x1 in a file of version 2"),
    Rule("entries with versions in a version that has none", file_of(version=4, flags=2), "5 has them"),
    Rule("an index longer than the file", file_of(index_length=HUGE), "an index of 1,099,511,627,776 bytes"),
    Rule("an index whose end wraps", file_of(index_length=2**64 - 1), "an index of 18,446,744,073,709,551,615"),
    Rule("more tensors than fit", file_of(count=HUGE), "1,099,511,627,776 tensors are declared, in an index of"),
    Rule("a tensor more than there is", file_of(count=2), "2 tensors are declared", file_of(index_padding=100)),
    Rule(
        "a tensor more than there is, with room for it",
        file_of(count=2, index_padding=100),
        "its header is said to be at byte 0",
        file_of(index_padding=100),
    ),
    Rule("an index that ends early", file_of(index_length=35), "truncated: its place takes 24 bytes"),
    Rule(
        "a name past the index", file_of([T(index={"name": b"n" * 65_535})], index_length=60), "its name takes 65,535"
    ),
    Rule("a header before the index ends", indexed(header=-1), "its header is said to be at byte"),
    Rule("a hole before a header", indexed(header=1), "what comes before ends at byte"),
    Rule("data before their header", indexed(data=-100), "and its data at"),
    Rule("data that wrap", indexed(data=2**64 - 40), "its header is said"),
    Rule("data past the end", indexed(length=100), "truncated: tensor b't' ends at byte"),
    Rule("a length that wraps", indexed(length=2**64 - 8 - 8), "truncated: tensor"),
    Rule("an overlap", file_of([T(index={"length": 4}), T(b"u")]), "its header is said to be at byte"),
    Rule("data that end early", WHOLE[:-9], "truncated: tensor"),
    Rule("no end", WHOLE[:-8], "8 bytes follow the last tensor, here 0"),
    Rule("another tensor after the last", file_of(end=b"\1" + bytes(7)), "another tensor follows at byte"),
    Rule("a header of another length", one(header_length=HUGE), "its length is 1099511627776, and the index says"),
    Rule("a header that is empty", one(header_length=0), "its length is 0"),
    Rule("another name in the index", indexed(name=b"u"), "name is b't', and the index says b'u'"),
    Rule("another kind in the index", indexed(kind=1), "its kind is 2, and the index says 1"),
    Rule("another dtype in the index", indexed(dtype=b"<i4"), "its dtype is"),
    Rule("another shape in the index", indexed(dims=(1, 2)), "its shape is (2,), and the index says (1, 2)"),
    Rule("another data length in the header", one(data_length=4), "its data length is 4, and the index says 8"),
    Rule("compressed data", one(data_length=-8), "its data length is -8"),
    Rule("kind 3", one(kind=3), "its kind is 3: 0, 1 and 2"),
    Rule("an empty name", one(name=b""), "its name is empty"),
    Rule("a name that is a dot", one(name=b".", kind=0), "its name is empty", one(name=b".t", kind=0)),
    Rule("a name that is not UTF-8", one(name=b"\xff"), "not UTF-8", one(name="é".encode())),
    Rule("a path that is no JSON", one(name=b"\x1e[1"), "model.tensors", one(name=b'\x1e["a",1]')),
    Rule("a path that is no list", one(name=b'\x1e{"a":1}'), "no list of keys and numbers"),
    Rule("a path that ends the list", one(name=b'\x1e1,"path":["a"]'), "duplicate"),
    Rule("an empty path", one(name=b"\x1e[]"), "no list of keys"),
    Rule("a negative step", one(name=b"\x1e[-1]"), "no list of keys"),
    Rule("a step that is true", one(name=b"\x1e[true]"), "no list of keys"),
    Rule("a deep path", one(name=b"\x1e" + b"[" * 60_000), "model.tensors"),
    Rule("a path of a parameter", one(name=b"\xff", kind=0), "not UTF-8", one(name=b"\x1e[]", kind=0)),
    Rule("the same name twice", file_of([T(), T()]), "duplicate name: a tensor 't'", file_of([T(), T(b"u")])),
    Rule("the same name by a dot", file_of([T(), T(b".t", 0)]), "duplicate name"),
    Rule("an object dtype", one(dtype=b"|O8", dims=(1,)), "is not read here", error=UnsupportedDtype),
    Rule("big-endian floats", one(dtype=b">f4"), "dtype b'>f4' is not read", error=UnsupportedDtype),
    Rule("void", one(dtype=b"|V8", dims=(1,)), "is not read here", error=UnsupportedDtype),
    Rule("a dtype of torch that is none", one(dtype=b"<V4\0torch.load"), "is not read", error=UnsupportedDtype),
    Rule("a shape for other data", one(dims=(3,)), "F32 of shape [3] takes 12 bytes, its data has 8"),
    Rule(
        "no data, before version 4", one(data=b""), "takes 8 bytes, its data has 0", file_of([T(data=b"")], version=4)
    ),
    Rule("a scalar of half a byte", one(dtype=b"|V1\0torch.float4_e2m1fn_x2", dims=()), "a scalar of F4"),
    Rule("sizes that wrap", one(dims=(2**31,) * 4), "overflows 64 bits"),
    Rule("sizes of an empty tensor that wrap", one(dims=(0, *(2**31,) * 4), data=b""), "overflows 64 bits"),
    Rule(
        "65 dimensions",
        one(dims=(1,) * 65, data=bytes(4)),
        "it has 65 dimensions, the limit is 64",
        one(dims=(1,) * 64, data=bytes(4)),
    ),
    Rule(
        "255 dimensions of 64 bits", file_of([T(dims=(2**64 - 1,) * 255, version=5)], version=5, flags=2), "it has 255"
    ),
    Rule("dimensions of 64 bits", file_of([T(dims=(2**64 - 1,), version=5)], version=5, flags=2), "overflows"),
    Rule(
        "an entry of version 2", file_of([T(version=2)], version=5, flags=2), "version 2: 1 and 5", error=UnknownFormat
    ),
    Rule("a hash of kind 2", one(hashes=hashes((2, bytes(4)))), "a hash of kind 2", error=UnknownFormat),
    Rule("a CRC of three bytes", one(hashes=hashes((0, bytes(3)))), "with 3 bytes", error=UnknownFormat),
    Rule("two of a kind", one(hashes=hashes((0, bytes(4)), (0, bytes(4)))), "two hashes of kind 0"),
    Rule(
        "hashes past the header",
        one(hashes=hashes((0, bytes(4)), count=9)),
        "hash",
        one(hashes=hashes()),
        UnknownFormat,
    ),
    Rule("hashes of another length", one(hashes=hashes((0, bytes(4)), length=6)), "their length says"),
    Rule("padding that is something", one(after=b"\1"), "padding is not all zeros", one(after=b"\0")),
    Rule("padding without end", one(after=bytes(70_000)), "70,000 bytes of padding", one(after=bytes(65_536))),
    # -- encryption
    Rule("nothing of encryption in an encrypted file", file_of(version=3), "model.tensors", SEALED),
    Rule("a plain tensor in an encrypted file", sealed(crypt()), "it is not encrypted", sealed(crypt(), b"")),
    Rule("encryption past the header", sealed(crypt(BOX, length=HUGE)), "truncated: how it is encrypted ends"),
    Rule("encryption that ends elsewhere", sealed(crypt(BOX, length=10)), "its length says", SEALED),
    Rule("too many parts", sealed(crypt(BOX, count=9)), "9 things of its encryption"),
    Rule("encryption of kind 9", sealed(crypt((9, b""))), "kind 9 is not known", SEALED, UnknownFormat),
    Rule("two ciphers", sealed(crypt(BOX, BOX)), "kind 2 is not known", SEALED, UnknownFormat),
    Rule("boxes of no bytes", sealed(crypt(macs(0, 1))), "boxes of 0 bytes", SEALED),
    Rule("boxes of 1,000 bytes", sealed(crypt(macs(1000, 1))), "boxes of 1,000 bytes", sealed(crypt(macs(1024, 1)))),
    Rule("more MACs than boxes", sealed(crypt(macs(2048, 2))), "have 1 MACs, not 2", SEALED),
    Rule("MACs without end", sealed(crypt(macs(2048, HUGE))), "have 1 MACs, not 1,099,511,627,776", SEALED),
    Rule(
        "a box over the limit",
        sealed(crypt(macs(2**40, 1)), bytes(65 << 20)),
        "limit is 67,108,864",
        SEALED,
        UnknownFormat,
    ),
    Rule("a key derived otherwise", argon(method=2), "its key is derived by 2", argon(), UnknownFormat),
    Rule("another algorithm", argon(algorithm=1), "derived by 1, 1", argon(), UnknownFormat),
    Rule("a key that takes forever", argon(operations=2**32), "4,294,967,296 operations", argon(operations=4)),
    Rule("a key that takes all memory", argon(memory=2**43), "over 8,796,093,022,208 bytes", argon(memory=1 << 30)),
    Rule("a short salt", argon(salt=8), "a salt of 8", argon()),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_what_breaks_a_rule_is_refused_by_name(rule: Rule) -> None:
    with pytest.raises(rule.error) as refusal:
        catalogue(rule.refused)
    assert NAME in str(refusal.value)
    assert rule.says in str(refusal.value)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_its_neighbour_is_read(rule: Rule) -> None:
    assert len(catalogue(rule.accepted)) <= 2


def test_a_name_that_would_write_to_the_terminal_is_escaped() -> None:
    with pytest.raises(CorruptFile) as refusal:
        catalogue(one(name=b"a\x1b[31mb", index={"kind": 1}))
    assert "\x1b" not in str(refusal.value)


# -- what it costs


def many(count: int, after: bytes = b"", version: int = 1, last: Mapping[str, Any] | None = None) -> bytes:
    """A file of `count` small tensors; `last` changes the last one."""
    tensors = [T(b"layers.%d.weight" % n, after=after) for n in range(count - 1)]
    return file_of([*tensors, replace(T(b"last", after=after), **(last or {}))], version=version)


COSTLY = {
    "as many tensors as may be, the last one wrong": lambda: many(
        MAX_TENSORS, last={"hashes": hashes((0, bytes(4)), length=6)}
    ),
    "as many encrypted tensors, the last one wrong": lambda: many(
        MAX_TENSORS, crypt(ARGON, BOX), version=3, last={"after": crypt(BOX, length=9)}
    ),
    "a tensor too many": lambda: many(MAX_TENSORS + 1),
    "names that are long": lambda: file_of(
        [T(b"%05d" % n + b"n" * 60_000) for n in range(100)] + [T(index={"kind": 1})]
    ),
    "names that are too long together": lambda: file_of([T(b"%05d" % n + b"n" * 60_000) for n in range(400)]),
    "many zeros": lambda: bytes(80 << 20),
    "an index of nothing": lambda: file_of(count=30_000, index_padding=80 << 20),
    "padding": lambda: file_of([T(b"%d" % n, after=bytes(65_536)) for n in range(600)] + [T(after=b"\1")]),
    "dimensions": lambda: file_of([T(b"%d" % n, dims=(2**31,) * 64) for n in range(20_000)]),
}


@pytest.mark.parametrize("what", COSTLY)
def test_refusing_a_file_takes_little_memory_and_time(what: str) -> None:
    storage = MemoryStorage({NAME: COSTLY[what]()})
    file = storage.stat(NAME)
    began = time.process_time()
    with pytest.raises(TensorferryError):
        TensorizerFormat().catalogue(storage, file)
    assert time.process_time() - began < 5  # about half a second; busy machines differ, and tracing takes longer
    storage.reads.clear()
    tracemalloc.start()
    try:
        with pytest.raises(TensorferryError):
            TensorizerFormat().catalogue(storage, file)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


# -- damage

SEED = file_of(
    [
        T(b"a", dims=(2, 1)),
        T(b".b", kind=0, dtype=b"<V2\0torch.bfloat16", dims=(4,), after=bytes(3)),
        T(b'\x1e["c",0]', hashes=hashes((0, bytes(4)), (1, bytes(32)))),
        T(b"d", dims=(0,), data=b"", version=5),
    ],
    version=5,
    flags=2,
    index_padding=5,
)
SEALED_SEED = file_of(
    [
        T(b"a", after=crypt(ARGON, BOX)),
        T(b"b", after=crypt((3, bytes(40)))),
        T(b"c", data=b"", dims=(0,), after=crypt()),
    ],
    version=3,
)
EDGES = st.sampled_from([0, 1, 8, 31, 32, 2**31, 2**32 - 1, 2**32, 2**40, 2**61, 2**63 - 1, 2**63, 2**64 - 1])


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_damaged_file_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    seed = data.draw(st.sampled_from([SEED, SEALED_SEED]))
    content = bytearray(seed)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(5, len(seed) - 9))
        if data.draw(st.booleans()):
            content[at] = data.draw(st.integers(0, 255))
        else:
            content[at : at + 8] = struct.pack("<Q", data.draw(EDGES))
    storage = MemoryStorage({NAME: bytes(content[: data.draw(st.integers(5, len(content)))])})
    file = storage.stat(NAME)
    try:
        found = TensorizerFormat().catalogue(storage, file)
        opened = TensorizerFormat().unlock(storage, [file], None)
    except TensorferryError:
        return
    spans = [entry.span for entry in found.values()]
    assert all(span is not None and span.offset + span.length <= file.size - 8 for span in spans)
    assert all(a is not None and b is not None and a.offset + a.length <= b.offset for a, b in pairwise(spans))
    try:
        verify_hashes(opened, file)
    except TensorferryError:
        return


def test_nothing_is_executed_and_nothing_outside_is_opened(tmp_path: Path) -> None:
    for at, rule in enumerate(RULES):
        (tmp_path / f"{at:03}.tensors").write_bytes(rule.refused)
    (tmp_path / "good.tensors").write_bytes(SEALED_SEED)
    assert catalogue_watched(tmp_path, "tensorizer") == (len(RULES), 1, [], [], [])
