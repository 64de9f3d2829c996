"""The plan: the whole account of a load, as values. Making one is in `planning`; nothing here reads or writes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, get_args

from tensorferry.core.amounts import counted
from tensorferry.core.boxes import Region
from tensorferry.core.catalogue import TensorEntry
from tensorferry.core.dtypes import DType
from tensorferry.core.names import fold, said_of_all, template_of
from tensorferry.core.rules import matcher
from tensorferry.core.transforms import TensorSpec, Transform
from tensorferry.errors import ConfigError, PlanError, shown
from tensorferry.problems import Problem, ProblemKind

__all__ = ["Dropped", "Plan", "Source", "Step", "Strictness", "Treatment"]

Treatment = Literal["error", "warn"]

_LINE = 400
"""Longest line of a message, in characters; names come out of files."""


@dataclass(frozen=True, slots=True)
class Strictness:
    """What stops a load. Everything that does not stop it is reported.

    unexpected: entries that nothing wants. missing: parameters that nothing fills; with "warn" they keep
    what they hold, so that on a meta model the load still fails. lossy: casts that change the sort of number
    (found while planning) and casts that overflow (found while loading).
    may_miss: parameters that may be missing, in rule notation. Shapes, gaps and overlaps always stop it.

    Raises ConfigError for a value that is none of these, and RuleError for a name that is no rule notation.
    """

    unexpected: Treatment = "warn"
    missing: Treatment = "error"
    lossy: Treatment = "error"
    may_miss: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("unexpected", "missing", "lossy"):
            if (value := getattr(self, name)) not in get_args(Treatment):
                raise ConfigError(f"Strictness: {name} {value!r}: one of {', '.join(get_args(Treatment))} is expected")
        patterns: object = self.may_miss
        if not isinstance(patterns, tuple) or not all(isinstance(p, str) for p in patterns):
            hint = f", such as ({patterns!r},)" if isinstance(patterns, str) else ""
            raise ConfigError(f"Strictness: may_miss {patterns!r}: a tuple of names in rule notation is expected{hint}")
        matcher(self.may_miss)

    def needs(self, name: str) -> bool:
        """Whether it stops the load that nothing fills the parameter `name`."""
        return self.missing == "error" and not matcher(self.may_miss)(name)

    @classmethod
    def strict(cls) -> Strictness:
        """Return the setting under which every entry must be wanted, too."""
        return cls(unexpected="error")


class Source(NamedTuple):
    """A part of an entry."""

    entry: TensorEntry
    region: Region


class Step(NamedTuple):
    """One copy: the sources, through `via` if there is one, become the part `into` of a parameter.

    Without `via` there is one source with as many elements as `into`. With it, the whole inputs are the whole
    entries, `sources` are the parts of them that are needed, and `window` is the part of the output that goes
    into `into`. Without sources, `into` is filled with `fill`.
    """

    parameter: str
    into: Region
    sources: tuple[Source, ...]
    via: Transform | None = None
    window: Region | None = None
    fill: float | None = None


class Dropped(NamedTuple):
    """An entry that is not used, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Plan:
    """Everything that a load will do and leave undone, known before it touches anything.

    steps: in storage order. parameters: dtype and shape of everything to be filled, ties left out.
    aliases: tied name to the parameter it shares. dropped: entries not used. problems: all findings.
    """

    steps: tuple[Step, ...]
    parameters: Mapping[str, TensorSpec]
    aliases: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[Dropped, ...] = ()
    problems: tuple[Problem, ...] = ()

    @cached_property
    def bytes_needed(self) -> int:
        """Bytes of checkpoint that the steps need, before any rounding up to whole reads."""
        sources = [s for step in self.steps if step.sources and step.into.size for s in step.sources]
        return sum([entry.dtype.nbytes(region.box.shape) for entry, region in sources])

    @cached_property
    def fatal(self) -> tuple[Problem, ...]:
        """The problems that stop the load."""
        return tuple(p for p in self.problems if p.fatal)

    @cached_property
    def unexpected(self) -> tuple[str, ...]:
        """Entries that nothing wanted."""
        return tuple(p.subject for p in self.problems if p.kind is ProblemKind.UNEXPECTED)

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Parameters that are not filled, or not whole."""
        return tuple(dict.fromkeys(p.subject for p in self.problems if p.kind is ProblemKind.MISSING))

    @cached_property
    def casts(self) -> Mapping[tuple[DType, DType], int]:
        """How many steps change a type, by (from, to)."""
        pairs: Counter[tuple[DType, DType]] = Counter()
        for step in self.steps:
            if step.sources:
                source = step.sources[0].entry.dtype if step.via is None else _made(step).dtype
                target = self.parameters[step.parameter].dtype
                if source is not target and source != target:
                    pairs[source, target] += 1
        return pairs

    @cached_property
    def fingerprint(self) -> str:
        """Sixty-four hex digits that are equal for equal plans, on every machine and in every run.

        Problems and reasons are words for people and take no part.
        """
        digest = hashlib.sha256()
        said = lru_cache(maxsize=1024)(repr)  # few regions differ where there are many steps
        for step in self.steps:
            digest.update(_canonical(step, said).encode())
        for name, spec in sorted(self.parameters.items()):
            digest.update(f"{name}\0{spec.dtype}\0{spec.shape}\n".encode())
        for pair in sorted(self.aliases.items()):
            digest.update(f"{pair}\n".encode())
        return digest.hexdigest()

    def raise_for_problems(self) -> None:
        """Raise PlanError with everything that stops the load; return where nothing does."""
        if self.fatal:
            raise PlanError(describe_problems(self.fatal), self.fatal)

    def explain(self, *, lines: int = 40) -> str:
        """Return the plan in at most about `lines` lines of text, layer numbers folded."""
        from tensorferry.core.explain import explain

        return explain(self, lines=lines)

    def to_json(self) -> str:
        """Return the plan as JSON, from which `Plan.from_json` makes an equal one."""
        from tensorferry.core.plan_json import to_json

        return to_json(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan that `to_json` wrote."""
        from tensorferry.core.plan_json import from_json

        return from_json(text)


