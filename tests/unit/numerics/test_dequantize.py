"""Every block type decodes as the C reference does, bit for bit; some values are worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tensorferry.core.dtypes import DTYPES, DType
from tensorferry.errors import UnsupportedDtype
from tensorferry.numerics.dequantize import decoders, dequantize
from tensorferry.numerics.gguf.grids import GRIDS

gguf = pytest.importorskip("gguf", reason="gguf-py is the second opinion")
libgguf = pytest.importorskip("libgguf", reason="libgguf holds the C reference")

TYPES = sorted(decoders())
IDS = {kind.name: kind.value for kind in gguf.GGMLQuantizationType}
NOT_IN_LIBGGUF = {"Q2_0"}
NOT_IN_GGUF_PY = {"Q1_0", "Q2_0"}


def blocks_of(dtype: DType, n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, dtype.block_bytes), dtype=np.uint8)


def bits(values: np.ndarray) -> np.ndarray:
    """Float32 bits, with one pattern for everything that is not a number."""
    return np.where(np.isnan(values), np.float32("nan"), values).view(np.int32)


def by_libgguf(dtype: DType, blocks: np.ndarray) -> np.ndarray:
    raw = libgguf.dequantize_rows_raw(IDS[dtype.name], np.ascontiguousarray(blocks), len(blocks), dtype.block)
    return np.frombuffer(raw, np.float32).reshape(len(blocks), dtype.block)


def by_gguf_py(dtype: DType, blocks: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        values: np.ndarray = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[dtype.name])
    return values


def decoded(dtype: DType, blocks: np.ndarray) -> np.ndarray:
    values: np.ndarray = dequantize(dtype, torch.from_numpy(blocks)).numpy()
    return values


@pytest.mark.parametrize("name", [n for n in TYPES if n not in NOT_IN_LIBGGUF])
def test_random_bytes_decode_like_the_c_reference(name: str) -> None:
    blocks = blocks_of(DTYPES[name], 3000)
    assert np.array_equal(bits(decoded(DTYPES[name], blocks)), bits(by_libgguf(DTYPES[name], blocks)))


@pytest.mark.parametrize("name", [n for n in TYPES if n not in NOT_IN_GGUF_PY])
def test_random_bytes_decode_like_gguf_py(name: str) -> None:
    blocks = blocks_of(DTYPES[name], 1000, seed=1)
    assert np.array_equal(bits(decoded(DTYPES[name], blocks)), bits(by_gguf_py(DTYPES[name], blocks)))


ONE, TWO, HALF = b"\x00\x3c", b"\x00\x40", b"\x00\x38"  # float16

BY_HAND = [
    ("Q1_0", ONE + b"\x05" + b"\x00" * 15, {0: 1, 1: -1, 2: 1, 3: -1, 127: -1}),
    ("Q2_0", HALF + b"\xe4" + b"\x00" * 15, {0: -0.5, 1: 0, 2: 0.5, 3: 1, 4: -0.5, 63: -0.5}),
    ("Q4_0", TWO + b"\xf0" + b"\x98" * 15, {0: -16, 16: 14, 1: 0, 17: 2, 31: 2}),
    ("Q4_1", TWO + HALF + b"\xf0" + b"\x21" * 15, {0: 0.5, 16: 30.5, 1: 2.5, 31: 4.5}),
    ("Q5_0", ONE + b"\x01\x00\x00\x80" + b"\x00" * 15 + b"\xf0", {0: 0, 1: -16, 15: -16, 31: 15}),
    ("Q5_1", ONE + TWO + b"\x01\x00\x00\x80" + b"\x00" * 15 + b"\xf0", {0: 18, 1: 2, 15: 2, 31: 33}),
    ("Q8_0", HALF + b"\x80\x7f\x02" + b"\x00" * 29, {0: -64, 1: 63.5, 2: 1, 31: 0}),
    ("Q2_K", b"\x21" * 16 + b"\xe4" * 64 + ONE + HALF, {0: -1, 32: 0, 64: 1, 96: 2, 128: -1, 255: 2}),
    ("Q6_K", b"\x0f" * 128 + b"\x03" * 64 + b"\xff" * 16 + TWO, {0: -62, 32: 34, 64: 64, 96: 64, 128: -62}),
    ("IQ4_NL", TWO + b"\xf0" + b"\x88" * 15, {0: -254, 16: 226, 1: 2, 31: 2}),
    ("MXFP4", b"\x80" + b"\x97" + b"\x08" * 15, {0: 12, 16: -1, 1: 0, 17: 0}),
    ("NVFP4", b"\x38\x00\x7f\x7e" + b"\x97" * 32, {0: 6, 8: -0.5, 16: 0, 32: 0, 48: 2688, 56: -224}),
    ("TQ1_0", b"\xff" * 52 + TWO, {0: 2, 32: 2, 239: 2, 240: 2, 255: 2}),
    ("TQ2_0", b"\xe4" * 64 + TWO, {0: -2, 32: 0, 64: 2, 96: 4, 128: -2, 255: 4}),
]


@pytest.mark.parametrize(("name", "block", "expected"), BY_HAND, ids=[name for name, _, _ in BY_HAND])
def test_a_block_decodes_to_what_its_layout_says(name: str, block: bytes, expected: dict[int, float]) -> None:
    values = dequantize(DTYPES[name], torch.frombuffer(bytearray(block), dtype=torch.uint8))
    assert {at: float(values[at]) for at in expected} == expected


@pytest.mark.parametrize("name", TYPES)
def test_dimensions_before_the_last_stay(name: str) -> None:
    dtype = DTYPES[name]
    packed = torch.from_numpy(blocks_of(dtype, 12)).view(2, 3, 2 * dtype.block_bytes)
    values = dequantize(dtype, packed)
    assert (values.dtype, values.shape) == (torch.float32, (2, 3, 2 * dtype.block))
    assert np.array_equal(bits(values.numpy()), bits(dequantize(dtype, packed.flatten()).view(2, 3, -1).numpy()))


@pytest.mark.parametrize("name", TYPES)
def test_no_blocks_are_no_numbers(name: str) -> None:
    dtype = DTYPES[name]
    assert dequantize(dtype, torch.empty(0, 3 * dtype.block_bytes, dtype=torch.uint8)).shape == (0, 3 * dtype.block)


@pytest.mark.parametrize("name", ["Q4_K", "IQ3_S"])
def test_blocks_that_lie_apart_are_decoded_where_they_are(name: str) -> None:
    dtype = DTYPES[name]
    wide = torch.from_numpy(blocks_of(dtype, 40)).view(10, 4 * dtype.block_bytes)
    part = wide[:, dtype.block_bytes : 3 * dtype.block_bytes]
    expected = dequantize(dtype, wide)[:, dtype.block : 3 * dtype.block]
    assert np.array_equal(bits(dequantize(dtype, part).numpy()), bits(expected.numpy()))


def test_types_that_nothing_decodes_are_refused_with_those_that_are_decoded() -> None:
    with pytest.raises(UnsupportedDtype, match=r"Q8_K blocks cannot be dequantized; these can: .*Q4_K"):
        dequantize(DTYPES["Q8_K"], torch.empty(292, dtype=torch.uint8))


@pytest.mark.parametrize("name", sorted(GRIDS))
def test_codebooks_are_those_of_gguf_py(name: str) -> None:
    kind = getattr(gguf.quants, name)
    kind.init_grid()
    assert np.array_equal(np.array(list(GRIDS[name].vectors())), kind.grid[0, 0])
