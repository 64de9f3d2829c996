"""Other libraries that read safetensors files for us: same plan, same completeness, same report; and what they lack."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, raw, write_index, write_raw_safetensors, write_safetensors
from helpers.measuring import measured
from helpers.memory_storage import MemoryStorage
from helpers.third_party import (
    LIBRARIES,
    MIB,
    Borrowing,
    Recorded,
    empty,
    filled,
    need,
    planned,
    pretend_instanttensor,
    pretend_version,
    unchanged_environment,
)
from tensorferry.checkpoint import Checkpoint, open_checkpoint
from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import Catalogue, Chunk, Span, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.lower import lower
from tensorferry.core.planning import make_plan
from tensorferry.core.rules import Join
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Slot, TargetTensor
from tensorferry.core.transforms import Chain, Stack, Transpose
from tensorferry.errors import ConfigError, CorruptFile, PlanError, ReadError
from tensorferry.execute import Counters, ThreadedExecutor
from tensorferry.loaders import LoadConfig, ModelConfig, get_model_loader
from tensorferry.loaders.default import DefaultModelLoader
from tensorferry.loaders.third_party.batches import Batch
from tensorferry.loaders.third_party.executor import COMMON_TYPES, LibraryExecutor, Tensors
from tensorferry.loaders.third_party.instanttensor import InstantTensorExecutor, InstantTensorOptions
from tensorferry.loaders.third_party.runai import RunaiExecutor, RunaiOptions
from tensorferry.storage.local import LocalStorage

F32 = DTYPES["F32"]
CPU = torch.device("cpu")

SIX = {f"layers.{i}.weight": ar(5, 4, start=100 * i) for i in range(6)}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    need(request.param)
    name: str = request.param
    return name


@pytest.fixture
def executor(library: str) -> LibraryExecutor:
    return LIBRARIES[library]()


def write_sharded(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> Path:
    """Write `tensors` into so many shards in turn, with an index."""
    names = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    where = {key: names[n % shards] for n, key in enumerate(tensors)}
    for name in names:
        write_safetensors(folder / name, {k: t for k, t in tensors.items() if where[k] == name})
    write_index(folder / "model.safetensors.index.json", where)
    return folder


class Model(nn.Module):
    """Two matrices of which the second is tied, and a vector."""

    def __init__(self, config: object = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embed.weight


WEIGHTS = {"embed.weight": ar(6, 4), "head.bias": ar(6, start=50)}


# -- what comes in


def test_a_sharded_checkpoint_is_filled_as_by_our_own_reader(executor: LibraryExecutor, tmp_path: Path) -> None:
    write_sharded(tmp_path, SIX, 3)
    found, ours = filled(executor, tmp_path), filled(ThreadedExecutor(1), tmp_path)
    assert {n: t.tolist() for n, t in found.items()} == {n: t.tolist() for n, t in ours.items()}


@pytest.mark.parametrize("dtype", sorted(COMMON_TYPES))
def test_every_type_arrives_bit_by_bit(executor: LibraryExecutor, dtype: str, tmp_path: Path) -> None:
    kind, ones = DTYPES[dtype], dtype == "BOOL"
    shapes = {"m": (3, 8), "v": (2,), **({} if kind.block > 1 else {"s": ()}), "e": (0, 2)}
    data = {n: bytes((7 * i) % (2 if ones else 256) for i in range(kind.nbytes(shape))) for n, shape in shapes.items()}
    write_raw_safetensors(tmp_path / "model.safetensors", [(n, dtype, shapes[n], data[n]) for n in shapes])
    found = filled(executor, tmp_path)
    assert {n: raw(t) for n, t in found.items()} == data


def test_only_files_and_names_that_the_plan_needs_are_asked_for(executor: LibraryExecutor, tmp_path: Path) -> None:
    write_sharded(tmp_path, SIX, 3)
    recorded = Recorded(executor)
    target = [TargetTensor.plain(f"layers.{i}.weight", F32, (5, 4)) for i in (0, 1)]
    found = filled(recorded, tmp_path, *target)
    (batch,) = recorded.asked
    assert [Path(p).name for p in batch.paths] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2)]
    assert sorted(batch.parts) == sorted(found) == ["layers.0.weight", "layers.1.weight"]
    assert all(torch.equal(found[name], SIX[name]) for name in found)


def test_a_rank_takes_its_part_of_each_tensor(executor: LibraryExecutor, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"w": ar(6, 4)})
    slot = Slot(Region.whole((6, 2)), (6, 4), Region((6, 4), Box((0, 2), (6, 4))))
    found = filled(executor, tmp_path, TargetTensor("w", F32, (6, 2), {"": slot}))
    assert torch.equal(found["w"], ar(6, 4)[:, 2:])


def test_tensors_that_wait_for_others_outlive_the_buffers_of_the_library(
    executor: LibraryExecutor, tmp_path: Path
) -> None:
    many = {f"e.{i}": ar(64, 64, start=5000 * i) for i in range(8)}
    write_sharded(tmp_path, many, 2)
    rule = Join(("e.{i}",), "t", Chain((Stack(0), Transpose((2, 1, 0)))))
    for one in (executor, Borrowing()):
        found = filled(one, tmp_path, TargetTensor.plain("t", F32, (64, 64, 8)), rules=RuleSet(rule))
        assert torch.equal(found["t"], torch.stack(list(many.values())).permute(2, 1, 0))


def test_names_that_stand_in_several_files_are_taken_from_the_right_one(
    executor: LibraryExecutor, tmp_path: Path
) -> None:
    a, b = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    write_safetensors(tmp_path / a, {"x": ar(4), "y": ar(4, start=100)})
    write_safetensors(tmp_path / b, {"x": ar(4, start=200), "y": ar(4, start=300)})
    with LocalStorage(tmp_path) as storage:
        recorded, at = Recorded(executor), (tmp_path / a).stat().st_size - 32
        entries = [TensorEntry.at("x", F32, (4,), a, at), TensorEntry.at("y", F32, (4,), b, at + 16)]
        checkpoint = _checkpoint(storage, entries)
        schedule = planned(checkpoint)
        found = empty(schedule)
        recorded.run(schedule, storage, found)
    assert [batch.labels for batch in recorded.asked] == [[a], [b]]
    assert found["x"].tolist() == [0, 1, 2, 3]
    assert found["y"].tolist() == [300, 301, 302, 303]


def test_an_entry_that_lies_in_several_files_is_put_together(executor: LibraryExecutor, tmp_path: Path) -> None:
    whole = ar(4, 6)
    for rank in (0, 1):
        write_safetensors(tmp_path / f"rank-{rank}.safetensors", {"w": whole[:, 3 * rank : 3 * rank + 3]})
    start = (tmp_path / "rank-0.safetensors").stat().st_size - 48
    boxes = [Box((0, 3 * rank), (4, 3 * rank + 3)) for rank in (0, 1)]
    chunks = tuple(Chunk(box, Span(f"rank-{rank}.safetensors", start, 48)) for rank, box in enumerate(boxes))
    entry = TensorEntry("w", F32, (4, 6), chunks)
    slot = Slot(Region.whole((2, 6)), (4, 6), Region((4, 6), Box((1, 0), (3, 6))))
    with LocalStorage(tmp_path) as storage:
        checkpoint = _checkpoint(storage, [entry])
        schedule = planned(checkpoint, TargetTensor("w", F32, (2, 6), {"": slot}))
        found = empty(schedule)
        executor.run(schedule, storage, found)
        assert torch.equal(found["w"], whole[1:3])
        assert [(n, t.tolist()) for n, t in executor.stream(storage, [entry], Counters())] == [("w", whole.tolist())]


def test_a_stream_yields_tensors_that_stay(executor: LibraryExecutor, tmp_path: Path) -> None:
    tensors = SIX | {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    write_sharded(tmp_path, tensors, 2)
    for one in (executor, Borrowing()):
        counters = Counters()
        with open_checkpoint(tmp_path) as checkpoint:
            found = dict(one.stream(checkpoint.storage, list(checkpoint.catalogue.values()), counters))
        assert {n: t.tolist() for n, t in found.items()} == {n: t.tolist() for n, t in tensors.items()}
        assert counters.bytes_read == 6 * 80 + 4


def _checkpoint(storage: LocalStorage, entries: list[TensorEntry]) -> Checkpoint:
    from tensorferry.config import ReadOptions
    from tensorferry.formats.base import Selection
    from tensorferry.formats.opening import Opened

    catalogue = Catalogue(entries, format="safetensors", files=[f.path for f in storage.list()])
    return Checkpoint(Opened(storage, Selection("safetensors", tuple(storage.list()), ""), catalogue), ReadOptions())


# -- the loaders


def test_a_model_is_loaded_and_the_report_says_by_what(library: str, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", WEIGHTS | {"spare": ar(3)})
    loader = get_model_loader(LoadConfig(load_format=library.upper()))
    model = loader.load_model(ModelConfig(str(tmp_path)), Model)
    assert torch.equal(model.get_parameter("head.weight"), WEIGHTS["embed.weight"])
    assert torch.equal(model.get_parameter("head.bias"), WEIGHTS["head.bias"])
    assert loader.report is not None
    assert loader.report.executor == type(LIBRARIES[library]()).__name__
    assert loader.report.bytes_needed == loader.report.bytes_read == 120
    assert loader.report.unexpected == ("spare",)


def test_a_missing_tensor_stops_the_load_before_the_library_is_asked(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"embed.weight": ar(6, 4)})
    monkeypatch.setattr(LibraryExecutor, "run", None)
    model = Model()
    before = model.head.bias.tolist()
    with pytest.raises(PlanError, match=r"missing: head\.bias") as caught:
        get_model_loader(LoadConfig(load_format=library)).load_weights(model, ModelConfig(str(tmp_path)))
    assert not caught.value.touched
    assert model.head.bias.tolist() == before


def test_sources_with_prefixes_may_hold_equal_names(library: str, tmp_path: Path) -> None:
    for part, start in (("one", 0), ("two", 100)):
        write_safetensors(tmp_path / part / "model.safetensors", {"weight": ar(2, 2, start=start)})

    class Both(nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 2))
            self.other = nn.Linear(2, 2, bias=False)
            self.secondary_weights = [DefaultModelLoader.Source(tmp_path / "two", prefix="other.")]

    model = get_model_loader(LoadConfig(load_format=library)).load_model(ModelConfig(str(tmp_path / "one")), Both)
    assert model.get_parameter("weight").tolist() == [[0, 1], [2, 3]]
    assert model.get_parameter("other.weight").tolist() == [[100, 101], [102, 103]]


class Own(Model):
    """Fills itself."""

    def load_weights(self, weights: Any) -> set[str]:
        kept = list(weights)
        for name, tensor in kept:
            with torch.no_grad():
                self.get_parameter(name).copy_(tensor)
        return {name for name, _ in kept}


@pytest.mark.parametrize("how", ["trace", "stream"])
def test_models_with_their_own_loader_are_filled(library: str, how: str, tmp_path: Path) -> None:
    write_sharded(tmp_path, WEIGHTS, 2)
    loader = get_model_loader(LoadConfig.from_dict({"load_format": library, "own_loader": how}))
    model = loader.load_model(ModelConfig(str(tmp_path)), Own)
    assert torch.equal(model.get_parameter("embed.weight"), WEIGHTS["embed.weight"])
    assert torch.equal(model.get_parameter("head.bias"), WEIGHTS["head.bias"])
    assert loader.report is not None
    assert loader.report.executor == type(LIBRARIES[library]()).__name__
    assert bool(loader.report.streamed) == (how == "stream")


def test_all_weights_are_yielded_through_the_library(library: str, tmp_path: Path) -> None:
    write_sharded(tmp_path, WEIGHTS, 2)
    loader = get_model_loader(LoadConfig(load_format=library))
    assert isinstance(loader, DefaultModelLoader)
    found = dict(loader.get_all_weights(ModelConfig(str(tmp_path)), Model()))
    assert {n: t.tolist() for n, t in found.items()} == {n: t.tolist() for n, t in WEIGHTS.items()}


@pytest.mark.parametrize("given", [{"strategy": "eager"}, {"threads": 4}, {"read": {"threads": 2}}])
def test_how_tensorferry_would_read_is_no_option(library: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="says how tensorferry reads, and with load_format"):
        get_model_loader(LoadConfig.from_dict({"load_format": library, **given}))


# -- what goes wrong


def test_a_truncated_shard_is_refused_by_name_before_anything_is_touched(library: str, tmp_path: Path) -> None:
    write_sharded(tmp_path, WEIGHTS, 2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(CorruptFile, match=r"model-00002-of-00002\.safetensors") as caught:
        get_model_loader(LoadConfig(load_format=library)).load_model(ModelConfig(str(tmp_path)), Model)
    assert not caught.value.touched


class Meddling(Recorded):
    """Does something to the first file after it was checked and before the library opens it."""

    def __init__(self, inner: LibraryExecutor, deed: Any) -> None:
        super().__init__(inner)
        self.deed = deed

    def tensors(self, batch: Batch) -> Tensors:
        self.deed(Path(batch.paths[0]))
        yield from super().tensors(batch)


def test_a_shard_that_is_cut_meanwhile_is_an_error_with_its_name(executor: LibraryExecutor, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", SIX)
    cut = Meddling(executor, lambda path: os.truncate(path, path.stat().st_size - 8))
    with pytest.raises(ReadError, match=rf"^model\.safetensors: {executor.name} could not read it: ."):
        filled(cut, tmp_path)


def test_a_shard_that_is_replaced_meanwhile_is_noticed(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_safetensors(tmp_path / "model.safetensors", WEIGHTS)
    kind = type(LIBRARIES[library]())
    inner = kind.tensors

    def tensors(self: Any, batch: Batch) -> Tensors:
        write_safetensors(tmp_path / "new", {name: -tensor for name, tensor in WEIGHTS.items()})
        (tmp_path / "new").replace(tmp_path / "model.safetensors")
        return inner(self, batch)

    monkeypatch.setattr(kind, "tensors", tensors)
    with pytest.raises(ReadError, match=r"model\.safetensors") as caught:
        get_model_loader(LoadConfig(load_format=library)).load_model(ModelConfig(str(tmp_path)), Model)
    assert caught.value.touched


def test_a_library_that_leaves_something_out_is_found_out(tmp_path: Path) -> None:
    class Forgetful(Borrowing):
        def tensors(self, batch: Batch) -> Tensors:
            yield from (pair for pair in super().tensors(batch) if pair[0] != "layers.3.weight")

    write_safetensors(tmp_path / "model.safetensors", SIX)
    with pytest.raises(ReadError, match=r"model\.safetensors: borrowing handed on all but 1 .*: layers\.3\.weight"):
        filled(Forgetful(), tmp_path)


def test_a_library_that_hands_on_another_shape_is_found_out(tmp_path: Path) -> None:
    class Flat(Borrowing):
        def tensors(self, batch: Batch) -> Tensors:
            yield from ((name, tensor.reshape(-1)) for name, tensor in super().tensors(batch))

    write_safetensors(tmp_path / "model.safetensors", SIX)
    with pytest.raises(PlanError, match=r"was fed as torch\.float32 \(20,\), but the plan was made for F32 \(5, 4\)"):
        filled(Flat(), tmp_path)


def test_a_type_that_the_library_does_not_know_is_refused_before_anything_is_touched(
    executor: LibraryExecutor, tmp_path: Path
) -> None:
    write_raw_safetensors(
        tmp_path / "model.safetensors", [("w", "F32", (1,), bytes(4)), ("odd", "F8_E4M3FNUZ", (1,), bytes(1))]
    )
    with open_checkpoint(tmp_path) as checkpoint:
        schedule = planned(checkpoint, TargetTensor.plain("w", F32, (1,)))
        with pytest.raises(ConfigError, match=f"'odd' has the type F8_E4M3FNUZ, which {executor.name} does not know"):
            executor.run(schedule, checkpoint.storage, {})


def test_files_that_are_not_on_this_machine_are_refused_before_anything_is_touched(executor: LibraryExecutor) -> None:
    entry = TensorEntry.at("w", F32, (1,), "far.safetensors", 8)
    plan = make_plan(Catalogue([entry], format="memory"), {"w": TargetTensor.plain("w", F32, (1,))}, RuleSet())
    schedule = lower(plan, max_gap=0, max_read=4096, max_staging=4096, waste=2.0)
    with pytest.raises(ConfigError, match=r"far\.safetensors of memory: .* reads files of this machine"):
        executor.run(schedule, MemoryStorage({"far.safetensors": bytes(12)}), {})


def test_torch_files_are_refused(executor: LibraryExecutor, tmp_path: Path) -> None:
    torch.save({"w": ar(2, 2).t()}, tmp_path / "pytorch_model.bin")
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(ConfigError, match="reads safetensors files"):
        executor.run(planned(checkpoint), checkpoint.storage, {})


# -- what is not there


def test_a_library_that_is_not_installed_is_told_before_a_model_is_built(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution = {"fastsafetensors": "fastsafetensors", "runai_streamer": "runai-model-streamer"}[library]
    loader = get_model_loader(LoadConfig(load_format=library))
    for found, says in ((None, "is not installed: pip install"), ("0.1.2", "0.1.2 is installed, and 0.* is needed")):
        pretend_version(monkeypatch, distribution, found)
        with pytest.raises(ConfigError, match=says):
            loader.load_model(ModelConfig(str(tmp_path)), lambda config: pytest.fail("it was built"))
        with pytest.raises(ConfigError, match=says):
            loader.load_weights(Model(), ModelConfig(str(tmp_path)))


def test_a_library_that_cannot_be_imported_is_told(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr("tensorferry.loaders.third_party.library.import_module", fail)
    with pytest.raises(ConfigError, match=r"cannot be imported: libcudart\.so\.12"):
        get_model_loader(LoadConfig(load_format=library)).load_model(ModelConfig("."), Model)


def test_gpu_direct_storage_needs_a_gpu(tmp_path: Path) -> None:
    need("fastsafetensors")
    loader = get_model_loader(LoadConfig(load_format="fastsafetensors", options={"gds": True}))
    with pytest.raises(ConfigError, match="GPUDirect Storage reads into the memory of a GPU, and the device is cpu"):
        loader.load_model(ModelConfig(str(tmp_path)), Model)


# -- options


@pytest.mark.parametrize(
    ("load_format", "options"),
    [
        ("runai_streamer", {"concurrency": 0}),
        ("runai_streamer", {"concurrency": True}),
        ("runai_streamer", {"concurrency": "4"}),
        ("runai_streamer", {"memory_limit": -2}),
        ("runai_streamer", {"memory_limit": 1.5}),
        ("runai_streamer", {"distributed": 1}),
        ("runai_streamer", {"no_such": 1}),
        ("fastsafetensors", {"max_threads": 0}),
        ("fastsafetensors", {"gds": "yes"}),
        ("instanttensor", {"buffer_size": 0}),
        ("instanttensor", {"io_depth": "8"}),
    ],
)
def test_options_that_are_none_are_refused(load_format: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        get_model_loader(LoadConfig(load_format=load_format, options=options))


def test_the_environment_of_the_process_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("runai_streamer")
    write_safetensors(tmp_path / "model.safetensors", SIX)
    monkeypatch.setenv("RUNAI_STREAMER_MEMORY_LIMIT", "12345")
    seen = []

    class Peeping(Recorded):
        def tensors(self, batch: Batch) -> Tensors:
            for pair in self.inner.tensors(batch):
                seen.append(os.environ["RUNAI_STREAMER_MEMORY_LIMIT"])
                yield pair

    with unchanged_environment():
        filled(Peeping(RunaiExecutor(CPU, MIB, RunaiOptions(concurrency=2))), tmp_path)
        assert set(seen) == {"12345"}
        with pytest.raises(ReadError):
            filled(Meddling(RunaiExecutor(CPU, MIB), lambda path: os.truncate(path, 9)), tmp_path)


def test_a_limit_below_the_largest_tensor_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    need("runai_streamer")
    write_safetensors(tmp_path / "model.safetensors", {"w": ar(1000)})
    with open_checkpoint(tmp_path) as checkpoint:
        limited = RunaiExecutor(CPU, MIB, RunaiOptions(memory_limit=3999))
        with pytest.raises(ConfigError, match=r"memory_limit 3,999: the largest .* takes 4,000 bytes"):
            limited.run(planned(checkpoint), checkpoint.storage, {})
    for limit in (0, 4000, -1):
        found = filled(RunaiExecutor(CPU, MIB, RunaiOptions(memory_limit=limit)), tmp_path)
        assert torch.equal(found["w"], ar(1000))


def test_reading_that_ranks_share_needs_ranks(tmp_path: Path) -> None:
    need("runai_streamer")
    loader = get_model_loader(LoadConfig(load_format="runai_streamer", options={"distributed": True}))
    with pytest.raises(ConfigError, match="which is not initialized"):
        loader.load_model(ModelConfig(str(tmp_path)), Model)


BOUNDED = """
from tensorferry.loaders import LoadConfig, ModelConfig, get_model_loader
load_format, limit = sys.argv[2], int(sys.argv[3])
options = {"memory_limit": limit} if sys.argv[4] == "option" else {}
read = {"max_staging": 256 << 20 if options else limit, "max_read": 4 << 20}
loader = get_model_loader(LoadConfig.from_dict({"load_format": load_format, "options": options, "read": read}))
loader.reading
def build(config):
    with torch.device("meta"):
        return torch.nn.ParameterDict({f"w{i}": torch.empty(1024, 1024) for i in range(64)})