def _made(step: Step) -> TensorSpec:
    assert step.via is not None
    return step.via.infer([TensorSpec(s.entry.dtype, s.entry.shape) for s in step.sources])


def _canonical(step: Step, said: Callable[[Region | None], str]) -> str:
    """Return the ``repr`` of all that a step is, put together of that of its parts; said: ``repr`` of a region."""
    into = said(step.into)
    read = ", ".join([_read(e, into if region is step.into else said(region)) for e, region in step.sources])
    via = step.via and step.via.to_json()
    return f"({step.parameter!r}, {into}, [{read}], {via!r}, {said(step.window)}, {step.fill!r})\n"


def _read(entry: TensorEntry, region: str) -> str:
    chunks = ", ".join([f"({c.box!r}, {c.span!r}, {c.strides!r})" for c in entry.chunks])
    return f"({entry.name!r}, {entry.dtype.name!r}, {entry.shape!r}, [{chunks}], {region})"


def describe_problems(problems: Sequence[Problem], *, limit: int = 30) -> str:
    """Return findings that stop a load in a few lines: a head, then `problem_lines`."""
    head = f"checkpoint and model do not fit: {counted(len(problems), 'problem')}; the model was not touched"
    return "\n".join([head, *problem_lines(problems, limit=limit)])


def problem_lines(problems: Iterable[Problem], *, limit: int = 30) -> list[str]:
    """Return about one line for each sort of finding, names folded, with what may have been meant.

    There are at most `limit` lines, and one that says how many more there would be. Sorts of problem take turns,
    so that no sort hides another.
    """
    groups: dict[ProblemKind, dict[str, list[Problem]]] = {}
    for p in problems:
        groups.setdefault(p.kind, {}).setdefault(template_of(p.detail), []).append(p)
    kinds = [[line for some in details.values() for line in _lines(some)] for details in groups.values()]
    total, fair = sum(map(len, kinds)), max(1, limit // max(1, len(kinds)))
    if total <= limit:
        return [line for lines in kinds for line in lines]
    spare = limit - sum(min(len(lines), fair) for lines in kinds)
    out = []
    for lines in kinds:
        most = fair + spare
        spare -= max(0, min(len(lines), most) - fair)
        out += lines[:most]
    return [*out, f"  … and {total - len(out)} more lines"]


def _lines(members: Sequence[Problem]) -> Iterable[str]:
    """Yield the lines of findings of one kind that differ in names and in the layer numbers of their details."""
    near = {p.subject: p.near for p in members}
    details = {p.subject: p.detail for p in members}
    for folded in fold(near):
        hints = dict.fromkeys(f.text for f in fold([n for name in folded.names for n in near[name][:1]]))
        hint = f" (did you mean {', '.join(hints)}?)" if hints else ""
        detail = said_of_all([details[name] for name in folded.names])
        text = f"{members[0].kind.value}: {folded.text}" + (f": {detail}" if detail else "") + hint
        yield "  " + shown(text, limit=_LINE)
