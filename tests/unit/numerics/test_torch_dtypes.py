"""Which torch dtype stands for which element type, both ways, and the shapes of packed ones."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tensorferry.core.dtypes import DTYPES, Kind
from tensorferry.errors import UnsupportedDtype
from tensorferry.numerics.torch_dtypes import dtype_of, logical_shape, torch_dtype, torch_elements, torch_shape

AS_BYTES = ("F6_E2M3", "F6_E3M2", *(name for name, dtype in DTYPES.items() if dtype.kind is Kind.PACKED))


@pytest.mark.parametrize("name", sorted(DTYPES.keys() - set(AS_BYTES)))
def test_every_type_that_torch_has_leads_there_and_back(name: str) -> None:
    assert dtype_of(torch_dtype(DTYPES[name])) is DTYPES[name]


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_a_block_is_a_whole_number_of_torch_elements(name: str) -> None:
    dtype = DTYPES[name]
    assert torch_elements(dtype) * torch_dtype(dtype).itemsize == dtype.block_bytes


def test_types_that_torch_lacks_come_as_bytes() -> None:
    assert {torch_dtype(DTYPES[name]) for name in AS_BYTES} == {torch.uint8}
    assert torch_shape(DTYPES["F6_E2M3"], (2, 8)) == (2, 6)
    assert torch_shape(DTYPES["F6_E2M3"], (2, 2)) == (3,)


def test_f4_comes_two_to_a_torch_element() -> None:
    assert torch_shape(DTYPES["F4"], (2, 4)) == (2, 2)
    assert torch_shape(DTYPES["F4"], (2, 3)) == (3,)
    assert logical_shape(DTYPES["F4"], (2, 2)) == (2, 4)
    assert logical_shape(DTYPES["F32"], (2, 2)) == (2, 2)


def test_a_quantized_tensor_has_no_element_type() -> None:
    with pytest.raises(UnsupportedDtype, match=r"torch\.qint8"):
        dtype_of(torch.qint8)


def test_a_type_that_this_torch_lacks_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_dtype.cache_clear()
    monkeypatch.delattr(torch, "uint64")
    with pytest.raises(UnsupportedDtype, match=r"U64 needs torch\.uint64, which torch \S+ does not have: upgrade"):
        torch_dtype(DTYPES["U64"])
    assert torch_dtype(DTYPES["U32"]) is torch.uint32
    torch_dtype.cache_clear()


def test_everything_imports_under_a_torch_without_some_types() -> None:
    code = "import torch; del torch.uint64, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2; import tensorferry.api"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
