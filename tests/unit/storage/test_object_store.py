"""Objects read by ranges: few requests, one version of each, and every fault in words that hold nothing secret."""

from __future__ import annotations

import hashlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn

pytest.importorskip("obstore")

from helpers.checkpoints import ar, raw, write_index, write_safetensors
from helpers.object_stores import Fault, FaultyStore, Request
from helpers.torch_files import saved
from tensorferry import ReadOptions, load, open_checkpoint, verify
from tensorferry.errors import AccessDenied, ConfigError, LocateError, ReadError, TensorferryError, UnsafeFile
from tensorferry.storage import object_store
from tensorferry.storage.object_store import LARGEST, ObjectStorage

SECRETS = ("SECRET", "verysecret", "Signature=", "Credential=")


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    with FaultyStore() as running:
        yield running


def read(storage: ObjectStorage, path: str, offset: int, length: int) -> bytes:
    out = bytearray(length)
    storage.read_vector(path, offset, [memoryview(out)])
    return bytes(out)


def said(refusal: pytest.ExceptionInfo[TensorferryError]) -> str:
    """Return the words of an error, after seeing that nothing secret is in it, nor in what it came from."""
    error: BaseException | None = refusal.value
    while error is not None:
        assert not any(secret in f"{error} {error!r}" for secret in SECRETS)
        error = error.__cause__ or error.__context__
    return str(refusal.value)


def first(count: int, what: int | str, method: str = "GET") -> Fault:
    """Return a fault of the first `count` requests for ranges, or of another method."""
    seen: list[Request] = []

    def fault(request: Request) -> int | str | None:
        if request.method != method or (method == "GET" and not request.range) or len(seen) >= count:
            return None
        seen.append(request)
        return what

    return fault


# -- what is asked ----------------------------------------------------------------------------------------------------


def test_a_list_of_several_pages_is_whole_sorted_and_has_neither_folders_nor_dot_files(store: FaultyStore) -> None:
    names = ["b", "a", "d.bin", "c", ".hidden", "sub/x", "sub/deep/y", ""]
    store.objects = {f"model/{name}": name.encode() for name in names} | {"model2/z": b"", "other": b""}
    with store.storage() as storage:
        assert [file.path for file in storage.list()] == ["a", "b", "c", "d.bin"]
        assert list(storage.nested()) == ["sub/x"]
        assert storage.uri == "s3://bucket/model"
        assert repr(storage) == "ObjectStorage('s3://bucket/model')"


def test_the_list_is_asked_for_once_and_answers_what_is_asked_of_single_objects(store: FaultyStore) -> None:
    store.objects = {"model/a": b"12345"}
    with store.storage() as storage:
        for _ in range(3):
            storage.list()
        assert storage.stat("a").size == 5
        with pytest.raises(LocateError, match=r"b .*there is no such object"):
            storage.stat("b")
        assert (len(store.log), storage.traffic.looks) == (1, 1)


def test_without_a_list_an_object_is_looked_for_once(store: FaultyStore) -> None:
    store.objects = {"model/a": b"12345", "model/sub/b": b"1"}
    with store.storage() as storage:
        for _ in range(2):
            assert (storage.stat("a").size, storage.stat("sub/b").size) == (5, 1)
        assert [request.method for request in store.log] == ["HEAD", "HEAD"]
        with pytest.raises(LocateError, match=r"nope \(s3://bucket/model\): there is no such object"):
            storage.stat("nope")


def test_a_header_takes_one_request_and_a_load_what_it_asks_for(store: FaultyStore, tmp_path: Path) -> None:
    tensors = {f"t{n}": ar(300, 100, start=n) for n in range(5)}
    store.objects = {
        f"model/model-0000{n}-of-00002.safetensors": write_safetensors(
            tmp_path / str(n), {name: t for k, (name, t) in enumerate(tensors.items()) if k % 2 == n - 1}
        ).read_bytes()
        for n in (1, 2)
    }
    with store.storage() as storage:
        for file in storage.list():
            for offset, length in ((0, 8), (8, 200), (100, 50), (208, 100)):
                storage.read_into(file.path, offset, memoryview(bytearray(length)))
        assert len(store.asked("GET")) == 1 + 2
        before = storage.traffic
        data = read(storage, storage.list()[0].path, 4000, 120_000)
        assert data == store.objects["model/model-00001-of-00002.safetensors"][4000:124_000]
        assert storage.traffic.bytes_read - before.bytes_read == 120_000
        assert storage.traffic.reads - before.reads == 1


