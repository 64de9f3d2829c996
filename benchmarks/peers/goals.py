"""What the loader is meant to reach, as ratios within one run, and whether it does. Pure.

Loads into given memory are compared with loads into given memory, and loads on meta with everything that ends in
memory of its own or given: who brings memory can lay it out as suits the reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.contestant import OURS, Contestant
from benchmarks.peers.summary import Ratio, Run

__all__ = ["Outcome", "outcomes"]

MIB = 1 << 20
_META = f"{OURS}, on meta"
_AGAIN = f"{OURS}, again"
_STAGED, _ALLOWED = 256 * MIB, 64 * MIB
"""The bound on what is staged, which is the default of `ReadOptions`, and what may come on top of it."""

Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A goal, what was found, in words, and whether it is met; None where the run does not say."""

    goal: str
    found: str
    met: bool | None


def outcomes(run: Run, contestants: Mapping[str, Contestant]) -> list[Outcome]:
    """Return every goal with what the run says of it."""
    return list(_Judge(run, contestants).all())


@dataclass(frozen=True)
class _Judge:
    run: Run
    contestants: Mapping[str, Contestant]

    def all(self) -> Iterator[Outcome]:
        yield self._limit("full, cold", "full", "cold", "raw read", 1.05)
        yield from self._no_peer_faster("full", "cold")
        yield self._fewest_cpu_seconds("full", "cold")
        yield self._limit("full, warm", "full", "warm", "page-cache read into fresh memory", 1.10)
        yield from self._no_peer_faster("full", "warm")
        yield self._reload()
        yield self._limit("tp 4, cold", "tp", "cold", "raw read", 1.25)
        yield from self._no_peer_faster("tp", "cold", times=1.5)
        yield from self._no_peer_faster("tp", "warm")
        yield self._limit("ep 4, cold", "ep", "cold", "raw read", 1.10)
        yield self._bytes("ep", 1.02)
        yield from self._no_peer_faster("ep", "cold")
        yield from self._no_peer_faster("ep", "warm")
        for cache in ("cold", "warm"):
            yield self._beside(
                f"many small tensors, {cache}: twice as fast as safetensors and copy",
                ("many", cache, OURS), ("many", cache, "safetensors mmap"), 0.5,
            )  # fmt: skip
        for cache in ("cold", "warm"):
            yield self._beside(
                f".bin, {cache}: within 1.15 times of the same weights as safetensors",
                ("bin", cache, OURS), ("full", cache, OURS), 1.15,
            )  # fmt: skip
        yield self._memory()

    def _limit(self, what: str, work: str, cache: str, limit: str, most: float) -> Outcome:
        """Compare the faster of ours with the fastest of a kind of limit."""
        fastest = self._limit_named(work, cache, limit)
        mine = self.run.fastest(work, cache, (OURS, _META))
        goal = f"{what}: at most {most:.2f} times {fastest or limit}"
        if mine is None or fastest is None:
            return Outcome(goal, "not measured", None)
        return self._beside(goal, (work, cache, mine), (work, cache, fastest), most)

    def _reload(self) -> Outcome:
        fastest = self._limit_named("full", "warm", "page-cache read")
        goal = f"reload, warm: at most 1.10 times {fastest or 'page-cache read'}"
        if fastest is None:
            return Outcome(goal, "not measured", None)
        return self._beside(goal, ("reload", "warm", _AGAIN), ("full", "warm", fastest), 1.10)

    def _limit_named(self, work: str, cache: str, kind: str) -> str | None:
        names = [c for c in self.run.contestants(work, cache) if c.startswith(f"{kind}, ")]
        return self.run.fastest(work, cache, names)

    def _no_peer_faster(self, work: str, cache: str, times: float = 1.0) -> Iterator[Outcome]:
        for mine, whose in ((OURS, ("given",)), (_META, ("given", "own"))):
            where = "into given memory" if mine == OURS else "on meta"
            said = "no peer faster" if times == 1 else f"{times} times as fast as the fastest peer"
            goal = f"{work}, {cache}, {where}: {said}"
            peer = self.run.fastest(work, cache, self._peers(work, cache, whose))
            if peer is None:
                yield Outcome(goal, "not measured", None)
            else:
                yield self._beside(goal, (work, cache, mine), (work, cache, peer), 1 / times)

    def _fewest_cpu_seconds(self, work: str, cache: str) -> Outcome:
        goal = f"{work}, {cache}: CPU seconds at most those of the thriftiest peer"
        mine = self.run.fastest(work, cache, (OURS, _META), "cpu")
        peer = self.run.fastest(work, cache, self._peers(work, cache, ("given", "own")), "cpu")
        if mine is None or peer is None:
            return Outcome(goal, "not measured", None)
        return self._beside(goal, (work, cache, mine), (work, cache, peer), 1.0, "cpu")

    def _peers(self, work: str, cache: str, whose: Sequence[str]) -> list[str]:
        known = [self.contestants[name] for name in self.run.contestants(work, cache) if name in self.contestants]
        return [c.name for c in known if not c.limit and not c.ours and c.memory in whose]

    def _beside(self, goal: str, mine: Key, other: Key, most: float, key: str = "seconds") -> Outcome:
        ratio = self.run.ratio(mine, other, key)
        if ratio is None:
            return Outcome(goal, "not measured", None)
        sides = [name if mine[0] == other[0] else f"{name}, {work}" for work, _, name in (mine, other)]
        return Outcome(goal, f"{_told(ratio)} ({' beside '.join(sides)})", ratio.value <= most)

    def _bytes(self, work: str, most: float) -> Outcome:
        goal = f"{work}, cold: at most {most:.2f} times the needed bytes from the disk"
        row = self.run.row(work, "cold", OURS)
        if row is None:
            return Outcome(goal, "not measured", None)
        return Outcome(goal, f"{row.disk / row.needed:.3f}", row.disk <= most * row.needed)

    def _memory(self) -> Outcome:
        """Look at every load of ours, not at medians: the bound is for always."""
        goal = f"memory beside the parameters: at most {(_STAGED + _ALLOWED) // MIB} MiB, always"
        most: tuple[float, str] = (0.0, "")
        for r in self.run.records:
            if r["contestant"] in (OURS, _META, _AGAIN) and "error" not in r:
                extra = r["anonymous"] - (0 if r["work"] in self.run.touched else r["needed"])
                most = max(most, (extra, f"{r['work']}, {r['cache']}, {r['contestant']}"))
        if not any(r["contestant"] in (OURS, _META, _AGAIN) for r in self.run.records):
            return Outcome(goal, "not measured", None)
        return Outcome(goal, f"{most[0] / MIB:.0f} MiB ({most[1]})", most[0] <= _STAGED + _ALLOWED)


def _told(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} ({ratio.least:.2f} to {ratio.most:.2f})"
