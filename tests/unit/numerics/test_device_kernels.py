"""Kernels for GPUs, run here by the interpreter of Triton, give the bits that torch gives, wherever they put them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tensorferry.core.dtypes import DTYPES, DType
from tensorferry.numerics.casts import Loss, copy_counting
from tensorferry.numerics.dequantize import decoders

triton = pytest.importorskip("triton", reason="kernels for GPUs are written in Triton")
filling = pytest.importorskip("tensorferry.numerics.gguf.device.filling")

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="kernels are compiled on this machine: tests/gpu runs them"
)

TYPES = sorted(decoders())
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SCALES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2),
    "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": (), "MXFP4": (), "NVFP4": (),
}  # fmt: skip
ODD_HALVES = (0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFD01)
"""Zeros, subnormal and smallest normal numbers, the largest ones, infinities and NaN, as bits of float16."""


@pytest.fixture(autouse=True)
def many_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(filling, "_SIZE", 1 << 13)  # the interpreter takes as long for few elements as for many
    with np.errstate(all="ignore"):
        yield


def packed_of(dtype: DType, blocks: int) -> torch.Tensor:
    """Any bytes, and all odd scales; (blocks, bytes)."""
    raw = np.random.default_rng(7).integers(0, 256, (blocks, dtype.block_bytes), dtype=np.uint8)
    for place in SCALES.get(dtype.name, (0,)):
        for n, bits in enumerate(ODD_HALVES):
            raw[3 * n + place % 3, place : place + 2] = bits & 255, bits >> 8
    return torch.from_numpy(raw)


def in_torch(dtype: DType, packed: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, Loss]:
    values = decoders()[dtype.name](packed).reshape(len(packed), dtype.block)
    into = torch.zeros(values.shape, dtype=kind)
    return into, copy_counting(into, values)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit, where NaN is NaN whatever its bits."""
    bits = {2: torch.int16, 4: torch.int32}[left.element_size()]
    there = ~left.isnan()
    return left.isnan().equal(right.isnan()) and left.view(bits)[there].equal(right.view(bits)[there])


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("kind", FLOATS)
def test_every_type_has_the_bits_and_losses_that_torch_gives(name: str, kind: torch.dtype) -> None:
    dtype = DTYPES[name]
    packed = packed_of(dtype, 300)
    expected, loss = in_torch(dtype, packed, kind)
    into = torch.full(expected.shape, 7, dtype=kind)
    assert filling.fill(dtype, packed, into) == loss
    assert same(into, expected)


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("shape", ["rows", "columns", "row by row", "turned", "vector", "stack turned", "nothing"])
def test_any_destination_is_filled_and_nothing_beside_it(shape: str, kind: torch.dtype) -> None:
    whole = torch.full((6, 64, 96), 7, dtype=kind)
    into = {
        "rows": whole[1:3],
        "columns": whole[0, :, 32:],
        "row by row": whole[:, 2:4, 32:64],
        "turned": whole[2, 32:, 3:20].t(),
        "stack turned": whole[1:5].transpose(1, 2)[:, 90:, 32:],
        "vector": whole.view(-1)[1::96],
        "nothing": whole[:0],
    }[shape]
    packed = packed_of(DTYPES["Q4_1"], 100).repeat(4, 1)[: into.numel() // 32]
    expected, _ = in_torch(DTYPES["Q4_1"], packed, kind)
    filling.fill(DTYPES["Q4_1"], packed, into)
    assert same(into.contiguous(), expected.view(into.shape))
    into.fill_(7)
    assert whole.eq(7).all()


def test_more_than_one_launch_counts_are_filled_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "_AT_ONCE", 64)
    packed = packed_of(DTYPES["Q8_0"], 60)
    expected, loss = in_torch(DTYPES["Q8_0"], packed, torch.float16)
    for into in (torch.zeros(60 * 32, dtype=torch.float16), torch.zeros(10, 200, dtype=torch.float16)[:, :192]):
        assert filling.fill(DTYPES["Q8_0"], packed, into) == loss
        assert same(into.contiguous().view(60, 32), expected)


def test_parameters_with_gradients_and_tensors_of_inference_mode_are_filled() -> None:
    packed = packed_of(DTYPES["Q8_0"], 60)
    expected, _ = in_torch(DTYPES["Q8_0"], packed, torch.bfloat16)
    with torch.inference_mode():
        inferred = torch.zeros(60, 32, dtype=torch.bfloat16)
    for into in (torch.nn.Parameter(torch.zeros(60, 32, dtype=torch.bfloat16)), inferred):
        filling.fill(DTYPES["Q8_0"], packed, into)
        assert same(into.detach(), expected)


def test_bits_of_bfloat16_round_to_even_and_nan_has_one_pattern() -> None:
    block = bytearray(b"\x00\x3c" + bytes(range(32)))
    into = torch.zeros(32, dtype=torch.bfloat16)
    filling.fill(DTYPES["Q8_0"], torch.frombuffer(block, dtype=torch.uint8), into)
    assert into.tolist() == [float(n) for n in range(32)]
    block[1] = 0x7E
    filling.fill(DTYPES["Q8_0"], torch.frombuffer(block, dtype=torch.uint8), into)
    assert into.view(torch.int16).eq(0x7FC0).all()
