"""What every executor keeps to. Subclass `ExecutorConformance` to hold an executor of your own to it."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import pytest
import torch

from helpers.checkpoints import ar, raw
from helpers.memory_storage import MemoryStorage
from helpers.pushing import Pushing, lent
from tensorferry.config import ReadOptions
from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.lower import lower
from tensorferry.core.planning import make_plan
from tensorferry.core.rules import Join, Part, Rule, Split
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.schedule import Schedule
from tensorferry.core.target import Slot, TargetTensor
from tensorferry.core.transforms import Custom, Stack, TensorSpec
from tensorferry.errors import ReadError
from tensorferry.execute import Executor, SimpleExecutor, ThreadedExecutor
from tensorferry.loaders.strategies import EagerExecutor, PrefetchExecutor
from tensorferry.numerics.casts import Loss
from tensorferry.numerics.torch_dtypes import dtype_of, torch_dtype

SETTINGS = {"max_gap": 8, "max_read": 64, "max_staging": 128, "waste": 4.0}
F32 = DTYPES["F32"]


class Load:
    """Tensors in two files of a `MemoryStorage`, and what is to be filled from them."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], *target: TargetTensor, rules: tuple[Rule, ...] = ()
    ) -> None:
        files, entries = {"a": bytearray(b"header"), "b": bytearray()}, []
        for n, (name, tensor) in enumerate(tensors.items()):
            file = "ab"[n % 2]
            files[file] += bytes(-len(files[file]) % 8)
            entries.append(TensorEntry.at(name, dtype_of(tensor.dtype), tuple(tensor.shape), file, len(files[file])))
            files[file] += raw(tensor)
        self.storage = MemoryStorage({name: bytes(data) for name, data in files.items()})
        catalogue = Catalogue(entries, format="memory", files=files)
        self.plan = make_plan(catalogue, {t.name: t for t in target}, RuleSet(*rules))
        self.plan.raise_for_problems()

    @classmethod
    def plain(cls, tensors: Mapping[str, torch.Tensor]) -> Load:
        """Return a load that fills each tensor as it is."""
        target = [TargetTensor.plain(n, dtype_of(t.dtype), tuple(t.shape)) for n, t in tensors.items()]
        return cls(tensors, *target)

    @property
    def schedule(self) -> Schedule:
        return lower(self.plan, **SETTINGS)  # type: ignore[arg-type]

    def empty(self) -> dict[str, torch.Tensor]:
        specs = self.plan.parameters.items()
        return {name: torch.full(spec.shape, -1.0).to(torch_dtype(spec.dtype)) for name, spec in specs}