told["peak"], told["after"] = peak.of(lambda: loader.load_model(ModelConfig(folder), build))
told["right"] = all(bool((peak.result[f"w{i}"] == i).all()) for i in range(64))
"""


@pytest.mark.parametrize("limit", ["option", "bound"])
def test_memory_beside_the_parameters_is_bounded(library: str, limit: str, tmp_path: Path) -> None:
    if (library, limit) == ("fastsafetensors", "option"):
        pytest.skip("it has no limit of its own")
    write_sharded(tmp_path, {f"w{i}": torch.full((1024, 1024), float(i)) for i in range(64)}, 2)
    told = measured(BOUNDED, tmp_path, library, str(32 * MIB), limit)
    assert told["right"]
    # The bounce buffers of fastsafetensors are 16 MiB; unbounded, each library would take 128 MiB or more.
    assert told["peak"] <= (256 + 32 + 16 + 32) * MIB


# -- instanttensor, of which there is a stand-in: it reads on NVIDIA GPUs only


def test_without_an_nvidia_gpu_instanttensor_is_refused_before_a_model_is_built() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU and a torch that is built for CUDA, and finds none"):
        get_model_loader(LoadConfig(load_format="instanttensor")).load_model(
            ModelConfig("."), lambda config: pytest.fail("it was built")
        )


def test_instanttensor_is_asked_for_exact_names_of_the_files_that_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = pretend_instanttensor(monkeypatch)
    write_sharded(tmp_path, SIX, 3)
    executor = InstantTensorExecutor(torch.device("cuda:0"), InstantTensorOptions(buffer_size=MIB))
    found = filled(executor, tmp_path, TargetTensor.plain("layers.1.weight", F32, (5, 4)))
    assert torch.equal(found["layers.1.weight"], SIX["layers.1.weight"])
    (call,) = calls
    assert [Path(file).name for file in call.pop("files")] == ["model-00002-of-00003.safetensors"]
    assert call == {"buffer_size": MIB, "copy": True, "device": torch.device("cuda:0")}


def test_a_model_is_loaded_through_instanttensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_instanttensor(monkeypatch)
    write_sharded(tmp_path, WEIGHTS, 2)
    loader = get_model_loader(LoadConfig(load_format="instanttensor"))
    model = loader.load_model(ModelConfig(str(tmp_path)), Model)
    assert torch.equal(model.get_parameter("head.weight"), WEIGHTS["embed.weight"])
    assert loader.report is not None
    assert loader.report.executor == "InstantTensorExecutor"


def test_an_old_instanttensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_instanttensor(monkeypatch, version="0.2.1")
    with pytest.raises(ConfigError, match=r"instanttensor 0\.2\.1 is installed, and 0\.2\.2 or newer is needed"):
        get_model_loader(LoadConfig(load_format="instanttensor")).load_model(ModelConfig("."), Model)
