"""A report as one HTML page without scripts or references. What is in a report is decided in `report`.

A single page of a few tables needs no template engine: the standard library escapes and fills in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from string import Template

from tensorferry.core.amounts import counted, human_bytes
from tensorferry.core.names import fold
from tensorferry.errors import shown
from tensorferry.report import Report, by_reason

__all__ = ["page"]

_LINES = 8  # of a list, before it is folded away
_HUES = (212, 160, 32, 275, 340, 95)  # of the phases, in turn

_PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Loaded $source</title>
<style>
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 16%, transparent);
  --dim: color-mix(in srgb, currentColor 62%, transparent); }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.35rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; }
.dim { color: var(--dim); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: .75rem; margin: 1.5rem 0; }
.facts div { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
.facts b { display: block; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.warnings { border-left: .25rem solid #d98a00; padding: .4rem .9rem; margin: 1.25rem 0; }
.bar { display: flex; height: 1.1rem; border-radius: .3rem; overflow: hidden; background: var(--line); }
.bar i, .key { background: hsl(var(--hue) 55% 52%); }
.key { display: inline-block; width: .7rem; height: .7rem; border-radius: .15rem; margin: 0 .35rem 0 1rem; }
.key:first-child { margin-left: 0; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .3rem 1rem .3rem 0; border-top: 1px solid var(--line); }
th { font-weight: 500; width: 13rem; }
td { overflow-wrap: anywhere; }
code { font: 13px/1.5 ui-monospace, monospace; }
td code { display: block; }
summary { cursor: pointer; color: var(--dim); }
</style>
</head>
<body>
<h1>$source</h1>
<p class="dim">$summary</p>
<p class="dim">$selection</p>
<p><strong>$verified</strong></p>
<div class="facts">
$facts
</div>
$warnings
$phases
<h2>Account</h2>
<table>
$account
</table>
<p class="dim">Plan <code>$fingerprint</code>, run by $executor.</p>
</body>
</html>
""")


def page(report: Report) -> str:
    """Return `report` as a page; every text in it is escaped, and names have their layer numbers folded."""
    count = counted(len(report.files), "file")
    return _PAGE.substitute(
        source=_text(report.source),
        summary=_text(f"{report.format}, {count}, {report.entries:,} entries"),
        selection=_text(report.selection),
        verified=_text(report.verified),
        facts="\n".join(_facts(report)),
        warnings=_warnings(report.warnings),
        phases=_phases(report.seconds),
        account="\n".join(_account(report)),
        fingerprint=_text(report.fingerprint),
        executor=_text(report.executor),
    )


def _text(text: str) -> str:
    return escape(shown(text, 1000))


def _facts(report: Report) -> Iterable[str]:
    facts = {
        "parameters filled": f"{report.parameters:,}",
        "read": human_bytes(report.bytes_read),
        "needed": human_bytes(report.bytes_needed),
        "reads": f"{report.reads:,}",
        "straight into parameters": human_bytes(report.direct_bytes),
        "compared for ties": human_bytes(report.bytes_compared),
        "staged at most": human_bytes(report.staging_peak),
    }
    return (f'<div><b>{_text(value)}</b><span class="dim">{_text(what)}</span></div>' for what, value in facts.items())


def _warnings(warnings: Iterable[str]) -> str:
    lines = "".join(f"<p>{_text(w)}</p>" for w in warnings)
    return f'<div class="warnings">{lines}</div>' if lines else ""


def _phases(seconds: Mapping[str, float]) -> str:
    total = sum(seconds.values())
    if not total:
        return ""
    hues = {phase: _HUES[n % len(_HUES)] for n, phase in enumerate(seconds)}
    bar = "".join(f'<i style="--hue:{hues[p]};width:{100 * s / total:.2f}%"></i>' for p, s in seconds.items())
    keys = "".join(f'<span class="key" style="--hue:{hues[p]}"></span>{_text(p)} {s:.2f} s' for p, s in seconds.items())
    return f'<h2>{total:.2f} seconds</h2>\n<div class="bar">{bar}</div>\n<p class="dim">{keys}</p>'


def _account(report: Report) -> Iterable[str]:
    yield _row("files", _folded(report.files))
    for why, names in by_reason(report.ignored_files).items():
        yield _row(f"left out: {why}", _folded(names))
    for device, number in report.devices.items():
        yield _row(f"on {device}", [counted(number, "tensor")])
    for pair, number in report.casts.items():
        yield _row("cast", [f"{counted(number, 'tensor')} {pair}"])
    yield _row("tied", _folded(f"{alias} = {owner}" for alias, owner in report.ties.items()))
    yield _row("computed by the model", _folded(report.computed))
    for why, names in by_reason(report.streamed).items():
        yield _row(f"streamed: {why}", _folded(names))
    yield _row("post-processed", _folded(report.post_processed))
    for why, names in by_reason(report.dropped).items():
        yield _row(f"dropped: {why}", _folded(names))
    yield _row("unexpected, not used", _folded(report.unexpected))
    yield _row("missing, allowed", _folded(report.missing))
    for name, (overflow, underflow) in report.losses.items():
        yield _row("values lost", [f"{name}: {overflow:,} overflow, {underflow:,} underflow"])


def _row(what: str, lines: Iterable[str]) -> str:
    codes = [f"<code>{_text(line)}</code>" for line in lines]
    if not codes:
        return ""
    cell = "".join(codes[:_LINES])
    if more := codes[_LINES:]:
        cell += f"<details><summary>{len(more):,} more</summary>{''.join(more)}</details>"
    return f"<tr><th>{_text(what)}</th><td>{cell}</td></tr>"


def _folded(names: Iterable[str]) -> list[str]:
    return [f.text for f in fold(names)]
