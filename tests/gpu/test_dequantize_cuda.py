"""Packed bytes go to the device and are decoded there, to the bits that the CPU makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tensorferry.core.dtypes import DTYPES
from tensorferry.numerics.dequantize import decode_into, decoders

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", sorted(decoders()))
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_a_device_decodes_to_the_same_bits(name: str, kind: torch.dtype) -> None:
    dtype = DTYPES[name]
    raw = np.random.default_rng(3).integers(0, 256, (3000, dtype.block_bytes), dtype=np.uint8)
    packed = torch.from_numpy(raw)
    here = torch.zeros(3000, dtype.block, dtype=kind)
    there = torch.zeros(3000, dtype.block, dtype=kind, device="cuda")
    assert decode_into(dtype, packed, here) == decode_into(dtype, packed, there)
    numbers = ~here.isnan()
    bits = torch.int32 if kind == torch.float32 else torch.int16
    assert there.isnan().cpu().equal(~numbers)
    assert there.cpu().view(bits)[numbers].equal(here.view(bits)[numbers])
