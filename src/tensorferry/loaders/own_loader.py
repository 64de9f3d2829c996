"""Models that bring their own ``load_weights(iterable)``: traced into a plan, and streamed where that is impossible.

Whatever is streamed is watched, so that what the loader leaves out is found, whatever it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tensorferry.api import Prepared
from tensorferry.checkpoint import Checkpoint
from tensorferry.config import LoadConfig
from tensorferry.core.amounts import counted, few
from tensorferry.core.names import nearest
from tensorferry.core.plan import Strictness, describe_problems
from tensorferry.core.ruleset import COMMON_LEFTOVERS
from tensorferry.core.schedule import Schedule
from tensorferry.core.target import Target
from tensorferry.core.unused import unused_patterns
from tensorferry.errors import FinalizeError, PlanError, shown
from tensorferry.execute.base import Counters, Executor, OnReady, Parameters
from tensorferry.loaders.reading import Reading
from tensorferry.loaders.writes import Share, Watch
from tensorferry.modules.describe import describe
from tensorferry.modules.materialize import Materialized
from tensorferry.modules.trace import Traced, all_streamed, ignored_by_loader, stream_opaque, trace
from tensorferry.problems import Problem, ProblemKind
from tensorferry.progress import SILENT, Progress
from tensorferry.report import Report
from tensorferry.storage.base import Storage
from tensorferry.timing import timed

__all__ = ["SelfLoad", "brings_own_loader", "prepare_own", "told"]

_HINTED = 20
"""Missing names that similar ones are looked up for; that takes a while each."""


def brings_own_loader(model: nn.Module) -> bool:
    """Tell whether `model` is filled by its own ``load_weights``, and not by rules that it declares."""
    return callable(getattr(model, "load_weights", None)) and getattr(model, "weight_rules", None) is None


def prepare_own(
    model: nn.Module, checkpoint: Checkpoint, config: LoadConfig, strict: Strictness, reading: Reading
) -> SelfLoad:
    """Return what is to be done to fill `model` through its own loader. Touches nothing, raises no PlanError."""
    seconds: dict[str, float] = {}
    with timed(seconds, "trace"):
        target = describe(model)
        if config.own_loader == "trace":
            traced = trace(model, checkpoint.catalogue, strict=strict, target=target)
        else:
            traced = all_streamed(target, checkpoint.catalogue, "streaming was asked for")
    findings = (*traced.plan.problems, *unused_patterns(strict, target))
    plan = replace(traced.plan, problems=findings)
    notes = _unknown(traced.loaded or (), target)
    if traced.fallback is not None:
        notes = [f"the model's load_weights could not be traced: it {traced.fallback}"]
    prepared = Prepared(checkpoint, target, plan, strict, notes=tuple(notes), seconds=seconds)
    return SelfLoad(model, prepared, traced, reading, strict)


@dataclass
class SelfLoad:
    """A load through the model's own loader: what is planned, and, as an `Executor`, what is streamed after it.

    With something to stream, modules are post-processed only when everything is there.

    watch: called often where there is something to stream; what it raises ends the load. may_lack: tells, when all has
    been streamed, whether a tensor is complete of which just that share was written. lacking: what it said that of.
    """

    model: nn.Module
    prepared: Prepared
    traced: Traced
    reading: Reading
    strict: Strictness
    watch: Callable[[], None] = lambda: None
    may_lack: Callable[[str, Share], bool] = lambda name, share: False
    lacking: dict[str, Share] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    streamed: Counters = field(default_factory=Counters)
    bytes_streamed: int = 0

    @property
    def executor(self) -> Executor:
        """What runs the plan, and does what it leaves out."""
        return self if self.traced.opaque or self.traced.settings else self.reading.executor

    def run(
        self,
        schedule: Schedule,
        storage: Storage,
        parameters: Parameters,
        *,
        on_ready: OnReady | None = None,
        progress: Progress = SILENT,
    ) -> Counters:
        """Fill what is planned, then stream; see `Executor`. Raises PlanError for what the loader left out."""
        if not self.traced.opaque:
            return self._planned(schedule, storage, parameters, on_ready or (lambda name: None), progress)
        counters, ready = Counters(), dict.fromkeys(step.parameter for step in schedule.plan.steps)

        def planned(name: str) -> None:
            ready[name] = None
            self.watch()

        if self.traced.plan.steps:
            counters = self.reading.executor.run(schedule, storage, parameters, on_ready=planned, progress=progress)
        opaque = [name for name in self.traced.opaque if name in parameters]
        for name in opaque:
            parameters[name]
        self._stream(storage, opaque, parameters, progress)
        counters.absorb(self.streamed)
        counters.staging_peak = max(counters.staging_peak, self.streamed.staging_peak)
        for name in ready | dict.fromkeys(opaque):
            if on_ready is not None:
                on_ready(name)
        return counters

    def _planned(
        self, schedule: Schedule, storage: Storage, parameters: Parameters, on_ready: OnReady, progress: Progress
    ) -> Counters:
        """Run the plan; hooks, which run when a parameter is ready, find what the loader set."""
        is_settled = False

        def ready(name: str) -> None:
            nonlocal is_settled
            if not is_settled:
                self.traced.settle(self.model)
                is_settled = True
            on_ready(name)

        counters = self.reading.executor.run(schedule, storage, parameters, on_ready=ready, progress=progress)
        if not is_settled:
            self.traced.settle(self.model)
        return counters

    def account(self, report: Report) -> Report:
        """Return `report` with what was streamed, and what that brought to light."""
        kinds = {kind: tuple(p.subject for p in self.problems if p.kind is kind) for kind in ProblemKind}
        return replace(
            report,
            executor=type(self.reading.executor).__name__,
            bytes_needed=report.bytes_needed + self.bytes_streamed,
            streamed=dict(self.traced.opaque),
            unexpected=(*report.unexpected, *kinds[ProblemKind.UNEXPECTED]),
            missing=(*report.missing, *kinds[ProblemKind.MISSING]),
            warnings=(*report.warnings, *self.notes),
        )

    def _stream(self, storage: Storage, opaque: Sequence[str], parameters: Parameters, progress: Progress) -> None:
        wanted = set(self.traced.stream)
        entries = [e for e in self.prepared.checkpoint.catalogue.values() if e.name in wanted]
        watch = Watch(self.model)
        self.bytes_streamed = sum(e.nbytes for e in entries)
        progress.start(self.bytes_streamed, "streamed weights")
        try:
            with closing(self.reading.stream(storage, entries, self.streamed)) as tensors, watch:
                claimed = stream_opaque(self.model, self.traced, watch.offer(told(tensors, progress, self.watch)))
        finally:
            progress.finish()
        if not self.traced.plan.steps:
            self._note_unexpected(watch.unused(e.name for e in entries))
        self._note_missing(opaque, watch.written(), _names(claimed))
        self.notes += _unknown(_names(claimed), self.prepared.target)
        self._refuse(parameters)

    def _note_unexpected(self, unused: Sequence[str]) -> None:
        self.problems += [ignored_by_loader(n, self.strict) for n in unused if COMMON_LEFTOVERS.route(n) is None]

    def _note_missing(self, opaque: Sequence[str], written: Mapping[str, Share], claimed: set[str]) -> None:
        short = [n for n in opaque if n in written and written[n].written < written[n].total]
        self.lacking = {n: written[n] for n in short if self.may_lack(n, written[n])}
        missing = [self._missing(n, written[n], n in claimed) for n in short if n not in self.lacking]
        self.problems += _with_near(missing, self.problems)

    def _missing(self, name: str, share: Share, is_claimed: bool) -> Problem:
        if share.written:
            detail = f"the model's load_weights wrote {share.written:,} of its {share.total:,} elements"
        elif is_claimed:
            detail = "the model's load_weights says that it loaded it, and wrote nothing to it"
        else:
            detail = "the model's load_weights wrote nothing to it"
        fatal = self.strict.needs(name)
        return Problem(ProblemKind.MISSING, name, detail, fatal=fatal)

    def _refuse(self, parameters: Parameters) -> None:
        fatal = [p for p in self.problems if p.fatal]
        if fatal:
            lines = describe_problems(fatal).splitlines()[1:]
            count = counted(len(fatal), "problem")
            head = f"the model's load_weights and the checkpoint do not fit: {count}, found after loading"
            raise PlanError("\n".join([head, *lines]), fatal)
        given = parameters.given_memory if isinstance(parameters, Materialized) else set()
        missing = (p.subject for p in self.problems if p.kind is ProblemKind.MISSING)
        empty = [name for name in (*missing, *self.lacking) if name in given]
        if empty:
            raise FinalizeError(
                f"nothing filled {few(empty, 8)}, which had no memory before: build the model on a real device, "
                "so that what may be missing has values"
            )


def _with_near(problems: Sequence[Problem], unexpected: Sequence[Problem]) -> list[Problem]:
    """Return `problems`, the first of the missing ones with the unexpected names that may have been meant."""
    spare = [p.subject for p in unexpected if p.kind is ProblemKind.UNEXPECTED]
    missing = [p.subject for p in problems if p.kind is ProblemKind.MISSING][:_HINTED] if spare else []
    near = {name: nearest(name, spare) for name in missing}
    return [replace(p, near=near.get(p.subject, p.near)) for p in problems]


def told(
    tensors: Iterable[tuple[str, torch.Tensor]], progress: Progress, watch: Callable[[], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `tensors` on; `watch` is called before each of them, and `progress` told of it afterwards."""
    for name, tensor in tensors:
        watch()
        yield name, tensor
        progress.advance(tensor.nbytes)


def _names(returned: Any) -> set[str]:
    """Return the names in what a loader returned, if it returned names."""
    return set(map(str, returned)) if isinstance(returned, set | frozenset | list | tuple | dict) else set()


def _unknown(claimed: Iterable[str], target: Target) -> list[str]:
    unknown = sorted(set(claimed) - target.keys())
    if not unknown:
        return []
    return [f"load_weights says that it loaded {few(map(shown, unknown), 5)}, which the model does not have"]
