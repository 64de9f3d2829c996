"""load_format instanttensor: files are read by the library of that name, into the memory of an NVIDIA GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tensorferry.checks import expect
from tensorferry.errors import ConfigError
from tensorferry.loaders.third_party.batches import FileBatch
from tensorferry.loaders.third_party.executor import COMMON_TYPES, LibraryExecutor, Tensors
from tensorferry.loaders.third_party.library import Library
from tensorferry.loaders.third_party.loader import ThirdPartyLoader

__all__ = ["InstantTensorExecutor", "InstantTensorLoader", "InstantTensorOptions"]

_LIBRARY = Library("instanttensor", "instanttensor", "instanttensor", least=(0, 2, 2))


@dataclass(frozen=True, slots=True)
class InstantTensorOptions:
    """What the library takes of these names; it chooses what is left out. Sizes are in bytes."""

    buffer_size: int | None = None
    chunk_size: int | None = None
    concurrency: int | None = None
    io_depth: int | None = None

    def __post_init__(self) -> None:
        for name in ("buffer_size", "chunk_size", "concurrency", "io_depth"):
            value = getattr(self, name)
            if value is not None:
                expect(name, value, int, "a number")
                if value < (name != "concurrency"):
                    raise ConfigError(f"{name} {value}: a positive number is expected")

    @property
    def given(self) -> dict[str, int]:
        """Those that were given."""
        values = {name: getattr(self, name) for name in ("buffer_size", "chunk_size", "concurrency", "io_depth")}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class InstantTensorExecutor(LibraryExecutor):
    """Reads through a buffer in the memory of `device`; each tensor is a copy of its own there."""

    device: torch.device
    options: InstantTensorOptions = InstantTensorOptions()

    name = "instanttensor"
    borrowed = False
    dtypes = COMMON_TYPES | {"C64", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}

    def tensors(self, batch: FileBatch) -> Tensors:
        with _LIBRARY.imported().safe_open(
            list(batch.paths),
            framework="pt",
            device=self.device,
            tensor_filter=list(batch.parts),
            tensor_name_match_mode="exact",
            copy=True,
            **self.options.given,
        ) as opened:
            yield from opened.tensors()


class InstantTensorLoader(ThirdPartyLoader):
    """Loads safetensors files through InstantTensor: load_format instanttensor; see `ThirdPartyLoader`.

    Parameters elsewhere than on the GPU are filled over it.
    """

    Options = InstantTensorOptions
    library = _LIBRARY

    @property
    def reading(self) -> InstantTensorExecutor:
        """What runs the library; see `ThirdPartyLoader`."""
        if torch.version.cuda is None or not torch.cuda.is_available():
            raise ConfigError(
                "load_format 'instanttensor' needs an NVIDIA GPU and a torch that is built for CUDA, and finds none: "
                "take load_format 'safetensors'"
            )
        self.library.imported()
        device = self.device
        if device.type != "cuda" or device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return InstantTensorExecutor(device, self.options)
