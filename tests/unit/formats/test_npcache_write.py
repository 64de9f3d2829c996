"""How NumPy caches are written: files that NumPy reads, put in place whole, with nothing of others' replaced."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.checkpoints import ar, raw
from tensorferry import FormatError, UnsafeFile, UnsupportedDtype, open_checkpoint
from tensorferry.core.dtypes import DTYPES, DType
from tensorferry.formats.npcache_write import NpcacheWriter, one_builder, write_npcache
from tensorferry.formats.npy import items_of
from tensorferry.formats.writing import NewTensor, checkpoint_writer

F32 = DTYPES["F32"]


def floats(*values: float) -> NewTensor:
    return NewTensor(F32, (len(values),), [np.array(values, "<f4").tobytes()])


def write(folder: Path, tensors: dict[str, NewTensor]) -> list[str]:
    return list(NpcacheWriter().write(folder, tensors, metadata={}, max_shard_size=None))


def test_the_writer_is_known_by_name_and_says_which_files_it_wrote(tmp_path: Path) -> None:
    writer = checkpoint_writer("npcache")
    files = writer.write(tmp_path, {"w": floats(1, 2), "v": floats(3)}, metadata={"a": "b"}, max_shard_size=1)
    assert files == ["np/w", "np/v", "np/weight_names.json", "np/tensorferry.json"]
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()) == sorted(files)
    assert json.loads((tmp_path / "np/weight_names.json").read_text()) == ["w", "v"]
    with open_checkpoint(tmp_path, load_format="npcache") as checkpoint:
        assert (checkpoint.warnings, dict(checkpoint.catalogue.metadata)) == ((), {"a": "b"})


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.int8, torch.bool, torch.complex128, torch.uint32]
)
def test_numpy_reads_types_of_its_own_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = ar(2, 3, dtype=dtype)
    name = {torch.bool: "BOOL", torch.complex128: "C128", torch.int8: "I8", torch.uint32: "U32"}
    kind = name.get(dtype) or f"F{dtype.itemsize * 8}"
    write(tmp_path, {"t": NewTensor(DTYPES[kind], (2, 3), [raw(tensor)])})
    found = np.load(tmp_path / "np" / "t", allow_pickle=False)
    assert found.dtype == tensor.numpy().dtype
    assert np.array_equal(found, tensor.numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32])
def test_types_that_numpy_lacks_are_bits_that_nobody_takes_for_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = bytes(range(6 * dtype.itemsize))
    names = {torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
    write(tmp_path, {"t": NewTensor(DTYPES[names.get(dtype, "C32")], (2, 3), [bits])})
    found = np.load(tmp_path / "np" / "t")
    assert (found.shape, found.tobytes()) == ((2, 3), bits)
    with pytest.raises(TypeError, match="void"):
        torch.from_numpy(found)
    with open_checkpoint(tmp_path, load_format="npcache") as checkpoint:
        read = checkpoint.read("t")
    assert read.dtype == dtype
    assert raw(read) == bits


@pytest.mark.parametrize(("name", "shape"), [("F4", (2, 4)), ("F6_E2M3", (2, 8)), ("Q8_0", (2, 64))])
def test_packed_types_are_items_of_whole_blocks(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    dtype = DTYPES[name]
    data = bytes(i % 251 for i in range(dtype.nbytes(shape)))
    write(tmp_path, {"t": NewTensor(dtype, shape, [data])})
    assert np.load(tmp_path / "np" / "t").dtype.itemsize == dtype.block_bytes
    with open_checkpoint(tmp_path, load_format="npcache") as checkpoint:
        assert (checkpoint.catalogue["t"].dtype, checkpoint.catalogue["t"].shape) == (dtype, shape)
        assert raw(checkpoint.read("t")) == data


@pytest.mark.parametrize(
    ("dtype", "shape"), [(DTYPES["F4"], (3,)), (DTYPES["Q8_0"], ()), (items_of(4), (2,)), (DTYPES["Q4_K"], (2, 128))]
)
def test_what_is_not_made_of_whole_items_is_refused(tmp_path: Path, dtype: DType, shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedDtype, match=r"tensor 't'.*a NumPy file cannot hold it"):
        write(tmp_path, {"t": NewTensor(dtype, shape, [b""])})
    assert not list(tmp_path.iterdir())


def test_names_that_are_no_file_names_are_escaped_and_come_back(tmp_path: Path) -> None:
    names = ["", ".", "..", "../../etc/x", "a/b", "a%2Fb", "nul\0", "x" * 400, "ü" * 300, "tensorferry.json", "plain"]
    write(tmp_path, {name: floats(i) for i, name in enumerate(names)})
    with open_checkpoint(tmp_path, load_format="npcache") as checkpoint:
        assert [(name, tensor.tolist()) for name, tensor in checkpoint.tensors()] == [
            (name, [i]) for i, name in enumerate(names)
        ]
    assert (tmp_path / "np" / "plain").is_file()


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="surrogate"):
        write(tmp_path, {"\ud800": floats(1)})


@pytest.mark.parametrize("data", [[b"1234567"], [b"1234", b"56789"]])
def test_chunks_of_another_length_leave_the_old_cache_alone(tmp_path: Path, data: list[bytes]) -> None:
    write(tmp_path, {"t": floats(1, 2)})
    before = (tmp_path / "np").stat().st_ino
    with pytest.raises(FormatError, match="'t' takes 8 bytes"):
        write(tmp_path, {"t": NewTensor(F32, (2,), data)})
    assert (tmp_path / "np").stat().st_ino == before
    assert [p.name for p in tmp_path.iterdir()] == ["np"]


def test_an_error_in_the_middle_of_a_tensor_leaves_nothing(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"1234"
        assert not (tmp_path / "np").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, {"first": floats(1), "t": NewTensor(F32, (2,), chunks())})
    assert not list(tmp_path.iterdir())


def test_what_confirms_the_writing_can_still_stop_it(tmp_path: Path) -> None:
    def confirm() -> None:
        raise FormatError("no")

    with pytest.raises(FormatError, match="no"):
        write_npcache(tmp_path, {"t": floats(1)}, metadata={}, confirm=confirm)
    assert not list(tmp_path.iterdir())


def test_one_tensor_is_asked_for_at_a_time_and_in_order(tmp_path: Path) -> None:
    asked = []

    def chunks(name: str) -> Iterator[bytes]:
        asked.append(name)
        yield bytes(4)

    write(tmp_path, {name: NewTensor(F32, (1,), chunks(name)) for name in ("b", "a", "c")})
    assert asked == ["b", "a", "c"]


def test_an_older_cache_gives_way_whole(tmp_path: Path) -> None:
    write(tmp_path, {"old": floats(1), "both": floats(2)})
    write(tmp_path, {"both": floats(3)})
    assert sorted(p.name for p in (tmp_path / "np").iterdir()) == ["both", "tensorferry.json", "weight_names.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["np"]


@pytest.mark.parametrize("stranger", ["notes.txt", "folder", "w.npy"])
def test_a_folder_that_is_something_else_is_never_replaced(tmp_path: Path, stranger: str) -> None:
    place = tmp_path / "np"
    place.mkdir()
    if stranger == "folder":
        (place / stranger).mkdir()
    else:
        (place / stranger).write_bytes(b"\x93NUMPY" if stranger == "w.npy" else b"mine")
    with pytest.raises(UnsafeFile, match=f"{stranger} is no part of a NumPy cache.*move it away"):
        write(tmp_path, {"t": floats(1)})
    assert [p.name for p in place.iterdir()] == [stranger]
    assert [p.name for p in tmp_path.iterdir()] == ["np"]


def test_a_finished_cache_is_known_by_its_lists_and_an_unfinished_one_by_its_names(tmp_path: Path) -> None:
    place = tmp_path / "np"
    place.mkdir()
    (place / "weight_names.json").write_bytes(b"")
    (place / "other").write_bytes(b"\x93NUMPY")
    write(tmp_path, {"t": floats(1)})
    (place / "weight_names.json").unlink()
    (place / "tensorferry.json").unlink()
    (place / "t").write_bytes(b"")
    write(tmp_path, {"t": floats(1)})
    assert np.load(place / "t").tolist() == [1]


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write(tmp_path, {"t": floats(1)})
    finally:
        os.umask(old)
    assert (tmp_path / "np").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "np" / "t").stat().st_mode & 0o777 == 0o640


def test_what_killed_builders_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    left = tmp_path / ".np.0123456789abcdef.part" / "np"
    left.mkdir(parents=True)
    (left / "t").write_bytes(b"half")
    with one_builder(tmp_path):
        assert not left.parent.exists()
