"""A plan in words: one line for each sort of step, layer numbers folded, on one screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tensorferry.core.names import fold, template_of
from tensorferry.core.plan import Plan, Step, describe_problems

__all__ = ["explain", "human_bytes"]


def human_bytes(n: int) -> str:
    """Return `n` bytes in binary units.

    >>> human_bytes(3 << 20), human_bytes(512)
    ('3.0 MiB', '512 B')
    """
    value, unit = float(n), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{int(value)} {unit}" if unit == "B" else f"{value:.1f} {unit}"


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
    body = [_line(g) for g in groups.values()]
    ties = [f"  {alias} = {owner} (tied)" for alias, owner in plan.aliases.items()]
    drops = list(_drops(plan))
    return "\n".join(
        [
            f"{len(plan.parameters):,} parameters, {len(plan.steps):,} steps, {human_bytes(plan.bytes_needed)} to read",
            *_cut(body, lines, "sorts of step"),
            *_cut(ties, 6, "ties"),
            *_cut(drops, 8, "drops"),
            *([describe_problems(plan.problems, limit=12)] if plan.problems else []),
        ]
    )


def _sort(step: Step) -> tuple[object, ...]:
    sources = tuple((template_of(s.entry.name), s.entry.dtype.name, s.region) for s in step.sources[:2])
    via = step.via.op if step.via else None
    return template_of(step.parameter), step.into.shape, sources, len(step.sources), via, step.fill


def _line(group: _Group) -> str:
    first, steps = group.steps[0], group.steps
    into = _folded(s.parameter for s in steps)
    part = "" if first.into.is_whole else f"[{_box(first)}]"
    if not first.sources:
        return f"  {into}{part} <- {first.fill} (declared default)"
    sources = _folded(s.entry.name for step in steps for s in step.sources)
    same = "" if sources == into else f" {sources}"
    cut = "" if first.sources[0].region.is_whole else f" part {list(first.sources[0].region.shape)}"
    via = f" via {first.via.op}" if first.via else ""
    entry = first.sources[0].entry
    return f"  {into}{part} <-{same} {entry.dtype} {list(entry.shape)}{cut}{via}, {human_bytes(group.nbytes)}"


def _box(step: Step) -> str:
    box = step.into.box
    return ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True))


def _folded(names: Iterable[str]) -> str:
    folded = fold(names)
    more = f" and {len(folded) - 1} more" if len(folded) > 1 else ""
    return folded[0].text + more


def _drops(plan: Plan) -> Iterable[str]:
    groups: dict[str, list[str]] = {}
    for drop in plan.dropped:
        groups.setdefault(drop.why, []).append(drop.name)
    for why, names in groups.items():
        for folded in fold(names):
            yield f"  dropped: {folded.text} ({why})"


def _cut(lines: Sequence[str], most: int, what: str) -> Sequence[str]:
    if len(lines) <= most:
        return lines
    return [*lines[:most], f"  … and {len(lines) - most} more {what}"]
