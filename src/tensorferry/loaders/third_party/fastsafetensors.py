"""load_format fastsafetensors: files are read by the library of that name, on the CPU or into a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import torch

from tensorferry.checks import expect
from tensorferry.errors import ConfigError
from tensorferry.loaders.third_party.batches import FileBatch
from tensorferry.loaders.third_party.executor import COMMON_TYPES, LibraryExecutor, Tensors
from tensorferry.loaders.third_party.library import Library
from tensorferry.loaders.third_party.loader import ThirdPartyLoader

__all__ = ["FastsafetensorsExecutor", "FastsafetensorsLoader", "FastsafetensorsOptions"]

_LIBRARY = Library("fastsafetensors", "fastsafetensors", "fastsafetensors", least=(0, 5))


@dataclass(frozen=True, slots=True)
class FastsafetensorsOptions:
    """gds: read with GPUDirect Storage, straight into the memory of the device. max_threads: of the library."""

    gds: bool = False
    max_threads: int = 16

    def __post_init__(self) -> None:
        expect("gds", self.gds, bool, "true or false")
        expect("max_threads", self.max_threads, int, "a number of threads")
        if self.max_threads < 1:
            raise ConfigError(f"max_threads {self.max_threads}: at least 1 is expected")


@dataclass(frozen=True)
class FastsafetensorsExecutor(LibraryExecutor):
    """Reads chunks of files into two buffers, whose tensors are views. bound: most bytes that the buffers have.

    A tensor that is larger gets a buffer of its own size.
    """

    device: torch.device
    bound: int
    options: FastsafetensorsOptions = FastsafetensorsOptions()

    name = "fastsafetensors"
    dtypes = COMMON_TYPES

    def tensors(self, batch: FileBatch) -> Tensors:
        loader = _LIBRARY.imported().ParallelLoader(
            None,
            list(batch.paths),
            queue_size=0,
            use_tqdm_on_load=False,
            device=str(self.device),
            max_threads=self.options.max_threads,
            nogds=not self.options.gds,
            set_numa=False,
            tensor_filter=batch.parts.__contains__,
            max_batch_bytes=max(self.bound // 2, batch.largest),
            accumulate_resident=False,
            borrowed_tensors=True,
        )
        with closing(loader):
            weights: Iterator[tuple[str, torch.Tensor]]
            with closing(loader.iterate_weights()) as weights:
                yield from weights


class FastsafetensorsLoader(ThirdPartyLoader):
    """Loads safetensors files through fastsafetensors: load_format fastsafetensors; see `ThirdPartyLoader`."""

    Options = FastsafetensorsOptions
    library = _LIBRARY

    @property
    def reading(self) -> FastsafetensorsExecutor:
        """What runs the library; see `ThirdPartyLoader`."""
        self.library.imported()
        device = self.device
        if self.options.gds and device.type != "cuda":
            raise ConfigError(f"gds: GPUDirect Storage reads into the memory of a GPU, and the device is {device}")
        return FastsafetensorsExecutor(device, self.load_config.read.max_staging, self.options)
