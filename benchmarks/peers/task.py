"""What a contestant is handed for one load: files, and a preallocated module. And whether it did what it should."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.digest import digest_of
from benchmarks.peers.files import FILES, digest_file, folder_of
from benchmarks.peers.works import CHECKPOINTS, WORKS, Part, Shape, Work, local_shape, part_of
from torch import nn

__all__ = ["Task"]


@dataclass
class Task:
    """One load. parts: tensors that are needed, with what the rank takes of each (None: all).

    module: named as the checkpoint is, with memory that nothing has touched unless the work says so, or on meta for
    contestants that bring memory of their own. kept: what has to live until the load has been checked.
    """

    root: Path
    work: Work
    size: str
    family: str
    own: bool = False
    kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder = folder_of(self.root, self.size, self.work.checkpoint, self.family)
        self.files = sorted(map(str, self.folder.glob(FILES[self.family])))
        self.config = CHECKPOINTS[self.work.checkpoint].sized(self.size)
        self.shapes: dict[str, Shape] = CHECKPOINTS[self.work.checkpoint].shapes(self.size)
        self.parts: dict[str, Part | None] = part_of(self.work, self.size)
        self.module = nn.Module()
        self.parameters: dict[str, nn.Parameter] = {}
        for name, part in self.parts.items():
            self._declare(name, local_shape(self.shapes[name], part))

    def _declare(self, name: str, shape: Shape) -> None:
        memory = torch.empty(shape, dtype=torch.bfloat16, device="meta" if self.own else "cpu")
        if self.work.touched and not self.own:
            memory.fill_(1)
        *path, leaf = name.split(".")
        inner = self.module
        for step in path:
            if step not in inner._modules:
                inner.add_module(step, nn.Module())
            inner = inner.get_submodule(step)
        self.parameters[name] = nn.Parameter(memory, requires_grad=False)
        inner.register_parameter(leaf, self.parameters[name])

    def slices(self, name: str) -> tuple[slice, ...]:
        """Return the index of the rank's part of a tensor that has one."""
        part = self.parts[name]
        if part is None:
            return ()
        return (*[slice(None)] * part[0], slice(part[1], part[1] + part[2]))

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Do what an engine does with a whole tensor: narrow it to the rank's part and copy that, if it is wanted."""
        if name in self.parameters:
            part = self.parts[name]
            self.parameters[name].data.copy_(tensor if part is None else tensor.narrow(*part))

    def give(self, name: str, tensor: torch.Tensor) -> None:
        """Make the memory of `tensor` that of the parameter, if it is wanted."""
        if name in self.parameters:
            self.parameters[name] = nn.Parameter(tensor, requires_grad=False)
            holder, _, leaf = name.rpartition(".")
            self.module.get_submodule(holder)._parameters[leaf] = self.parameters[name]

    def take_model(self, model: nn.Module) -> None:
        """Make a model that a contestant built the one that is checked."""
        self.kept.append(model)
        for name, parameter in model.named_parameters():
            self.give(name, parameter.data)

    def check(self) -> None:
        """Raise RuntimeError unless all parameters hold what they should, in memory that is no mapping of a file."""
        found = {name: p.data for name, p in self.module.named_parameters()}
        expected = digest_file(self.root, self.size, self.work).read_text()
        if found.keys() != self.parts.keys() or digest_of((n, _bits(t)) for n, t in found.items()) != expected:
            raise RuntimeError("the parameters do not hold what the checkpoint has")
        mapped = _mapped_ranges()
        for name, tensor in found.items():
            if any(first <= tensor.data_ptr() < last for first, last in mapped):
                raise RuntimeError(f"{name} lies in a mapped file")


def _bits(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(torch.int16).numpy().reshape(-1)


def _mapped_ranges() -> list[tuple[int, int]]:
    """Return the addresses of mapped files of weights, of the maps of this process."""
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    suffixes = tuple(pattern[1:] for pattern in FILES.values())
    ranges = (words[0].split("-") for words in lines if len(words) == 6 and words[5].endswith(suffixes))
    return [(int(first, 16), int(last, 16)) for first, last in ranges]


def warm_up(contestant: Any, root: Path, work: str, family: str) -> None:
    """Do the work once on the smallest checkpoint, so that lazy imports and the like are done; check that too."""
    toy = Task(root, WORKS[work], "toy", family, own=contestant.memory == "own")
    run(contestant, toy)
    if not contestant.limit:
        toy.check()


def run(contestant: Any, task: Task) -> None:
    """Prepare and load, untimed."""
    if contestant.prepare:
        contestant.prepare(task)
    contestant.load(task)
