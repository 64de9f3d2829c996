"""What goes to CUDA's runtime, which is made up here, where memory is pinned; the rest needs a device."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from tensorferry.execute.device import Cuda

DEVICE = torch.device("cuda", 1)


class Runtime:
    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[tuple[Any, ...]] = []

    def cudaHostRegister(self, *given: int) -> int:
        self.calls.append(("register", *given))
        return self.status

    def cudaHostUnregister(self, *given: int) -> int:
        self.calls.append(("unregister", *given))
        return self.status


def runtime(monkeypatch: pytest.MonkeyPatch, status: int) -> Runtime:
    made = Runtime(status)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)

    def on(device: torch.device) -> AbstractContextManager[None]:
        made.calls.append(("on", device))
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", on)
    return made


def test_memory_is_registered_for_every_device_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made, block = runtime(monkeypatch, 0), torch.empty(8192, dtype=torch.uint8)
    release = Cuda().pin(block, DEVICE)
    assert made.calls == [("on", DEVICE), ("register", block.data_ptr(), 8192, 1)]
    release()
    assert made.calls[2:] == [("on", DEVICE), ("unregister", block.data_ptr())]


def test_memory_that_cannot_be_pinned_is_told_and_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, block = runtime(monkeypatch, 712), torch.empty(8192, dtype=torch.uint8)
    with caplog.at_level(logging.WARNING):
        Cuda().pin(block, DEVICE)()
    assert "memory cannot be pinned (712)" in caplog.text
    assert [call[0] for call in made.calls] == ["on", "register"]


def test_devices_of_cuda_have_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert Cuda().exact(torch.device("cpu")) is None
    assert Cuda().exact(DEVICE) == DEVICE
    assert Cuda().exact(torch.device("cuda")) == torch.device("cuda", 3)
