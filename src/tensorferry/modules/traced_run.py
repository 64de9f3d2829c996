"""One run of a model's own loader without values: what it wrote and set, and what two such runs differ in."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from tensorferry.core.catalogue import TensorEntry
from tensorferry.errors import shown
from tensorferry.modules.containers import held_in
from tensorferry.modules.contents import Contents
from tensorferry.modules.describe import ORDINARY, seen_as_plain, tensors_of, walked_once
from tensorferry.modules.likeness import Likeness
from tensorferry.modules.recorder import CannotFollow, Guard, Memory, Recorder, key_of, memory_like
from tensorferry.modules.snapshot import Change, IsFixed, Setting, Snapshot, attribute_tensors

__all__ = ["Kept", "LoadWeights", "Run", "harm", "run_loader", "undone"]

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
"""What a model's own loader looks like; what it returns, if anything, is the names that it filled."""

Modules = Sequence[tuple[str, nn.Module]]
"""Modules with their names and a dot."""


class Kept(NamedTuple):
    """What a loader has hung on the model and only it can.

    entries: those behind it. like: what tells it from what another run may hang there, see `Likeness`.
    """

    entries: frozenset[str]
    like: Hashable


@dataclass(slots=True)
class Run:
    """What one run of the loader showed.

    memory, loose: as the recorder has them. kept: what the loader has hung on the model and only it can, by name.
    changes: all that it has set or deleted. hanging: ids of the tensors that were the model's in the end, None where it
    was left as it was. unfollowed: why the run says nothing, None where it does. loaded: what was returned, None where
    that were no names.
    """

    memory: Mapping[int, Memory]
    loose: Sequence[Memory]
    kept: Mapping[str, Kept]
    changes: Sequence[Change]
    hanging: frozenset[int] | None
    unfollowed: str | None
    loaded: frozenset[str] | None
    failed: bool = False
    failed_at: str | None = None

    @property
    def settings(self) -> tuple[Setting, ...]:
        """What sets again what the loader has set."""
        return tuple(change.after for change in self.changes if change.after is not None)

    def takes_off(self, tensor: torch.Tensor) -> bool:
        """Whether the loader writes nothing to a parameter or buffer, and takes it off the model."""
        is_off = self.hanging is not None and id(tensor) not in self.hanging
        return is_off and not self.memory[key_of(tensor)].contents.touched


def run_loader(model: nn.Module, loader: LoadWeights, entries: Sequence[TensorEntry]) -> Run:
    """Run `loader` on stand-ins of `entries`, and leave the model as it was."""
    saved = Snapshot(model)
    memory = _memory_of(saved.modules)
    recorder = Recorder(memory)
    try:
        result = _under_watch(loader, recorder, entries)
        with seen_as_plain():
            after = walked_once(model)
            changes = saved.changes(after, _fixed_by(memory, recorder))
            kept = _kept(after, saved, changes, recorder, memory)
            hanging = frozenset(map(id, tensors_of(model))) if changes else None
    finally:
        saved.restore()
    failed = isinstance(result, _Failed)
    at = recorder.current if failed else None
    unfollowed, loaded = recorder.unfollowed, _names(result)
    return Run(memory, recorder.loose, kept, changes, hanging, unfollowed, loaded, failed, at)


def _fixed_by(memory: Mapping[int, Memory], recorder: Recorder) -> IsFixed:
    """Return what tells tensors that the loader made with values, whatever is in the checkpoint."""

    def is_fixed(tensor: torch.Tensor) -> bool:
        if type(tensor) not in ORDINARY or tensor.layout is not torch.strided or tensor.is_meta:
            return False
        return not (recorder.chose_device or key_of(tensor) in memory or recorder.touched(tensor))

    return is_fixed


def _kept(
    modules: Modules, saved: Snapshot, changes: Sequence[Change], recorder: Recorder, owned: Mapping[int, Memory]
) -> dict[str, Kept]:
    """Return what only the loader can hang on `modules`. saved: what was there before."""
    likeness = Likeness(saved.modules, recorder, owned)
    kept = {
        name: Kept(recorder.taint(t), likeness.of(t))
        for name, t in attribute_tensors(modules)
        if key_of(t) not in owned and recorder.touched(t)
    }
    for change in changes:
        if change.after is None and not any(_is_within(other, change.name) for other in kept):
            entries = frozenset[str]().union(*map(likeness.behind, held_in(change.value)))
            kept[change.name] = Kept(entries, likeness.of(change.value))
    return kept


