"""How a safetensors file is written: whole or not at all, and as the reference library reads and writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from helpers.checkpoints import ar, raw
from helpers.safetensors_bytes import NAME, catalogue, header_and_values
from tensorferry.core.dtypes import DTYPES
from tensorferry.errors import FormatError
from tensorferry.formats.safetensors_write import write_safetensors
from tensorferry.formats.writing import NewTensor

MADE = {"b": ar(2, 3), "a": ar(4, start=7), "h": ar(3, dtype=torch.bfloat16), "flag": torch.tensor([True, False])}
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.bool: "BOOL"}


def new(tensor: torch.Tensor) -> NewTensor:
    return NewTensor(DTYPES[TYPES[tensor.dtype]], tuple(tensor.shape), [raw(tensor)])


def test_it_writes_what_the_reference_library_writes_but_for_the_spaces_that_end_the_header(tmp_path: Path) -> None:
    write_safetensors(tmp_path / NAME, {k: new(v) for k, v in MADE.items()}, metadata={"format": "pt"})
    assert header_and_values((tmp_path / NAME).read_bytes()) == header_and_values(save(MADE, {"format": "pt"}))


@pytest.mark.parametrize("text", ["", "x" * 4000, "x" * 5000])
def test_values_begin_on_a_page_of_the_file(text: str, tmp_path: Path) -> None:
    write_safetensors(tmp_path / NAME, {k: new(v) for k, v in MADE.items()}, metadata={"text": text})
    size = int.from_bytes((tmp_path / NAME).read_bytes()[:8], "little")
    assert (8 + size) % 4096 == 0
    with safe_open(tmp_path / NAME, "pt") as reference:
        assert reference.metadata() == {"text": text}
        assert all(torch.equal(reference.get_tensor(name), tensor) for name, tensor in MADE.items())


def test_the_reference_library_reads_it(tmp_path: Path) -> None:
    write_safetensors(tmp_path / NAME, {k: new(v) for k, v in MADE.items()})
    with safe_open(tmp_path / NAME, "pt") as reference:
        assert all(torch.equal(reference.get_tensor(name), tensor) for name, tensor in MADE.items())


def test_chunks_of_any_sort_and_cut_are_put_together_in_turn(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes | bytearray | memoryview]:
        yield b"\x01"
        yield bytearray(b"\x02\x03")
        yield memoryview(b"")
        yield memoryview(b"\x04\x05\x06\x07\x08").cast("B")

    write_safetensors(tmp_path / NAME, {"t": NewTensor(DTYPES["U16"], (4,), chunks())})
    assert (tmp_path / NAME).read_bytes().endswith(bytes(range(1, 9)))
    assert catalogue_shape(tmp_path) == (4,)


def catalogue_shape(folder: Path) -> tuple[int, ...]:
    return catalogue(folder, (folder / NAME).read_bytes())["t"].shape


def test_every_tensor_starts_at_a_multiple_of_its_size(tmp_path: Path) -> None:
    sizes = {"U8": 1, "F64": 8, "BF16": 2, "F32": 4}
    tensors = {name: NewTensor(DTYPES[name], (3,), [bytes(3 * size)]) for name, size in sizes.items()}
    write_safetensors(tmp_path / NAME, tensors)
    found = catalogue(tmp_path, (tmp_path / NAME).read_bytes())
    assert list(found) == ["F64", "F32", "BF16", "U8"]
    assert all(e.span is not None and e.span.offset % sizes[name] == 0 for name, e in found.items())


def test_no_tensors_are_a_file_too(tmp_path: Path) -> None:
    write_safetensors(tmp_path / NAME, {})
    assert len(catalogue(tmp_path, (tmp_path / NAME).read_bytes())) == 0


def test_a_new_file_has_the_mode_of_the_umask_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_safetensors(tmp_path / NAME, {})
    finally:
        os.umask(old)
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o640
    (tmp_path / NAME).chmod(0o604)
    write_safetensors(tmp_path / NAME, {})
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o604


def test_a_link_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"blob")
    (tmp_path / NAME).symlink_to("blob")
    write_safetensors(tmp_path / NAME, {})
    assert (tmp_path / "blob").read_bytes() == b"blob"
    assert not (tmp_path / NAME).is_symlink()


def interrupted() -> Iterator[bytes]:
    yield b"\0"
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        (NewTensor(DTYPES["U8"], (2,), [b"\0"]), FormatError),
        (NewTensor(DTYPES["U8"], (2,), [b"\0\0", b"\0"]), FormatError),
        (NewTensor(DTYPES["U8"], (2,), interrupted()), KeyboardInterrupt),
    ],
)
def test_what_fails_in_the_middle_leaves_the_old_file_and_nothing_beside(
    tensor: NewTensor, error: type[BaseException], tmp_path: Path
) -> None:
    (tmp_path / NAME).write_bytes(b"old")
    with pytest.raises(error):
        write_safetensors(tmp_path / NAME, {"t": tensor})
    assert (tmp_path / NAME).read_bytes() == b"old"
    assert os.listdir(tmp_path) == [NAME]


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "says"),
    [
        ("__metadata__", "U8", (0,), "cannot be called"),
        ("t", "C128", (0,), "no dtype C128"),
        ("t", "F4", (3,), "no whole bytes"),
        ("t", "U8", (-1,), "no whole bytes"),
        ("\ud800", "U8", (0,), "lone surrogate"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_before_a_file_is_made(
    name: str, dtype: str, shape: tuple[int, ...], says: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=says):
        write_safetensors(tmp_path / NAME, {name: NewTensor(DTYPES[dtype], shape, [])})
    assert os.listdir(tmp_path) == []
