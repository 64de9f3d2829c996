"""The reference executor: obviously right, one step after the other, whole entries. Others are tested against it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tensorferry.core.boxes import Box, Region, strides_of
from tensorferry.core.catalogue import Chunk, TensorEntry, refuse_unknown
from tensorferry.core.cutting import in_blocks
from tensorferry.core.plan import Plan, Step
from tensorferry.core.schedule import Schedule
from tensorferry.core.transforms import TensorSpec
from tensorferry.errors import ReadError
from tensorferry.execute.base import Counters, OnReady, Parameters, Remaining
from tensorferry.execute.blame import reading_for
from tensorferry.execute.making import is_made, read_made
from tensorferry.execute.placing import region_of, write
from tensorferry.numerics.casts import fill
from tensorferry.numerics.compute import compute_whole
from tensorferry.numerics.memory import bytes_of, strided_view
from tensorferry.numerics.torch_dtypes import torch_dtype, torch_shape
from tensorferry.progress import SILENT, Progress
from tensorferry.storage.base import Storage
from tensorferry.storage.reading import ReadInto

__all__ = ["SimpleExecutor", "entry_in", "made_of", "read_entry", "read_entry_through"]


class SimpleExecutor:
    """Reads every entry whole and cuts in memory. Ignores the schedule but for its plan."""

    def run(
        self,
        schedule: Schedule,
        storage: Storage,
        parameters: Parameters,
        *,
        on_ready: OnReady | None = None,
        progress: Progress = SILENT,
    ) -> Counters:
        """Fill `parameters`, step by step in the plan's order."""
        plan, counters = schedule.plan, Counters()
        remaining = Remaining.of_steps(plan)
        progress.start(plan.bytes_needed, "weights")
        try:
            for step in plan.steps:
                # Nothing here keeps the parameter: when it is ready, whoever replaces it may free it.
                _fill(step, plan, storage, parameters, counters)
                progress.advance(sum(s.entry.dtype.nbytes(s.region.shape) for s in step.sources))
                if remaining.done(step.parameter) and on_ready is not None:
                    on_ready(step.parameter)
        finally:
            progress.finish()
        return counters


def _fill(step: Step, plan: Plan, storage: Storage, parameters: Parameters, counters: Counters) -> None:
    into = region_of(parameters[step.parameter], step.into, plan.parameters[step.parameter].dtype)
    if not step.sources:
        fill(into, step.fill)
    elif into.numel():
        values = _values(step, storage, counters)
        shape = tuple(values.shape)
        counters.lost(step.parameter, write(into, values, Box.whole(shape), Region.whole(shape)))


def _values(step: Step, storage: Storage, counters: Counters) -> torch.Tensor:
    wholes = []
    for source in step.sources:
        wholes.append(read_entry(storage, source.entry))
        counters.bytes_read += source.entry.nbytes
        counters.reads += len(source.entry.chunks)
        counters.staging_peak = max(counters.staging_peak, sum(w.nbytes for w in wholes))
    return made_of(step, wholes)


def made_of(step: Step, wholes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what `step` puts into its parameter, made of its whole entries, in their order; may alias one of them."""
    if step.via is None:
        return region_of(wholes[0].contiguous(), step.sources[0].region, step.sources[0].entry.dtype)
    assert step.window is not None
    specs = [TensorSpec(s.entry.dtype, s.entry.shape) for s in step.sources]
    whole = compute_whole(step.via, wholes, specs)
    return region_of(whole.contiguous(), step.window, step.via.infer(specs).dtype)


def read_entry(storage: Storage, entry: TensorEntry) -> torch.Tensor:
    """Return the values of an entry in memory of their own, row-major, in the entry's dtype, on the CPU.

    Types that torch lacks come as bytes; F4 comes two elements to one. Raises ReadError.
    """
    return read_entry_through(storage.read_into, entry)


def read_entry_through(read_into: ReadInto, entry: TensorEntry) -> torch.Tensor:
    """Return what `read_entry` does, with a function that reads as `Storage.read_into`."""
    if is_made(entry):
        return read_made(read_into, entry)
    if len(entry.chunks) == 1 and entry.chunks[0].box is None:
        return _read_chunk(read_into, entry, entry.chunks[0], Region.whole(entry.shape))
    out = torch.empty(torch_shape(entry.dtype, entry.shape), dtype=torch_dtype(entry.dtype), device="cpu")
    for chunk in entry.chunks:
        region = Region(entry.shape, chunk.box or Box.whole(entry.shape))
        values = _read_chunk(read_into, entry, chunk, Region.whole(region.shape))
        region_of(out, region, entry.dtype).copy_(values)
    return out


def _read_chunk(read_into: ReadInto, entry: TensorEntry, chunk: Chunk, whole: Region) -> torch.Tensor:
    if chunk.span is None:
        refuse_unknown([entry])
        raise ReadError(f"{entry.name}: its bytes are no span of a file: only its format can read it")
    staged = torch.empty(chunk.span.length, dtype=torch.uint8, device="cpu")
    if chunk.span.length:
        with reading_for([entry.name]):
            read_into(chunk.span.file, chunk.span.offset, bytes_of(staged))
    values = _in_bytes(staged, entry, chunk, whole)
    return values if chunk.strides is None else values.contiguous()


def entry_in(staged: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Return the values of an entry of one chunk as a view of its bytes (uint8), strides as they lie."""
    return _in_bytes(staged, entry, entry.chunks[0], Region.whole(entry.shape))


def _in_bytes(staged: torch.Tensor, entry: TensorEntry, chunk: Chunk, whole: Region) -> torch.Tensor:
    blocks = in_blocks(whole, entry.dtype)
    if blocks is None:
        return staged
    return strided_view(staged, 0, entry.dtype, blocks.view, chunk.strides or strides_of(blocks.view))
