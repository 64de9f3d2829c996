"""Rules: which entry names go to which slot of which parameter. Names only, as data; the first match wins.

A rule's source is written with placeholders and matches a whole name: ``{i}`` stands for a number,
``{x:part}`` for one dotted component, ``{x:path}`` for one or more. What a placeholder matched can be used in
`into` and `slot`::

    Place("layers.{i}.attention.wq.weight", "model.layers.{i}.self_attn.q_proj.weight")
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from tensorferry.core.transforms import Transform
from tensorferry.errors import RuleError

__all__ = ["Drop", "Ignore", "Join", "Part", "Place", "Rule", "Split", "compiled", "filled", "matcher"]

_PLACEHOLDER = re.compile(r"\{([a-z_][a-z0-9_]*)(?::(part|path))?\}")
_MATCHES = {None: r"[0-9]{1,18}", "part": r"[^.]+", "path": r".+"}


@dataclass(frozen=True, slots=True)
class Place:
    """The entry `source` feeds `slot` of the parameter `into`, through the transform `via` if there is one."""

    source: str
    into: str
    slot: str = ""
    via: Transform | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One destination of a Split; `via` is usually a Take."""

    into: str
    slot: str = ""
    via: Transform | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """One entry feeds several slots: fused on disk, or needed twice."""

    source: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """Several entries make one slot through `via`.

    The inputs of `via` are, for each source in turn, the entries that it matches, ordered by the placeholders
    that `into` and `slot` do not use; those must be numbers that count from 0 without a hole.
    """

    sources: tuple[str, ...]
    into: str
    via: Transform
    slot: str = ""


@dataclass(frozen=True, slots=True)
class Drop:
    """Entries that are not wanted, and why. Applies even to the name of a parameter."""

    source: str
    why: str


@dataclass(frozen=True, slots=True)
class Ignore:
    """Entries that are harmless where no parameter has their name: buffers that models compute themselves."""

    source: str
    why: str


Rule = Place | Split | Join | Drop | Ignore


@lru_cache(maxsize=4096)
def compiled(source: str) -> re.Pattern[str]:
    """Return the regular expression of a rule's source; raises RuleError where it is malformed."""
    parts, at, names = [], 0, set()
    for hole in _PLACEHOLDER.finditer(source):
        name, kind = hole.groups()
        if name in names:
            raise RuleError(f"rule {source!r} uses the placeholder {name!r} twice")
        names.add(name)
        parts += [re.escape(source[at : hole.start()]), f"(?P<{name}>{_MATCHES[kind]})"]
        at = hole.end()
    rest = source[at:]
    if set("{}") & set(_PLACEHOLDER.sub("", source)):
        raise RuleError(f"rule {source!r} has a brace that is no placeholder like {{i}}, {{x:part}} or {{x:path}}")
    return re.compile("".join([*parts, re.escape(rest)]), re.DOTALL)


@lru_cache(maxsize=16)
def matcher(given: tuple[str, ...]) -> Callable[[str], bool]:
    """Return what tells whether a name matches one of the sources `given`; raises RuleError where one is malformed.

    Those without a placeholder match themselves, and no regular expression is made of them: that takes long.
    """
    names = frozenset(source for source in given if not set("{}") & set(source))
    patterns = [compiled(source) for source in given if source not in names]
    return lambda name: name in names or any(pattern.fullmatch(name) for pattern in patterns)


def placeholders(text: str) -> tuple[str, ...]:
    """Return the names of the placeholders in `text`, in order."""
    return tuple(m[1] for m in _PLACEHOLDER.finditer(text))


def fixed_numbers(source: str) -> set[str] | None:
    """Return the components of `source` that are numbers; None where a match can depend on a number otherwise.

    A name whose other numbers are exchanged for some number that is not among these matches as before.
    """
    fixed = set()
    for component in _PLACEHOLDER.sub("{}", source).split("."):
        literal = component.replace("{}", "")
        if component == literal and literal.isdecimal():
            fixed.add(literal)
        elif "{}" in component and (literal.isdecimal() or (not literal and component != "{}")):
            return None
    return fixed


