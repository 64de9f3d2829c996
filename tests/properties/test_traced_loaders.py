"""Random loaders, traced and really run: whatever they do, plan and streamed rest together give the same values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tensorferry.core.boxes import Box
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.plan import Plan
from tensorferry.core.transforms import TensorSpec
from tensorferry.modules.trace import stream_opaque, trace
from tensorferry.numerics.compute import compute
from tensorferry.numerics.memory import view_region
from tensorferry.numerics.torch_dtypes import dtype_of

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


def of_values(t: torch.Tensor, a: int, b: int, c: int) -> list[Callable[[], torch.Tensor]]:
    """What goes for a tensor of any shape."""
    return [
        lambda: t.to(DTYPES[a % 3]),
        t.clone,
        t.contiguous,
        lambda: t + 1 if a % 4 == 0 else t,
        lambda: t.mul_(2) if a % 8 == 0 and t.is_contiguous() else t,
        lambda: t.unsqueeze(a % (t.dim() + 1)) if t.dim() < 5 else t,
    ]


def of_dimensions(t: torch.Tensor, a: int, b: int, c: int) -> list[Callable[[], torch.Tensor]]:
    """What goes for a dimension, empty or not."""
    dim = a % t.dim()
    few = t.numel() < 200 and t.dim() < 5
    return [
        lambda: t.transpose(dim, b % t.dim()),
        lambda: t.flatten(dim, min(dim + 1, t.dim() - 1)),
        lambda: torch.cat(list(t.chunk(2, dim))[::-1], dim),
        lambda: torch.stack([t, t.flip(0).flip(0) if b % 4 == 0 else t], dim) if few else t,
        lambda: t.repeat_interleave(2, dim) if few else t,
        lambda: t.unsqueeze(dim).expand(*t.shape[:dim], 2, *t.shape[dim:]) if few else t,
    ]


def of_elements(t: torch.Tensor, a: int, b: int, c: int) -> list[Callable[[], torch.Tensor]]:
    """What needs elements in a dimension."""
    dim = a % t.dim()
    n = t.shape[dim]
    start = b % n
    parts = [k for k in range(1, n + 1) if n % k == 0]
    turned = torch.arange(n).flip(0) if b % 2 else torch.tensor([b % n, c % n])
    return [
        lambda: t.narrow(dim, start, 1 + c % (n - start)),
        lambda: t.reshape(*t.shape[:dim], (k := parts[b % len(parts)]), n // k, *t.shape[dim + 1 :]),
        lambda: t.chunk(2, dim)[-1],
        lambda: t.select(dim, start),
        lambda: t.movedim(dim, 0)[start :: 1 + c % 3],
        lambda: t.index_select(dim, turned),
        lambda: t.movedim(dim, 0)[torch.arange(n) % 2 == b % 2],
        lambda: through_scratch(t, dim, zeros=bool(b % 2)),
    ]


def through_scratch(t: torch.Tensor, dim: int, *, zeros: bool) -> torch.Tensor:
    """Exchange the halves of a dimension by way of memory that the loader makes."""
    n = t.shape[dim]
    half = n // 2
    scratch = torch.zeros(t.shape, dtype=t.dtype) if zeros else torch.empty_like(t)
    scratch.narrow(dim, 0, n - half).copy_(t.narrow(dim, half, n - half))
    scratch.narrow(dim, n - half, half).copy_(t.narrow(dim, 0, half))
    return scratch


Act = tuple[int, int, int, int]
"""Which of the things that go for a tensor is done, and three numbers to do it with."""


def perform(program: list[Act], weight: torch.Tensor) -> torch.Tensor:
    """Return what a loader that does `program` makes of an entry."""
    made = weight
    for which, a, b, c in program:
        acts = of_values(made, a, b, c)
        acts += of_dimensions(made, a, b, c) if made.dim() else []
        acts += of_elements(made, a, b, c) if made.dim() and made.shape[a % made.dim()] else []
        made = acts[which % len(acts)]()
    return made


NUMBERS = st.integers(0, 1 << 16)
PROGRAMS = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=6)


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


@st.composite
def a_case(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], Callable[[], Model]]:
    values, shapes, programs, how = {}, [], [], []
    for i in range(draw(st.integers(1, 2))):
        shape = draw(st.lists(st.integers(1, 6), max_size=4))
        weight = (torch.randperm(meta_numel(shape)) + 1).reshape(shape).to(draw(st.sampled_from(DTYPES)))
        program = draw(PROGRAMS)
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
