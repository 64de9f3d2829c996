"""What all libraries that read for us are run through: what the plan needs, into a `Feeder`, or as a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import closing

import torch

from tensorferry.core.amounts import few
from tensorferry.core.catalogue import TensorEntry
from tensorferry.core.schedule import Schedule
from tensorferry.errors import PlanError, ReadError, TensorferryError, shown
from tensorferry.execute.base import Counters, OnReady, Parameters
from tensorferry.execute.feed import Feeder
from tensorferry.execute.placing import region_of
from tensorferry.loaders.third_party.batches import FileBatch, WantedTensor, batches, needed_by, parts_of
from tensorferry.numerics.torch_dtypes import torch_dtype, torch_shape
from tensorferry.progress import SILENT, Progress
from tensorferry.storage.base import Storage

__all__ = ["COMMON_TYPES", "LibraryExecutor", "Tensors"]

Tensors = Generator[tuple[str, torch.Tensor], None, None]
_LISTED = 3

COMMON_TYPES = frozenset(
    {"BOOL", "U8", "U16", "U32", "U64", "I8", "I16", "I32", "I64", "F4"}
    | {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F16", "BF16", "F32", "F64"}
)
"""The element types that every library here knows."""


class LibraryExecutor(ABC):
    """An `Executor`, and a `Reading`, of which the subclass gives the library.

    name: what messages call it. dtypes: the element types that it knows. borrowed: whether a tensor that it hands on is
    good only until the next one is asked for.
    """

    name: str
    dtypes: frozenset[str]
    borrowed: bool = True

    @abstractmethod
    def tensors(self, batch: FileBatch) -> Tensors:
        """Yield what the library reads of the files of `batch`: at least every name in ``batch.parts``, each once."""

    def check(self, wanted: Sequence[FileBatch]) -> None:  # noqa: B027 - most refuse nothing
        """Raise ConfigError where the library would refuse `wanted`; called before anything is touched."""

    @property
    def executor(self) -> LibraryExecutor:
        """Itself."""
        return self

    def run(
        self,
        schedule: Schedule,
        storage: Storage,
        parameters: Parameters,
        *,
        on_ready: OnReady | None = None,
        progress: Progress = SILENT,
    ) -> Counters:
        """Fill `parameters`; see `Executor`.

        Whole tensors are read, of those entries that the plan needs. Counters: bytes are those of the tensors that were
        handed on, and what is staged is what waits here; what the library holds it does not tell.

        Raises ConfigError, with nothing touched, for what the library cannot read; ReadError for what it fails at.
        """
        wanted = self._batches(storage, needed_by(schedule.plan))
        feeder = Feeder(schedule.plan, parameters, on_ready=on_ready, borrowed=self.borrowed)
        progress.start(_total(wanted), "weights")
        try:
            with closing(self._parts(wanted)) as parts:
                for part, tensor in parts:
                    feeder.feed(part.entry.name, tensor, part.region)
                    progress.advance(tensor.nbytes)
        finally:
            progress.finish()
        try:
            return feeder.finish()
        except PlanError as error:
            raise ReadError(f"{self.name} did not hand on all that was asked of it: {error}") from None

    def stream(self, storage: Storage, entries: Sequence[TensorEntry], counters: Counters) -> Tensors:
        """Yield name and values of each entry, in memory of their own, in the order of the library.

        Raises what `run` raises.
        """
        parts = [part for entry in entries if entry.nbytes for part in parts_of(entry)]
        return self._streamed(self._batches(storage, parts), entries, counters)

    def _streamed(self, wanted: Sequence[FileBatch], entries: Sequence[TensorEntry], counters: Counters) -> Tensors:
        left = {entry.name: len(entry.chunks) for entry in entries}
        begun: dict[str, torch.Tensor] = {}
        for entry in entries:
            if not entry.nbytes:
                yield entry.name, _empty(entry, torch.device("cpu"))
        with closing(self._parts(wanted)) as parts:
            for part, tensor in parts:
                counters.bytes_read += tensor.nbytes
                name = part.entry.name
                left[name] -= 1
                if part.region is None:
                    yield name, tensor.clone() if self.borrowed else tensor
                    continue
                whole = begun.setdefault(name, _empty(part.entry, tensor.device))
                region_of(whole, part.region, part.entry.dtype).copy_(tensor)
                if not left[name]:
                    yield name, begun.pop(name)

    def _batches(self, storage: Storage, parts: Sequence[WantedTensor]) -> list[FileBatch]:
        wanted = batches(storage, parts, reader=self.name, dtypes=self.dtypes)
        self.check(wanted)
        return wanted

    def _parts(self, wanted: Sequence[FileBatch]) -> Generator[tuple[WantedTensor, torch.Tensor], None, None]:
        """Yield each part once, or raise ReadError."""
        for batch in wanted:
            came = set[str]()
            with closing(self._told(batch)) as tensors:
                for name, tensor in tensors:
                    if name in batch.parts and name not in came:
                        came.add(name)
                        yield batch.parts[name], tensor
            never = [name for name in batch.parts if name not in came]
            if never:
                listed = few(map(shown, never), _LISTED)
                raise ReadError(f"{_files(batch)}: {self.name} handed on all but {len(never)} of its tensors: {listed}")

    def _told(self, batch: FileBatch) -> Tensors:
        """Yield what the library does; what it raises comes as ReadError, with the files."""
        try:
            with closing(self.tensors(batch)) as tensors:
                yield from tensors
        except TensorferryError:
            raise
        except Exception as error:
            why = shown(" ".join(str(error).split()), 500) or type(error).__name__
            raise ReadError(f"{_files(batch)}: {self.name} could not read it: {why}") from error


def _empty(entry: TensorEntry, device: torch.device) -> torch.Tensor:
    return torch.empty(torch_shape(entry.dtype, entry.shape), dtype=torch_dtype(entry.dtype), device=device)


def _total(wanted: Sequence[FileBatch]) -> int:
    return sum(part.nbytes for batch in wanted for part in batch.parts.values())


def _files(batch: FileBatch) -> str:
    return few(map(shown, batch.labels), _LISTED, what="file")
