"""What models are built and filled in: the device asked for, and torch's default dtype, which all threads share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tensorferry.errors import ConfigError, shown
from tensorferry.modules.describe import tensors_of
from tensorferry.modules.distributed import device_of_mesh

__all__ = ["building", "device_for", "named_device", "usable_device"]

_ONE_AT_A_TIME = threading.RLock()


def named_device(device: torch.device | str) -> torch.device:
    """Return the device of that name; raises ConfigError where torch knows none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise _no_device(device, error) from None


def usable_device(device: torch.device | str | None) -> torch.device:
    """Return the device that was asked for, the CPU for None.

    Raises ConfigError where nothing can be put there: a name that torch does not know, hardware that is not there, or
    meta, whose tensors have no values.
    """
    found = named_device("cpu" if device is None else device)
    if found.type == "meta":
        raise ConfigError("device 'meta': tensors there have no values; leave the device out to fill them on the CPU")
    if found.type == "cpu" and found.index:
        raise ConfigError(f"device {str(device)!r}: there is one CPU, 'cpu'")
    try:
        if found.type != "cpu":
            torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise _no_device(device, error) from None
    return found


def device_for(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Return the device on which tensors of `model` get memory: the one that was asked for.

    Where none was, that of the mesh on which DTensors of the model are that have no memory yet, else the CPU.

    Raises ConfigError where nothing would go there, because everything has memory elsewhere, or nothing could.
    """
    if device is not None:
        _refuse_idle_device(model, named_device(device))
    return usable_device(device_of_mesh(tensors_of(model)) if device is None else device)


def _refuse_idle_device(model: nn.Module, asked: torch.device) -> None:
    """Raise ConfigError where a device was asked for, and everything has memory on others already."""
    there = {tensor.device for tensor in tensors_of(model)}
    if there and not any(d.type == "meta" or _is_one(asked, d) for d in there):
        where = ", ".join(sorted(map(str, there)))
        raise ConfigError(
            f"device {str(asked)!r}: the model's tensors have memory on {where} already, and are filled where they "
            f"are; call model.to({str(asked)!r}) before, or build the model on meta"
        )


def _is_one(asked: torch.device, there: torch.device) -> bool:
    return asked.type == there.type and (asked.index == there.index or None in (asked.index, there.index))


def _no_device(device: object, error: Exception) -> ConfigError:
    why = shown(str(error).partition("\n")[0], 300)
    return ConfigError(f"device {str(device)!r}: nothing can be put there: {why}")


@contextmanager
def building(dtype: torch.dtype | None) -> Iterator[None]:
    """Have models be built of `dtype` where they do not say otherwise; None leaves the default as it is.

    Torch has one default for all threads, so only one thread builds at a time: two would find each other's, and leave
    the wrong one behind.
    """
    with _ONE_AT_A_TIME:
        before = torch.get_default_dtype()
        torch.set_default_dtype(before if dtype is None else dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