def test_a_checkpoint_is_opened_by_a_list_its_index_and_a_request_for_each_header(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    for n, name in enumerate(names):
        write_safetensors(tmp_path / name, {f"t{n}": ar(200, 200)})
    write_index(tmp_path / "model.safetensors.index.json", {f"t{n}": name for n, name in enumerate(names)})
    store.objects = {f"m/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}
    store.use(monkeypatch, tmp_path)
    with open_checkpoint("s3://bucket/m") as checkpoint:
        assert sorted(checkpoint.catalogue) == ["t0", "t1", "t2"]
    lists = [request for request in store.log if request.key.startswith("?")]
    assert (len(lists), len(store.log) - len(lists)) == (2, 1 + 3)  # the list has two pages
    assert not store.asked("HEAD")


def test_the_headers_of_a_zip_are_brought_together(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"t{n}": ar(400, 250, start=n) for n in range(24)}
    store.objects = {"m/pytorch_model.bin": saved(state)}
    store.use(monkeypatch, tmp_path)
    with open_checkpoint("s3://bucket/m") as checkpoint:
        assert len(checkpoint.catalogue) == 24
        opened = len(store.log)
        tensor = checkpoint.read("t7")
    assert raw(tensor) == raw(state["t7"])
    assert opened <= 2 + 8 + 24, [request.range for request in store.log]


def test_large_reads_are_cut_into_ranges_of_about_the_same_size(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "LARGEST", 1000)
    data = Random(0).randbytes(5000)
    store.objects = {"model/a": data}
    with store.storage() as storage:
        outs = [bytearray(n) for n in (1, 0, 999, 1500, 100)]
        storage.read_vector("a", 10, [memoryview(out) for out in outs])
        assert b"".join(outs) == data[10:2610]
    assert [request.range for request in store.asked("GET")] == [
        "bytes=10-876", "bytes=877-1743", "bytes=1744-2609",
    ]  # fmt: skip
    assert LARGEST == 8 << 20


def test_runs_are_read_one_by_one_and_nothing_between_them(store: FaultyStore) -> None:
    store.objects = {"model/a": bytes(range(250))}
    with store.storage() as storage:
        out = bytearray(6)
        storage.read_runs("a", 10, 100, 2, memoryview(out))
        assert list(out) == [10, 11, 110, 111, 210, 211]
        assert storage.traffic.bytes_read == 6


def test_many_threads_read_ahead_and_get_what_they_asked_for(store: FaultyStore) -> None:
    data = Random(1).randbytes(300_000)
    store.objects = {"model/a": data, "model/b": data[::-1]}
    ranges = [(Random(n).choice("ab"), Random(n).randrange(290_000), 1 + n % 9000) for n in range(300)]
    with store.storage() as storage, ThreadPoolExecutor(8) as pool:

        def one(asked: tuple[str, int, int]) -> bytes:
            out = bytearray(asked[2])
            storage.read_into(asked[0], asked[1], memoryview(out))
            return bytes(out)

        found = list(pool.map(one, ranges))
    assert found == [store.objects[f"model/{name}"][at : at + n] for name, at, n in ranges]


def test_every_range_asks_for_the_version_that_was_found(store: FaultyStore) -> None:
    store.objects = {"model/a": bytes(100)}
    with store.storage() as storage:
        read(storage, "a", 0, 10)
        read(storage, "a", 50, 10)
    tag = hashlib.md5(bytes(100)).hexdigest()
    assert [request.if_match for request in store.asked("GET")] == [f'"{tag}"'] * 2
    store.log.clear()
    with store.storage() as storage:
        storage.list()
        read(storage, "a", 0, 10)
        read(storage, "a", 50, 10)
    assert [request.if_match for request in store.asked("GET")] == ["", "", f'"{tag}"']


# -- faults that pass -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [503, "reset", "stall"])
def test_what_fails_twice_is_asked_for_again(store: FaultyStore, fault: int | str) -> None:
    data = Random(2).randbytes(200_000)
    store.objects, store.fault = {"model/a": data}, first(2 if fault != "stall" else 1, fault)
    with store.storage() as storage:
        assert read(storage, "a", 100, 150_000) == data[100:150_100]


def test_a_broken_answer_is_taken_up_where_it_broke(store: FaultyStore) -> None:
    data = Random(3).randbytes(200_000)
    store.objects, store.fault = {"model/a": data}, first(1, "reset")
    with store.storage() as storage:
        assert read(storage, "a", 0, 200_000) == data
    whole, rest = store.asked("GET")
    assert whole.range == "bytes=0-199999"
    assert int(rest.range.removeprefix("bytes=").split("-")[0]) > 0


# -- faults that do not -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (503, r"the server cannot answer at present \(503, Whatever\), after several tries"),
        ("reset", "the connection broke, after several tries|sends nothing for too long"),
        ("stall", "the server sends nothing for too long, after several tries"),
        ("whole", "the server answers with the whole where a part is asked for, .*: fetch it"),
        ("short", "the server answers with another part than was asked for"),
        (418, "the server answers 418, Whatever"),
    ],
)
def test_a_fault_that_stays_says_what_was_asked(store: FaultyStore, fault: int | str, words: str) -> None:
    store.objects, store.fault = {"model/a": bytes(1000)}, first(1000, fault)
    with store.storage() as storage, pytest.raises(ReadError, match=words) as refusal:
        read(storage, "a", 100, 500)
    assert "reading 500 bytes at offset 100" in said(refusal)
    assert "a (s3://bucket/model)" in said(refusal)


