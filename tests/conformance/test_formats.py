"""Every format that comes with tensorferry keeps to `FormatConformance`; so can those of others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
import pytest
import torch
from torch import nn

from helpers.checkpoints import write_index, write_raw_safetensors
from helpers.format_conformance import FormatConformance
from helpers.samples import Sample, as_new, of_values, sample
from tensorferry.checkpoint import Checkpoint
from tensorferry.config import ParallelConfig
from tensorferry.core.boxes import Box, Region
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.target import Slot
from tensorferry.formats.gguf_types import GGML_TYPES
from tensorferry.formats.safetensors import SAFETENSORS_DTYPES
from tensorferry.formats.tensorizer_types import TENSORIZER_DTYPES
from tensorferry.formats.tensorizer_write import write_tensorizer
from tensorferry.formats.writing import checkpoint_writer
from tensorferry.loaders.saving import save_sharded_state


def safetensors_file(path: Path, samples: Mapping[str, Sample]) -> Path:
    return write_raw_safetensors(path, [(name, s.dtype.name, s.shape, s.data) for name, s in samples.items()])


class TestSafetensors(FormatConformance):
    format = "safetensors"
    dtypes = tuple(SAFETENSORS_DTYPES)
    writer = "safetensors"

    def write(self, folder: Path, samples: Mapping[str, Sample]) -> Path:
        safetensors_file(folder / "model.safetensors", samples)
        return folder


class TestShardedSafetensors(FormatConformance):
    format = "safetensors"
    dtypes = ("F32", "BF16", "F4")

    def write(self, folder: Path, samples: Mapping[str, Sample]) -> Path:
        names, where = list(samples), dict[str, str]()
        for n, part in enumerate((names[:1], names[1:])):
            shard = f"model-{n + 1:05}-of-00002.safetensors"
            safetensors_file(folder / shard, {name: samples[name] for name in part})
            where |= dict.fromkeys(part, shard)
        write_index(folder / "model.safetensors.index.json", where)
        return folder


class TestConsolidatedSafetensors(FormatConformance):
    format = "safetensors"
    dtypes = ("BF16", "F8_E4M3")
    plain = "BF16"
    options: ClassVar[Mapping[str, Any]] = {"load_format": "mistral"}

    def write(self, folder: Path, samples: Mapping[str, Sample]) -> Path:
        safetensors_file(folder / "consolidated.safetensors", samples)
        return folder


_TORCH = (
    "BOOL", "U8", "U16", "U32", "U64", "I8", "I16", "I32", "I64", "F4", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2",
    "F8_E5M2FNUZ", "F8_E8M0", "F16", "BF16", "F32", "F64", "C32", "C64", "C128",
)  # fmt: skip


class TestTorchZip(FormatConformance):
    format = "torch"
    dtypes = _TORCH

    def write(self, folder: Path, samples: Mapping[str, Sample]) -> Path:
        torch.save({name: s.tensor for name, s in samples.items()}, folder / "pytorch_model.bin")
        return folder


class TestTorchLegacy(FormatConformance):
    format = "torch"
    dtypes = tuple(name for name in _TORCH if name != "F4")

    def write(self, folder: Path, samples: Mapping[str, Sample]) -> Path:
        tensors = {name: s.tensor for name, s in samples.items()}
        torch.save(tensors, folder / "model.pt", _use_new_zipfile_serialization=False)
        return folder / "model.pt"

    def in_order(self, checkpoint: Checkpoint, samples: Mapping[str, Sample]) -> list[str]:
        """Torch orders storages by their keys, which are addresses: names come in the order of the bytes."""
        return sorted(samples, key=lambda name: checkpoint.catalogue[name].chunks[0].span or ())


class TestGguf(FormatConformance):
    """The types that are plain numbers; packed ones have tests of their own, by decoder."""

    format = "gguf"
    dtypes = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")

    def write(self, folder: Path, samples: Mapping[str, Sample]) -> Path:
        path = folder / "model.gguf"
        out = gguf.GGUFWriter(path, "llama")
        numbers = {dtype.name: number for number, dtype in GGML_TYPES.items()}
        for name, s in samples.items():
            data = np.frombuffer(s.data or b"", np.uint8)
            kind = gguf.GGMLQuantizationType(numbers[s.dtype.name])
            out.add_tensor_info(name, s.shape, np.dtype(np.float32), len(s.data), raw_dtype=kind)
            out.tensors[-1][name].tensor = data
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_tensors_to_file()
        out.close()
        return folder


class TestTensorizer(FormatConformance):
    format = "tensorizer"
    dtypes = tuple(dtype.name for dtype in TENSORIZER_DTYPES.values())
    writer = "tensorizer"

    def write(self, folder: Path, samples: Mapping[str, Sample]) -> Path:
        checkpoint_writer("tensorizer").write(folder, as_new(samples), metadata={}, max_shard_size=None)
        return folder


class TestNpcache(FormatConformance):
    format = "npcache"
    dtypes = tuple(DTYPES)
    writer = "npcache"
    options: ClassVar[Mapping[str, Any]] = {"load_format": "npcache"}

    def write(self, folder: Path, samples: Mapping[str, Sample]) -> Path:
        checkpoint_writer("npcache").write(folder, as_new(samples), metadata={}, max_shard_size=None)
        return folder


class TestEncryptedTensorizer(FormatConformance):
    """Its tensors are decrypted on the way, from where they lie."""

    format = "tensorizer"
    dtypes = ("F32", "BF16", "I8")
    reads_slices = False  # what is sealed together is read together

    def write(self, folder: Path, samples: Mapping[str, Sample]) -> Path:
        pytest.importorskip("nacl")
        folder.with_name(f"{folder.name}.key").write_bytes(bytes(range(32)))
        write_tensorizer(folder / "model.tensors", as_new(samples), key=bytes(range(32)))
        return folder / "model.tensors"

    def options_for(self, path: Path) -> Mapping[str, Any]:
        return {"encryption_keyfile": path.parent.with_name(f"{path.parent.name}.key")}

    def on_disk(self, file: str) -> str:
        return "model.tensors"


class TestShardedStateOfOneRank(FormatConformance):
    """As vLLM writes it: without a manifest."""

    format = "sharded_state"
    dtypes = ("F32", "BF16", "I64", "F8_E4M3")
    options: ClassVar[Mapping[str, Any]] = {"load_format": "sharded_state"}
    knows_its_files = False

    def write(self, folder: Path, samples: Mapping[str, Sample]) -> Path:
        names = list(samples)
        for n, part in enumerate((names[:1], names[1:])):
            safetensors_file(folder / f"model-rank-0-part-{n}.safetensors", {name: samples[name] for name in part})
        return folder


class Shares(nn.Module):
    """One rank's columns of each tensor whose columns are even in number, and copies of the others."""

    def __init__(self, samples: Mapping[str, Sample], rank: int, size: int) -> None:
        super().__init__()
        self.windows: dict[str, Slot] = {}
        for n, s in enumerate(samples.values()):
            tensor = s.tensor
            if len(s.shape) == 2 and s.shape[1] and s.shape[1] % size == 0:
                width = s.shape[1] // size
                window = Box((0, rank * width), (s.shape[0], (rank + 1) * width))
                self.windows[f"t{n}"] = Slot(Region.whole(window.shape), s.shape, Region(s.shape, window))
                tensor = tensor[window.slices].contiguous()
            self.register_buffer(f"t{n}", tensor)

    def tensor_slots(self) -> dict[str, dict[str, Slot]]:
        return {name: {"": slot} for name, slot in self.windows.items()}


