"""Prefixes that wrappers leave on names: DistributedDataParallel's ``module.`` and torch.compile's ``_orig_mod.``."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tensorferry.core.rules import Place
from tensorferry.core.ruleset import RuleSet

__all__ = ["unwrapping"]

_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_forward_module.")


def unwrapping(names: Collection[str], wanted: Collection[str]) -> tuple[RuleSet, str] | None:
    """Return rules that strip wrapper prefixes from `names`, and what they strip; None where none is to be stripped.

    A prefix goes only where every name has it and more of the names are `wanted` without it, so a real sub-module
    called ``module`` stays. Inner ``_orig_mod.`` components go together with the outer ones. Names with braces, which
    no module can have, cannot be written as rules; where one is there, nothing is stripped.

    >>> unwrapping(["module.a.w", "module.a.b"], {"a.w", "a.b"})[1]
    'module.'
    """
    bare = dict.fromkeys(names)
    if any("{" in name or "}" in name for name in bare):
        return None
    stripped = {name: _strip(name) for name in bare}
    outer = _common_prefix(bare)
    if outer:
        stripped = {name: _strip(name[len(outer) :]) for name in bare}
    if all(name == short for name, short in stripped.items()):
        return None
    if len(set(stripped.values())) < len(bare) or _hits(stripped.values(), wanted) <= _hits(bare, wanted):
        return None
    if all(short == name[len(outer) :] for name, short in stripped.items()):
        return RuleSet(Place(outer + "{name:path}", "{name}")), outer
    return RuleSet(*(Place(name, short) for name, short in stripped.items())), f"{outer or '_orig_mod.'} and inner ones"


def _common_prefix(names: Iterable[str]) -> str:
    rest, prefix = list(names), ""
    while rest and (found := next((w for w in _WRAPPERS if all(n.startswith(w) for n in rest)), "")):
        prefix += found
        rest = [n[len(found) :] for n in rest]
    return prefix


def _strip(name: str) -> str:
    """Remove components that no model has of its own accord."""
    return ".".join(c for c in name.split(".") if c not in ("_orig_mod", "_fsdp_wrapped_module"))


def _hits(names: Iterable[str], wanted: Collection[str]) -> int:
    return sum(name in wanted for name in names)
