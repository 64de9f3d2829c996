"""What is to be done to fill a vLLM model from a checkpoint, found out before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from hashlib import sha256

from torch import nn

from tensorferry import api
from tensorferry.checkpoint import Checkpoint
from tensorferry.compat.vllm.expectations import (
    HasDefaultScales,
    IsPadding,
    computed,
    padding_of,
    without_computed,
    without_padding,
)
from tensorferry.config import LoadConfig, ReadOptions
from tensorferry.core.plan import Dropped, Plan, describe_problems
from tensorferry.core.schedule import Schedule
from tensorferry.core.strays import suggestions
from tensorferry.errors import PlanError, shown
from tensorferry.execute.borrowed import Borrowed
from tensorferry.execute.borrowing import Adopt, borrow
from tensorferry.execute.exchange import Party
from tensorferry.loaders.own_loader import SelfLoad, prepare_own
from tensorferry.loaders.reading import OwnReading
from tensorferry.loaders.writes import Share
from tensorferry.modules.finalize import hooked_modules
from tensorferry.modules.moving import movable, move
from tensorferry.modules.snapshot import Setting
from tensorferry.modules.trace import Traced, trace
from tensorferry.problems import Problem, ProblemKind

__all__ = ["Planned", "party_of", "planned", "reading_together", "refuse_misfit", "uses_of"]

_TRIES = 5
"""Entries that are left out one after the other, to see what else the loader cannot take."""

_ELSEWHERE = "another rank needs it"

_HINT = (
    "if the loader fails only because it has no values while it is traced, give model_loader_extra_config "
    """{"own_loader": "stream"}"""
)


@dataclass(frozen=True, slots=True)
class Planned:
    """A load that can begin. computed: tensors that are left as the constructor made them, with the reason.

    Those that streaming leaves are known afterwards, from `SelfLoad.lacking`. reading: how it reads by itself, with
    what is borrowed. schedule: how the rest is read; None where nobody has to know before. hands_on: whether this rank
    reads for others, and they for it.
    """

    own: SelfLoad
    computed: dict[str, str]
    reading: OwnReading
    schedule: Schedule | None = None
    hands_on: bool = False

    @property
    def borrowed(self) -> Borrowed | None:
        """Memory that needs no reading."""
        return None if self.reading.borrowed is None else self.reading.borrowed[0]


def planned(
    model: nn.Module,
    checkpoint: Checkpoint,
    config: LoadConfig,
    has_default_scales: HasDefaultScales,
    shared: Callable[[Collection[Setting]], Mapping[str, str]] = lambda settings: {},
    *,
    borrows: bool = False,
) -> Planned:
    """Trace the ``load_weights`` of `model` on `model` itself, and return what follows. Touches no parameter.

    shared: returns what is taken from another model later, with the reason; told what the model's loader has set.
    It is asked again when all has been streamed, for a loader that was not traced has set nothing before. borrows:
    whether parameters may have the pages of files; `Planned.borrowed` is for the caller to settle, or to close.
    Raises PlanError where the loader fails, as it would when half of the model is filled; all else that does not fit
    is for `refuse_misfit`.
    """
    built, is_padding = computed(model, has_default_scales), padding_of(model)
    own = prepare_own(model, checkpoint, config, config.strictness, OwnReading(config))
    settings = own.traced.settings
    if own.traced.failed:
        raise _refused(own, is_padding, lambda traced: {**built, **shared(traced.settings)})

    def may_lack(name: str, share: Share) -> bool:
        return name in built or name in shared(settings) or is_padding(name, *share)

    own.may_lack = may_lack
    left = {**built, **shared(settings)}
    filled = set(own.traced.opaque) | {step.parameter for step in own.traced.plan.steps}
    plan = _settled(own.prepared.plan, is_padding, left)
    # vLLM runs the hooks itself, in its own order.
    own.prepared = replace(own.prepared, plan=plan, strict=config.strictness, processed=tuple(hooked_modules(model)))
    hands_on = _hands_on(model, config)
    untraced = {name: why for name, why in left.items() if name not in filled}
    with ExitStack() as if_refused:
        found = _borrowed(own) if borrows and _may_borrow(model, config) else None
        own.reading = reading = OwnReading(config, borrowed=found)
        rest = own.prepared
        if found is not None:
            rest = replace(rest, plan=if_refused.enter_context(found[0]).rest)
        schedule = api.scheduled(rest) if hands_on or found is not None else None
        if_refused.pop_all()
    return Planned(own, untraced, reading, schedule, hands_on)


def _borrowed(own: SelfLoad) -> tuple[Borrowed, Adopt] | None:
    """Return memory for parameters that can lie elsewhere, and are filled by the plan alone, and what moves them."""
    tensors = movable(own.model, own.prepared.target)
    wanted = tensors.keys() - own.traced.opaque.keys()
    borrowed = borrow(own.prepared.plan, own.prepared.checkpoint.storage, wanted)
    return None if borrowed is None else (borrowed, lambda name, memory: move(tensors[name], memory))


def _may_borrow(model: nn.Module, config: LoadConfig) -> bool:
    """Whether all is on the CPU, and nothing else was asked for: to read in some way, or to leave the cache alone."""
    read = config.reading
    as_usual = config.strategy == "lazy" and read.direct == "auto" and read.keep_cache and not read.huge_pages
    return as_usual and all(parameter.device.type == "cpu" for parameter in model.parameters())


def _hands_on(model: nn.Module, config: LoadConfig) -> bool:
    """Whether this rank reads for others, and they for it: not for GPUs, which another executor fills."""
    on_cpu = all(parameter.device.type in ("cpu", "meta") for parameter in model.parameters())
    return on_cpu and config.reading.hands_on and config.strategy == "lazy"


def party_of(load: Planned | None) -> Party:
    """Return this rank as a party to an exchange with others, told what it will read; close it when it has met them."""
    if load is None or not load.hands_on:
        return Party(None, None)
    return Party(load.schedule, load.own.prepared.checkpoint.storage)


@contextmanager
def reading_together(
    load: Planned, party: Party, offers: Sequence[str], rank: int, read: ReadOptions
) -> Iterator[None]:
    """Have `load` read together with the ranks of this machine that offer the same rows, while this lasts.

    read: how it reads, now that it is known which ranks share files.
    """
    config = replace(load.reading.config, read=read)
    kind = load.own.prepared.checkpoint.options.storage_kind
    workers = (config.reading if kind == "auto" else config.reading.settled(kind)).workers
    with party.meet(offers, rank, workers) or nullcontext() as exchange:
        load.own.reading = replace(load.reading, config=config, exchange=exchange)
        try:
            yield
        finally:
            load.own.reading = load.reading


def uses_of(load: Planned | None) -> str:
    """Return which entries a rank uses, to be told to the others: a digest of all names, and 1 or 0 for each entry."""
    if load is None:
        return ""
    names, unused = load.own.prepared.checkpoint.catalogue, set(load.own.prepared.plan.unexpected)
    return _digest(names) + "".join("0" if name in unused else "1" for name in names)


def refuse_misfit(load: Planned, uses: Sequence[str]) -> None:
    """Raise PlanError with every problem. uses: of all ranks; what one of them uses is not unexpected on another."""
    prepared = load.own.prepared
    names = list(prepared.checkpoint.catalogue)
    digest = _digest(names)
    same = [told[len(digest) :] for told in uses if told.startswith(digest)]
    elsewhere = {name for name, used in zip(names, zip(*same, strict=True), strict=False) if "1" in used}
    is_needed = [p.kind is ProblemKind.UNEXPECTED and p.subject in elsewhere for p in prepared.plan.problems]
    dropped = [
        Dropped(p.subject, _ELSEWHERE) for p, needed in zip(prepared.plan.problems, is_needed, strict=True) if needed
    ]
    problems = tuple(p for p, needed in zip(prepared.plan.problems, is_needed, strict=True) if not needed)
    plan = replace(prepared.plan, problems=problems, dropped=(*prepared.plan.dropped, *dropped))
    load.own.prepared = replace(prepared, plan=plan)
    api.refuse_misfit(load.own.prepared, load.own.model)


def _digest(names: Iterable[str]) -> str:
    return sha256("\0".join(names).encode()).hexdigest()


def _settled(plan: Plan, is_padding: IsPadding, left: Mapping[str, str]) -> Plan:
    """Return `plan` without findings about what need not come from a checkpoint."""
    return without_computed(without_padding(plan, is_padding), left)


def _refused(own: SelfLoad, is_padding: IsPadding, left: Callable[[Traced], Mapping[str, str]]) -> PlanError:
    """Return what to raise where the model's loader fails: at which entries, and what is missing then.

    left: returns what need not be filled, told what came of the entries that the loader takes.
    """
    model, checkpoint, traced = own.model, own.prepared.checkpoint, own.traced
    failures: dict[str, Problem] = {}
    while traced.failed and len(failures) < _TRIES:
        at = traced.failed_at or ""
        if at in failures:
            break
        failures[at] = Problem(ProblemKind.UNEXPECTED, at or "(all entries)", f"the model's loader {traced.fallback}")
        rest = checkpoint.catalogue.keys() - failures.keys()
        traced = trace(model, checkpoint.catalogue, strict=own.strict, names=rest)
    found = () if traced.failed else _settled(traced.plan, is_padding, left(traced)).fatal
    others = [p for p in found if p.kind is not ProblemKind.UNEXPECTED]
    near = suggestions([p.subject for p in others if p.kind is ProblemKind.MISSING], list(failures))
    problems = [*failures.values(), *(replace(p, near=near.get(p.subject, p.near)) for p in others)]
    return PlanError(f"{shown(checkpoint.uri, 300)}: {describe_problems(problems)}\n  {_HINT}", problems)
