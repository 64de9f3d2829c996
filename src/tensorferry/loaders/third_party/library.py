"""Whether another library is there, in a version that is known to work."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from tensorferry.errors import ConfigError, shown

__all__ = ["Library"]


@dataclass(frozen=True, slots=True)
class Library:
    """A library by the name of its module, of its distribution, and of our extra; and the least version of it."""

    module: str
    distribution: str
    extra: str
    least: tuple[int, ...]

    def imported(self) -> ModuleType:
        """Return the module. Raises ConfigError where it is not installed, too old, or cannot be imported."""
        found = self.version
        if _numbers(found) < self.least:
            least = ".".join(map(str, self.least))
            raise ConfigError(
                f"{self.distribution} {shown(found)} is installed, and {least} or newer is needed: "
                f"pip install --upgrade '{self._extra}'"
            )
        try:
            return import_module(self.module)
        except (ImportError, OSError) as error:
            why = shown(str(error), 300)
            raise ConfigError(
                f"{self.distribution} {shown(found)} is installed and cannot be imported: {why}"
            ) from None

    @property
    def version(self) -> str:
        """Which version is installed; raises ConfigError where none is."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            raise ConfigError(
                f"the package {self.distribution} is not installed: pip install '{self._extra}', or take load_format "
                "'safetensors', which needs nothing"
            ) from None

    @property
    def _extra(self) -> str:
        return f"tensorferry[{self.extra}]"


def _numbers(text: str) -> tuple[int, ...]:
    """Return the release numbers that a version begins with."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()