class TestShardedStateOfTwoRanks(FormatConformance):
    """Whole tensors out of the parts that two ranks saved, which their manifests tell."""

    format = "sharded_state"
    dtypes = ("F32", "BF16", "I64", "F8_E4M3")
    matrix = ("t0", (12, 16))
    options: ClassVar[Mapping[str, Any]] = {"load_format": "sharded_state"}

    def samples(self, dtype: str) -> dict[str, Sample]:
        return {f"t{n}": s for n, s in enumerate(super().samples(dtype).values())}

    def all_samples(self) -> dict[str, Sample]:
        every = [s for dtype in self.dtypes for s in self.samples(dtype).values()]
        return {f"t{n}": s for n, s in enumerate(every)}

    def large(self) -> dict[str, Sample]:
        return {"t0": next(iter(super().large().values())), "t1": sample(self.plain, 5)}

    def write(self, folder: Path, samples: Mapping[str, Sample]) -> Path:
        for rank in range(2):
            parallel = ParallelConfig(tp_size=2, tp_rank=rank)
            save_sharded_state(Shares(samples, rank, 2), folder, parallel=parallel)
        return folder


class TestModelParallelParts(FormatConformance):
    """Meta's layout: rows or columns of a tensor in each of two files, or a copy."""

    format = "torch"
    dtypes = ("F32", "BF16", "F16")
    scalars = empties = False
    matrix = ("layers.0.attention.wq.weight", (16, 16))
    options: ClassVar[Mapping[str, Any]] = {"load_format": "mistral"}

    def samples(self, dtype: str, layer: int = 0) -> dict[str, Sample]:
        shapes = {"attention.wq.weight": (16, 16), "attention.wo.weight": (16, 16), "attention_norm.weight": (16,)}
        return {f"layers.{layer}.{name}": sample(dtype, *shape, seed=layer) for name, shape in shapes.items()}

    def all_samples(self) -> dict[str, Sample]:
        return {n: s for layer, dtype in enumerate(self.dtypes) for n, s in self.samples(dtype, layer).items()}

    def large(self) -> dict[str, Sample]:
        name, shape = self.matrix
        values = torch.arange(256, dtype=torch.float64).reshape(shape)
        return {name: of_values(values, self.plain), "norm.weight": sample(self.plain, 16)}

    def write(self, folder: Path, samples: Mapping[str, Sample]) -> Path:
        (folder / "params.json").write_text(json.dumps({"dim": 16, "n_layers": 1, "n_heads": 2}))
        for part in range(2):
            tensors = {name: self._part(name, s.tensor, part) for name, s in samples.items()}
            torch.save(tensors, folder / f"consolidated.{part:02}.pth")
        return folder

    @staticmethod
    def _part(name: str, tensor: torch.Tensor, part: int) -> torch.Tensor:
        if "norm" in name:
            return tensor
        return tensor.chunk(2, dim=1 if name.endswith("wo.weight") else 0)[part].clone()
