"""The executor for GPUs, on a device that is made up and as late as may be: order, bounds, errors, what is left."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from helpers.checkpoints import ar, raw
from helpers.fake_device import Elsewhere, FakeDevices, ReadByDevice
from helpers.memory_storage import MemoryStorage
from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.lower import lower
from tensorferry.core.plan import Plan
from tensorferry.core.planning import make_plan
from tensorferry.core.rules import Place
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Slot, TargetTensor
from tensorferry.core.transforms import Custom, TensorSpec, Transpose
from tensorferry.errors import ConfigError, ReadError
from tensorferry.execute import ThreadedExecutor
from tensorferry.execute.device import DeviceExecutor
from tensorferry.numerics.torch_dtypes import dtype_of, torch_dtype

MANY = {f"t{i}": ar(16, start=100 * i) for i in range(40)}  # 64 bytes each
SMALL: dict[str, Any] = {"max_gap": 0, "max_read": 4096, "max_staging": 3 * 4096, "waste": 1.0}
LARGE = {f"t{i}": ar(1024, start=5000 * i) for i in range(24)}  # a batch each


def planned(
    tensors: dict[str, torch.Tensor], into: torch.dtype | None = None, rules: RuleSet | None = None
) -> tuple[Plan, bytes]:
    entries, data, target = [], b"", {}
    for name, tensor in tensors.items():
        entries.append(TensorEntry.at(name, dtype_of(tensor.dtype), tuple(tensor.shape), "f", len(data)))
        data += raw(tensor)
        shape = tuple(tensor.shape) if rules is None else tuple(reversed(tensor.shape))
        target[name] = TargetTensor.plain(name, dtype_of(into or tensor.dtype), shape)
    return make_plan(Catalogue(entries, format="memory"), target, rules or RuleSet()), data


def on(device: str, plan: Plan, *, also: dict[str, str] | None = None) -> Elsewhere:
    tensors = {n: torch.zeros(s.shape, dtype=torch_dtype(s.dtype)) for n, s in plan.parameters.items()}
    return Elsewhere(tensors, dict.fromkeys(tensors, device) | (also or {}))


def executor(devices: FakeDevices, threads: int = 4) -> DeviceExecutor:
    return DeviceExecutor(threads, ThreadedExecutor(threads, pinned=False), accelerator=devices)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("into", [None, torch.float64, torch.bfloat16])
def test_a_device_that_is_late_gets_the_bytes_that_belong_to_it(threads: int, into: torch.dtype | None) -> None:
    plan, data = planned(LARGE, into)
    devices, found = FakeDevices(), on("cuda:0", plan)
    executor(devices, threads).run(lower(plan, **SMALL), MemoryStorage({"f": data}), found)
    assert all(torch.equal(found[name], tensor.to(into or tensor.dtype)) for name, tensor in LARGE.items())


def test_a_single_element_of_a_column_is_put_where_it_belongs() -> None:
    """A view of one element has the stride of the column that it is part of."""
    tensor = ar(3, 1).to(torch.int16)
    entry = TensorEntry.at("t", dtype_of(tensor.dtype), (3, 1), "f", 0)
    column = Slot.of(Region((3, 2), Box((0, 1), (3, 2))), (3, 1))
    target = {"p": TargetTensor("p", entry.dtype, (3, 2), {"": column}, default=7.0)}
    plan = make_plan(Catalogue([entry], format="memory"), target, RuleSet(Place("t", "p")))
    found = on("cuda:0", plan)
    schedule = lower(plan, **{**SMALL, "max_read": 1, "max_staging": 1})
    executor(FakeDevices()).run(schedule, MemoryStorage({"f": raw(tensor)}), found)
    assert found["p"].tolist() == [[7, 0], [7, 1], [7, 2]]


def test_no_more_is_pinned_than_may_be_staged_and_all_of_it_is_let_go() -> None:
    plan, data = planned(LARGE)
    devices = FakeDevices()
    counters = executor(devices, 8).run(lower(plan, **SMALL), MemoryStorage({"f": data}), on("cuda:0", plan))
    assert 0 < devices.most_pinned == counters.staging_peak <= SMALL["max_staging"]
    assert devices.pinned == {}


def test_a_block_is_not_read_into_before_the_device_is_done_with_it() -> None:
    plan, data = planned(LARGE)
    devices, found = FakeDevices(busy=True), on("cuda:0", plan)
    schedule = lower(plan, **{**SMALL, "max_staging": 4096})
    executor(devices, 1).run(schedule, MemoryStorage({"f": data}), found)
    assert devices.most_pinned == 4096
    ours = [what[0] for what in devices.log if what[1] == "ours of cuda:0" and what[0] in ("submit", "synchronize")]
    assert ours[: 2 * len(LARGE) - 1] == ["submit", *["synchronize", "submit"] * (len(LARGE) - 1)]
    assert all(torch.equal(found[name], tensor) for name, tensor in LARGE.items())


def test_the_cpu_waits_for_no_device_while_there_are_blocks_left() -> None:
    plan, data = planned(LARGE)
    devices = FakeDevices(busy=True)
    schedule = lower(plan, **{**SMALL, "max_staging": 4096 * len(LARGE)})
    executor(devices, 1).run(schedule, MemoryStorage({"f": data}), on("cuda:0", plan))
    last = max(i for i, what in enumerate(devices.log) if what[0] == "submit")
    assert not [what for what in devices.log[:last] if what[0] == "synchronize"]


def test_the_callers_stream_waits_for_ours_before_it_is_told_that_a_parameter_is_whole() -> None:
    plan, data = planned(LARGE)
    devices, found, seen = FakeDevices(), on("cuda:0", plan), list[str]()

    def ready(name: str) -> None:
        assert torch.equal(found[name], LARGE[name])
        assert devices.log[-1][0] != "synchronize"
        seen.append(name)

    executor(devices).run(lower(plan, **SMALL), MemoryStorage({"f": data}), found, on_ready=ready)
    assert sorted(seen) == sorted(LARGE)


def test_our_stream_waits_for_the_callers_before_it_writes_to_memory_that_was_just_given() -> None:
    plan, data = planned(LARGE)
    devices = FakeDevices()
    executor(devices).run(lower(plan, **SMALL), MemoryStorage({"f": data}), on("cuda:0", plan))
    ours = [what for what in devices.log if what[1] == "ours of cuda:0" and what[0] in ("wait", "submit")]
    assert ours[0] == ("wait", "ours of cuda:0", "caller of cuda:0")
    assert [what[0] for what in ours].count("wait") == len(LARGE)


def test_parameters_are_looked_up_in_the_thread_that_asked_for_the_run() -> None:
    plan, data = planned(MANY)
    threads = set[threading.Thread]()

    class Noting(Elsewhere):
        def __getitem__(self, name: str) -> torch.Tensor:
            threads.add(threading.current_thread())
            return super().__getitem__(name)

    found = Noting(dict(on("cuda:0", plan)), dict.fromkeys(plan.parameters, "cuda:0"))
    executor(FakeDevices()).run(lower(plan, **SMALL), MemoryStorage({"f": data}), found)
    assert threads == {threading.current_thread()}


def test_each_device_has_a_stream_of_its_own_and_the_bound_is_for_all_of_them() -> None:
    plan, data = planned(LARGE)
    names = ("cuda:0", "cuda:1")
    devices = FakeDevices(names=names)
    where = {name: names[i % 2] for i, name in enumerate(LARGE)}
    found = on("cuda:0", plan, also=where)
    executor(devices).run(lower(plan, **SMALL), MemoryStorage({"f": data}), found)
    assert {stream.name for stream in devices.streams} == {"ours of cuda:0", "ours of cuda:1"}
    assert devices.most_pinned <= SMALL["max_staging"]
    assert all(torch.equal(found[name], tensor) for name, tensor in LARGE.items())


def test_one_batch_may_be_for_several_devices_and_for_the_cpu() -> None:
    plan, data = planned(MANY)
    where = {name: ("cpu", "cuda:0", "cuda:1")[i % 3] for i, name in enumerate(MANY)}
    devices, found = FakeDevices(names=("cuda:0", "cuda:1")), on("cpu", plan, also=where)
    ready: list[str] = []
    counters = executor(devices).run(lower(plan, **SMALL), MemoryStorage({"f": data}), found, on_ready=ready.append)
    assert all(torch.equal(found[name], tensor) for name, tensor in MANY.items())
    assert sorted(ready) == sorted(MANY)
    assert counters.direct_bytes == 64 * sum(device == "cpu" for device in where.values())


def test_what_casts_spoil_is_counted_on_the_device_and_asked_for_in_the_end() -> None:
    spoiling = {"a": torch.tensor([1, 1e5, -1e30, 1e-30]), "b": torch.ones(4)}
    plan, data = planned(spoiling, torch.float16)
    counters = executor(FakeDevices()).run(lower(plan, **SMALL), MemoryStorage({"f": data}), on("cuda:0", plan))
    assert counters.losses == {"a": (2, 1)}


def test_a_transform_is_computed_from_bytes_that_were_sent_and_a_function_of_the_caller_on_the_cpu() -> None:
    seen: list[torch.Tensor] = []

    def double(parts: Any) -> torch.Tensor:
        seen.append(parts[0])
        turned: torch.Tensor = parts[0].t() * 2
        return turned

    custom = Custom("double", TensorSpec(DTYPES["F32"], (3, 2)), double)
    rules = RuleSet(Place("a", "a", via=Transpose((1, 0))), Place("b", "b", via=custom))
    tensors = {"a": ar(2, 3), "b": ar(2, 3, start=10)}
    plan, data = planned(tensors, rules=rules)
    devices, found = FakeDevices(), on("cuda:0", plan)
    executor(devices).run(lower(plan, **SMALL), MemoryStorage({"f": data}), found)
    assert torch.equal(found["a"], tensors["a"].t())
    assert torch.equal(found["b"], tensors["b"].t() * 2)
    assert len(seen) == 1


@pytest.mark.parametrize("threads", [1, 4])
def test_a_read_that_fails_leaves_nothing_pinned_and_no_thread(threads: int) -> None:
    plan, data = planned(LARGE)
    devices = FakeDevices()

    def fail(path: str, offset: int, length: int) -> None:
        if offset == 7 * 4096:
            raise ReadError("f: gone")

    before = set(threading.enumerate())
    storage = MemoryStorage({"f": data}, before_read=fail)
    with pytest.raises(ReadError, match=r"f: gone \(while reading t7\)"):
        executor(devices, threads).run(lower(plan, **SMALL), storage, on("cuda:0", plan))
    assert set(threading.enumerate()) == before
    assert devices.pinned == {}
    assert all(stream.done == stream.put for stream in devices.streams)


def test_a_device_that_fails_leaves_nothing_pinned() -> None:
    plan, data = planned(LARGE)
    devices = FakeDevices(fail_at=5)
    with pytest.raises(RuntimeError, match="fallen over"):
        executor(devices).run(lower(plan, **SMALL), MemoryStorage({"f": data}), on("cuda:0", plan))
    assert devices.pinned == {}


def test_a_hook_that_fails_leaves_nothing_pinned() -> None:
    plan, data = planned(LARGE)
    devices = FakeDevices()

    def fail(name: str) -> None:
        raise ValueError(name)

    with pytest.raises(ValueError, match="t"):
        executor(devices).run(lower(plan, **SMALL), MemoryStorage({"f": data}), on("cuda:0", plan), on_ready=fail)
    assert devices.pinned == {}


def test_a_task_that_is_larger_than_the_bound_has_a_block_of_its_own() -> None:
    tensors = {"large": ar(64, 64)}
    custom = Custom("turned", TensorSpec(DTYPES["F32"], (64, 64)), lambda parts: parts[0].t())
    rules = RuleSet(Place("large", "large", via=custom))
    plan, data = planned(tensors, rules=rules)
    devices, found = FakeDevices(), on("cuda:0", plan)
    schedule = lower(plan, max_gap=0, max_read=4096, max_staging=4096, waste=1.0)
    executor(devices).run(schedule, MemoryStorage({"f": data}), found)
    assert torch.equal(found["large"], ar(64, 64).t())
    assert devices.most_pinned == 64 * 64 * 4
    assert devices.pinned == {}


def test_devices_that_read_by_themselves_read_pages_and_nothing_is_pinned() -> None:
    plan, data = planned(MANY)
    storage: Any = ReadByDevice({"f": data})
    devices, found = FakeDevices(), on("cuda:0", plan)
    counters = executor(devices).run(
        lower(plan, max_gap=0, max_read=4096, max_staging=4096 * 4, waste=1.0), storage, found
    )
    assert all(torch.equal(found[name], tensor) for name, tensor in MANY.items())
    assert all(offset % 4096 == 0 for offset, _ in storage.reads)
    assert devices.most_pinned == 0
    assert counters.bytes_read == sum(length for _, length in storage.reads)


def test_a_storage_that_devices_cannot_read_is_refused_before_anything_is_looked_up() -> None:
    plan, data = planned(MANY)
    found, looked_up = on("cuda:0", plan, also={"t0": "cpu"}), list[str]()
    found.__class__ = type("Noting", (Elsewhere,), {"__getitem__": lambda self, name: looked_up.append(name)})
    run = DeviceExecutor(2, ThreadedExecutor(2), accelerator=FakeDevices(), gpu_direct="always")
    with pytest.raises(ConfigError, match="gpu_direct 'always'"):
        run.run(lower(plan, **SMALL), MemoryStorage({"f": data}), found)
    assert looked_up == []
