"""The results of a run as files: all records as JSON, a page of Markdown with the tables, and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.contestant import Contestant, all_contestants
from benchmarks.peers.goals import outcomes
from benchmarks.peers.picture import picture
from benchmarks.peers.summary import Row, Run
from benchmarks.peers.works import WORKS

__all__ = ["write_results"]

_GIB, _MIB = 1 << 30, 1 << 20
_HEAD = ("", "seconds", "least to most", "of the limit", "CPU s", "read, MiB", "read / needed", "extra memory, MiB",
         "peak, MiB", "left in page cache, MiB")  # fmt: skip


def write_results(told: Mapping[str, Any], folder: Path) -> None:
    """Write ``peers.json``, ``peers.md`` and ``peers.svg`` to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    run, contestants = Run(told["records"]), all_contestants()
    (folder / "peers.json").write_text(_as_json(told))
    (folder / "peers.md").write_text("\n\n".join(_parts(told, run, contestants)) + "\n")
    (folder / "peers.svg").write_text(picture(told, run, contestants))


def _as_json(told: Mapping[str, Any]) -> str:
    """Return the run with a record on each line."""
    about = json.dumps({k: v for k, v in told.items() if k != "records"}, indent=1)
    records = ",\n  ".join(json.dumps(r) for r in told["records"])
    return about[:-2] + f',\n "records": [\n  {records}\n ]\n}}\n'


def _parts(told: Mapping[str, Any], run: Run, contestants: Mapping[str, Contestant]) -> Iterator[str]:
    yield "# Beside other loaders"
    yield _about(told)
    yield "![seconds of each contestant](peers.svg)"
    yield "## Goals\n\n" + table(
        ("goal", "found: median (least to most)", ""),
        ((o.goal, o.found, _met(o.met)) for o in outcomes(run, contestants)),
    )
    for work, size in told["bytes"].items():
        for cache in WORKS[work].caches:
            rows = _rows(run, work, cache, contestants)
            if rows:
                cells = (_cells(row, run, (work, cache), contestants) for row in rows)
                yield f"## {WORKS[work].title}, {cache}: {size / _GIB:.2f} GiB needed\n\n" + table(_HEAD, cells)
    yield "## What each does\n\n" + table(("", "call", "memory"), _calls(run, contestants))
    if told["skipped"]:
        yield "## Left out\n\n" + "\n".join(f"* {name}: {why}" for name, why in told["skipped"].items())
    if failed := {(r["work"], r["contestant"]): r["error"] for r in run.records if "error" in r}:
        yield "## Failed\n\n" + "\n".join(f"* {work}, {name}: {why}" for (work, name), why in failed.items())


def _about(told: Mapping[str, Any]) -> str:
    dropped = "the whole page cache dropped" if told["dropped_caches"] else "the files dropped from the page cache"
    return (
        f"{told['date']}, {told['machine']}, whose load was {told['load']:.1f}; {told['rounds']} rounds in turns, "
        f"checkpoints of size {told['size']}, torch with {told['threads']} threads. Cold: {dropped}. Medians; every "
        "load has a process of its own, imports and preallocation are not timed, and all end with the same bytes, "
        "compared by digest. *Own memory*: the loader brings the memory of the parameters. *Of the limit*: round by "
        "round, of the fastest raw read of the same bytes when cold, of the fastest page-cache read into fresh memory "
        "when warm. *Extra memory*: most anonymous memory at once, beyond the parameters. Written by "
        "`python -m benchmarks.peers`; see [how it is measured](../peers/README.md)."
    )


def _rows(run: Run, work: str, cache: str, contestants: Mapping[str, Contestant]) -> list[Row]:
    """Return the limits first, then the others, each from the fastest to the slowest."""
    found = (run.row(work, cache, name) for name in run.contestants(work, cache))
    return sorted((r for r in found if r), key=lambda r: (not contestants[r.contestant].limit, r.seconds))


def _cells(row: Row, run: Run, about: tuple[str, str], contestants: Mapping[str, Contestant]) -> tuple[str, ...]:
    contestant, fastest = contestants[row.contestant], run.limit(*about, contestants)
    ratio = run.ratio((*about, row.contestant), (*about, fastest)) if fastest else None
    name = f"**{row.contestant}**" if contestant.ours else f"*{row.contestant}*" if contestant.limit else row.contestant
    memory = (f"{n / _MIB:.0f}" for n in (row.extra, row.peak, row.cached))
    return (
        name, f"{row.seconds:.3f}", f"{row.least:.3f} to {row.most:.3f}", f"{ratio.value:.2f}" if ratio else "",
        f"{row.cpu:.2f}", f"{row.disk / _MIB:.0f}", f"{row.disk / row.needed:.2f}",
        *(("", "", "") if contestant.limit else memory),
    )  # fmt: skip


def _calls(run: Run, contestants: Mapping[str, Contestant]) -> Iterator[tuple[str, ...]]:
    seen = {record["contestant"] for record in run.records}
    for contestant in (c for c in contestants.values() if c.name in seen):
        yield contestant.name, f"`{contestant.call}`", "" if contestant.limit else contestant.memory


def _met(met: bool | None) -> str:
    return {True: "met", False: "not met", None: ""}[met]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
