"""Every block type decodes as the C reference does, bit for bit; some values are worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tensorferry.core.dtypes import DTYPES, DType
from tensorferry.numerics.dequantize import decoders, dequantize

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
