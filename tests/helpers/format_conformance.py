"""What every format keeps to. Subclass `FormatConformance` to hold a format of your own to it.

The formats that come with tensorferry do so in tests/conformance/test_formats.py.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from helpers.measuring import little_memory, little_time
from helpers.samples import Sample, as_new, bits, of_values, sample
from tensorferry.checkpoint import Checkpoint, open_checkpoint
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
from tensorferry.formats.safetensors import SAFETENSORS_DTYPES
from tensorferry.formats.writing import checkpoint_writer
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
        if self.reads_slices and isinstance(executor, ThreadedExecutor):
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
