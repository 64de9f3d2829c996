"""What models are built in: the device that was asked for, and torch's default dtype, which all threads share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tensorferry.errors import ConfigError, shown

__all__ = ["building", "named_device", "usable_device"]

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
