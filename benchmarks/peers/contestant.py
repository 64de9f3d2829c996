"""What a contestant is: a function that fills a module, and how it is to be run. One file for each in contestants/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from benchmarks.peers.task import Task

__all__ = ["OURS", "Contestant", "all_contestants"]

OURS = "tensorferry"

Memory = Literal["given", "own"]
"""Whose memory the parameters end in: that of the preallocated module, or what the loader allocates for them."""

_SAFETENSORS = ("full", "reload", "tp", "moe", "ep", "many")


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way to load. `load` is timed; `prepare`, where there is one, is not, and is for what belongs to the model.

    works: of `WORKS`, those that it can do. family: of the files that it reads, by the keys of `FILES`;
    None for the family of the work. environment: of `ENVIRONMENTS`. imports: modules that are there before the clock
    starts. call: what it does, in a few words, for the table. caches: states of the page cache in which to run it.
    settings: of environment variables, while it runs. limit: whether it is what the
    machine can do at best, and no loader.
    """

    name: str
    load: Callable[[Task], None]
    call: str
    works: Sequence[str] = _SAFETENSORS
    environment: str = "libraries"
    imports: Sequence[str] = ()
    memory: Memory = "given"
    family: str | None = None
    prepare: Callable[[Task], None] | None = None
    caches: Sequence[str] = ("cold", "warm")
    settings: dict[str, str] = field(default_factory=dict)
    limit: bool = False

    @property
    def ours(self) -> bool:
        """Whether this is tensorferry."""
        return self.name.startswith(OURS)


def all_contestants() -> dict[str, Contestant]:
    """Return every contestant by name: the limits of the machine first, then those of the files, by name."""
    files = sorted(path.stem for path in (Path(__file__).parent / "contestants").glob("[!_]*.py"))
    files.sort(key=lambda stem: (stem != "limits", stem != OURS))
    modules = [import_module(f"benchmarks.peers.contestants.{stem}") for stem in files]
    return {one.name: one for module in modules for one in module.CONTESTANTS}