def test_who_cannot_be_reached_is_said(store: FaultyStore, tmp_path: Path) -> None:
    storage = store.storage()
    store._server.server_close()
    with pytest.raises(ReadError, match="the server cannot be reached: check the endpoint and the network") as refusal:
        storage.list()
    assert "listing it" in said(refusal)


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "AccessDenied", r"refused \(403, AccessDenied\).*check the credentials, and whether they may read"),
        (403, "InvalidAccessKeyId", "the access key is not known there"),
        (403, "SignatureDoesNotMatch", "the secret key is not that of the access key"),
        (403, "ExpiredToken", "the session token has expired: get a new one"),
        (401, "Unauthorized", r"refused \(401, Unauthorized\)"),
    ],
)
def test_who_is_refused_is_told_why_and_with_which_credentials(
    store: FaultyStore, status: int, code: str, words: str
) -> None:
    store.objects, store.code, store.fault = {"model/a": bytes(1000)}, code, lambda request: status
    with store.storage() as storage:
        with pytest.raises(AccessDenied, match=words) as refusal:
            storage.list()
        assert "while listing it, asked with the key of the test" in said(refusal)
        with pytest.raises(AccessDenied, match=rf"a .*refused \({status}") as refusal:
            read(storage, "a", 0, 10)
        assert "asked with the key of the test" in said(refusal)


def test_credentials_that_expire_while_reading_are_told(store: FaultyStore) -> None:
    store.objects, store.code = {"model/a": bytes(1000)}, "ExpiredToken"
    with store.storage() as storage:
        read(storage, "a", 0, 10)
        store.fault = lambda request: 403
        with pytest.raises(AccessDenied, match=r"the session token has expired") as refusal:
            read(storage, "a", 10, 10)
    assert "reading 10 bytes at offset 10" in said(refusal)


def test_a_bucket_that_is_not_there_and_one_of_another_region_are_told(store: FaultyStore) -> None:
    store.code, store.fault = "NoSuchBucket", lambda request: 404
    with store.storage() as storage, pytest.raises(LocateError, match="there is no such bucket: check its name"):
        storage.list()
    store.fault = lambda request: 301
    with store.storage() as storage, pytest.raises(LocateError, match=r"in another region .* set AWS_REGION"):
        storage.list()


def test_a_prefix_with_nothing_below_is_told_with_names_that_are_like_it(store: FaultyStore) -> None:
    store.objects = {"models/llama-8b/config.json": b"{}", "models/qwen/config.json": b"{}"}
    words = r"nothing lies there; did you mean llama-8b\?"
    with store.storage("models/llama8b") as storage, pytest.raises(LocateError, match=words):
        storage.list()


# -- objects that change ----------------------------------------------------------------------------------------------

CHANGED = r"a \(s3://bucket/model\): changed while it was in use: .*cannot be trusted: load again"


