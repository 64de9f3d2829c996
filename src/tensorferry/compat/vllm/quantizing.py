"""Models that vLLM quantizes while they load: streamed through their own loaders, which make parameters as they go."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from torch import nn

from tensorferry.checkpoint import Checkpoint
from tensorferry.config import LoadConfig
from tensorferry.core.plan import describe_problems
from tensorferry.errors import PlanError, TensorferryError, shown
from tensorferry.execute.base import Counters
from tensorferry.loaders.own_loader import told
from tensorferry.loaders.reading import OwnReading
from tensorferry.problems import Problem, ProblemKind
from tensorferry.progress import Progress
from tensorferry.report import Report
from tensorferry.timing import timed

__all__ = ["stream_online"]

_WHY = "vLLM quantizes the model while it loads"


def stream_online(
    model: nn.Module, checkpoint: Checkpoint, config: LoadConfig, progress: Progress, watch: Callable[[], None]
) -> Report:
    """Give every entry to the model's own loader, and return the report. What `watch` raises ends the load.

    The memory of such a model does not say what was written, so what counts is what the loader says that it loaded.
    Raises PlanError, with the model touched, for parameters that were empty and that it does not name.
    """
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    entries, counters, seconds = list(checkpoint.catalogue.values()), Counters(), dict[str, float]()
    progress.start(checkpoint.catalogue.nbytes, "streamed weights")
    reading = OwnReading(config)
    try:
        with timed(seconds, "load"), closing(reading.stream(checkpoint.storage, entries, counters)) as tensors:
            loaded = model.load_weights(told(tensors, progress, watch))  # type: ignore[operator]
        checkpoint.storage.check_unchanged()
    except TensorferryError as error:
        error.touched = True
        raise
    finally:
        progress.finish()
    _refuse_unloaded(checkpoint, empty, loaded)
    return Report(
        source=checkpoint.uri,
        format=checkpoint.catalogue.format,
        files=checkpoint.catalogue.files,
        selection=checkpoint.selection.reason,
        ignored_files=dict(checkpoint.selection.ignored),
        parameters=sum(1 for _ in model.parameters()),
        entries=len(entries),
        bytes_needed=checkpoint.catalogue.nbytes,
        bytes_read=counters.bytes_read,
        reads=counters.reads,
        direct_bytes=0,
        staging_peak=counters.staging_peak,
        executor="stream",
        fingerprint="",
        streamed=dict.fromkeys(empty, _WHY),
        warnings=checkpoint.warnings,
        seconds=seconds,
    )


def _refuse_unloaded(checkpoint: Checkpoint, empty: list[str], loaded: object) -> None:
    if not isinstance(loaded, set | frozenset):
        return
    detail = "the model's load_weights does not say that it loaded it"
    problems = [Problem(ProblemKind.MISSING, name, detail) for name in empty if name not in loaded]
    if problems:
        lines = describe_problems(problems).splitlines()[1:]
        error = PlanError("\n".join([f"{shown(checkpoint.uri, 300)}: found after loading, {_WHY}", *lines]), problems)
        error.touched = True
        raise error
