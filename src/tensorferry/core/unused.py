"""Rules and patterns that somebody gave and that match nothing: most are misspelt, and some are globs."""

from __future__ import annotations

from collections.abc import Collection

from tensorferry.core.names import nearest
from tensorferry.core.plan import Strictness
from tensorferry.core.rules import compiled, filled, placeholders
from tensorferry.core.ruleset import RuleSet
from tensorferry.errors import RuleError, shown
from tensorferry.problems import Problem, ProblemKind

__all__ = ["unused_patterns", "unused_rules"]

_FOREIGN = frozenset("*?()[]|^$\\+")
"""Characters of globs and regular expressions; in rules they stand for themselves, and in names they hardly occur."""


def unused_rules(rules: RuleSet, entries: Collection[str]) -> list[Problem]:
    """Return a finding for each source that decides for no entry. Raises RuleError for one that looks like a glob."""
    return [_unused(source, "matches no entry of the checkpoint", entries) for source in rules.unused(entries)]


def unused_patterns(strict: Strictness, parameters: Collection[str]) -> list[Problem]:
    """Return a finding for each pattern of `may_miss` that no parameter has. Raises what `unused_rules` raises."""
    unused = [p for p in strict.may_miss if not (p in parameters or any(map(compiled(p).fullmatch, parameters)))]
    return [_unused(p, "of may_miss matches no parameter of the model", parameters) for p in unused]


def _unused(source: str, what: str, names: Collection[str]) -> Problem:
    foreign = sorted(_FOREIGN & set(source))
    if foreign:
        raise RuleError(
            f"{shown(source)!r} {what}, and {foreign[0]!r} stands for itself there: rules are no globs and no regular "
            "expressions; they write {i} for a number, {x:part} for one dotted component, {x:path} for one or more"
        )
    likely = filled(source, dict.fromkeys(placeholders(source), "0"))
    return Problem(ProblemKind.UNUSED_RULE, source, what, nearest(likely, names), fatal=False)
