"""Checkpoints in a bucket of a real server of S3 do what they do on a disk of this machine, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("obstore")

import tensorferry
from helpers.checkpoints import ar, write_index, write_safetensors
from helpers.command_line import CommandLine
from helpers.fake_vllm import FakeVllm, installed, model_config
from helpers.gguf_models import tiny_llama
from helpers.object_stores import BUCKET, READER, FaultyStore, Seaweed, upload
from helpers.old_loaders import NanoModel, nano_checkpoint, poisoned
from helpers.ranks import Ranks
from helpers.storage_conformance import StorageConformance
from helpers.tiny_transformers import by_transformers, differences, equal_bits, saved
from helpers.vllm_loading import filled_by_itself, is_untouched, load
from tensorferry import AccessDenied, ConfigError, LocateError, ReadError, ReadOptions, Reloader
from tensorferry.formats.places import place_of
from tensorferry.loaders import LoadConfig, ModelConfig, get_model_loader
from tensorferry.loaders.saving import save_sharded_state
from tensorferry.parallel import ColumnParallelLinear
from tensorferry.storage.base import Storage
from tensorferry.storage.object_store import ObjectStorage


@pytest.fixture(autouse=True)
def here(s3: Seaweed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the environment lead to the server, as its administrator."""
    s3.use(monkeypatch, tmp_path)


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """Return where in the bucket this test may write."""
    return re.sub(r"\W+", "-", request.node.name)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


class TestObjectsOfSeaweed(StorageConformance):
    @pytest.fixture(autouse=True)
    def server(self, s3: Seaweed, prefix: str) -> None:
        self.s3, self.at = s3, prefix

    def storage(self, files: Mapping[str, bytes], folder: Path) -> Storage:
        for name, data in files.items():
            self.s3.store().put(f"{self.at}/{name}", data)
        return place_of(f"s3://{BUCKET}/{self.at}").storage


