"""Other libraries that read safetensors files for us: same plan, same completeness, same report; and what they lack."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_raw_safetensors, write_safetensors
from helpers.measuring import measured
from helpers.memory_storage import MemoryStorage
from helpers.third_party import (
    LIBRARIES,
    MIB,
    Borrowing,
    Recorded,
    filled,
    need,
    planned,
    pretend_version,
    unchanged_environment,
    write_sharded,
)
from tensorferry.checkpoint import open_checkpoint
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.lower import lower
from tensorferry.core.planning import make_plan
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import TargetTensor
from tensorferry.errors import ConfigError, CorruptFile, PlanError, ReadError
from tensorferry.loaders import LoadConfig, ModelConfig, get_model_loader
from tensorferry.loaders.default import DefaultModelLoader
from tensorferry.loaders.third_party.batches import FileBatch
from tensorferry.loaders.third_party.executor import LibraryExecutor, Tensors
from tensorferry.loaders.third_party.runai import RunaiExecutor, RunaiOptions

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


class Model(nn.Module):
    """Two matrices of which the second is tied, and a vector."""

    def __init__(self, config: object = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embed.weight


WEIGHTS = {"embed.weight": ar(6, 4), "head.bias": ar(6, start=50)}


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

    def tensors(self, batch: FileBatch) -> Tensors:
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

    def tensors(self: Any, batch: FileBatch) -> Tensors:
        write_safetensors(tmp_path / "new", {name: -tensor for name, tensor in WEIGHTS.items()})
        (tmp_path / "new").replace(tmp_path / "model.safetensors")
        return inner(self, batch)

    monkeypatch.setattr(kind, "tensors", tensors)
    with pytest.raises(ReadError, match=r"model\.safetensors") as caught:
        get_model_loader(LoadConfig(load_format=library)).load_model(ModelConfig(str(tmp_path)), Model)
    assert caught.value.touched


def test_a_library_that_leaves_something_out_is_found_out(tmp_path: Path) -> None:
    class Forgetful(Borrowing):
        def tensors(self, batch: FileBatch) -> Tensors:
            yield from (pair for pair in super().tensors(batch) if pair[0] != "layers.3.weight")

    write_safetensors(tmp_path / "model.safetensors", SIX)
    with pytest.raises(ReadError, match=r"model\.safetensors: borrowing handed on all but 1 .*: layers\.3\.weight"):
        filled(Forgetful(), tmp_path)


def test_a_library_that_hands_on_another_shape_is_found_out(tmp_path: Path) -> None:
    class Flat(Borrowing):
        def tensors(self, batch: FileBatch) -> Tensors:
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
        def tensors(self, batch: FileBatch) -> Tensors:
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
    # The slack has the 16 MiB of bounce buffers of fastsafetensors; unbounded, each library takes over 150 MiB.
    assert told["peak"] <= (256 + 32 + 64) * MIB
