"""Loading a model again and again: planned once, into the memory that it has, all or nothing where that is asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack

import torch
from torch import nn

from tensorferry.api import Prepared, opened, prepare, refuse_misfit, run
from tensorferry.arguments import refuse_nonsense
from tensorferry.checkpoint import Checkpoint, OpeningOptions, refuse_unknown_options
from tensorferry.config import ReadOptions
from tensorferry.core.amounts import few
from tensorferry.core.catalogue import Catalogue
from tensorferry.core.names import fold
from tensorferry.core.plan import Strictness
from tensorferry.core.rebasing import rebased, refuse_differences
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Target
from tensorferry.errors import PlanError
from tensorferry.modules.aside import Aside
from tensorferry.modules.describe import describe, dtensors_of
from tensorferry.modules.distributed import reshard
from tensorferry.modules.materialize import Materialized
from tensorferry.modules.shadows import Again, Shadows, refuse_if_short
from tensorferry.progress import SILENT, Progress, progress_of
from tensorferry.report import Report
from tensorferry.timing import timed
from tensorferry.verify import verify_files

__all__ = ["Reloader"]


@dataclass(frozen=True)
class _Kept:
    """A plan, and what it was made for: the checkpoint, and how DTensors of the model lay on the ranks."""

    prepared: Prepared
    catalogue: Catalogue
    dtensors: Mapping[str, object]


class Reloader:
    """Fills one model from one checkpoint after the other, all of the same names, types and shapes.

    The first `load` plans; the others read headers, see that nothing else has changed, and use the plan again. Values
    are written where the model has them: tensors stay the same objects in the same memory, so optimizers, captured
    graphs and views go on. Training mode is left as it is.

    Modules that post-process their weights are laid out as they were before, filled, post-processed again, and given
    back the tensors that they had, with the new values. Their hooks must be able to run again; one that has a second
    run do nothing would leave weights that are not processed.

    The first load may be that of a model on meta. rules, strict, device, options and opening: as in `load`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rules: RuleSet | None = None,
        strict: Strictness | None = None,
        device: torch.device | str | None = None,
        options: ReadOptions | None = None,
        **opening: Unpack[OpeningOptions],
    ) -> None:
        refuse_unknown_options(Reloader, opening)
        refuse_nonsense(model, rules, strict)
        self._model = model
        self._rules, self._strict = rules, strict
        self._device, self._options, self._opening = device, options, opening
        self._kept: _Kept | None = None

    def load(
        self,
        path: str | os.PathLike[str] | Checkpoint,
        *,
        atomic: bool = False,
        verify: bool = False,
        progress: Progress | bool = SILENT,
    ) -> Report:
        """Fill the model from the checkpoint at `path` and return the report.

        atomic: keep all new values beside the old ones, and overwrite these when everything has been read, checked and
        post-processed; where anything fails before, the model is as it was. Takes as much memory as the model. Without
        it, a load that fails leaves some new and some old values, and ``error.touched`` says so.
        verify, progress: as in `load`.

        Other threads may use the model meanwhile as far as they can do with old and new values side by side: with
        atomic, while the last copy is made; without, all the time. Not where modules post-process: these have no
        values for a while.

        Raises what `load` raises; PlanError where names, types or shapes are not those of the first checkpoint, or
        the model is not what it was; ConfigError where there is no memory for `atomic`. Nothing is touched then.
        """
        telling = progress_of(progress)
        with opened(path, self._options, self._opening) as checkpoint, self._mode_kept():
            seconds: dict[str, float] = {}
            if self._kept is not None:  # before all of the checkpoint is read to be verified, and the model laid out
                refuse_differences(self._kept.catalogue, checkpoint.catalogue, checkpoint.uri)
            with timed(seconds, "verify") if verify else nullcontext():
                verified = verify_files(checkpoint, progress=telling).summary if verify else Prepared.verified
            reshard(self._model)  # before anything remembers what hangs where
            aside, dtensors = Aside(self._model), dtensors_of(self._model)
            try:
                prepared = self._laid_out(aside, checkpoint, atomic=atomic)
                prepared = replace(prepared, verified=verified, seconds={**seconds, **prepared.seconds})
                filling = self._at_once if atomic else self._as_it_comes
                report = filling(aside, partial(run, self._model, prepared, device=self._device, progress=telling))
            except BaseException:
                aside.restore()
                raise
            self._kept = _Kept(prepared, checkpoint.catalogue, dtensors)
        return _told(report, aside)

    def _laid_out(self, aside: Aside, checkpoint: Checkpoint, *, atomic: bool) -> Prepared:
        """Lay the model out for a load and return its plan; raises where it does not fit, with no value touched."""
        before = aside.lay_out()
        prepared = self._prepared(checkpoint)
        refuse_misfit(prepared)
        made = prepared.plan
        filled = {step.parameter for step in made.steps}
        filled |= {alias for alias, owner in made.aliases.items() if owner in filled}
        if lost := before - filled:
            raise PlanError(
                f"post-processing has replaced {few((f.text for f in fold(lost)), 5)}, and the checkpoint does not "
                "hold what was there before: load it into a model that is newly built"
            )
        if atomic:
            refuse_if_short(self._model, filled)
        aside.hang_empty(filled)
        return prepared

    def _prepared(self, checkpoint: Checkpoint) -> Prepared:
        """Return the plan that is kept, for this checkpoint, or a new one where there is none or it may be another."""
        kept = self._kept
        if kept is None:
            return prepare(self._model, checkpoint, rules=self._rules, strict=self._strict)
        _refuse_other_model(kept.prepared.target, describe(self._model))
        other = _may_untie(kept.prepared) or kept.dtensors != dtensors_of(self._model)
        plan = None if other else rebased(kept.prepared.plan, checkpoint.catalogue)
        if plan is None:
            return prepare(self._model, checkpoint, rules=self._rules, strict=self._strict)
        return replace(kept.prepared, checkpoint=checkpoint, plan=plan, seconds={})

    def _as_it_comes(self, aside: Aside, fill: Callable[..., Report]) -> Report:
        report = fill(memory=partial(Again, where=aside.devices), processed=aside.put_back)
        _surely(aside.put_back)
        return report

    def _at_once(self, aside: Aside, fill: Callable[..., Report]) -> Report:
        made: list[Shadows] = []

        def memory(*given: object, **options: object) -> Materialized:
            made.append(Shadows(*given, where=aside.devices, **options))  # type: ignore[arg-type]
            return made[0]

        def swap() -> None:
            made[0].swap()
            aside.put_back()

        report, seconds = fill(memory=memory), dict[str, float]()
        with timed(seconds, "swap"):
            _surely(swap)
        return replace(report, seconds={**report.seconds, **seconds})

    @contextmanager
    def _mode_kept(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self._model.modules()]
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


