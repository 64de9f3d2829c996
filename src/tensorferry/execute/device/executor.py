"""The executor for parameters on GPUs: threads read into pinned blocks, and a stream for each device takes it on."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch

from tensorferry.config import Direct
from tensorferry.core.plan import Plan
from tensorferry.core.schedule import Schedule
from tensorferry.execute.base import Counters, Executor, KnowsDevices, OnReady, Parameters, Remaining
from tensorferry.execute.device.dividing import divided
from tensorferry.execute.device.placing import Counts, Placed, copy, place, settled, sorted_out
from tensorferry.execute.device.reading import Stager
from tensorferry.execute.device.streams import Accelerator, Cuda, Event
from tensorferry.execute.pool import PATIENCE, Readers
from tensorferry.execute.ways import Ways
from tensorferry.progress import SILENT, Progress
from tensorferry.storage.base import Storage, SupportsDevice
from tensorferry.storage.gpu_direct import Use, gpu_direct
from tensorferry.waiting import Flag, Outcome

__all__ = ["DeviceExecutor", "any_on_devices"]

_AHEAD = 4  # batches that wait for each thread


def any_on_devices(parameters: Parameters, plan: Plan) -> bool:
    """Whether any of the parameters of `plan` is on a GPU, or will be; see `KnowsDevices`."""
    where = _where(parameters)
    devices = {where(step.parameter) for step in plan.steps} if where else ()
    return any(Cuda().exact(device) is not None for device in devices)


def _devices_of(parameters: Parameters, plan: Plan, accelerator: Accelerator) -> dict[str, torch.device]:
    """Return on which devices of `accelerator` parameters are, by name; those elsewhere are left out.

    A mapping that cannot say so and may allocate what is looked up is taken to have them on the CPU.
    """
    where = _where(parameters)
    if where is None:
        return {}
    found = {name: accelerator.exact(where(name)) for name in {step.parameter for step in plan.steps}}
    return {name: device for name, device in found.items() if device is not None}


def _where(parameters: Parameters) -> Callable[[str], torch.device] | None:
    if isinstance(parameters, KnowsDevices):
        return parameters.device_of
    return (lambda name: parameters[name].device) if isinstance(parameters, dict) else None


class DeviceExecutor:
    """Runs batches in `threads` threads, in the order of the schedule, for parameters on devices.

    Each device has a stream of its own, in which its copies and what makes numbers of them follow each other. That
    stream waits for the stream that is current where `run` is called when memory comes from there, and the other way
    round before `on_ready` is told of a parameter and before `run` returns; the CPU waits for neither until the last
    bytes are on their way. What is staged is bounded for all devices together.

    rest: what fills the parameters that are elsewhere, before the others. gpu_direct: whether devices read files by
    themselves; those of a storage that `SupportsDevice` are read so in any case. direct, keep_cache, shared:
    as in `ReadOptions`, for what the CPU reads.
    """

    def __init__(
        self,
        threads: int,
        rest: Executor,
        *,
        accelerator: Accelerator | None = None,
        gpu_direct: Use = "never",
        direct: Direct = "auto",
        keep_cache: bool = True,
        shared: bool = False,
    ) -> None:
        self._threads, self._rest = threads, rest
        self._way: Direct = direct
        self._keep_cache = keep_cache
        self._shared = shared
        self._accelerator, self._use = accelerator or Cuda(), gpu_direct

    def run(
        self,
        schedule: Schedule,
        storage: Storage,
        parameters: Parameters,
        *,
        on_ready: OnReady | None = None,
        progress: Progress = SILENT,
    ) -> Counters:
        """Fill `parameters`; see `Executor`. They are looked up in the thread that this is called in.

        Raises ConfigError, with nothing looked up, where devices are to read files by themselves and cannot.
        """
        where = _devices_of(parameters, schedule.plan, self._accelerator)
        mine, others = divided(schedule, where.__contains__)
        ways = Ways(storage, self._way, self._keep_cache, self._shared)
        ways.refuse_impossible(read.file for batch in mine.batches for read in batch.reads)
        progress.start(schedule.bytes_read, "weights")
        counters, part = Counters(), _Part(progress)
        try:
            with _direct(storage, self._use if mine.batches else "never") as direct:
                if others.batches:
                    counters = self._rest.run(others, storage, parameters, on_ready=on_ready, progress=part)
                if mine.batches:
                    run = _Run(mine, ways, where, self._accelerator, direct)
                    run.go(parameters, self._threads, on_ready, part)
                    counters.absorb(run.counters)
                    counters.staging_peak = max(counters.staging_peak, run.stager.peak)
        finally:
            progress.finish()
        return counters


@contextmanager
def _direct(storage: Storage, use: Use) -> Iterator[SupportsDevice | None]:
    """Yield what reads files of `storage` into devices, if anything; raises ReadError in the end where they changed."""
    found = None if isinstance(storage, SupportsDevice) else gpu_direct(storage, use)
    if found is None:
        yield storage if isinstance(storage, SupportsDevice) else None
        return
    with found:
        yield found
        found.check_unchanged()


class _Part:
    """Tells of a part of a run, of which somebody else tells the beginning and the end."""

    def __init__(self, progress: Progress) -> None:
        self.advance = progress.advance

    def start(self, total: int, what: str) -> None:
        pass

    def finish(self) -> None:
        pass


class _Job(NamedTuple):
    """A batch, and what is to be done of it by device."""

    number: int
    work: Mapping[torch.device, list[Placed]]


_Done = tuple[int, Mapping[torch.device, Event]]
"""The number of a batch, and when each device is done with it."""


class _Run:
    """What the threads of one run share."""

    def __init__(
        self, schedule: Schedule, ways: Ways, where: Mapping[str, torch.device], accelerator: Accelerator,
        direct: SupportsDevice | None,
    ) -> None:  # fmt: skip
        self._schedule, self._where, self._accelerator = schedule, where, accelerator
        devices = sorted(set(where.values()), key=str)
        self._callers = {device: accelerator.current(device) for device in devices}
        self._streams = {device: accelerator.new_stream(device) for device in devices}
        self._turns = {device: threading.Lock() for device in devices}
        self.stager = Stager(schedule, ways, self._streams, accelerator, direct)
        self.counters = Counters()
        self._counts: Counts = {}
        self._seen: set[str] = set()
        self._finished: queue.SimpleQueue[Outcome[_Done]] = queue.SimpleQueue()
        self._stopped = Flag()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._remaining = Remaining.of_tasks(schedule)

    def go(self, parameters: Parameters, threads: int, on_ready: OnReady | None, progress: Progress) -> None:
        """Do all batches, and wait until the devices have."""
        readers = Readers[_Done](threads)
        with ExitStack() as ending:
            ending.callback(setattr, self, "_error", None)  # it knows this frame, and this frame it
            ending.callback(self.stager.close)
            ending.callback(self._wait_for_devices)
            ending.callback(readers.close, PATIENCE)
            ending.callback(self._stopped.set)
            self._feed(readers, parameters, threads, on_ready, progress)
            settled(self.counters, self._counts)

    def _feed(
        self, readers: Readers[_Done], parameters: Parameters, threads: int, on_ready: OnReady | None,
        progress: Progress,
    ) -> None:  # fmt: skip
        in_flight, waiting, bound = 0, 0, self._schedule.max_staging
        for number, batch in enumerate(self._schedule.batches):
            while waiting and (in_flight + batch.staging > bound or waiting >= _AHEAD * threads):
                in_flight -= self._settle(on_ready, progress)
                waiting -= 1
            in_flight += batch.staging
            waiting += 1
            readers.submit(self._work, self._job(number, parameters), ended=self._finished)
        for _ in range(waiting):
            self._settle(on_ready, progress)

    def _job(self, number: int, parameters: Parameters) -> _Job:
        """Look up what a batch fills.

        New memory may have been in use until now: whatever our stream is given from now on is done after that.
        """
        work: dict[torch.device, list[Placed]] = defaultdict(list)
        new: set[torch.device] = set()
        for task in self._schedule.batches[number].tasks:
            name = self._schedule.plan.steps[task.step].parameter
            device = self._where[name]
            work[device].append(Placed(task, parameters[name]))
            if name not in self._seen:
                self._seen.add(name)
                new.add(device)
        for device in new:
            self._streams[device].wait(self._callers[device].record())
        return _Job(number, work)

    def _settle(self, on_ready: OnReady | None, progress: Progress) -> int:
        """Take in a batch that is on its way to where it belongs, and return how much it staged."""
        outcome = self._finished.get()
        if self._error is not None:
            raise self._error
        number, done = outcome.result()
        for device, event in done.items():
            self._callers[device].wait(event)
        batch = self._schedule.batches[number]
        progress.advance(batch.length)
        for task in batch.tasks:
            name = self._schedule.plan.steps[task.step].parameter
            if self._remaining.done(name) and on_ready is not None:
                on_ready(name)
        return batch.staging

    def _work(self, job: _Job) -> _Done:
        """Read and place one batch, in a thread of the pool; where that fails, no thread begins another read."""
        if self._stopped.is_set():
            return job.number, {}
        try:
            return job.number, self._moved(job)
        except BaseException as error:  # noqa: BLE001 - whoever settles batches raises it
            with self._lock:
                self._error = self._error or error
            self._stopped.set()
            return job.number, {}  # an outcome that kept the error would keep this frame, and all that it knows

    def _moved(self, job: _Job) -> Mapping[torch.device, Event]:
        counters, done = Counters(), dict[torch.device, Event]()
        with self.stager.staged(job.number, list(job.work), counters, self._stopped) as staged:
            if staged is None:
                return done
            views, events = staged
            for device in job.work:
                try:
                    self._submit(job, device, views)
                finally:  # part of it may have begun to use what is staged
                    done[device] = self._streams[device].record()
                    events.append(done[device])
        with self._lock:
            self.counters.absorb(counters)
        return done

    def _submit(self, job: _Job, device: torch.device, staged: list[torch.Tensor]) -> None:
        plan, stream = self._schedule.plan, self._streams[device]
        plain, rest = sorted_out(plan, job.work[device])
        if plain:
            stream.submit(partial(copy, plain, staged))
        if not rest:
            return
        batch = self._schedule.batches[job.number]
        with self._turns[device]:  # one batch at a time has memory on the device beside the parameters
            stream.submit(partial(place, plan, batch, rest, staged, self._accelerator, device, self._counts))

    def _wait_for_devices(self) -> None:
        for stream in self._streams.values():
            stream.record().synchronize()
