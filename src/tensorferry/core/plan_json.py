"""Plans as JSON, for comparing ranks, keeping a plan, or making one on another machine. Keys are stable."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import Chunk, Span, TensorEntry
from tensorferry.core.dtypes import dtype_from_json, dtype_to_json
from tensorferry.core.plan import Dropped, Plan, Source, Step
from tensorferry.core.transform_json import transform_from_json
from tensorferry.core.transforms import TensorSpec
from tensorferry.errors import PlanError
from tensorferry.problems import Problem, ProblemKind

__all__ = ["from_json", "to_json"]

_VERSION = 1


def to_json(plan: Plan) -> str:
    """Return `plan` as a JSON object; entries are listed once and steps refer to them by position."""
    entries = {s.entry.name: s.entry for step in plan.steps for s in step.sources}
    number = {name: i for i, name in enumerate(entries)}
    data = {
        "tensorferry_plan": _VERSION,
        "fingerprint": plan.fingerprint,
        "bytes_needed": plan.bytes_needed,
        "parameters": {n: [dtype_to_json(s.dtype), s.shape] for n, s in plan.parameters.items()},
        "aliases": dict(plan.aliases),
        "entries": [_entry_out(e) for e in entries.values()],
        "steps": [_step_out(s, number) for s in plan.steps],
        "dropped": [list(d) for d in plan.dropped],
        "problems": [_problem_out(p) for p in plan.problems],
    }
    return json.dumps(data, separators=(",", ":"))


def from_json(text: str) -> Plan:
    """Return the plan that `to_json` wrote; raises PlanError where `text` is something else."""
    try:
        data = json.loads(text)
        version = data["tensorferry_plan"]
        if version == _VERSION:
            return _plan_in(data)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise PlanError(f"this is no plan written by tensorferry: {type(error).__name__}: {error}") from None
    raise PlanError(f"plan version {version} cannot be read, only {_VERSION}: make the plan again")


def _plan_in(data: Mapping[str, Any]) -> Plan:
    entries = [_entry_in(e) for e in data["entries"]]
    return Plan(
        steps=tuple(_step_in(s, entries) for s in data["steps"]),
        parameters={n: TensorSpec(dtype_from_json(d), tuple(s)) for n, (d, s) in data["parameters"].items()},
        aliases=dict(data["aliases"]),
        dropped=tuple(Dropped(*d) for d in data["dropped"]),
        problems=tuple(_problem_in(p) for p in data["problems"]),
    )


def _entry_out(entry: TensorEntry) -> dict[str, Any]:
    chunks = [[c.box and _box_out(c.box), c.span, c.strides] for c in entry.chunks]
    out = {"name": entry.name, "dtype": dtype_to_json(entry.dtype), "shape": entry.shape, "chunks": chunks}
    return out | ({"digest": entry.digest} if entry.digest else {})


def _entry_in(data: Mapping[str, Any]) -> TensorEntry:
    chunks = tuple(
        Chunk(box and _box_in(box), Span(*span) if span else None, None if strides is None else tuple(strides))
        for box, span, strides in data["chunks"]
    )
    return TensorEntry(data["name"], dtype_from_json(data["dtype"]), tuple(data["shape"]), chunks, data.get("digest"))


def _step_out(step: Step, number: Mapping[str, int]) -> dict[str, Any]:
    out: dict[str, Any] = {"parameter": step.parameter, "into": _region_out(step.into)}
    if step.sources:
        out["sources"] = [[number[s.entry.name], _region_out(s.region)] for s in step.sources]
    if step.via is not None:
        out["via"] = step.via.to_json()
    if step.window is not None:
        out["window"] = _region_out(step.window)
    if step.fill is not None:
        out["fill"] = step.fill
    return out


def _step_in(data: Mapping[str, Any], entries: Sequence[TensorEntry]) -> Step:
    return Step(
        data["parameter"],
        _region_in(data["into"]),
        tuple(Source(entries[n], _region_in(region)) for n, region in data.get("sources", ())),
        transform_from_json(data["via"]) if "via" in data else None,
        _region_in(data["window"]) if "window" in data else None,
        data.get("fill"),
    )


def _problem_out(p: Problem) -> dict[str, Any]:
    return {"kind": p.kind.value, "subject": p.subject, "detail": p.detail, "near": p.near, "fatal": p.fatal}


def _problem_in(data: Mapping[str, Any]) -> Problem:
    near = tuple(data["near"])
    return Problem(ProblemKind(data["kind"]), data["subject"], data["detail"], near, data["fatal"])


def _region_out(region: Region) -> list[Any]:
    return [region.view] if region.is_whole else [region.view, *_box_out(region.box)]


def _region_in(data: Sequence[Sequence[int]]) -> Region:
    return Region.whole(tuple(data[0])) if len(data) == 1 else Region(tuple(data[0]), _box_in(data[1:]))


def _box_out(box: Box) -> list[Any]:
    return [box.start, box.stop]


def _box_in(data: Sequence[Sequence[int]]) -> Box:
    return Box(tuple(data[0]), tuple(data[1]))
