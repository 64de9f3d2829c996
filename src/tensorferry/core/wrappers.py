"""Prefixes that wrappers leave on names: DistributedDataParallel's ``module.`` and torch.compile's ``_orig_mod.``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from tensorferry.core.rules import Place
from tensorferry.core.ruleset import RuleSet

__all__ = ["stripping_told", "unwrapping"]

_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_forward_module.")
_MOST_WRAPPERS = 8  # around one model; a name out of a file may begin with thousands


def unwrapping(names: Collection[str], wanted: Collection[str]) -> tuple[RuleSet, str] | None:
    """Return rules that strip wrapper prefixes from `names`, and what they strip; None where none is to be stripped.

    A prefix goes only where every name has it and more of the names are `wanted` without it, so a real sub-module
    called ``module`` stays. Inner ``_orig_mod.`` components go together with the outer ones. Names with braces, which
    no module can have, cannot be written as rules; where one is there, nothing is stripped.

    >>> unwrapping(["module.a.w", "module.a.b"], {"a.w", "a.b"})[1]
    'module.'
    """
    together = "\n".join(names)
    if not any(word in together for word in ("module", "_orig_mod")):  # what each wrapper leaves has one of these
        return None
    bare = dict.fromkeys(names)
    if any("{" in name or "}" in name for name in bare):
        return None
    outer, best, most = "", {name: name for name in bare}, _hits(bare, wanted)
    for prefix in _common_prefixes(bare):
        stripped = {name: _strip(name[len(prefix) :]) for name in bare}
        hits = _hits(stripped.values(), wanted)
        if stripped == best or (hits > most and len(set(stripped.values())) == len(bare)):
            outer, best, most = prefix, stripped, hits
    return None if best.keys() == set(best.values()) else _as_rules(outer, best)


def stripping_told(what: str) -> str:
    """Return the sentence for the user that `what`, the second that `unwrapping` returns, was stripped."""
    return f"the prefix {what} that a wrapper left on every name was stripped"


def _as_rules(outer: str, stripped: Mapping[str, str]) -> tuple[RuleSet, str]:
    if all(short == name[len(outer) :] for name, short in stripped.items()):
        return RuleSet(Place(outer + "{name:path}", "{name}")), outer
    return RuleSet(*(Place(name, short) for name, short in stripped.items())), f"{outer or '_orig_mod.'} and inner ones"


def _common_prefixes(names: Iterable[str]) -> Iterator[str]:
    """Yield what may be stripped off every name: nothing, the outermost prefix, that and the next one."""
    rest, prefix = list(names), ""
    yield prefix
    for _ in range(_MOST_WRAPPERS):
        found = next((w for w in _WRAPPERS if all(n.startswith(w) for n in rest)), "")
        if not rest or not found:
            return
        prefix += found
        rest = [n[len(found) :] for n in rest]
        yield prefix


def _strip(name: str) -> str:
    """Remove components that no model has of its own accord."""
    return ".".join(c for c in name.split(".") if c not in ("_orig_mod", "_fsdp_wrapped_module"))


def _hits(names: Iterable[str], wanted: Collection[str]) -> int:
    return sum(name in wanted for name in names)
