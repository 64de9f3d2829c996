"""What can be wrong between a checkpoint and a model: one value per finding, found before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Problem", "ProblemKind"]


class ProblemKind(Enum):
    """The kinds of finding; the value is the word used in reports and JSON."""

    MISSING = "missing"
    """A slot of a parameter that no entry of the checkpoint feeds."""
    UNEXPECTED = "unexpected"
    """An entry that no parameter wants and no rule drops."""
    SHAPE = "shape"
    """An entry whose shape is not the one that its slot takes."""
    LOSSY_DTYPE = "lossy dtype"
    """A cast that changes the sort of number, or widens a quantized weight without the scale beside it."""
    UNSUPPORTED_DTYPE = "unsupported dtype"
    """An entry of a type that is not known here, so that its values cannot be read."""
    GAP = "gap"
    """Elements of a parameter that no slot covers and no default fills."""
    OVERLAP = "overlap"
    """Elements of a parameter that two slots would write."""
    AMBIGUOUS_RULE = "ambiguous rule"
    """Two entries that rules send to the same slot."""
    UNUSED_RULE = "unused rule"
    """A rule, or a name that may be missing, that was given and matches nothing; stops nothing."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding. `subject` is the parameter or the entry it is about.

    detail: what was found and expected. near: names that may have been meant, best first.
    fatal: whether it stops the load; a finding that was allowed explicitly is kept and reported.
    """

    kind: ProblemKind
    subject: str
    detail: str = ""
    near: tuple[str, ...] = ()
    fatal: bool = True
