"""A device that is made up: it does what is put into its streams as late as it may, and notes the order of it all.

Its memory is the CPU's. Who reuses a block before its event, reads memory before what fills it or waits for nothing
gets wrong bytes, as on a device that is busy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from tensorferry.errors import ReadError
from tensorferry.execute.device.streams import Event, Stream

__all__ = ["FakeDevices", "FakeEvent", "FakeStream"]


class FakeEvent:
    """A point in a stream; `number` counts what was put into it before."""

    def __init__(self, stream: FakeStream, number: int) -> None:
        self.stream, self.number = stream, number

    def query(self) -> bool:
        return self.stream.done >= self.number

    def synchronize(self) -> None:
        self.stream.devices.note("synchronize", self.stream.name)
        self.stream.work_off(self.number)


class FakeStream:
    """Does nothing until somebody waits for it. One that is `eager`, as the caller's, does everything at once."""

    def __init__(self, devices: FakeDevices, name: str, *, eager: bool = False) -> None:
        self.devices, self.name, self.eager = devices, name, eager
        self._lock = devices.turn
        self._work: deque[Callable[[], None]] = deque()
        self.put = self.done = 0

    def submit(self, work: Callable[[], None]) -> None:
        self.devices.submitted(self.name)
        self._put(work)

    def record(self) -> Event:
        self.devices.note("record", self.name)
        return FakeEvent(self, self.put)

    def wait(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        self.devices.note("wait", self.name, event.stream.name)
        self._put(lambda: event.stream.work_off(event.number))

    def work_off(self, number: int) -> None:
        """Do what was put in, up to the `number`-th."""
        with self._lock:
            while self.done < number:
                try:
                    self._work.popleft()()
                finally:
                    self.done += 1

    def _put(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._work.append(work)
            self.put += 1
        if self.eager:
            self.work_off(self.put)


class FakeDevices:
    """An `Accelerator` of devices of these names; tensors of the CPU stand for theirs, see `Elsewhere`.

    most_pinned: bytes that were pinned at once. fail_at: which piece of work, counted from 1, cannot be put into a
    stream. busy: the caller's streams come to what they are given as late as ours, too.
    """

    def __init__(self, *, names: Iterable[str] = ("cuda:0",), fail_at: int = 0, busy: bool = False) -> None:
        self.devices = {torch.device(name) for name in names}
        self.log: list[tuple[str, ...]] = []
        self.streams: list[FakeStream] = []
        self.pinned: dict[int, int] = {}
        self.most_pinned = 0
        self.fail_at, self._submitted = fail_at, 0
        self._lock = threading.Lock()
        self.turn = threading.RLock()  # one for all streams: two may wait for each other's events, in either order
        self._callers = {device: FakeStream(self, f"caller of {device}", eager=not busy) for device in self.devices}

    def note(self, *what: str) -> None:
        with self._lock:
            self.log.append(what)

    def submitted(self, name: str) -> None:
        self.note("submit", name)
        self._submitted += 1
        if self._submitted == self.fail_at:
            raise RuntimeError("the device has fallen over")

    def exact(self, device: torch.device) -> torch.device | None:
        return device if device in self.devices else None

    def current(self, device: torch.device) -> Stream:
        return self._callers[device]

    def new_stream(self, device: torch.device) -> Stream:
        self.streams.append(FakeStream(self, f"ours of {device}"))
        return self.streams[-1]

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        assert device in self.devices
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def pin(self, block: torch.Tensor, device: torch.device) -> Callable[[], None]:
        assert device in self.devices
        at = block.data_ptr()
        with self._lock:
            assert at not in self.pinned
            self.pinned[at] = block.nbytes
            self.most_pinned = max(self.most_pinned, sum(self.pinned.values()))
        return lambda: self._unpin(at)

    def _unpin(self, at: int) -> None:
        assert all(stream.done == stream.put for stream in self.streams), "a device may still read what is let go of"
        del self.pinned[at]


class Elsewhere(dict[str, torch.Tensor]):
    """Parameters of which each is on a device by its name; what is not named is on the CPU."""

    def __init__(self, tensors: dict[str, torch.Tensor], where: dict[str, str]) -> None:
        super().__init__(tensors)
        self.where = where

    def device_of(self, name: str) -> torch.device:
        return torch.device(self.where.get(name, "cpu"))


class ReadByDevice:
    """A storage that devices read by themselves, in pages, and nobody else."""

    uri = "memory"

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.reads: list[tuple[int, int]] = []

    def list(self) -> Sequence[object]:
        return []

    def stat(self, path: str) -> object:
        from tensorferry.storage.base import File

        return File(path, len(self.files[path]), path)

    def read_into(self, path: str, offset: int, out: memoryview) -> None:
        raise ReadError("read by the CPU")

    def reaches(self, path: str) -> bool:
        return True

    def read_to_device(self, path: str, offset: int, out: object) -> None:
        assert isinstance(out, torch.Tensor)
        self.reads.append((offset, out.numel()))
        out.copy_(torch.frombuffer(bytearray(self.files[path][offset : offset + out.numel()]), dtype=torch.uint8))

    def check_unchanged(self) -> None:
        pass

    def close(self) -> None:
        pass