def _surely(act: Callable[[], object]) -> None:
    """Call `act`, which may be repeated, and where it is interrupted call it again first: half of it would be worse."""
    try:
        act()
    except BaseException:
        act()
        raise


def _may_untie(prepared: Prepared) -> bool:
    """Whether the values of the checkpoint decide which tensors are tied: some come under several names of one."""
    return any(dropped.why.startswith("tied to ") for dropped in prepared.plan.dropped) or bool(prepared.bytes_compared)


def _refuse_other_model(before: Target, now: Target) -> None:
    """Raise PlanError where tensors of the model have another type or shape than when the plan was made."""
    changed = [n for n, t in before.items() if n not in now or (now[n].dtype, now[n].shape) != (t.dtype, t.shape)]
    if changed:
        raise PlanError(
            f"the model is not what it was when the load was planned: {few((f.text for f in fold(changed)), 5)}; "
            "it was not touched; plan anew with another Reloader"
        )


def _told(report: Report, aside: Aside) -> Report:
    """Return `report` with a warning of tensors that are other objects now."""
    if not aside.renewed:
        return report
    names = few((f.text for f in fold(aside.renewed)), 5)
    warning = f"post-processing made {names} in another form than before: who refers to the old ones has old values"
    return replace(report, warnings=(*report.warnings, warning))