def discards(rule: Rule) -> bool:
    """Whether a rule only says that entries are not wanted."""
    return isinstance(rule, Drop | Ignore)


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return `text` with its placeholders replaced; raises RuleError for one that the source does not have."""

    def value(hole: re.Match[str]) -> str:
        try:
            return values[hole[1]]
        except KeyError:
            raise RuleError(f"{text!r} uses the placeholder {hole[1]!r} that its source does not have") from None

    return _PLACEHOLDER.sub(value, text)


def format_of(text: str) -> str:
    """Return `text` as a format string, which ``format_map`` fills as `filled` does, only sooner."""
    literal = _PLACEHOLDER.split(text)[::3]
    escaped = [part.replace("{", "{{").replace("}", "}}") for part in literal]
    return escaped[0] + "".join(f"{{{name}}}{part}" for name, part in zip(placeholders(text), escaped[1:], strict=True))


def destinations(rule: Rule) -> Sequence[Part]:
    """Return where a rule sends what it matches; nothing for Drop and Ignore."""
    match rule:
        case Place(_, into, slot, via):
            return (Part(into, slot, via),)
        case Split(_, parts):
            return parts
        case Join(_, into, via, slot):
            return (Part(into, slot, via),)
        case _:
            return ()


def sources(rule: Rule) -> Sequence[str]:
    """Return the patterns of a rule."""
    return rule.sources if isinstance(rule, Join) else (rule.source,)


def under(rule: Rule, prefix: str) -> Rule:
    """Return the rule for the same names below `prefix`, on both sides."""
    match rule:
        case Place(source, into):
            return replace(rule, source=prefix + source, into=prefix + into)
        case Split(source, parts):
            return Split(prefix + source, tuple(replace(p, into=prefix + p.into) for p in parts))
        case Join(several, into):
            return replace(rule, sources=tuple(prefix + s for s in several), into=prefix + into)
        case Drop(source) | Ignore(source):
            return replace(rule, source=prefix + source)


def inverse(rule: Rule) -> Rule:
    """Return the rule that leads back; raises RuleError where there is none."""
    if not isinstance(rule, Place) or rule.slot:
        raise RuleError(f"{type(rule).__name__} of {sources(rule)[0]!r} has no inverse: only whole placements do")
    back = None
    if rule.via is not None:
        undo = getattr(rule.via, "inverse", None)
        if undo is None:
            raise RuleError(f"the transform {rule.via.op!r} of {rule.source!r} has no inverse")
        back = undo()
    kinds = {m[1]: m[0] for m in _PLACEHOLDER.finditer(rule.source)}
    if set(kinds) != set(placeholders(rule.into)):
        raise RuleError(f"{rule.into!r} does not keep every placeholder of {rule.source!r}, so it cannot be undone")
    return Place(
        _PLACEHOLDER.sub(lambda m: kinds[m[1]], rule.into),
        _PLACEHOLDER.sub(lambda m: f"{{{m[1]}}}", rule.source),
        via=back,
    )


def open_numbers(rule: Join) -> tuple[str, ...]:
    """Return the placeholders that order the inputs of a join: those that `into` and `slot` do not use."""
    used = {*placeholders(rule.into), *placeholders(rule.slot)}
    return tuple(name for name in placeholders(rule.sources[0]) if name not in used)


def check(rules: Iterable[Rule]) -> None:
    """Raise RuleError for a rule that could never work: braces, unknown placeholders, inputs without an order."""
    for rule in rules:
        _check_types(rule)
        for source in sources(rule):
            known = dict.fromkeys(placeholders(source), "0")
            if "{" in source or "}" in source:
                compiled(source)
            for part in destinations(rule):
                filled(part.into, known)
                filled(part.slot, known)
        if isinstance(rule, Join):
            _check_order(rule)


def _check_types(rule: object) -> None:
    """Raise RuleError for what is no rule, or holds something else than names and transforms."""
    if not isinstance(rule, Rule):
        several = isinstance(rule, list | tuple) and rule and all(isinstance(r, Rule) for r in rule)
        hint = ": give rules one by one, RuleSet(*rules)" if several else ""
        raise RuleError(f"a rule (Place, Split, Join, Drop, Ignore) is expected, not {type(rule).__name__}{hint}")
    kind = type(rule).__name__
    if isinstance(rule, Join) and not isinstance(rule.sources, tuple):
        raise RuleError(f"{kind}: sources is a tuple of names, not {rule.sources!r}")
    if isinstance(rule, Split) and not (isinstance(rule.parts, tuple) and all(isinstance(p, Part) for p in rule.parts)):
        raise RuleError(f"{kind} of {rule.source!r}: parts is a tuple of Part, not {rule.parts!r}")
    texts = [*sources(rule), *(text for part in destinations(rule) for text in (part.into, part.slot))]
    texts += [rule.why] if isinstance(rule, Drop | Ignore) else []
    for text in texts:
        if not isinstance(text, str):
            raise RuleError(f"{kind}: text is expected, not {text!r}")
    for part in destinations(rule):
        if not (part.via is None or (hasattr(part.via, "op") and not isinstance(part.via, type))):
            raise RuleError(
                f"{kind} into {part.into!r}: via is a transform such as Transpose((1, 0)), not {part.via!r}"
            )


def _check_order(rule: Join) -> None:
    if not rule.sources:
        raise RuleError(f"a join into {rule.into!r} has no sources")
    used = {*placeholders(rule.into), *placeholders(rule.slot)}
    left = [{m[1]: m[2] for m in _PLACEHOLDER.finditer(s) if m[1] not in used} for s in rule.sources]
    if any(kind for kinds in left for kind in kinds.values()) or any(kinds != left[0] for kinds in left):
        raise RuleError(
            f"the sources of the join into {rule.into!r} are ordered by the placeholders that it does not use; "
            "these must be numbers like {i}, and the same ones in every source"
        )
