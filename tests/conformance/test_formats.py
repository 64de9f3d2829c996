"""What every format keeps to. Subclass `FormatConformance` to hold a format of your own to it."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
import pytest
import torch
from torch import nn

from helpers.checkpoints import write_index, write_raw_safetensors
from helpers.measuring import little_memory, little_time
from helpers.samples import Sample, as_new, bits, of_values, sample
from tensorferry.checkpoint import Checkpoint, open_checkpoint
from tensorferry.config import ParallelConfig
from tensorferry.conversion import convert
from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import Catalogue, Span
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.lower import lower
from tensorferry.core.planning import make_plan
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Slot, TargetTensor
from tensorferry.errors import FormatError, LocateError, ReadError, TensorferryError
from tensorferry.execute import Counters, Executor, SimpleExecutor, ThreadedExecutor
from tensorferry.formats.gguf_types import GGML_TYPES
from tensorferry.formats.safetensors import SAFETENSORS_DTYPES
from tensorferry.formats.tensorizer_types import TENSORIZER_DTYPES
from tensorferry.formats.tensorizer_write import write_tensorizer
from tensorferry.formats.writing import checkpoint_writer
from tensorferry.loaders.saving import save_sharded_state
from tensorferry.numerics.torch_dtypes import torch_dtype
from tensorferry.storage.base import SupportsMap

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 4096\n"
HTML = b"<!DOCTYPE html><html><body>Sign in to continue</body></html>"
WORTHLESS = {
    "no bytes": b"",
    "one byte": b"\x80",
    "zeros": bytes(1000),
    "ones": b"\xff" * 1000,
    "junk": bytes(199 * i * i % 251 for i in range(1000)),
    "text": b"weights\n" * 100,
    "a Git-LFS pointer": LFS,
    "an HTML page": HTML,
}
"""What stands in place of weight files."""

SAYS = {"a Git-LFS pointer": "git lfs pull", "an HTML page": "HTML page"}


Written = tuple[Path, dict[str, Sample]]
"""What to open, and what is in it."""


class FormatConformance(ABC):
    """Give `write`, `format` and `dtypes`.

    format: what catalogues call it. dtypes: every type that it holds, by name. plain: one of them whose tensors may be
    cut anywhere. scalars, empties: whether it has tensors without dimensions, and without elements. matrix: name and
    shape of the tensor of which parts are read. writer: what ``tensorferry convert --to`` calls it, if it is written.
    options: with which checkpoints are opened. reads_slices: whether just the bytes of a part are read for it.
    knows_its_files: whether a checkpoint tells that one of its files is not there.
    """

    format: str
    dtypes: Sequence[str]
    plain: str = "F32"
    scalars: bool = True
    empties: bool = True
    matrix: tuple[str, tuple[int, int]] = ("layers.0.weight", (12, 16))
    writer: str | None = None
    options: ClassVar[Mapping[str, Any]] = {}
    reads_slices: bool = True
    knows_its_files: bool = True

    @abstractmethod
    def write(self, folder: Path, samples: Mapping[str, Sample]) -> Path:
        """Write a checkpoint of `samples` into `folder`, and return what to open."""

    def samples(self, dtype: str) -> dict[str, Sample]:
        """Return tensors of one type, whose names begin with it."""
        block = DTYPES[dtype].block
        found = {
            "matrix.weight": sample(dtype, 3, 2 * block),
            "vector": sample(dtype, 4 * block, seed=1),
            "deep.0.tensor": sample(dtype, 2, 1, 3, block, seed=2),
        }
        if self.scalars and block == 1:
            found["scalar"] = sample(dtype, seed=3)
        if self.empties:
            found["empty"] = sample(dtype, 2, 0)
        return {f"{dtype}.{name}": s for name, s in found.items()}

    def all_samples(self) -> dict[str, Sample]:
        """Return tensors of every type."""
        return {name: s for dtype in self.dtypes for name, s in self.samples(dtype).items()}

    def in_order(self, checkpoint: Checkpoint, samples: Mapping[str, Sample]) -> list[str]:
        """Return the names of `samples` in the order in which the format promises to list them: that of writing."""
        return list(samples)

    def large(self) -> dict[str, Sample]:
        """Return tensors of which one is the matrix, of numbers that tell where they belong."""
        name, shape = self.matrix
        values = torch.arange(shape[0] * shape[1], dtype=torch.float64).reshape(shape)
        return {name: of_values(values, self.plain), "other": sample(self.plain, 5)}

    def open(self, path: Path) -> Checkpoint:
        """Open what `write` returned."""
        return open_checkpoint(path, **self.options_for(path))

    def files(self, checkpoint: Checkpoint) -> Sequence[str]:
        """Return the paths of the files of a checkpoint that hold weights, relative to its storage."""
        return checkpoint.catalogue.files

    @pytest.fixture(scope="class")
    @classmethod
    def written(cls, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Sample]]:
        """A checkpoint with tensors of every type, which tests leave as it is, and what is in it."""
        one = cls()
        samples = one.all_samples()
        return one.write(tmp_path_factory.mktemp(cls.__name__), samples), samples

    def on_disk(self, file: str) -> str:
        """Return where the file that spans call `file` lies, relative to the checkpoint."""
        return file

    def options_for(self, path: Path) -> Mapping[str, Any]:
        """Return the options with which the checkpoint at `path` is opened."""
        return self.options

    # -- the catalogue

    def test_names_types_and_shapes_are_listed_in_order(self, written: Written) -> None:
        path, samples = written
        with self.open(path) as checkpoint:
            found = {e.name: (e.dtype, e.shape) for e in checkpoint.catalogue.values()}
            assert found == {name: (s.dtype, s.shape) for name, s in samples.items()}
            assert list(found) == self.in_order(checkpoint, samples)
            assert checkpoint.catalogue.format == self.format
            assert checkpoint.catalogue.nbytes == sum(len(s.data) for s in samples.values())

    def test_entries_lie_in_the_files_whole_and_apart(self, written: Written) -> None:
        with self.open(written[0]) as checkpoint:
            for entry in checkpoint.catalogue.values():
                boxes = [chunk.box or Box.whole(entry.shape) for chunk in entry.chunks]
                assert sum(box.size for box in boxes) == Box.whole(entry.shape).size, entry.name
                assert not any(a.meet(b) for i, a in enumerate(boxes) for b in boxes[:i]), entry.name
            spans = sorted(span for span in _spans(checkpoint.catalogue) if span[2])
            for file, offset, length in spans:
                assert 0 <= offset <= offset + length <= checkpoint.storage.stat(file).size
            assert not any(a[0] == b[0] and a[1] + a[2] > b[1] for a, b in pairwise(spans))

    # -- values

    def test_reading_one_after_the_other_gives_what_was_written(self, written: Written) -> None:
        path, samples = written
        with self.open(path) as checkpoint:
            for name, expected in reversed(samples.items()):
                assert_same(checkpoint.read(name), expected, name)

    def test_streaming_gives_what_was_written_in_order(self, written: Written) -> None:
        path, samples = written
        with self.open(path) as checkpoint:
            found = dict(checkpoint.tensors())
            assert list(found) == self.in_order(checkpoint, samples)
        for name, tensor in found.items():
            assert_same(tensor, samples[name], name)

    def test_views_of_mapped_files_are_what_was_written(self, written: Written) -> None:
        path, samples = written
        with self.open(path) as checkpoint:
            if not isinstance(checkpoint.storage, SupportsMap):
                pytest.skip("what is read here cannot be mapped")
            for name, tensor in checkpoint.tensors(mapped=True):
                assert_same(tensor, samples[name], name)

    def test_only_names_that_are_asked_for_are_read(self, tmp_path: Path) -> None:
        samples = self.large()
        last = list(samples)[-1]
        with self.open(self.write(tmp_path, samples)) as checkpoint:
            ((name, tensor),) = checkpoint.tensors([last])
        assert name == last
        assert_same(tensor, samples[name], name)

    @pytest.mark.parametrize("executor", [SimpleExecutor(), ThreadedExecutor(2)], ids=lambda e: type(e).__name__)
    @pytest.mark.parametrize("what", ["rows", "columns", "rows and columns", "one element", "nothing", "everything"])
    def test_a_part_is_that_part_and_nothing_else_is_read(self, what: str, executor: Executor, tmp_path: Path) -> None:
        samples = self.large()
        name, shape = self.matrix
        box = _boxes(shape)[what]
        with self.open(self.write(tmp_path, samples)) as checkpoint:
            found, counters, needed = _window(checkpoint, name, box, executor)
        assert found.tolist() == samples[name].tensor[box.slices].tolist()
        if isinstance(executor, ThreadedExecutor) and self.reads_slices:
            assert counters.bytes_read == needed == box.size * samples[name].dtype.block_bytes

    def test_the_parts_of_all_ranks_are_the_whole(self, tmp_path: Path) -> None:
        samples = self.large()
        name, (rows, columns) = self.matrix
        boxes = [Box((0, c), (rows, c + columns // 4)) for c in range(0, columns, columns // 4)]
        with self.open(self.write(tmp_path, samples)) as checkpoint:
            parts = [_window(checkpoint, name, box, ThreadedExecutor(1))[0] for box in boxes]
        assert torch.cat(parts, dim=1).tolist() == samples[name].tensor.tolist()

    # -- what cannot be believed

    def test_a_file_that_was_cut_is_refused_by_name_and_cheaply(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, self.samples(self.plain))
        for file, cut, hurts in list(self._cuts(path)):
            target = _below(path, file)
            whole = target.read_bytes()
            target.write_bytes(whole[:cut])
            if hurts:
                self._refused(path, file, f"{file} cut to {cut} of {len(whole)} bytes")
            else:
                self._refused_or_right(path, file)
            target.write_bytes(whole)

    @pytest.mark.parametrize("what", WORTHLESS)
    def test_what_is_no_such_file_is_refused_by_name_and_cheaply(self, what: str, tmp_path: Path) -> None:
        path = self.write(tmp_path, self.samples(self.plain))
        with self.open(path) as checkpoint:
            file = self.files(checkpoint)[0]
        _below(path, file).write_bytes(WORTHLESS[what])
        message = self._refused(path, file, what)
        assert SAYS.get(what, "") in message

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        if not self.knows_its_files:
            pytest.skip("nothing says how many files there should be")
        path = self.write(tmp_path, self.samples(self.plain))
        with self.open(path) as checkpoint:
            files = self.files(checkpoint)
        _below(path, files[-1]).unlink()
        with pytest.raises((LocateError, FormatError)) as refusal:
            self.open(path)
        assert os.path.basename(files[-1]) in str(refusal.value) or str(path) in str(refusal.value)

    def test_flipped_bytes_of_a_header_are_refused_or_read_and_nothing_else(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, self.samples(self.plain))
        with self.open(path) as checkpoint:
            file = self.files(checkpoint)[0]
        target = _below(path, file)
        whole = target.read_bytes()
        with little_memory():
            for at in range(0, min(len(whole), 600), 5):
                target.write_bytes(whole[:at] + bytes([whole[at] ^ 0x85]) + whole[at + 1 :])
                with suppress(TensorferryError), self.open(path) as checkpoint:
                    list(islice(checkpoint.tensors(), 20))

    def test_a_file_that_was_written_to_meanwhile_is_noticed(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, self.large())
        with self.open(path) as checkpoint:
            checkpoint.storage.check_unchanged()
            name, _ = self.matrix
            checkpoint.read(name)
            file = checkpoint.catalogue[name].files[-1]
            target = _below(path, self.on_disk(file))
            os.utime(target, ns=(1, 1))
            with pytest.raises(ReadError, match=target.name):
                checkpoint.storage.check_unchanged()
            with pytest.raises(ReadError, match=target.name):
                list(checkpoint.tensors())

    # -- there and back

    def test_converting_to_safetensors_changes_nothing(self, written: Written, tmp_path: Path) -> None:
        samples = _for_safetensors(written[1])
        path = written[0] if len(samples) == len(written[1]) else self.write(_made(tmp_path / "src"), samples)
        convert(path, tmp_path / "dst", names="keep", **self.options_for(path))
        with open_checkpoint(tmp_path / "dst") as checkpoint:
            assert_all_same(checkpoint, samples)

    def test_converting_from_safetensors_and_back_changes_nothing(self, tmp_path: Path) -> None:
        if self.writer is None:
            pytest.skip("this format is only read")
        samples = _for_safetensors(self.all_samples())
        source = _made(tmp_path / "src")
        checkpoint_writer("safetensors").write(source, as_new(samples), metadata={}, max_shard_size=None)
        convert(source, tmp_path / "there", to=self.writer, names="keep")
        with self.open(tmp_path / "there") as checkpoint:
            assert checkpoint.catalogue.format == self.format
            assert_all_same(checkpoint, samples)
        convert(tmp_path / "there", tmp_path / "back", names="keep", **self.options)
        with open_checkpoint(tmp_path / "back") as checkpoint:
            assert_all_same(checkpoint, samples)

    def test_a_type_that_the_format_lacks_is_refused_with_nothing_written(self, tmp_path: Path) -> None:
        if self.writer is None:
            pytest.skip("this format is only read")
        lacking = [name for name in DTYPES if name not in self.dtypes]
        if not lacking:
            pytest.skip("it has them all")
        block = DTYPES[lacking[0]].block
        new = as_new({"good": sample(self.plain, 2), "bad": sample(lacking[0], block)})
        with pytest.raises(FormatError, match="bad"):
            checkpoint_writer(self.writer).write(tmp_path, new, metadata={}, max_shard_size=None)
        assert list(tmp_path.iterdir()) == []

    # -- how

    def _cuts(self, path: Path) -> Iterator[tuple[str, int, bool]]:
        """Yield files, lengths to cut them to, and whether that hurts a tensor or a header."""
        with self.open(path) as checkpoint:
            spans = [(self.on_disk(f), offset, offset + n) for f, offset, n in _spans(checkpoint.catalogue) if n]
            for file in self.files(checkpoint):
                size = _below(path, file).stat().st_size
                mine = [(a, b) for f, a, b in spans if f == file]
                edges = {n for a, b in mine for n in (a - 1, a, a + 1, (a + b) // 2, b - 1, b)}
                steps = {0, 1, 2, 7, 8, 9, 15, 16, 23, 24, 31, 32, 33, *range(40, min(size, 2000), 61), size - 1}
                last = max((b for _, b in mine), default=0)
                for cut in sorted(n for n in edges | steps if 0 <= n < size):
                    yield file, cut, cut < last

    def _refused(self, path: Path, file: str, what: str) -> str:
        with little_time():
            try:
                self.open(path).close()
            except (FormatError, LocateError) as error:
                message = str(error)
            else:
                pytest.fail(f"{what}: it was opened")
        with little_memory(), pytest.raises((FormatError, LocateError)):
            self.open(path)
        assert os.path.basename(file) in message, what
        return message

    def _refused_or_right(self, path: Path, file: str) -> None:
        """What is cut off behind the last tensor may be missed or not; what is read is right."""
        expected = self.samples(self.plain)
        try:
            checkpoint = self.open(path)
        except (FormatError, LocateError) as error:
            message = str(error)
        else:
            with checkpoint:
                assert_all_same(checkpoint, expected)
            return
        assert os.path.basename(file) in message


def assert_same(tensor: torch.Tensor, expected: Sample, name: str) -> None:
    """Assert that a tensor has the type, the shape and the bits of what was written."""
    wanted = expected.tensor
    assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape), name
    assert bits(tensor) == expected.data, name


def assert_all_same(checkpoint: Checkpoint, samples: Mapping[str, Sample]) -> None:
    """Assert that a checkpoint holds exactly `samples`, in any order."""
    assert {e.name: (e.dtype, e.shape) for e in checkpoint.catalogue.values()} == {
        name: (s.dtype, s.shape) for name, s in samples.items()
    }
    for name, tensor in checkpoint.tensors():
        assert_same(tensor, samples[name], name)


def _boxes(shape: tuple[int, int]) -> dict[str, Box]:
    rows, columns = shape
    return {
        "rows": Box((rows // 4, 0), (rows // 2 + 1, columns)),
        "columns": Box((0, columns // 4), (rows, columns // 2 + 1)),
        "rows and columns": Box((1, 2), (rows - 1, columns - 2)),
        "one element": Box((rows - 1, columns - 1), (rows, columns)),
        "nothing": Box((0, 3), (rows, 3)),
        "everything": Box((0, 0), (rows, columns)),
    }


def _window(checkpoint: Checkpoint, name: str, box: Box, executor: Executor) -> tuple[torch.Tensor, Counters, int]:
    """Return what `executor` fills a parameter with that takes `box` of a tensor, and the bytes that the plan needs."""
    entry = checkpoint.catalogue[name]
    slot = Slot(Region.whole(box.shape), entry.shape, Region(entry.shape, box))
    plan = make_plan(checkpoint.catalogue, {name: TargetTensor(name, entry.dtype, box.shape, {"": slot})}, RuleSet())
    plan.raise_for_problems()
    found = {name: torch.zeros(box.shape, dtype=torch_dtype(entry.dtype))}
    schedule = lower(plan, max_gap=0, max_read=1 << 20, max_staging=1 << 20, waste=1.0)
    counters = executor.run(schedule, checkpoint.storage, found)
    return found[name], counters, plan.bytes_needed


def _spans(catalogue: Catalogue) -> Iterator[Span]:
    for entry in catalogue.values():
        yield from (chunk.span for chunk in entry.chunks if chunk.span is not None)


def _below(path: Path, file: str) -> Path:
    return (path if path.is_dir() else path.parent) / file


def _for_safetensors(samples: Mapping[str, Sample]) -> dict[str, Sample]:
    return {name: s for name, s in samples.items() if s.dtype.name in SAFETENSORS_DTYPES}


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


# -- the formats that come with tensorferry


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