class TestObjectsInMemory(StorageConformance):
    def storage(self, files: Mapping[str, bytes], folder: Path) -> Storage:
        from obstore.store import MemoryStore

        store = MemoryStore()
        for name, data in files.items():
            store.put(f"m/{name}", data)
        return ObjectStorage(store, "m", uri="memory://m")


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.transformers
@pytest.mark.parametrize("name", ["tied Llama", "Qwen3-MoE"])
def test_a_model_of_transformers_is_the_same_as_from_a_disk(
    name: str, s3: Seaweed, prefix: str, tmp_path: Path
) -> None:
    folder = saved(name, tmp_path / "m", shard="20kB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    uri = s3.upload(folder, prefix)
    model, report = tensorferry.load_model(uri, return_report=True)
    assert (report.source, report.storage_kind, model.config.name_or_path) == (uri, "remote", uri)
    model.config.name_or_path = str(folder)
    assert differences(model, by_transformers(folder)) == []


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_files_and_gguf_files_give_what_they_give_here(s3: Seaweed, prefix: str, tmp_path: Path) -> None:
    model = tensorferry.load_model(saved("Llama", tmp_path / "m"))
    (tmp_path / "bin").mkdir()
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    shutil.copy(tmp_path / "m" / "config.json", tmp_path / "bin")
    (tmp_path / "gguf").mkdir()
    tiny_llama(tmp_path / "gguf")
    uri = s3.upload(tmp_path, prefix)
    for path in ("bin", "gguf", "gguf/model.gguf"):
        ours, here = tensorferry.load_model(f"{uri}/{path}"), tensorferry.load_model(tmp_path / path)
        assert [n for n, t in here.state_dict().items() if not equal_bits(ours.state_dict()[n], t)] == [], path


class Part(nn.Module):
    """A rank's part of one matrix."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        parallel = tensorferry.ParallelConfig(tp_size=4, tp_rank=rank)
        self.proj = ColumnParallelLinear(256, 1024, bias=False, parallel=parallel)


def test_a_rank_fetches_the_bytes_of_its_part_and_no_others(s3: Seaweed, prefix: str, tmp_path: Path) -> None:
    whole = ar(1024, 256)
    write_safetensors(tmp_path / "m" / "model.safetensors", {"proj.weight": whole, "other": ar(512, 1024)})
    uri = s3.upload(tmp_path / "m", prefix)
    for rank in range(4):
        with tensorferry.open_checkpoint(uri) as checkpoint:
            storage = checkpoint.storage
            assert isinstance(storage, ObjectStorage)
            before, model = storage.traffic, Part(rank)
            report = tensorferry.load(model, checkpoint)
            assert storage.traffic.bytes_read - before.bytes_read == report.bytes_read == 256 * 256 * 4
            assert storage.traffic.reads - before.reads == report.reads == 1
            assert report.ways == {"fetched": report.bytes_read}
        assert torch.equal(model.proj.weight, whole[rank * 256 : (rank + 1) * 256])


def test_memory_beside_parameters_stays_within_its_bound(
    s3: Seaweed, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"t{n}": ar(1 << 20, start=n) for n in range(12)}
    write_safetensors(tmp_path / "m" / "model.safetensors", tensors)
    uri = s3.upload(tmp_path / "m", prefix)
    lock, held, most = threading.Lock(), 0, 0
    ranges = ObjectStorage._range

    def counting(self: ObjectStorage, path: str, offset: int, length: int) -> Any:
        nonlocal held, most
        with lock:
            held += length
            most = max(most, held)
        try:
            return ranges(self, path, offset, length)
        finally:
            with lock:
                held -= length

    monkeypatch.setattr(ObjectStorage, "_range", counting)
    bound = 16 << 20
    for options in (ReadOptions(max_staging=bound, max_read=1 << 20), ReadOptions(max_staging=bound)):
        model, most = nn.Module(), 0
        for name in tensors:  # of another type, so that all of it has to be staged
            model.register_parameter(name, nn.Parameter(torch.empty(1 << 20, dtype=torch.float64)))
        report = tensorferry.load(model, uri, options=options)
        assert 0 < report.staging_peak + most <= bound + (64 << 10)  # each block begins where its file says in a page
        assert all(torch.equal(model.get_parameter(name), t.double()) for name, t in tensors.items())


def logits_of_a_rank(rank: int, size: int, uri: str, variables: dict[str, str]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        config = tensorferry.ParallelConfig(tp_size=size, tp_rank=rank)
        model, report = tensorferry.load_model(uri, parallel=config, return_report=True)
        with torch.inference_mode():
            return model(torch.arange(3, 19).reshape(1, 16)).logits, report.storage_kind, report.bytes_needed


@pytest.mark.transformers
def test_ranks_that_divide_a_model_each_read_their_part(
    two_ranks: Ranks, s3: Seaweed, prefix: str, tmp_path: Path
) -> None:
    folder = saved("Llama", tmp_path / "m")
    uri = s3.upload(folder, prefix)
    here = two_ranks.run(logits_of_a_rank, str(folder), {})
    there = two_ranks.run(logits_of_a_rank, uri, s3.variables())
    for (ours, kind, nbytes), (expected, _, least) in zip(there, here, strict=True):
        assert torch.equal(ours, expected)
        assert (kind, nbytes) == ("remote", least)


LAYERS, ROWS, WIDTH = 4, 2048, 1024


class Columns(nn.Module):
    """Matrices that ranks divide by columns, and a vector that each needs."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.first, self.width = rank * WIDTH // size, WIDTH // size
        self.norm = nn.Parameter(torch.full((WIDTH,), 77.0))
        for n in range(LAYERS):
            self.register_parameter(f"w{n}", nn.Parameter(torch.full((ROWS, self.width), 77.0)))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            part = tensor if name == "norm" else tensor.narrow(1, self.first, self.width)
            self.get_parameter(name).data.copy_(part)


def filled_from(rank: int, size: int, uri: str, variables: dict[str, str], read: dict[str, Any]) -> Any:
    import torch.distributed as dist

    with pytest.MonkeyPatch.context() as patch, installed() as vllm:
        for name, value in variables.items():
            patch.setenv(name, value)
        vllm.share(size, rank, dist.group.WORLD)
        model = Columns(rank, size)
        report = load(vllm, Path("nowhere"), model, weights=uri, read=read).report
        return {n: p.detach().clone() for n, p in model.named_parameters()}, report.bytes_read, report.ways


@pytest.mark.parametrize("exchange", [True, False])
def test_columns_that_ranks_of_one_machine_need_are_fetched_once(
    two_ranks: Ranks, s3: Seaweed, prefix: str, tmp_path: Path, exchange: bool
) -> None:
    values = {f"w{n}": ar(ROWS, WIDTH, start=n) for n in range(LAYERS)} | {"norm": ar(WIDTH)}
    write_safetensors(tmp_path / "m" / "model.safetensors", values)
    uri = s3.upload(tmp_path / "m", prefix)
    found = two_ranks.run(filled_from, uri, s3.variables(), {"exchange": exchange})
    for rank, (parameters, _, ways) in enumerate(found):
        for name, tensor in values.items():
            part = tensor if name == "norm" else tensor.chunk(2, 1)[rank]
            assert torch.equal(parameters[name], part), name
        assert ("from another rank" in ways) == exchange
    nbytes = 4 * LAYERS * ROWS * WIDTH
    fetched = sum(nbytes for _, nbytes, _ in found)
    if exchange:
        assert fetched == nbytes + 2 * 4 * WIDTH
    else:
        assert fetched > 1.9 * nbytes


# -- everything else that opens checkpoints ---------------------------------------------------------------------------


def small(folder: Path, start: float = 0.0, names: tuple[str, ...] = ("weight", "bias")) -> Path:
    """Write the weights of a Linear(2, 3) in two shards."""
    values = {"weight": ar(3, 2, start=start), "bias": ar(3, start=start)}
    shards = {f"model-0000{n}-of-00002.safetensors": name for n, name in enumerate(names, 1)}
    for shard, name in shards.items():
        write_safetensors(folder / shard, {name: values[name]})
    write_index(folder / "model.safetensors.index.json", {name: shard for shard, name in shards.items()})
    return folder


@pytest.mark.parametrize("atomic", [False, True])
def test_new_values_are_loaded_into_the_same_model(atomic: bool, s3: Seaweed, prefix: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    reloader, kept = Reloader(model), model.weight
    reloader.load(s3.upload(small(tmp_path / "a"), f"{prefix}/a"))
    report = reloader.load(s3.upload(small(tmp_path / "b", 50), f"{prefix}/b"), atomic=atomic, verify=True)
    assert model.weight is kept
    assert torch.equal(model.weight, ar(3, 2, start=50))
    assert "plan" not in report.seconds


def test_a_file_an_index_and_a_subfolder_can_be_named(s3: Seaweed, prefix: str, tmp_path: Path) -> None:
    small(tmp_path / "m" / "deep" / "er")
    uri = s3.upload(tmp_path / "m", prefix)
    for path, options, count in [
        (f"{uri}/deep/er", {}, 2),
        (f"{uri}/deep/er/", {}, 2),
        (uri, {"subfolder": "deep/er"}, 2),
        (f"{uri}/deep/er/model.safetensors.index.json", {}, 2),
        (f"{uri}/deep/er/model-00001-of-00002.safetensors", {}, 1),
    ]:
        with tensorferry.open_checkpoint(path, **options) as checkpoint:  # type: ignore[arg-type]
            assert len(checkpoint.catalogue) == count
            assert checkpoint.uri == f"{uri}/deep/er"
    with pytest.raises(LocateError, match=r"sub-folder er/: .*Pass subfolder='er'"):
        tensorferry.open_checkpoint(f"{uri}/deep")


def test_a_bucket_is_verified_against_its_manifest(s3: Seaweed, prefix: str, tmp_path: Path) -> None:
    import hashlib

    folder = small(tmp_path / "m")
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in sorted(folder.glob("*.safetensors"))]
    (folder / "SHA256SUMS").write_text("".join(lines))
    uri = s3.upload(folder, prefix)
    assert "sha256 of 2 of 3 files verified against SHA256SUMS" in tensorferry.verify(uri).summary
    (folder / "SHA256SUMS").write_text("".join(lines).replace(lines[0][:8], "00000000"))
    with pytest.raises(tensorferry.CorruptFile, match="but SHA256SUMS says 00000000"):
        tensorferry.verify(s3.upload(folder, prefix))


def test_a_conversion_writes_what_it_writes_from_a_disk(s3: Seaweed, prefix: str, tmp_path: Path) -> None:
    folder = small(tmp_path / "m")
    for name, text in {"config.json": '{"a": 1}', "tokenizer.json": "{}", "extra/note.json": "{}"}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    uri = s3.upload(folder, prefix)
    tensorferry.convert(folder, tmp_path / "from-disk", dtype="bfloat16")
    account = tensorferry.convert(uri, tmp_path / "from-bucket", dtype="bfloat16")
    files = [
        {p.relative_to(tmp_path / name).as_posix(): p.read_bytes() for p in (tmp_path / name).rglob("*") if p.is_file()}
        for name in ("from-disk", "from-bucket")
    ]
    assert files[0] == files[1]
    assert "extra/note.json" in files[1]
    assert account.verified
    with pytest.raises(ConfigError, match="is written to this machine"):
        tensorferry.convert(uri, f"{uri}-other")


def test_the_loaders_take_addresses(s3: Seaweed, prefix: str, tmp_path: Path) -> None:
    uri = s3.upload(small(tmp_path / "m"), prefix)
    for config in (LoadConfig(), LoadConfig(strategy="eager"), LoadConfig(strategy="prefetch")):
        model = get_model_loader(config).load_model(ModelConfig(uri), build=lambda _: nn.Linear(2, 3))
        assert torch.equal(model.get_parameter("weight"), ar(3, 2))
    torch.save({"weight": ar(3, 2), "bias": ar(3)}, tmp_path / "pytorch_model.bin")
    s3.store().put(f"{prefix}-bin/pytorch_model.bin", (tmp_path / "pytorch_model.bin").read_bytes())
    loader = get_model_loader(LoadConfig(load_format="npcache"))
    loader.load_model(ModelConfig(f"{uri}-bin"), build=lambda _: nn.Linear(2, 3))
    assert loader.report is not None
    assert any("could not be written (it lies in an object store)" in warning for warning in loader.report.warnings)


def test_a_sharded_state_is_read_from_a_bucket(s3: Seaweed, prefix: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    save_sharded_state(model, tmp_path / "state")
    uri = s3.upload(tmp_path / "state", prefix)
    loader = get_model_loader(LoadConfig(load_format="sharded_state"))
    again = loader.load_model(ModelConfig(uri), build=lambda _: nn.Linear(2, 3))
    assert torch.equal(again.get_parameter("weight"), model.weight)


def test_tensorizer_files_of_ranks_are_found_in_a_bucket(s3: Seaweed, prefix: str, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "s" / "model.safetensors", {"weight": ar(3, 2), "bias": ar(3)})
    (tmp_path / "t").mkdir()
    tensorferry.convert(tmp_path / "s", tmp_path / "t" / "model-000.tensors", to="tensorizer")
    uri = s3.upload(tmp_path / "t", prefix)
    for name in ("model-000.tensors", "model-%03d.tensors"):
        loader = get_model_loader(LoadConfig(load_format="tensorizer", options={"tensorizer_uri": f"{uri}/{name}"}))
        model = loader.load_model(ModelConfig(uri), build=lambda _: nn.Linear(2, 3))
        assert torch.equal(model.get_parameter("weight"), ar(3, 2))
        assert loader.report is not None
        assert loader.report.verified.startswith("hashes in model-000.tensors verified")


def test_weights_of_vllm_may_lie_in_a_bucket(s3: Seaweed, prefix: str, tmp_path: Path, vllm: FakeVllm) -> None:
    folder = nano_checkpoint(tmp_path / "nano")
    uri = s3.upload(folder, prefix)
    expected = filled_by_itself(folder)
    shutil.rmtree(folder)
    told = model_config(folder)
    told.model_weights = uri
    model, other = poisoned(NanoModel()), poisoned(NanoModel())
    vllm.loader().load_weights(model, told)
    load(vllm, folder, other, weights=uri)
    for one in (model, other):
        assert [n for n, t in one.state_dict().items() if not equal_bits(t, expected[n])] == []


# -- the command line -------------------------------------------------------------------------------------------------


def test_the_commands_take_addresses(s3: Seaweed, prefix: str, tmp_path: Path, run: CommandLine) -> None:
    uri = s3.upload(small(tmp_path / "m"), prefix)
    shown = run("inspect", uri)
    assert shown.status == 0
    assert shown.out.startswith(f"{uri}: safetensors, 2 files, 2 tensors")
    assert "storage: remote, read at most 8.0 MiB at a time, over holes of at most 2.0 MiB" in shown.out
    told = json.loads(run("inspect", uri, "--json").out)
    assert (told["source"], told["storage_kind"]) == (uri, "remote")
    assert run("verify", uri, "--quiet").status == 0
    assert json.loads(run("verify", uri, "--json", "--quiet").out)["source"] == uri
    assert run("convert", uri, tmp_path / "out", "--quiet").status == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["model.safetensors"]
    assert run("convert", uri, f"{uri}/out", "--quiet").status == 2
    refused = run("inspect", f"s3://{BUCKET}/{prefix}x")
    assert refused.status == 1
    assert f"nothing lies there; did you mean {prefix}" in refused.err


@pytest.mark.transformers
def test_a_model_is_planned_and_loaded_from_a_bucket(
    s3: Seaweed, prefix: str, tmp_path: Path, run: CommandLine
) -> None:
    uri = s3.upload(saved("Llama", tmp_path / "m"), prefix)
    assert run("plan", uri, "--tp", "2").status == 0
    loaded = run("load", uri, "--quiet", "--json")
    assert json.loads(loaded.out)["source"] == uri


# -- what is refused --------------------------------------------------------------------------------------------------


def untouched() -> nn.Module:
    return poisoned(nn.Linear(2, 3))


def test_a_missing_shard_is_refused_before_the_model_is_touched(s3: Seaweed, prefix: str, tmp_path: Path) -> None:
    folder = small(tmp_path / "m")
    (folder / "model-00002-of-00002.safetensors").unlink()
    model = untouched()
    with pytest.raises(LocateError, match=r"1 of them is not there: model-00002-of-00002\.safetensors") as refusal:
        tensorferry.load(model, s3.upload(folder, prefix))
    assert not refusal.value.touched
    assert is_untouched(model)


@pytest.mark.parametrize("keys", [("n0b0dy", "testsecret"), ("testkey", "1S3CR3T1")])
def test_a_wrong_key_is_refused_and_not_told(
    keys: tuple[str, str], s3: Seaweed, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = s3.upload(small(tmp_path / "m"), prefix)
    s3.use(monkeypatch, tmp_path, keys)
    with pytest.raises(
        AccessDenied, match=r"refused \(403, \w+\) .*with the key of AWS_ACCESS_KEY_ID: the "
    ) as refusal:
        tensorferry.open_checkpoint(uri)
    assert not any(key in str(refusal.value) for key in keys)


def test_a_key_that_may_only_read_is_enough(
    s3: Seaweed, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = s3.upload(small(tmp_path / "m"), prefix)
    s3.use(monkeypatch, tmp_path, READER)
    model = nn.Linear(2, 3)
    tensorferry.load(model, uri, verify=True)
    assert torch.equal(model.weight, ar(3, 2))
    with pytest.raises((AccessDenied, LocateError)):
        tensorferry.open_checkpoint("s3://secret-bucket/m")


def test_a_bucket_that_is_not_there_is_told(s3: Seaweed) -> None:
    with pytest.raises(LocateError, match=r"s3://no-such-bucket/m: (there is no such bucket|nothing lies there)"):
        tensorferry.open_checkpoint("s3://no-such-bucket/m")


def test_an_object_that_is_replaced_while_it_is_used_is_refused(s3: Seaweed, prefix: str, tmp_path: Path) -> None:
    uri = s3.upload(small(tmp_path / "m"), prefix)
    model = untouched()
    with tensorferry.open_checkpoint(uri) as checkpoint:
        s3.upload(small(tmp_path / "n", 70), prefix)
        with pytest.raises(ReadError, match="changed while it was in use: another object took its place"):
            tensorferry.load(model, checkpoint)


# -- other stores -----------------------------------------------------------------------------------------------------


def test_a_file_over_http_is_read_by_its_address_and_by_one_that_is_signed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small(tmp_path / "m")
    with FaultyStore() as server:
        upload(_Direct(server), folder, "m")
        url = f"{server.endpoint}/bucket/m"
        for path, count in [
            (f"{url}/model-00001-of-00002.safetensors", 1),
            (f"{url}/model-00001-of-00002.safetensors?signature=SECRET", 1),
            (f"{url}/model.safetensors.index.json", 2),
        ]:
            with tensorferry.open_checkpoint(path) as checkpoint:
                assert len(checkpoint.catalogue) == count
                assert torch.equal(checkpoint.read("weight"), ar(3, 2))
                assert checkpoint.uri == url
                assert "SECRET" not in repr(checkpoint)
        with pytest.raises(LocateError, match="there is no such object"):
            tensorferry.open_checkpoint(f"{url}/nope.safetensors")
        server.fault = lambda request: 403
        with pytest.raises(AccessDenied, match="with what signs the address, which may have expired") as refusal:
            tensorferry.open_checkpoint(f"{url}/model-00001-of-00002.safetensors?signature=SECRET")
        assert "SECRET" not in f"{refusal.value} {refusal.value.__cause__!r} {refusal.value.__context__!r}"


class _Direct:
    """Puts objects into a server of ours."""

    def __init__(self, server: FaultyStore) -> None:
        self.server = server

    def put(self, key: str, data: bytes) -> None:
        self.server.objects[key] = data


def test_what_was_opened_leaves_no_thread_behind(s3: Seaweed, prefix: str, tmp_path: Path) -> None:
    uri, before = s3.upload(small(tmp_path / "m"), prefix), set(threading.enumerate())
    with suppress(LocateError):
        tensorferry.open_checkpoint(f"{uri}-nothing")
    tensorferry.load(nn.Linear(2, 3), uri)
    assert set(threading.enumerate()) == before


@pytest.mark.transformers
@pytest.mark.parametrize("status", [403, 404])
def test_who_may_not_list_gets_the_small_files_by_their_names(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved("Llama", tmp_path / "m", shard="20kB")
    with FaultyStore() as server:
        server.use(monkeypatch, tmp_path)
        upload(_Direct(server), folder, "m")
        server.fault = lambda request: (
            403 if request.key.startswith("?") else None if request.key in server.objects else status
        )
        uri = "s3://bucket/m/model.safetensors.index.json"
        model = tensorferry.load_model(uri)
        tensorferry.convert(uri, tmp_path / "out")
    here = by_transformers(folder)
    assert [n for n, t in here.state_dict().items() if not equal_bits(model.state_dict()[n], t)] == []
    assert (tmp_path / "out" / "config.json").is_file()
