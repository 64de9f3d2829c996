"""The picture of a run, as SVG: a panel for each work, in it a bar for each contestant, cold and warm. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.peers.contestant import Contestant
from benchmarks.peers.summary import Row, Run
from benchmarks.peers.works import WORKS

__all__ = ["picture"]

_WIDTH, _NAMES, _BARS, _STEP, _TITLE = 920, 250, 560, 17, 58
_COLOURS = {"ours": "#0b6e4f", "peer": "#8da0b3", "own": "#c3ced9"}
_STYLE = (
    "text{font-family:Helvetica,Arial,sans-serif;font-size:11px;fill:#1b2733}"
    ".title{font-size:14px;font-weight:bold}.note{fill:#5b6b7a}.ours{font-weight:bold}"
    ".end{text-anchor:end}"
)


def picture(told: Mapping[str, Any], run: Run, contestants: Mapping[str, Contestant]) -> str:
    """Return the text of an SVG file."""
    parts, top = list[str](), 64
    for work in told["bytes"]:
        for cache in WORKS[work].caches:
            rows = _rows(run, work, cache, contestants)
            if rows:
                parts += _panel(
                    top, f"{WORKS[work].title}, {cache}", rows, _limit(run, work, cache, contestants), contestants
                )
                top += _TITLE + _STEP * len(rows)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}" '
        f'role="img"><title>Seconds to load, by contestant</title><style>{_STYLE}</style>'
        f'<rect width="{_WIDTH}" height="{top}" fill="#ffffff"/>'
    )
    return "\n".join([head, *_legend(told), *parts, "</svg>\n"])


def _rows(run: Run, work: str, cache: str, contestants: Mapping[str, Contestant]) -> list[Row]:
    names = [name for name in run.contestants(work, cache) if not contestants[name].limit]
    found = (run.row(work, cache, name) for name in names)
    return sorted((row for row in found if row), key=lambda row: row.seconds)


def _limit(run: Run, work: str, cache: str, contestants: Mapping[str, Contestant]) -> Row | None:
    fastest = run.limit(work, cache, contestants)
    return run.row(work, cache, fastest) if fastest else None


def _legend(told: Mapping[str, Any]) -> Iterator[str]:
    yield _text(16, 22, f"Seconds to load: median, least and most of {told['rounds']} rounds", "title")
    about = f"{told['date']}, {told['machine']}, whose load was {told['load']:.1f}; checkpoints of size {told['size']}"
    yield _text(16, 40, about, "note")
    labels = {"ours": "tensorferry", "peer": "peer, into given memory", "own": "peer, in memory of its own"}
    at = 16
    for kind, label in labels.items():
        yield f'<rect x="{at}" y="49" width="11" height="11" fill="{_COLOURS[kind]}"/>' + _text(
            at + 16, 59, label, "note"
        )
        at += 40 + 6 * len(label)
    yield f'<path d="M{at} 49v12" stroke="#c0392b" stroke-dasharray="3 2"/>'
    yield _text(at + 8, 59, "limit: raw read when cold, page-cache read into fresh memory when warm", "note")


def _panel(
    top: int, title: str, rows: list[Row], limit: Row | None, contestants: Mapping[str, Contestant]
) -> Iterator[str]:
    longest = max(row.most for row in rows)
    scale = _BARS / min(longest, 4 * sorted(row.seconds for row in rows)[len(rows) // 2])
    yield _text(16, top + 30, f"{title} ({rows[0].needed / (1 << 30):.2f} GiB)", "title")
    for number, row in enumerate(rows):
        yield from _bar(top + 40 + _STEP * number, row, scale, contestants[row.contestant])
    if limit:
        x = _NAMES + limit.seconds * scale
        yield f'<path d="M{x:.1f} {top + 36}v{_STEP * len(rows) + 6}" stroke="#c0392b" stroke-dasharray="3 2"/>'


def _bar(y: int, row: Row, scale: float, contestant: Contestant) -> Iterator[str]:
    """Yield the name, the bar, a line from the least to the most, and the number; what is too long is cut off."""
    kind = "ours" if contestant.ours else "own" if contestant.memory == "own" else "peer"
    width = min(row.seconds * scale, _BARS)
    least, most = (_NAMES + min(x * scale, _BARS) for x in (row.least, row.most))
    style = "ours" if contestant.ours else ""
    yield _text(_NAMES - 8, y + 11, row.contestant, f"end {style}")
    yield f'<rect x="{_NAMES}" y="{y + 2}" width="{width:.1f}" height="{_STEP - 5}" fill="{_COLOURS[kind]}"/>'
    yield f'<path d="M{least:.1f} {y + 8}H{most:.1f}" stroke="#1b2733"/>'
    cut = " (cut off)" if row.seconds * scale > _BARS else ""
    yield _text(max(most, _NAMES + width) + 6, y + 11, f"{row.seconds:.2f}{cut}", style)


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{style.strip()}">{escape(text)}</text>'
