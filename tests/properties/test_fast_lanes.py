"""What is done sooner for tensors that are taken whole and as they are is what would have been done anyway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import tensorferry
from helpers.random_plans import World, costs, worlds
from helpers.safetensors_bytes import NAME, st_file
from tensorferry import ReadOptions, Report
from tensorferry.core.lower import lower
from tensorferry.core.planning import make_plan
from tensorferry.execute import ThreadedExecutor
from tensorferry.modules.describe import describe

MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LANES = ("core.planning.plain_copy", "core.lower.whole_entry", "core.batching.one_read")
DTYPES = {"U8": torch.uint8, "I16": torch.int16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


@contextmanager
def general_lanes() -> Iterator[None]:
    """Have every tensor go the way of those of which something is to be made."""
    with ExitStack() as stack:
        for lane in LANES:
            stack.enter_context(patch(f"tensorferry.{lane}", lambda *given: None))
        yield


class Tensor(NamedTuple):
    """A tensor of a random model. tied: number of an earlier one that it is; asked: its type in the model."""

    dtype: str
    shape: tuple[int, ...]
    tied: int | None
    asked: str


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    found: list[Tensor] = []
    for n in range(draw(st.integers(0, 12))):
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        dtype = draw(st.sampled_from(list(DTYPES)))
        tied = draw(st.none() | st.integers(0, n - 1)) if n and not draw(st.integers(0, 3)) else None
        wider = draw(st.booleans()) and dtype in ("F16", "F32")
        found.append(Tensor(dtype, shape, tied, "F64" if wider else dtype))
    return found


class Model(nn.Module):
    def __init__(self, described: list[Tensor], device: str) -> None:
        super().__init__()
        for n, (_, shape, tied, asked) in enumerate(described):
            made = torch.zeros(shape, dtype=DTYPES[asked], device=device)
            holder = nn.Module() if tied is None else self.get_submodule(f"m{tied}")
            if tied is None:
                holder.register_buffer("b", made)
            self.add_module(f"m{n}", holder)


def write(folder: Path, described: list[Tensor], pad: int) -> dict[str, bytes]:
    """Write what owns its values, one after the other behind a header with `pad` spaces; return bytes by name."""
    header: dict[str, Any] = {}
    data, values = b"", {}
    for n, (dtype, shape, tied, _) in enumerate(described):
        if tied is None:
            count = prod(shape)
            raw = (torch.arange(count) + n).to(DTYPES[dtype]).view(torch.uint8).numpy().tobytes() if count else b""
            header[f"m{n}.b"] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
            data, values[f"m{n}.b"] = data + raw, raw
    folder.mkdir(exist_ok=True)
    (folder / NAME).write_bytes(st_file(json.dumps(header) + " " * pad, data))
    return values


def counts(report: Report) -> dict[str, Any]:
    """Return all that a report says, but how long it took."""
    return {key: getattr(report, key) for key in report.__slots__ if key != "seconds"}


def contents(model: Model) -> dict[str, list[Any]]:
    return {name: [tensor.dtype, tensor.tolist()] for name, tensor in model.state_dict().items()}


@settings(MANY, max_examples=300)
@given(worlds(), costs)
def test_plans_and_schedules_are_equal(world: World, cost: dict[str, Any]) -> None:
    plan = world.plan()
    with general_lanes():
        expected = world.plan()
        schedule = lower(expected, **cost)
    assert plan == expected
    assert lower(plan, **cost) == schedule


@MANY
@given(tensors(), st.integers(0, 9), st.sampled_from(["cpu", "meta"]))
def test_models_and_reports_are_equal(tmp_path: Path, described: list[Tensor], pad: int, device: str) -> None:
    values = write(tmp_path / "m", described, pad)
    model, other = Model(described, device), Model(described, device)
    report = tensorferry.load(model, tmp_path / "m", options=ReadOptions(threads=1))
    with general_lanes():
        expected = tensorferry.load(other, tmp_path / "m", options=ReadOptions(threads=1))
    assert counts(report) == counts(expected)
    assert contents(model) == contents(other)
    for name, raw in values.items():
        tensor, (dtype, shape, *_) = model.get_buffer(name), described[int(name[1:].split(".")[0])]
        found = torch.frombuffer(bytearray(raw), dtype=DTYPES[dtype]).view(shape) if raw else torch.empty(shape)
        assert tensor.tolist() == found.tolist()


@MANY
@given(tensors(), st.integers(0, 9))
def test_parameters_become_whole_in_the_same_order(tmp_path: Path, described: list[Tensor], pad: int) -> None:
    write(tmp_path / "m", described, pad)
    orders = []
    for lanes in (general_lanes(), ExitStack()):
        seen: list[str] = []
        with lanes, tensorferry.open_checkpoint(tmp_path / "m") as checkpoint:
            model = Model(described, "cpu")
            plan = make_plan(checkpoint.catalogue, describe(model))
            schedule = lower(plan, max_gap=64, max_read=1 << 20, max_staging=1 << 22, waste=2.0)
            ThreadedExecutor(1).run(schedule, checkpoint.storage, model.state_dict(), on_ready=seen.append)
        orders.append(seen)
    assert orders[0] == orders[1]
