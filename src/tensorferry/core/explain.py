"""A plan in words: one line for each sort of step, layer numbers folded, on one screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tensorferry.core.amounts import counted, few, human_bytes
from tensorferry.core.names import fold, template_of
from tensorferry.core.plan import Plan, Source, Step, problem_lines
from tensorferry.errors import shown

__all__ = ["explain"]


@dataclass(slots=True)
class _Group:
    """Steps of one sort: the same parameter, sources and geometry in every layer."""

    steps: list[Step]

    @property
    def nbytes(self) -> int:
        return sum(s.entry.dtype.nbytes(s.region.shape) for step in self.steps for s in step.sources)


def explain(plan: Plan, *, lines: int = 40) -> str:
    """Return `plan` in at most about `lines` lines: totals, steps by sort, ties, drops, problems."""
    groups: dict[tuple[object, ...], _Group] = {}
    for step in plan.steps:
        groups.setdefault(_sort(step), _Group([])).steps.append(step)
    ties = [f"  {shown(alias)} = {shown(owner)} (tied)" for alias, owner in plan.aliases.items()]
    rest = [*_cut(ties, 4, "ties"), *_cut(list(_drops(plan)), 6, "drops"), *_problems(plan)]
    room = max(lines // 2, lines - 1 - len(rest))
    return "\n".join(
        [
            f"{counted(len(plan.parameters), 'parameter')}, {counted(len(plan.steps), 'step')}, "
            f"{human_bytes(plan.bytes_needed)} to read",
            *_cut([_line(g) for g in groups.values()], room, "sorts of step"),
            *rest,
        ]
    )


def _problems(plan: Plan) -> Sequence[str]:
    if not plan.problems:
        return ()
    found = f"{counted(len(plan.problems), 'finding')}, {_how_many_stop(len(plan.problems), len(plan.fatal))} the load:"
    return [found, *problem_lines(plan.problems, limit=12)]


def _how_many_stop(count: int, fatal: int) -> str:
    if count == 1:
        return "which stops" if fatal else "which does not stop"
    if fatal in (0, count):
        return "all of which stop" if fatal else "none of which stops"
    return f"{fatal:,} of which {'stops' if fatal == 1 else 'stop'}"


def _sort(step: Step) -> tuple[object, ...]:
    sources = tuple((template_of(s.entry.name), s.entry.dtype.name, s.region) for s in step.sources[:2])
    via = step.via.op if step.via else None
    return template_of(step.parameter), step.into.shape, sources, len(step.sources), via, step.fill


def _line(group: _Group) -> str:
    first, steps = group.steps[0], group.steps
    into, part = _folded(s.parameter for s in steps), _part(steps)
    if not first.sources:
        return f"  {into}{part} <- {first.fill} (declared default)"
    sources = _folded(s.entry.name for step in steps for s in _used(step))
    same = "" if sources == into else f" {sources}"
    entry, region = _used(first)[0]
    cut = "" if region.is_whole else f" part {list(region.shape)}"
    via = f" via {first.via.op}" if first.via else ""
    return f"  {into}{part} <-{same} {entry.dtype} {list(entry.shape)}{cut}{via}, {human_bytes(group.nbytes)}"


def _used(step: Step) -> Sequence[Source]:
    """Return the sources that something is taken of; all of them where that is none."""
    return [s for s in step.sources if s.region.size] or step.sources


def _part(steps: Sequence[Step]) -> str:
    """Say which part of their parameters steps fill: where, if it is the same in all, else how large."""
    first = steps[0].into
    if first.is_whole:
        return ""
    if any(step.into != first for step in steps):
        return f" part {list(first.shape)}"
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(first.box.start, first.box.stop, strict=True)) + "]"


def _folded(names: Iterable[str]) -> str:
    return few((shown(f.text) for f in fold(names)), 1)


def _drops(plan: Plan) -> Iterable[str]:
    groups: dict[str, list[str]] = {}
    for drop in plan.dropped:
        groups.setdefault(drop.why, []).append(drop.name)
    for why, names in groups.items():
        for folded in fold(names):
            yield f"  dropped: {shown(folded.text)} ({why})"


def _cut(lines: Sequence[str], most: int, what: str) -> Sequence[str]:
    if len(lines) <= most:
        return lines
    return [*lines[:most], f"  … and {len(lines) - most} more {what}"]
