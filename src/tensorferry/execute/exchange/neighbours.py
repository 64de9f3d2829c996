"""Which of the ranks that load together read the same files on one machine: they tell each other, once these are open.

Ranks of one engine may be on several machines, or have copies of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

from tensorferry.storage.base import Storage, SupportsKind
from tensorferry.storage.reading import version_of

__all__ = ["boot", "sharing", "told_of"]

_DIGITS = 16
"""Of a digest that stands for a file."""


def boot() -> str:
    """Return what tells this machine, since it was started, from all others; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def told_of(storage: Storage, files: Iterable[str]) -> str:
    """Return what a rank tells the others of its machine and the `files` that it loads from; empty if it cannot say.

    Raises what `Storage.stat` raises.
    """
    machine = boot()
    if not machine or not isinstance(storage, SupportsKind):
        return ""
    identities = {version_of(storage, file) for file in files}
    return " ".join([machine, *sorted(sha256(one.encode()).hexdigest()[:_DIGITS] for one in identities)])


def sharing(told: Sequence[str], rank: int) -> tuple[int, int]:
    """Return which of how many ranks `rank` is that share files with it, counted from 0; of all, if one cannot say.

    told: what `told_of` returned to each rank. One file is enough, so that it may be fewer for others.

    >>> sharing(["m a b", "n a b", "m b c"], 2)
    (1, 2)
    """
    if not all(told):
        return rank, len(told)
    machine, *mine = told[rank].split()
    near = []
    for n, one in enumerate(told):
        there, *files = one.split()
        if n == rank or (there == machine and not set(files).isdisjoint(mine)):
            near.append(n)
    return near.index(rank), len(near)