@pytest.mark.parametrize(
    ("now", "how"),
    [
        (bytes(999), "its size went from 1000 to 999 bytes"),
        (b"1" * 1000, "another object took its place|its modification time moved"),
        (None, "it is no longer there"),
    ],
)
@pytest.mark.parametrize("etags", [True, False])
def test_an_object_that_is_replaced_between_two_ranges_is_refused(
    store: FaultyStore, now: bytes | None, how: str, etags: bool
) -> None:
    store.objects, store.etags = {"model/a": bytes(1000)}, etags
    with store.storage() as storage:
        read(storage, "a", 0, 10)
        if now is None:
            del store.objects["model/a"]
        else:
            store.objects["model/a"], store.moment = now, "Tue, 01 Dec 2026 00:00:01 GMT"
        with pytest.raises(ReadError, match=CHANGED) as refusal:
            read(storage, "a", 500, 10)
        assert re.search(how, said(refusal))
        with pytest.raises(ReadError, match=CHANGED):
            storage.check_unchanged()


def test_an_object_that_is_replaced_in_the_middle_of_an_answer_gives_no_mixture(store: FaultyStore) -> None:
    store.objects = {"model/a": bytes(100_000)}

    def fault(request: Request) -> str | None:
        if request.method == "GET" and request.range == "bytes=0-99999":
            store.objects["model/a"] = b"1" * 100_000
            return "reset"
        return None

    with store.storage() as storage:
        read(storage, "a", 5, 5)
        store.fault = fault
        with pytest.raises(ReadError):
            read(storage, "a", 0, 100_000)


def test_an_object_that_was_replaced_since_it_was_listed_is_refused_for_its_size(store: FaultyStore) -> None:
    store.objects = {"model/a": bytes(1000)}
    with store.storage() as storage:
        storage.list()
        store.objects["model/a"] = bytes(2000)
        with pytest.raises(ReadError, match="its size went from 1000 to 2000 bytes"):
            read(storage, "a", 0, 10)


def test_one_list_tells_that_nothing_has_changed_and_what_has(store: FaultyStore) -> None:
    store.objects = {f"model/{name}": name.encode() * 100 for name in "abc"}
    with store.storage() as storage:
        storage.list()
        for name in "ab":
            read(storage, name, 0, 10)
        store.log.clear()
        storage.check_unchanged()
        assert {request.key for request in store.log} == {"?model/"}
        store.objects["model/c"] = b"nobody has read it"
        storage.check_unchanged()
        store.objects["model/b"] = b"x" * 100
        with pytest.raises(ReadError, match=r"b .*changed while it was in use: another object took its place"):
            storage.check_unchanged()


# -- paths and ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/x", "a//b", "", ".", "a\\b", "s3:x"])
def test_names_that_are_no_plain_paths_are_refused_and_not_asked_for(store: FaultyStore, path: str) -> None:
    with store.storage() as storage:
        for ask in (lambda: storage.stat(path), lambda: read(storage, path, 0, 1)):
            with pytest.raises(UnsafeFile, match="is not a plain relative path"):
                ask()
    assert not store.log


def test_nothing_is_read_beyond_the_end_nor_asked_for(store: FaultyStore) -> None:
    store.objects = {"model/a": bytes(100)}
    with store.storage() as storage:
        storage.list()
        with pytest.raises(ReadError, match=r"a .*ends inside a read: wanted 20 bytes at offset 90, it has 100"):
            read(storage, "a", 90, 20)
        assert len(store.log) == 1


@pytest.mark.parametrize("name", ["mit leer.bin", "ümlaut.bin", "plus+and=.bin", "50%.bin", "tilde~[1].bin"])
def test_names_with_odd_signs_are_found(store: FaultyStore, name: str) -> None:
    store.objects = {f"model/{name}": b"12345"}
    with store.storage() as storage:
        assert [file.path for file in storage.list()] == [name]
        assert read(storage, name, 1, 3) == b"234"


def test_without_obstore_the_command_that_brings_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name="obstore")

    monkeypatch.setattr("tensorferry.storage.object_access.import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'tensorferry\[object-store\]'"):
        open_checkpoint("s3://bucket/model")


def test_a_path_that_was_made_of_an_address_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"s3:/bucket/model: .*pass s3://… as text"):
        open_checkpoint(Path("s3://bucket/model"))


