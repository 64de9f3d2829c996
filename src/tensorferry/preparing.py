"""Preparing a load: describing the model, settling names and ties, and planning. Nothing is touched here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from tensorferry.arguments import refuse_nonsense, refuse_processed
from tensorferry.checkpoint import Checkpoint
from tensorferry.collector import collector_paused
from tensorferry.core.catalogue import TensorEntry
from tensorferry.core.plan import Plan, Strictness
from tensorferry.core.planning import make_plan
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Target
from tensorferry.core.unused import unused_patterns, unused_rules
from tensorferry.core.wrappers import stripping_told, unwrapping
from tensorferry.errors import PlanError, shown
from tensorferry.execute.placing import refuse_unwritable
from tensorferry.formats.merge import same_values
from tensorferry.formats.quantized_parts import QUANTIZED_BY
from tensorferry.modules.adapters import Adapted, Derive, adapt
from tensorferry.modules.describe import describe, places
from tensorferry.modules.distributed import ORDINARY, memory_of
from tensorferry.modules.finalize import derive_buffers
from tensorferry.modules.tie import settle_ties
from tensorferry.problems import Problem
from tensorferry.timing import timed

__all__ = ["Prepared", "prepare", "refuse_misfit"]


@dataclass(frozen=True)
class Prepared:
    """A load that has been planned and not begun: what to fill, how, and what to tell of it.

    bytes_compared: read already, to find out whether tied tensors have equal values. hint: what may help, where
    checkpoint and model do not fit. processed: modules whose values come as their hooks leave them, so that these are
    not run.
    """

    checkpoint: Checkpoint
    target: Target
    plan: Plan
    strict: Strictness = field(default_factory=Strictness)
    notes: tuple[str, ...] = ()
    derive: Derive = derive_buffers
    verified: str = "contents not verified"
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes_compared: int = 0
    hint: str = ""
    processed: tuple[str, ...] = ()


def prepare(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    target: Target | None = None,
    rules: RuleSet | None = None,
    strict: Strictness | None = None,
    adapted: Adapted | None = None,
) -> Prepared:
    """Describe `model`, settle names and ties, and plan. Touches nothing, raises no PlanError.

    Given `target`, `rules` or `adapted` are taken as they are; without them, models of a known library are adapted.
    Raises ConfigError for a model, rules or strictness that are none, and for weights that would be processed twice.
    """
    refuse_nonsense(model, rules, strict)
    refuse_processed(model, checkpoint)
    seconds: dict[str, float] = {}
    compared = _Compared(checkpoint)
    with timed(seconds, "describe"), collector_paused():
        how = adapted or _adapted(model, checkpoint, target, rules)
    catalogue = checkpoint.catalogue if how.catalogue is None else how.catalogue
    with timed(seconds, "plan"), collector_paused():
        target, untied = settle_ties(catalogue, how.target, how.rules, compared)
        strict = strict or Strictness()
        lenient = replace(strict, may_miss=(*strict.may_miss, *how.may_miss))
        made = make_plan(catalogue, target, how.rules, strict=lenient)
        made = replace(made, problems=(*made.problems, *_unused(checkpoint, target, rules, strict)))
    return Prepared(
        checkpoint, target, made, strict, (*how.notes, *untied), how.derive,
        seconds=seconds, bytes_compared=compared.nbytes, hint=_hint(model, how, rules),
    )  # fmt: skip


@dataclass
class _Compared:
    """Tells whether entries have equal values, and counts what is read for that."""

    checkpoint: Checkpoint
    nbytes: int = 0

    def __call__(self, one: TensorEntry, other: TensorEntry) -> bool:
        def read_into(path: str, offset: int, out: memoryview) -> None:
            self.nbytes += len(out)
            self.checkpoint.storage.read_into(path, offset, out)

        return same_values(read_into, one, other)


def _unused(checkpoint: Checkpoint, target: Target, rules: RuleSet | None, strict: Strictness) -> list[Problem]:
    """Return findings of what the caller gave and nothing matches; his words are the only ones that are misspelt."""
    return [*(unused_rules(rules, checkpoint.catalogue) if rules is not None else ()), *unused_patterns(strict, target)]


def _hint(model: nn.Module, how: Adapted, rules: RuleSet | None) -> str:
    if rules is not None or how.derive is not derive_buffers or not callable(getattr(model, "load_weights", None)):
        return ""
    return (
        f"{type(model).__name__} has a load_weights of its own, which is not used here: load the model with "
        "tensorferry.get_model_loader, which traces it"
    )


def _adapted(model: nn.Module, checkpoint: Checkpoint, target: Target | None, rules: RuleSet | None) -> Adapted:
    if target is None and rules is None:
        found = adapt(model, checkpoint.catalogue)
        if found is not None:
            return found
    target = describe(model) if target is None else target
    if rules is not None:
        return Adapted(target, rules)
    guessed, notes = _guessed_rules(checkpoint, target)
    return Adapted(target, guessed, notes=tuple(notes))


def _guessed_rules(checkpoint: Checkpoint, target: Target) -> tuple[RuleSet, list[str]]:
    found = unwrapping(checkpoint.catalogue, target.keys())
    if found is None:
        return RuleSet(), []
    return found[0], [stripping_told(found[1])]


def refuse_misfit(prepared: Prepared, model: nn.Module | None = None) -> None:
    """Raise PlanError with every problem that stops the load, naming the checkpoint.

    model: as it will be when the load begins, to refuse a parameter that cannot be written to, too; for ranks, which
    have to know that before one of them writes.
    """
    try:
        prepared.plan.raise_for_problems()
    except PlanError as error:
        checkpoint = prepared.checkpoint
        empty = "" if checkpoint.catalogue else "it has no tensors (vocabulary only?), "
        told = [note for note in checkpoint.catalogue.notes if note.startswith(QUANTIZED_BY)]
        hints = "".join(f"\n  {hint}" for hint in (prepared.hint, *told) if hint)
        raise PlanError(f"{shown(checkpoint.uri, 300)}: {empty}{error}{hints}", error.problems) from None
    if model is not None:
        found = {place.name: place.tensor for place in places(model)}
        memory = {name: t if type(t) in ORDINARY else memory_of(t) for name, t in found.items()}
        refuse_unwritable(prepared.plan, memory)