def _is_within(name: str, outer: str) -> bool:
    """Whether `name` is `outer`, or what it names lies in it."""
    return name == outer or name.startswith((f"{outer}.", f"{outer}["))


class _Failed:
    """What a loader returns that raises an error of its own."""


def _names(result: Any) -> frozenset[str] | None:
    if isinstance(result, set | frozenset | list | tuple | dict) and all(isinstance(n, str) for n in result):
        return frozenset(result)
    return None


def _under_watch(loader: LoadWeights, recorder: Recorder, entries: Sequence[TensorEntry]) -> Any:
    try:
        offered = recorder.offer(entries)
        with torch.no_grad(), recorder, Guard(recorder):
            result = loader(offered)
            return set(result) if isinstance(result, Iterator) else result
    except CannotFollow:
        return None
    except Exception as error:  # noqa: BLE001 a loader may fail on meta in any way; with values it may not
        if recorder.unfollowed is not None:
            return None
        at = "" if recorder.current is None else f" at entry {shown(recorder.current)}"
        recorder.unfollowed = f"fails without values{at}: {type(error).__name__}: {shown(str(error))}"
        return _Failed()


def _memory_of(modules: Iterable[tuple[str, nn.Module]]) -> dict[int, Memory]:
    """Return the memory of every tensor that hangs on one of the modules."""
    found: dict[int, Memory] = {}
    with seen_as_plain():
        for name, tensor in attribute_tensors(modules):
            key = key_of(tensor)
            memory = found.get(key)
            if memory is None:
                memory = found[key] = memory_like(tensor)
            memory.labels = (*memory.labels, name)
    return found


def harm(whole: Run, part: Run) -> str | None:
    """Say what differs when only the entries for opaque parameters are streamed, after the plan; None if nothing.

    What the whole run sets is set again in the end, whatever the part made of it, and so is what only the part sets
    where it can be put back as it was (see `undone`): a flag or a counter, but no module, parameter or tensor.
    """
    if part.unfollowed is not None:
        return f"cannot load a part of the checkpoint: it {part.unfollowed}"
    undoable = [change.name for change in _only_in(part, whole) if change.before is not None]
    kept = {n: k for n, k in part.kept.items() if n in whole.kept or not any(_is_within(n, name) for name in undoable)}
    if kept != whole.kept or [m.log for m in part.loose] != [m.log for m in whole.loose]:
        return "does something else when it gets only a part of the checkpoint"
    for change in _only_in(part, whole):
        if change.before is None:
            return f"sets {change.name} only when it gets a part of the checkpoint"
    for key, memory in whole.memory.items():
        again = part.memory[key]
        is_opaque = memory.opaque or memory.contents.lost
        if again.log != memory.log if is_opaque else not _harmless(memory, again):
            return f"treats {memory.labels[0]} otherwise when it gets only a part of the checkpoint"
    return None


def undone(whole: Run, part: Run) -> tuple[Setting, ...]:
    """Return what puts back what the loader sets only when it gets a part of the checkpoint."""
    return tuple(change.before for change in _only_in(part, whole) if change.before is not None)


def _only_in(part: Run, whole: Run) -> Iterator[Change]:
    known = {change.name for change in whole.changes}
    return (change for change in part.changes if change.name not in known)


def _harmless(planned: Memory, again: Memory) -> bool:
    """Whether writing `again` over what the plan leaves changes nothing."""
    if again.opaque or again.contents.lost:
        return False
    before, after = _keys(planned.contents), _keys(again.contents)
    return after <= before and (again.contents.base is None or after == before)


def _keys(contents: Contents) -> set[tuple[object, ...]]:
    base = [] if contents.base is None else [(contents.base,)]
    return {(p.copy, p.entry and p.entry.name, p.fill, p.rounded) for p in contents.patches} | set(base)
