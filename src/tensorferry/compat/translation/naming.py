"""What the entries of a checkpoint in another layout are called in one of transformers: rules, and how parts lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tensorferry.core.mapped import Laid
from tensorferry.core.rules import compiled
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Slot

__all__ = ["Naming"]


@dataclass(frozen=True, slots=True)
class Naming:
    """How the entries of one checkpoint are called in a checkpoint of transformers.

    rules: from entry to name, with what is to be done to values. laid: by name (a pattern like a rule's source), how
    a tensor is laid out that several entries make up.
    """

    rules: RuleSet
    laid: Mapping[str, Laid] = field(default_factory=dict)

    def laid_of(self, name: str) -> Laid | None:
        """Return how the tensor `name` is laid out; None for one that is a single entry."""
        return next((laid for pattern, laid in self.laid.items() if compiled(pattern).fullmatch(name)), None)

    def slots_of(self, name: str) -> Mapping[str, Slot]:
        """Return the slots of the tensor `name`; none for one that is a single entry."""
        laid = self.laid_of(name)
        return {} if laid is None else laid.slots
