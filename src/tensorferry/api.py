"""The few lines that most people call: plan a load, do it, get a report. Start reading here."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Unpack

import torch
from torch import nn

from tensorferry.arguments import refuse_nonsense
from tensorferry.checkpoint import Checkpoint, OpeningOptions, open_checkpoint, refuse_unknown_options
from tensorferry.collector import collector_paused
from tensorferry.config import ReadOptions
from tensorferry.core.amounts import counted, few
from tensorferry.core.lower import lower
from tensorferry.core.plan import Plan, Strictness
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.schedule import Schedule
from tensorferry.errors import ConfigError, FinalizeError, TensorferryError, shown
from tensorferry.execute.base import Counters, Executor
from tensorferry.execute.lying import beginnings
from tensorferry.execute.mapping import mapped_parameters
from tensorferry.execute.placing import refuse_unwritable
from tensorferry.execute.threaded import ThreadedExecutor
from tensorferry.modules.describe import tensors_of
from tensorferry.modules.finalize import Completion, refuse_unfilled
from tensorferry.modules.materialize import LARGE, Materialized
from tensorferry.modules.surroundings import device_for
from tensorferry.preparing import Prepared, prepare, refuse_misfit
from tensorferry.problems import ProblemKind
from tensorferry.progress import SILENT, Progress, progress_of
from tensorferry.report import Report
from tensorferry.timing import timed
from tensorferry.verify import verify_files

__all__ = ["Prepared", "load", "opened", "plan", "prepare", "refuse_misfit", "run", "scheduled"]

logger = logging.getLogger(__name__)

_BATCHES, _LEAST_READ = 64, 1 << 20
"""Batches that a load is made of at least, so that threads share it evenly and little of a small one is staged at
once; and bytes below which batches are not cut for that."""
_LITTLE = 64 << 20
"""Bytes of a checkpoint that are read in a moment, so that making values for its tensors is most of the work."""


def load(
    model: nn.Module,
    path: str | os.PathLike[str] | Checkpoint,
    *,
    rules: RuleSet | None = None,
    device: torch.device | str | None = None,
    strict: Strictness | None = None,
    options: ReadOptions | None = None,
    verify: bool = False,
    progress: Progress | bool = SILENT,
    **opening: Unpack[OpeningOptions],
) -> Report:
    """Fill `model` from the checkpoint at `path` and return the report.

    Everything is planned first: unless all of it fits, PlanError lists every problem and the model is as it was.
    Parameters on meta get memory on `device` (default: CPU) when their bytes come; others are written in place, in
    the type they have. `rules` say how names differ; without them, names are the model's, but for what wrappers put
    before them. Afterwards the model has run its ``process_weights_after_loading`` hooks and is in eval mode.

    path: where the checkpoint is, or one that is open already; that one keeps its options and stays open.
    verify: read every file once before, and compare digests where there are some; see `tensorferry.verify`.
    progress: what is told of it; True for what suits standard error.
    opening: options of `open_checkpoint`. Raises LocateError, FormatError, ConfigError, PlanError, ReadError,
    FinalizeError; ``error.touched`` says whether the model may have been written to.
    """
    refuse_unknown_options(load, opening)
    refuse_nonsense(model, rules, strict)
    telling = progress_of(progress)
    device_for(model, device)  # raises, before anything is opened
    with opened(path, options, opening) as checkpoint, _paused_for_little(checkpoint):
        prepared = prepare(model, checkpoint, rules=rules, strict=strict)
        if verify:
            refuse_misfit(prepared)  # before all of it is read
            seconds: dict[str, float] = {}
            with timed(seconds, "verify"):
                verified = verify_files(checkpoint, progress=telling).summary
            prepared = replace(prepared, verified=verified, seconds={**seconds, **prepared.seconds})
        return run(model, prepared, device=device, progress=telling)


def plan(
    model: nn.Module,
    path: str | os.PathLike[str] | Checkpoint,
    *,
    rules: RuleSet | None = None,
    strict: Strictness | None = None,
    **opening: Unpack[OpeningOptions],
) -> Plan:
    """Return the plan of loading `path` into `model`, with all its problems. Touches nothing.

    Reads headers, and the values of tensors that the model ties and the checkpoint holds more than once, unless these
    are the same bytes of a file.
    """
    refuse_unknown_options(plan, opening)
    with opened(path, None, opening) as checkpoint:
        return prepare(model, checkpoint, rules=rules, strict=strict).plan


def run(
    model: nn.Module,
    prepared: Prepared,
    *,
    device: torch.device | str | None = None,
    executor: Executor | None = None,
    progress: Progress = SILENT,
    watch: Callable[[], None] = lambda: None,
    memory: Callable[..., Materialized] = Materialized,
    processed: Callable[[nn.Module], None] = lambda module: None,
    schedule: Schedule | None = None,
) -> Report:
    """Do what was planned: materialize, move the bytes, finalize; return the report.

    watch: called whenever a parameter is whole; what it raises ends the load. memory: what says where values go, of
    the arguments of `Materialized`. processed: called with each module that has just been post-processed. schedule:
    what `scheduled` has returned, where that was asked for before.

    Raises PlanError, and ConfigError for a `device` to which nothing would go, before anything is touched; ReadError
    and FinalizeError afterwards.
    """
    made, options = prepared.plan, prepared.checkpoint.options
    refuse_misfit(prepared)
    settled = device_for(model, device)
    seconds = dict(prepared.seconds)
    executor = executor or ThreadedExecutor.of(options)
    with timed(seconds, "schedule"), collector_paused():
        parameters = _memory(model, prepared, settled, memory)
        refuse_unwritable(made, parameters.hanging)
        mapped = _mapped(prepared, parameters)
        if schedule is None or mapped:
            schedule = _lowered(_without(made, mapped), options)
        expected = {s.parameter for s in made.steps}
        completion = Completion(model, prepared.target, expected, done=prepared.processed, then=processed)

    def ready(name: str) -> None:
        parameters.release(name)
        completion.ready(name)
        watch()

    where = shown(prepared.checkpoint.uri, 300)
    logger.info("loading %s: %s bytes to read", where, f"{schedule.bytes_read:,}")
    with _telling_what_was_touched(parameters), torch.no_grad():
        with timed(seconds, "load"):
            parameters.adopt(mapped)
            counters = executor.run(
                schedule, prepared.checkpoint.storage, parameters, on_ready=ready, progress=progress
            )
            for name in mapped:
                ready(name)
            prepared.checkpoint.storage.check_unchanged()
        with timed(seconds, "finalize"):
            _refuse_losses(counters, prepared.strict)
            computed = _finished(model, prepared, parameters, completion, settled)
    report = _report(prepared, executor, counters, computed, completion.processed, seconds)
    report = replace(report, devices=_devices(model), mapped_bytes=sum(t.nbytes for t in mapped.values()))
    for warning in report.warnings:
        logger.warning("%s: %s", where, shown(warning, 1000))
    logger.info("loaded %s in %.2f s", where, sum(report.seconds.values()))
    return report


def scheduled(prepared: Prepared) -> Schedule:
    """Return in which order which bytes will be read, if no parameter is mapped. Touches nothing."""
    with collector_paused():
        return _lowered(prepared.plan, prepared.checkpoint.options)


def _paused_for_little(checkpoint: Checkpoint) -> AbstractContextManager[None]:
    """Return what pauses the collector for a load, but where that may take long: other threads make garbage, too."""
    soon = checkpoint.catalogue.nbytes <= _LITTLE and checkpoint.options.storage_kind == "local"
    return collector_paused() if soon else nullcontext()


def _memory(
    model: nn.Module, prepared: Prepared, device: torch.device, memory: Callable[..., Materialized]
) -> Materialized:
    options = prepared.checkpoint.options
    is_new = any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers()))
    where = beginnings(prepared.plan, least=LARGE) if is_new and options.direct != "never" else {}
    return memory(model, prepared.target, device, beginnings=where, huge_pages=options.huge_pages)


def _mapped(prepared: Prepared, parameters: Materialized) -> dict[str, torch.Tensor]:
    """Return the parameters that are to be views of mapped files; none unless that was asked for."""
    if not prepared.checkpoint.options.mapped:
        return {}
    return mapped_parameters(prepared.plan, prepared.checkpoint.storage, parameters.replaceable)


def _without(made: Plan, names: Collection[str]) -> Plan:
    return replace(made, steps=tuple(s for s in made.steps if s.parameter not in names)) if names else made


def _lowered(made: Plan, options: ReadOptions) -> Schedule:
    return lower(
        made,
        max_gap=options.max_gap,
        max_read=min(options.max_read, max(_LEAST_READ, made.bytes_needed // _BATCHES)),
        max_staging=options.max_staging,
        waste=options.waste,
    )


def _finished(
    model: nn.Module, prepared: Prepared, parameters: Materialized, completion: Completion, device: torch.device
) -> tuple[str, ...]:
    """Compute what no checkpoint holds, run the hooks that are left, and refuse what is left; return the first."""
    _materialize_empty(parameters, prepared.plan)
    computed = prepared.derive(model, device)
    completion.finish()
    refuse_unfilled(model, _unfilled(parameters, prepared.plan))
    model.eval()
    return tuple(computed)


def opened(
    path: str | os.PathLike[str] | Checkpoint, options: ReadOptions | None, opening: OpeningOptions
) -> AbstractContextManager[Checkpoint]:
    """Return what opens the checkpoint at `path` and closes it in the end, or leaves alone one that is open already."""
    if isinstance(path, Checkpoint):
        if options is not None or opening:
            given = ", ".join([*(["options"] if options is not None else []), *opening])
            raise ConfigError(f"{given}: {path.uri} is open already; pass this to open_checkpoint")
        return nullcontext(path)
    return open_checkpoint(path, options=options, **opening)


@contextmanager
def _telling_what_was_touched(parameters: Materialized) -> Iterator[None]:
    try:
        yield
    except TensorferryError as error:
        error.touched = parameters.touched
        raise
    except BaseException as error:
        if parameters.touched:
            error.add_note("tensorferry: some parameters of the model had been written when this happened")
        raise


def _refuse_losses(counters: Counters, strict: Strictness) -> None:
    spoiled = {name: loss for name, loss in counters.losses.items() if loss.overflow}
    if spoiled and strict.lossy == "error":
        first = few((f"{name}: {loss}" for name, loss in spoiled.items()), 5, between="; ")
        raise FinalizeError(
            f"{counted(len(spoiled), 'parameter')} lost values to a type that cannot hold them ({first}): load into a "
            "wider type such as bfloat16 or float32, or allow it with Strictness(lossy='warn')"
        )


def _materialize_empty(parameters: Materialized, made: Plan) -> None:
    """Give tensors without elements their (empty) memory where no entry was there to do so."""
    for name, spec in made.parameters.items():
        if 0 in spec.shape:
            parameters.get(name)  # None where it was filled, and let go of


def _unfilled(parameters: Materialized, made: Plan) -> dict[str, str]:
    return {name: "missing in part" for name in made.missing if name in parameters.given_memory}


def _devices(model: nn.Module) -> dict[str, int]:
    return {str(device): n for device, n in Counter(t.device for t in tensors_of(model)).items()}


def _report(
    prepared: Prepared,
    executor: Executor,
    counters: Counters,
    computed: tuple[str, ...],
    processed: tuple[str, ...],
    seconds: Mapping[str, float],
) -> Report:
    made, checkpoint = prepared.plan, prepared.checkpoint
    narrowed = {name: (loss.overflow, loss.underflow) for name, loss in counters.losses.items()}
    return Report(
        source=checkpoint.uri,
        format=checkpoint.catalogue.format,
        files=checkpoint.catalogue.files,
        selection=checkpoint.selection.reason,
        ignored_files=dict(checkpoint.selection.ignored),
        parameters=len(made.parameters),
        entries=len(checkpoint.catalogue),
        bytes_needed=made.bytes_needed,
        bytes_compared=prepared.bytes_compared,
        bytes_read=counters.bytes_read,
        reads=counters.reads,
        direct_bytes=counters.direct_bytes,
        copied_bytes=counters.copied_bytes,
        ways=counters.ways,
        storage_kind=checkpoint.options.storage_kind,
        staging_peak=counters.staging_peak,
        executor=type(executor).__name__,
        fingerprint=made.fingerprint,
        unexpected=made.unexpected,
        missing=made.missing,
        dropped={d.name: d.why for d in made.dropped},
        ties=dict(made.aliases),
        computed=computed,
        post_processed=processed,
        casts={f"{a} -> {b}": n for (a, b), n in made.casts.items()},
        losses=narrowed,
        warnings=tuple(_warnings(prepared, counters)),
        verified=prepared.verified,
        seconds=seconds,
    )


def _warnings(prepared: Prepared, counters: Counters) -> Iterator[str]:
    yield from prepared.checkpoint.warnings
    yield from prepared.notes
    for name, loss in counters.losses.items():
        yield f"{name}: {loss} when cast"
    for problem in prepared.plan.problems:
        if problem.kind is not ProblemKind.UNEXPECTED:
            yield f"{problem.kind.value}: {problem.subject} {problem.detail}".strip()
