"""load_format runai_streamer: files are read by the Run:ai Model Streamer."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch

from tensorferry.checks import expect
from tensorferry.errors import ConfigError
from tensorferry.loaders.third_party.batches import FileBatch
from tensorferry.loaders.third_party.executor import COMMON_TYPES, LibraryExecutor, Tensors
from tensorferry.loaders.third_party.library import Library
from tensorferry.loaders.third_party.loader import ThirdPartyLoader

__all__ = ["RunaiExecutor", "RunaiLoader", "RunaiOptions"]

_LIBRARY = Library("runai_model_streamer", "runai-model-streamer", "runai", least=(0, 17))
_ENVIRONMENT = "RUNAI_STREAMER_"
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True, slots=True)
class RunaiOptions:
    """What the streamer is told.

    concurrency: its reader threads; None for as many as it thinks fit. memory_limit: most bytes that it buffers, -1
    for no limit and 0 for a single tensor; None for ``read.max_staging``, or one tensor where that is larger.
    distributed: whether ranks read a part of each file each and hand it on to the others.
    """

    concurrency: int | None = None
    memory_limit: int | None = None
    distributed: bool = False

    def __post_init__(self) -> None:
        if self.concurrency is not None:
            expect("concurrency", self.concurrency, int, "a number of threads")
            if self.concurrency < 1:
                raise ConfigError(f"concurrency {self.concurrency}: at least 1 is expected")
        if self.memory_limit is not None:
            expect("memory_limit", self.memory_limit, int, "a number of bytes")
            if self.memory_limit < -1:
                raise ConfigError(f"memory_limit {self.memory_limit}: -1 or more is expected")
        expect("distributed", self.distributed, bool, "true or false")


@dataclass(frozen=True)
class RunaiExecutor(LibraryExecutor):
    """Reads through a ring of buffers on the CPU, whose tensors are views. bound: of the ring, if no limit is given.

    device: where tensors come to if ranks share the reading; they come to the CPU otherwise.
    """

    device: torch.device
    bound: int
    options: RunaiOptions = RunaiOptions()

    name = "runai_streamer"
    dtypes = COMMON_TYPES | {"C64"}

    def check(self, wanted: Sequence[FileBatch]) -> None:
        """Refuse a limit that is smaller than the largest thing that is read at once; see `LibraryExecutor`."""
        limit, largest = self.options.memory_limit, max((batch.largest for batch in wanted), default=0)
        if limit is not None and 0 < limit < largest:
            raise ConfigError(
                f"memory_limit {limit:,}: the largest tensor or header takes {largest:,} bytes: allow as many, or 0 "
                "for one tensor at a time"
            )

    def tensors(self, batch: FileBatch) -> Tensors:
        with _LIBRARY.imported().SafetensorsStreamer() as streamer:
            with _environment(self._settings(batch)):
                streamer.stream_files(
                    list(batch.paths),
                    device=str(self.device) if self.options.distributed else "cpu",
                    is_distributed=self.options.distributed,
                    tensor_names=list(batch.parts),
                    owned=False,
                )
            with closing(streamer.get_tensors()) as tensors:
                yield from tensors

    def _settings(self, batch: FileBatch) -> dict[str, str]:
        """Return what the library takes from the environment only."""
        limit = self.options.memory_limit
        settings = {"MEMORY_LIMIT": str(max(self.bound, batch.largest) if limit is None else limit)}
        if self.options.concurrency is not None:
            settings["CONCURRENCY"] = str(self.options.concurrency)
        return {_ENVIRONMENT + name: value for name, value in settings.items()}


class RunaiLoader(ThirdPartyLoader):
    """Loads safetensors files through the Run:ai Model Streamer: load_format runai_streamer; see `ThirdPartyLoader`.

    Remote files are not streamed: fetch them first.
    """

    Options = RunaiOptions
    library = _LIBRARY

    @property
    def reading(self) -> RunaiExecutor:
        """What runs the library; see `ThirdPartyLoader`."""
        self.library.imported()
        if self.options.distributed and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise ConfigError(
                "distributed: ranks find each other through torch.distributed, which is not initialized: call "
                "torch.distributed.init_process_group, or leave it out"
            )
        return RunaiExecutor(self.device, self.load_config.read.max_staging, self.options)


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Have the process's environment say `settings`, one load at a time, and what it said before afterwards.

    The library writes to it, too, which is undone as well.
    """
    with _ONE_AT_A_TIME:
        before = {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name in [name for name in os.environ if name.startswith(_ENVIRONMENT) and name not in before]:
                del os.environ[name]
            os.environ.update(before)
