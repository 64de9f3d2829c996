"""A tensor in blocks knows its type and shape, is cut between blocks, and is joined row by row; nothing is encoded."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from tensorferry import ConfigError, PackedTensor, UnsupportedDtype
from tensorferry.core.dtypes import DTYPES
from tensorferry.numerics.dequantize import decoders
from tensorferry.numerics.packed import packed_type

gguf = pytest.importorskip("gguf", reason="gguf-py says which number a type has")

Q8_0 = DTYPES["Q8_0"]


def packed(*shape: int, name: str = "Q8_0") -> PackedTensor:
    """Random codes under scales from 1 to 2."""
    dtype = DTYPES[name]
    size = (*shape[:-1], shape[-1] // dtype.block, dtype.block_bytes)
    raw = np.random.default_rng(5).integers(0, 256, size, dtype=np.uint8)
    raw[..., 1] = 0x3C
    return PackedTensor(torch.from_numpy(raw.reshape(*shape[:-1], -1)), dtype)


@pytest.mark.parametrize("name", sorted(decoders()))
def test_every_type_has_its_number_and_its_shape_in_elements(name: str) -> None:
    made = PackedTensor(torch.zeros(3, 2 * DTYPES[name].block_bytes, dtype=torch.uint8), DTYPES[name])
    assert made.shape == (3, 2 * DTYPES[name].block)
    assert made.nbytes == 6 * DTYPES[name].block_bytes
    assert made.type_name == name
    if name != "Q2_0":  # newer than this gguf-py
        assert made.ggml_type == gguf.GGMLQuantizationType[name].value


def test_rows_are_cut_anywhere_and_columns_between_blocks() -> None:
    whole = packed(6, 96)
    numbers = whole.dequantize()
    assert torch.equal(whole.rows(1, 4).dequantize(), numbers[1:4])
    assert torch.equal(whole.columns(32, 96).dequantize(), numbers[:, 32:])
    assert whole.rows(1, 4).blocks.data_ptr() == whole.blocks[1].data_ptr()
    assert whole.columns(0, 32).rows(2, 3).columns(0, 0).shape == (1, 0)


@pytest.mark.parametrize(("start", "stop"), [(0, 16), (16, 64), (48, 80)])
def test_columns_are_not_cut_through_blocks(start: int, stop: int) -> None:
    expected = f"columns {start} to {stop} of Q8_0 (6, 96): a block is 32 elements, so both have to be multiples of 32"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        packed(6, 96).columns(start, stop)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_rows_outside_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ConfigError, match=rf"rows {start} to {stop} of Q8_0 \(6, 32\): there are 6"):
        packed(6, 32).rows(start, stop)


def test_a_vector_is_a_row() -> None:
    assert packed(96).columns(32, 64).shape == (32,)
    with pytest.raises(ConfigError, match="is one row"):
        packed(96).rows(0, 1)


def test_rows_of_one_type_are_joined() -> None:
    first, second = packed(6, 64), packed(2, 64)
    joined = PackedTensor.concat([first, second])
    assert joined.shape == (8, 64)
    assert torch.equal(joined.dequantize(), torch.cat([first.dequantize(), second.dequantize()]))


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ([packed(6, 64), packed(6, 64, name="Q4_0")], "Q8_0 (6, 64), Q4_0 (6, 64)"),
        ([packed(6, 64), packed(6, 32)], "Q8_0 (6, 64), Q8_0 (6, 32)"),
        ([packed(64), packed(64)], "Q8_0 (64,), Q8_0 (64,)"),
        ([], "nothing"),
    ],
)
def test_other_joins_are_refused(parts: list[PackedTensor], found: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"can be joined while they are packed, not {found}")):
        PackedTensor.concat(parts)


def test_numbers_are_rounded_once_and_made_where_they_are_wanted() -> None:
    whole = packed(6, 64)
    assert torch.equal(whole.dequantize(torch.bfloat16), whole.dequantize().bfloat16())
    assert whole.dequantize(device="meta").device.type == "meta"
    with pytest.raises(UnsupportedDtype, match="Q8_1 blocks cannot be dequantized"):
        PackedTensor(torch.zeros(1, 36, dtype=torch.uint8), DTYPES["Q8_1"]).dequantize()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, "float16", None])
def test_numbers_are_of_a_floating_type(dtype: Any) -> None:
    with pytest.raises(ConfigError, match=r"a floating torch\.dtype is expected"):
        packed(6, 64).dequantize(dtype)


@pytest.mark.parametrize("blocks", [torch.zeros(6, 33, dtype=torch.uint8), torch.zeros(34), torch.tensor(1).byte()])
def test_what_are_no_blocks_of_the_type_is_refused(blocks: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="blocks of Q8_0 are uint8 with rows of a multiple of 34 bytes, not torch"):
        PackedTensor(blocks, Q8_0)


@pytest.mark.parametrize("name", ["F32", "q4_k", "Q4_K_M"])
def test_types_of_numbers_and_of_files_are_no_types_of_blocks(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is no type of packed blocks; these are: Q4_0,"):
        packed_type(name)