def test_sixteen_ranges_are_under_way_at_a_time_and_fewer_where_there_is_less_room(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"t{n:02}": ar(1 << 18, start=n) for n in range(16)}
    data = write_safetensors(tmp_path / "m", tensors).read_bytes()
    store.objects = {"m/model.safetensors": data}
    store.use(monkeypatch, tmp_path)
    together = threading.Barrier(16)

    def fault(request: Request) -> None:
        if request.range and not request.range.startswith("bytes=0-"):
            together.wait(60)  # or the load fails

    store.fault = fault
    model = nn.Module()
    for name in tensors:
        model.register_parameter(name, nn.Parameter(torch.empty(1 << 18)))
    report = load(model, "s3://bucket/m")
    assert (report.reads, report.direct_bytes) == (16, 16 << 20)
    assert all(torch.equal(model.get_parameter(name), values) for name, values in tensors.items())
    workers = [ReadOptions(max_staging=n << 20).settled("remote").workers for n in (8, 16, 64, 256, 1024)]
    assert workers == [1, 1, 4, 16, 16]


@pytest.mark.parametrize("odd", ["/b", "./x", "../x", "new\nline"])
def test_a_key_that_is_no_path_hinders_lists_but_not_what_an_index_names(
    store: FaultyStore, odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = write_index(tmp_path / "index", {"t": "model-00001-of-00001.safetensors"}).read_bytes()
    data = write_safetensors(tmp_path / "data", {"t": ar(2, 2)}).read_bytes()
    store.objects = {"m/model.safetensors.index.json": index, "m/model-00001-of-00001.safetensors": data}
    store.objects[f"m/{odd}"] = b""
    store.use(monkeypatch, tmp_path)
    with pytest.raises(AccessDenied, match=r"s3://bucket/m: a key there .*name the weight file or its index"):
        open_checkpoint("s3://bucket/m")
    with open_checkpoint("s3://bucket/m/model.safetensors.index.json") as checkpoint:
        assert list(checkpoint.catalogue) == ["t"]


def test_what_may_be_read_and_not_listed_is_found_by_its_index(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = {f"t{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    index = write_index(tmp_path / "index", shards).read_bytes()
    store.objects = {
        f"m/{name}": write_safetensors(tmp_path / t, {t: ar(2)}).read_bytes() for t, name in shards.items()
    }
    store.objects["m/model.safetensors.index.json"] = index
    store.fault = lambda request: 403 if request.key.startswith("?") else None
    store.use(monkeypatch, tmp_path)
    with pytest.raises(AccessDenied, match=r"refused .* while listing it"):
        open_checkpoint("s3://bucket/m")
    with open_checkpoint("s3://bucket/m/model.safetensors.index.json") as checkpoint:
        assert list(checkpoint.catalogue) == ["t1", "t2"]
    assert verify("s3://bucket/m/model.safetensors.index.json").tensors == 2
    del store.objects[f"m/{shards['t2']}"]
    with pytest.raises(LocateError, match=r"1 of them is not there: model-00002-of-00002\.safetensors"):
        open_checkpoint("s3://bucket/m/model.safetensors.index.json")


@pytest.mark.parametrize("name", ["my%20model.safetensors", "my model.safetensors", "%6dy%20model.safetensors"])
@pytest.mark.parametrize("query", ["", "?signature=SECRET"])
def test_a_name_over_http_may_be_written_with_percent_signs(
    store: FaultyStore, name: str, query: str, tmp_path: Path
) -> None:
    store.objects = {"a b/my model.safetensors": write_safetensors(tmp_path / "m", {"t": ar(2)}).read_bytes()}
    with open_checkpoint(f"{store.endpoint}/bucket/a%20b/{name}{query}") as checkpoint:
        assert checkpoint.read("t").tolist() == ar(2).tolist()
    assert {request.key for request in store.log} == {"a b/my model.safetensors"}


OPENING = """
import sys
import tensorferry
tensorferry.open_checkpoint(sys.argv[1])
"""


@pytest.mark.parametrize("path", ["m", "m/model.safetensors"])
def test_an_interrupt_ends_opening_while_the_store_stalls(
    path: str, store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.objects = {"m/model.safetensors": write_safetensors(tmp_path / "m", {"t": ar(2)}).read_bytes()}
    store.fault = lambda request: "stall" if request.method == "GET" and request.range else None
    store.use(monkeypatch, tmp_path)
    command = [sys.executable, "-c", OPENING, f"s3://bucket/{path}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        try:
            while not any(request.range for request in store.log):
                assert child.poll() is None
                time.sleep(0.01)
            time.sleep(0.5)
            child.send_signal(signal.SIGINT)
            _, err = child.communicate(timeout=5)
        finally:
            child.kill()
    assert child.returncode == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert err.count("Traceback (most recent call last)") == 1
