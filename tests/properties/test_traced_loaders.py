"""Random loaders, traced and really run: whatever they do, plan and streamed rest together give the same values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.plan import Plan
from tensorferry.modules.trace import stream_opaque, trace
from tensorferry.numerics.compute import compute
from tensorferry.numerics.memory import view_region
from tensorferry.numerics.torch_dtypes import dtype_of
from tensorferry.core.boxes import Box
from tensorferry.core.transforms import TensorSpec

Act = Callable[[list[torch.Tensor], Any], None]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def run_plan(plan: Plan, values: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]) -> None:
    """Do every step by plain indexing."""
    for step in plan.steps:
        into = view_region(parameters[step.parameter], step.into)
        if not step.sources:
            into.fill_(step.fill or 0)
            continue
        (source,) = step.sources
        read = values[source.entry.name]
        if step.via is None:
            read = view_region(read, source.region)
        else:
            assert step.window is not None
            specs = [TensorSpec(source.entry.dtype, source.entry.shape)]
            made = compute(step.via, [read], specs, Box.whole(step.via.infer(specs).shape))
            read = view_region(made.contiguous(), step.window)
        into.copy_(read.reshape(into.shape))


@st.composite
def one_act(draw: st.DrawFn) -> Act:
    """One thing that loaders do, to the tensor that they work on (the last of a list) or with earlier ones."""
    kind = draw(st.sampled_from(
        ["narrow", "permute", "split", "merge", "chunk", "clone", "cast", "cat", "stack", "pick", "repeat", "select",
         "add", "scratch", "step", "expand", "contiguous", "unsqueeze", "change", "mask"]
    ))  # fmt: skip
    a, b, c = (draw(st.integers(0, 1 << 16)) for _ in range(3))

    def act(made: list[torch.Tensor], _: Any) -> None:
        made.append(_acted(kind, made, a, b, c))

    return act


def _acted(kind: str, made: list[torch.Tensor], a: int, b: int, c: int) -> torch.Tensor:  # noqa: PLR0911
    t = made[-1]
    other = made[a % len(made)]
    if kind == "cast":
        return t.to(DTYPES[a % 3])
    if kind == "clone":
        return t.clone()
    if kind == "contiguous":
        return t.contiguous()
    if kind == "add":
        return t + 1 if a % 4 == 0 else t
    if kind == "change":
        return t.mul_(2) if a % 8 == 0 and t.is_contiguous() else t
    if kind == "unsqueeze" or t.dim() == 0:
        return t.unsqueeze(a % (t.dim() + 1)) if t.dim() < 5 else t
    dim = a % t.dim()
    n = t.shape[dim]
    if kind == "permute":
        return t.transpose(dim, b % t.dim())
    if kind == "merge":
        return t.flatten(dim, min(dim + 1, t.dim() - 1))
    if kind == "cat" or kind == "stack":
        if other.shape == t.shape and other.dtype == t.dtype and t.numel() < 500:
            return torch.cat([t, other], dim) if kind == "cat" else torch.stack([other, t], dim)
        return torch.cat(list(t.chunk(2, dim))[::-1], dim)
    if kind == "repeat":
        return t.repeat_interleave(2, dim) if t.numel() < 200 else t
    if kind == "expand":
        return t.unsqueeze(dim).expand(*t.shape[:dim], 2, *t.shape[dim:]) if t.numel() < 200 and t.dim() < 5 else t
    if n == 0:
        return t
    if kind == "narrow":
        start = b % n
        return t.narrow(dim, start, 1 + c % (n - start))
    if kind == "split":
        k = [k for k in range(1, n + 1) if n % k == 0][b % 3 % len([k for k in range(1, n + 1) if n % k == 0])]
        return t.reshape(*t.shape[:dim], k, n // k, *t.shape[dim + 1 :])
    if kind == "chunk":
        return t.chunk(2, dim)[-1]
    if kind == "select":
        return t.select(dim, b % n)
    if kind == "step":
        return t[(*[slice(None)] * dim, slice(b % n, None, 1 + c % 3))]
    if kind == "pick":
        index = torch.arange(n).flip(0) if b % 2 else torch.tensor([b % n, c % n])
        return t.index_select(dim, index)
    if kind == "mask":
        return t[(*[slice(None)] * dim, torch.arange(n) % 2 == b % 2)]
    assert kind == "scratch"
    buffer = torch.zeros(t.shape, dtype=t.dtype) if b % 2 else torch.empty_like(t)
    half = n // 2
    buffer.narrow(dim, 0, n - half).copy_(t.narrow(dim, half, n - half))
    buffer.narrow(dim, n - half, half).copy_(t.narrow(dim, 0, half))
    return buffer


class Model(nn.Module):
    """Parameters of the shapes that the acts happen to make, filled by them."""

    def __init__(
        self, shapes: list[tuple[tuple[int, ...], torch.dtype]], programs: list[list[Act]], how: list[int]
    ) -> None:
        super().__init__()
        self.programs, self.how = programs, how
        for i, (shape, dtype) in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.full(shape, 99.0, dtype=dtype), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            i = int(name[1:])
            parameter = getattr(self, f"p{i}")
            result = perform(self.programs[i], weight)
            self._put(parameter.data, result, self.how[i])

    def _put(self, parameter: torch.Tensor, result: torch.Tensor, how: int) -> None:
        half = parameter.shape[0] // 2 if parameter.dim() else 0
        if how == 0 or not parameter.dim():
            parameter.copy_(result)
        elif how == 1:
            parameter[half:] = result[half:]
            parameter[:half] = result[:half]
        elif how == 2:
            parameter.fill_(3)
            parameter[half:].copy_(result[half:])
        elif how == 3:
            parameter.t().copy_(result.t()) if parameter.dim() == 2 else parameter.copy_(result)
        else:
            parameter.copy_(result)
            parameter[half:].mul_(3)


def perform(program: list[Act], weight: torch.Tensor) -> torch.Tensor:
    made = [weight]
    for act in program:
        act(made, None)
    return made[-1]


@st.composite
def a_case(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], Callable[[], Model]]:
    values, shapes, programs, how = {}, [], [], []
    for i in range(draw(st.integers(1, 2))):
        shape = draw(st.lists(st.integers(1, 6), max_size=4))
        weight = (torch.randperm(meta_numel(shape)) + 1).reshape(shape).to(draw(st.sampled_from(DTYPES)))
        program = draw(st.lists(one_act(), max_size=6))
        result = perform(program, weight.clone())
        values[f"e{i}"] = weight
        shapes.append((tuple(result.shape), draw(st.sampled_from([result.dtype, torch.float32]))))
        programs.append(program)
        how.append(draw(st.integers(0, 5)))
    return values, lambda: Model(shapes, programs, how)


def meta_numel(shape: list[int]) -> int:
    return torch.empty(shape, device="meta").numel()


def catalogue_of(values: dict[str, torch.Tensor]) -> Catalogue:
    entries = (TensorEntry.at(n, dtype_of(t.dtype), tuple(t.shape), "f", 0) for n, t in values.items())
    return Catalogue(entries, format="test")


def copies(values: dict[str, torch.Tensor], names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        yield name, values[name].clone()


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(a_case(), st.booleans())
def test_plan_and_stream_together_do_what_the_loader_does(
    case: tuple[dict[str, torch.Tensor], Callable[[], Model]], on_meta: bool
) -> None:
    values, make = case
    expected, got = make(), make()
    expected.load_weights(copies(values, values))
    if on_meta:
        with torch.device("meta"):
            traced = trace(make(), catalogue_of(values))
    else:
        traced = trace(got, catalogue_of(values))
        assert all(bool((p == 99).all()) for p in got.parameters()), "tracing wrote to the model"
    run_plan(traced.plan, values, {n: p.data for n, p in got.named_parameters()})
    stream_opaque(got, traced, copies(values, traced.stream))
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, got.get_parameter(name)), (name, traced.opaque)