class Watched(Mapping[str, torch.Tensor]):
    """Parameters that note which of them were looked up."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.asked.add(name)
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class Told:
    """Progress that adds up what it is told."""

    def __init__(self) -> None:
        self.total, self.done, self.finished = 0, 0, False
        self._lock = threading.Lock()

    def start(self, total: int, what: str) -> None:
        self.total = total

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes

    def finish(self) -> None:
        self.finished = True


SIX = {f"layers.{i}.weight": ar(5, 4, start=100 * i) for i in range(6)}


class ExecutorConformance(ABC):
    """Give `executor`. `stages_within_bound` is for those that follow the schedule, and so keep to its bound."""

    stages_within_bound = True

    @abstractmethod
    def executor(self) -> Executor:
        """Return the executor to be tested."""

    @pytest.fixture(autouse=True)
    def _no_thread_is_left(self) -> Iterator[None]:
        before = set(threading.enumerate())
        yield
        assert set(threading.enumerate()) == before

    def test_parameters_hold_what_the_checkpoint_holds(self) -> None:
        load = Load.plain(SIX)
        found = load.empty()
        self.executor().run(load.schedule, load.storage, found)
        assert {n: t.tolist() for n, t in found.items()} == {n: t.tolist() for n, t in SIX.items()}

    def test_values_are_cast_to_the_type_of_the_parameter(self) -> None:
        tensors = {"w": ar(3, 3, dtype=torch.bfloat16)}
        load = Load(tensors, TargetTensor.plain("w", F32, (3, 3)))
        found = load.empty()
        self.executor().run(load.schedule, load.storage, found)
        assert found["w"].dtype == torch.float32
        assert found["w"].tolist() == ar(3, 3).tolist()

    def test_a_slot_takes_its_window_and_a_default_fills_the_rest(self) -> None:
        slot = Slot(Region((3, 2), Box((0, 0), (2, 2))), (4, 2), Region((4, 2), Box((2, 0), (4, 2))))
        load = Load({"w": ar(4, 2)}, TargetTensor("w", F32, (3, 2), {"": slot}, default=7.0))
        found = load.empty()
        self.executor().run(load.schedule, load.storage, found)
        assert found["w"].tolist() == [[4, 5], [6, 7], [7, 7]]

    def test_a_transform_over_several_entries_is_computed(self) -> None:
        tensors = {f"e.{i}": ar(2, 2, start=10 * i) for i in range(3)}
        rule = Join(("e.{i}",), "stacked", Stack(0))
        load = Load(tensors, TargetTensor.plain("stacked", F32, (3, 2, 2)), rules=(rule,))
        found = load.empty()
        self.executor().run(load.schedule, load.storage, found)
        assert found["stacked"].tolist() == torch.stack(list(tensors.values())).tolist()

    def test_one_entry_may_feed_several_parameters(self) -> None:
        rule = Split("w", (Part("one"), Part("other")))
        target = [TargetTensor.plain(name, F32, (2, 3)) for name in ("one", "other")]
        load = Load({"w": ar(2, 3)}, *target, rules=(rule,))
        found = load.empty()
        self.executor().run(load.schedule, load.storage, found)
        assert found["one"].tolist() == found["other"].tolist() == ar(2, 3).tolist()

    def test_scalars_and_tensors_without_elements_are_filled(self) -> None:
        load = Load.plain({"s": torch.tensor(2.5), "n": torch.empty(0, 3), "w": ar(2)})
        found, ready = load.empty(), set[str]()
        self.executor().run(load.schedule, load.storage, found, on_ready=ready.add)
        assert found["s"].item() == 2.5
        assert ready == {"s", "n", "w"}

    def test_what_is_made_of_inputs_without_elements_is_made(self) -> None:
        ones = Custom("ones", TensorSpec(F32, (2,)), lambda parts: torch.ones(2))
        load = Load({"e.0": torch.empty(0)}, TargetTensor.plain("w", F32, (2,)), rules=(Join(("e.{i}",), "w", ones),))
        found, ready = load.empty(), list[str]()
        self.executor().run(load.schedule, load.storage, found, on_ready=ready.append)
        assert (found["w"].tolist(), ready) == ([1, 1], ["w"])

    @pytest.mark.parametrize("name", ["bool", "uint16", "uint64", "int8", "float8_e4m3fn", "float64", "complex64"])
    def test_every_sort_of_number_arrives_bit_by_bit(self, name: str) -> None:
        bits = (torch.arange(64) % 2).to(torch.uint8)
        load = Load.plain({"w": bits.view(getattr(torch, name))})
        found = load.empty()
        self.executor().run(load.schedule, load.storage, found)
        assert found["w"].view(torch.uint8).tolist() == bits.tolist()

    def test_a_parameter_that_is_seen_conjugated_is_filled_as_it_is_seen(self) -> None:
        load = Load.plain({"w": torch.tensor([1 + 2j, 3 - 4j])})
        found = {"w": torch.zeros(2, dtype=torch.complex64).conj()}
        self.executor().run(load.schedule, load.storage, found)
        assert found["w"].tolist() == [1 + 2j, 3 - 4j]

    def test_strided_parameters_keep_their_strides(self) -> None:
        load = Load.plain({"w": ar(2, 3, 4, 5)})
        found = {"w": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)}
        self.executor().run(load.schedule, load.storage, found)
        assert found["w"].tolist() == ar(2, 3, 4, 5).tolist()
        assert found["w"].is_contiguous(memory_format=torch.channels_last)

    def test_leaves_that_require_a_gradient_are_filled(self) -> None:
        load = Load.plain(SIX)
        found = {name: torch.zeros(5, 4, requires_grad=True) for name in SIX}
        self.executor().run(load.schedule, load.storage, found)
        assert all(torch.equal(found[name], SIX[name]) for name in SIX)
        assert all(t.is_leaf and t.requires_grad for t in found.values())

    def test_a_default_device_of_the_caller_does_not_matter(self) -> None:
        load = Load({"w": ar(3, 3, dtype=torch.float64)}, TargetTensor.plain("w", F32, (3, 3)))
        found = load.empty()
        with torch.device("meta"):
            self.executor().run(load.schedule, load.storage, found)
        assert found["w"].tolist() == ar(3, 3).tolist()

    def test_each_parameter_is_told_ready_once_when_it_is_whole_by_the_calling_thread(self) -> None:
        load = Load.plain(SIX)
        found, told = load.empty(), list[str]()

        def ready(name: str) -> None:
            assert threading.current_thread() is threading.main_thread()
            assert found[name].tolist() == SIX[name].tolist()
            told.append(name)

        self.executor().run(load.schedule, load.storage, found, on_ready=ready)
        assert sorted(told) == sorted(SIX)

    def test_only_parameters_that_are_filled_are_looked_up(self) -> None:
        target = [TargetTensor.plain("a", F32, (2,)), TargetTensor.plain("b", F32, (2,))]
        load = Load({"a": ar(2), "b": ar(2)}, *target)
        plan = type(load.plan)(load.plan.steps[:1], load.plan.parameters)
        found = Watched(load.empty())
        self.executor().run(lower(plan, **SETTINGS), load.storage, found)  # type: ignore[arg-type]
        assert found.asked == {"a"}

    def test_a_parameter_that_is_ready_may_be_let_go_of(self) -> None:
        load = Load.plain(SIX)
        found = load.empty()
        freed: list[bool] = []

        def ready(name: str) -> None:
            seen = weakref.ref(found.pop(name))
            freed.append(seen() is None)

        self.executor().run(load.schedule, load.storage, found, on_ready=ready)
        assert freed == [True] * 6

    def test_what_is_counted_is_what_was_read(self) -> None:
        load = Load.plain(SIX)
        counters = self.executor().run(load.schedule, load.storage, load.empty())
        assert counters.bytes_read == sum(length for _, _, length in load.storage.reads) >= load.plan.bytes_needed
        assert counters.reads == len(load.storage.reads)
        assert 0 <= counters.direct_bytes <= counters.bytes_read
        if self.stages_within_bound:
            assert counters.staging_peak <= SETTINGS["max_staging"]

    def test_losses_are_counted_by_parameter(self) -> None:
        tensors = {"w": torch.tensor([1, 1e5, -1e30, 1e-30], dtype=torch.bfloat16), "v": torch.ones(2)}
        target = [TargetTensor.plain("w", DTYPES["F16"], (4,)), TargetTensor.plain("v", DTYPES["F16"], (2,))]
        load = Load(tensors, *target)
        counters = self.executor().run(load.schedule, load.storage, load.empty())
        assert counters.losses == {"w": Loss(overflow=2, underflow=1)}

    def test_progress_adds_up_to_what_was_announced_and_is_finished(self) -> None:
        load, told = Load.plain(SIX), Told()
        self.executor().run(load.schedule, load.storage, load.empty(), progress=told)
        assert told.done == told.total > 0
        assert told.finished

    def test_a_read_that_fails_is_raised_with_its_file_and_its_tensors(self) -> None:
        load, told = Load.plain(SIX), Told()

        def fail(path: str, offset: int, length: int) -> None:
            if path == "b":
                raise ReadError(f"{path}: gone, at offset {offset}")

        load.storage.before_read = fail
        with pytest.raises(ReadError, match=r"^b: gone, at offset \d+ \(while reading layers\.[1350,{}]+\.weight\)"):
            self.executor().run(load.schedule, load.storage, load.empty(), progress=told)
        assert told.finished

    def test_an_error_of_a_storage_that_is_none_of_ours_comes_through_with_a_note(self) -> None:
        load = Load.plain(SIX)

        def fail(path: str, offset: int, length: int) -> None:
            raise OSError("the cable is out")

        load.storage.before_read = fail
        with pytest.raises(OSError, match="the cable is out") as caught:
            self.executor().run(load.schedule, load.storage, load.empty())
        assert any("while reading layers." in note for note in caught.value.__notes__)

    def test_an_error_of_on_ready_comes_through(self) -> None:
        load, told = Load.plain(SIX), Told()

        def ready(name: str) -> None:
            raise RuntimeError(f"cannot pack {name}")

        with pytest.raises(RuntimeError, match=r"cannot pack layers\.\d\.weight"):
            self.executor().run(load.schedule, load.storage, load.empty(), on_ready=ready, progress=told)
        assert told.finished

    def test_an_interrupt_comes_through(self) -> None:
        load = Load.plain(SIX)

        def ready(name: str) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.executor().run(load.schedule, load.storage, load.empty(), on_ready=ready)

    def test_an_empty_plan_reads_nothing(self) -> None:
        load = Load({})
        counters = self.executor().run(load.schedule, load.storage, {})
        assert (counters.bytes_read, counters.reads, load.storage.reads) == (0, 0, [])

    def test_it_can_be_run_again(self) -> None:
        load, executor = Load.plain(SIX), self.executor()
        for _ in range(2):
            found = load.empty()
            executor.run(load.schedule, load.storage, found)
            assert all(torch.equal(found[name], SIX[name]) for name in SIX)


class TestSimpleExecutor(ExecutorConformance):
    stages_within_bound = False

    def executor(self) -> Executor:
        return SimpleExecutor()


class TestThreadedExecutor(ExecutorConformance):
    def executor(self) -> Executor:
        return ThreadedExecutor(3)


class TestOneThread(ExecutorConformance):
    def executor(self) -> Executor:
        return ThreadedExecutor(1)


OPTIONS = ReadOptions(max_staging=8192, max_read=4096)


class TestEagerExecutor(ExecutorConformance):
    stages_within_bound = False  # it stages in blocks of its own, and tells of them

    def executor(self) -> Executor:
        return EagerExecutor(OPTIONS)


class TestPrefetchExecutor(ExecutorConformance):
    def executor(self) -> Executor:
        return PrefetchExecutor(OPTIONS)


class TestFeeder(ExecutorConformance):
    def executor(self) -> Executor:
        return Pushing(lent, borrowed=True)
