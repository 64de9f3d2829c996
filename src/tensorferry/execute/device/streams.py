"""The little of CUDA that filling parameters needs: streams, events and pinned memory. What is put into them is not
here, so that tests can run it on a device that they make up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from tensorferry.errors import shown

__all__ = ["Accelerator", "Cuda", "Event", "Stream"]

_log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...

    def synchronize(self) -> None:
        """Wait, in this thread only, until the device has come to it."""
        ...


class Stream(Protocol):
    """What a device does one after the other. May be used from several threads."""

    def submit(self, work: Callable[[], None]) -> None:
        """Call `work`, so that what it starts on the device is put into this stream; that may happen much later.

        Device memory that it allocates and lets go of is used again by what comes after it in this stream only.
        """
        ...

    def record(self) -> Event:
        """Return the event that all that was put into this stream so far is done."""
        ...

    def wait(self, event: Event) -> None:
        """Have the device do what is put into this stream from now on after `event`; waits for nothing here."""
        ...


class Accelerator(Protocol):
    """Devices of one make."""

    def exact(self, device: torch.device) -> torch.device | None:
        """Return `device` with its number where it is one of them, else None."""
        ...

    def current(self, device: torch.device) -> Stream:
        """Return the stream into which the calling thread puts its own work for `device`."""
        ...

    def new_stream(self, device: torch.device) -> Stream:
        """Return a stream of its own."""
        ...

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return uninitialized bytes of `device`, uint8, which belong to the stream that this is called in."""
        ...

    def pin(self, block: torch.Tensor, device: torch.device) -> Callable[[], None]:
        """Let all devices read `block`, bytes of the CPU, while this process goes on; return what ends that.

        device: one that is in use already, so that no other one has to be woken up for it.
        """
        ...


class Cuda:
    """NVIDIA devices, and AMD's, which torch calls by the same name."""

    def exact(self, device: torch.device) -> torch.device | None:
        if device.type != "cuda":
            return None
        return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())

    def current(self, device: torch.device) -> Stream:
        return _CudaStream(torch.cuda.current_stream(device))

    def new_stream(self, device: torch.device) -> Stream:
        return _CudaStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def pin(self, block: torch.Tensor, device: torch.device) -> Callable[[], None]:
        """Pin `block`; where the system allows no more of that, copies work all the same, and wait."""
        runtime, at = torch.cuda.cudart(), block.data_ptr()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            status = runtime.cudaHostRegister(at, block.nbytes, _PORTABLE)
        if int(status) != 0:
            _log.warning("memory cannot be pinned (%s): copies to devices are slower", shown(str(status)))
            return _nothing

        def unpin() -> None:
            with torch.cuda.device(device):
                _told(runtime.cudaHostUnregister(at))

        return unpin


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def submit(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> Event:
        # A thread that waits for a blocking event sleeps; for another one it would keep a core busy.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, event: Event) -> None:
        self._stream.wait_event(event)  # type: ignore[arg-type]  # one of ours


def _nothing() -> None:
    pass


def _told(status: object) -> None:
    if int(status) != 0:  # type: ignore[call-overload]
        _log.warning("memory stays pinned (%s)", shown(str(status)))
