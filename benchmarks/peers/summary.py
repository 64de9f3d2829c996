"""What the records of a run come to: medians and spreads, and ratios of two contestants in the same round. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.peers.contestant import Contestant

__all__ = ["Ratio", "Row", "Run"]

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ratio:
    """How a number of one compares to that of another in the same round: median, least and most over the rounds."""

    value: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Row:
    """What one contestant took for one work in one state of the page cache; medians over the rounds.

    seconds, and the `least` and `most` of them; cpu in seconds; the rest in bytes: disk (fetched from it), anonymous
    (most anonymous and shared memory at once, over what was there before), extra (of these, over what the parameters
    take), peak (resident, of the whole process), cached (of the files, in the page cache afterwards).
    """

    contestant: str
    seconds: float
    least: float
    most: float
    cpu: float
    needed: int
    disk: float
    anonymous: float
    extra: float
    peak: float
    cached: float


@dataclass(frozen=True)
class Run:
    """The records of one run. touched: works whose memory counts as there before."""

    records: Sequence[Record]
    touched: frozenset[str] = frozenset({"reload"})

    def of(self, work: str, cache: str, contestant: str) -> list[Record]:
        """Return what one contestant took in each round that it ended well."""
        about = (work, cache, contestant)
        return [r for r in self.records if (r["work"], r["cache"], r["contestant"]) == about and "error" not in r]

    def contestants(self, work: str, cache: str) -> list[str]:
        """Return who did a work, in the order of the run."""
        return list(
            dict.fromkeys(
                r["contestant"] for r in self.records if (r["work"], r["cache"]) == (work, cache) and "error" not in r
            )
        )

    def row(self, work: str, cache: str, contestant: str) -> Row | None:
        """Return the medians of one contestant, or None where it did not do the work."""
        found = self.of(work, cache, contestant)
        if not found:
            return None
        seconds, needed = [r["seconds"] for r in found], found[0]["needed"]
        parameters = 0 if work in self.touched else needed

        def middle(key: str) -> float:
            return float(median(r[key] for r in found))

        return Row(
            contestant, median(seconds), min(seconds), max(seconds), middle("cpu"), needed, middle("disk"),
            middle("anonymous"), middle("anonymous") - parameters, middle("peak"), middle("cached"),
        )  # fmt: skip

    def fastest(self, work: str, cache: str, names: Iterable[str], key: str = "seconds") -> str | None:
        """Return which of the named has the least median of a number, or None where none of them did the work."""
        medians = {name: median(r[key] for r in found) for name in names if (found := self.of(work, cache, name))}
        return min(medians, key=medians.__getitem__, default=None)

    def limit(self, work: str, cache: str, contestants: Mapping[str, Contestant]) -> str | None:
        """Return the fastest of the limits that a work is shown beside, or None where it is beside none."""
        kind = {"cold": "raw read, ", "warm": "page-cache read into fresh memory, "}[cache]
        names = [c.name for c in contestants.values() if c.name.startswith(kind) and work in c.works]
        return self.fastest(work, cache, names)

    def ratio(self, one: tuple[str, str, str], other: tuple[str, str, str], key: str = "seconds") -> Ratio | None:
        """Return the ratio of two (work, cache, contestant), round by round; None where they share no round.

        >>> about = {"work": "full", "cache": "cold", "round": 0}
        >>> run = Run([{**about, "contestant": c, "seconds": s} for c, s in (("a", 3), ("b", 2))])
        >>> run.ratio(("full", "cold", "a"), ("full", "cold", "b")).value
        1.5
        """
        return self._ratio(one, other, lambda a, b: a[key] / b[key] if b[key] else float("inf"))

    def _ratio(
        self, one: tuple[str, str, str], other: tuple[str, str, str], of: Callable[[Record, Record], float]
    ) -> Ratio | None:
        beside = {r["round"]: r for r in self.of(*other)}
        ratios = [of(r, beside[r["round"]]) for r in self.of(*one) if r["round"] in beside]
        return Ratio(median(ratios), min(ratios), max(ratios)) if ratios else None
