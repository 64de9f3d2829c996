"""Numbers go straight to where they belong, rounded once; compiled decoders give the same as those in torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tensorferry.core.dtypes import DTYPES, DType
from tensorferry.errors import UnsupportedDtype
from tensorferry.numerics import dequantize as module
from tensorferry.numerics.casts import Loss
from tensorferry.numerics.dequantize import decode_into, decoders, dequantize, foresee, kernel_of

TYPES = sorted(decoders())
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def packed_of(dtype: DType, rows: int, blocks: int = 1) -> torch.Tensor:
    """Any bytes: scales that are tiny, infinite or no number among them."""
    shape = (rows, blocks * dtype.block_bytes)
    return torch.from_numpy(np.random.default_rng(7).integers(0, 256, shape, dtype=np.uint8))


def in_torch(dtype: DType, packed: torch.Tensor) -> torch.Tensor:
    return decoders()[dtype.name](packed.reshape(-1, dtype.block_bytes)).reshape(len(packed), -1)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit, where NaN is NaN whatever its bits."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    there = ~left.isnan()
    return left.isnan().equal(right.isnan()) and left.view(bits)[there].equal(right.view(bits)[there])


@pytest.fixture(autouse=True)
def compiled_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WORTH", {"cpu": 0})


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "find_spec", lambda _name: None)
    kernel_of.cache_clear()
    yield
    kernel_of.cache_clear()


@pytest.mark.parametrize("name", TYPES)
def test_compiled_decoders_give_what_those_in_torch_give(name: str) -> None:
    pytest.importorskip("numba")
    assert kernel_of(name) is not None
    dtype = DTYPES[name]
    packed = packed_of(dtype, 2000)
    expected = in_torch(dtype, packed)
    for kind in (torch.float32, torch.bfloat16):
        into = torch.full(expected.shape, 7, dtype=kind)
        assert decode_into(dtype, packed, into) == Loss()
        assert same(into, expected.to(kind))


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 300])
def test_any_destination_is_filled_and_rounded_once(name: str, kind: torch.dtype, turned: bool, rows: int) -> None:
    dtype = DTYPES[name]
    packed = packed_of(dtype, rows, 2)
    expected = in_torch(dtype, packed).to(kind)
    into = torch.zeros(expected.shape, dtype=kind)
    into = into.t().contiguous().t() if turned else into
    decode_into(dtype, packed, into)
    assert same(into.contiguous(), expected)


@pytest.mark.parametrize("kind", FLOATS)
def test_without_numba_the_numbers_are_the_same(kind: torch.dtype, without_numba: None) -> None:
    dtype = DTYPES["IQ2_S"]
    packed = packed_of(dtype, 600)
    into = torch.zeros(600, 256, dtype=kind)
    decode_into(dtype, packed, into)
    assert kernel_of("IQ2_S") is None
    assert same(into, in_torch(dtype, packed).to(kind))


def test_columns_of_a_larger_tensor_are_filled_and_nothing_beside_them() -> None:
    dtype = DTYPES["Q8_0"]
    packed = packed_of(dtype, 5, 2)
    whole = torch.full((5, 96), 7.0)
    decode_into(dtype, packed, whole[:, 16:80])
    assert same(whole[:, 16:80].contiguous(), in_torch(dtype, packed))
    assert whole[:, :16].eq(7).all()
    assert whole[:, 80:].eq(7).all()


def test_a_vector_that_lies_apart_is_filled() -> None:
    packed = packed_of(DTYPES["Q8_0"], 1, 2)
    into = torch.zeros(64, 2)[:, 1]
    decode_into(DTYPES["Q8_0"], packed[0], into)
    assert same(into.contiguous(), in_torch(DTYPES["Q8_0"], packed)[0])


def test_a_long_vector_that_lies_apart_is_filled(without_numba: None) -> None:
    packed = packed_of(DTYPES["Q8_0"], 1, 3000)
    into = torch.zeros(3000 * 32, 2)[:, 1]
    decode_into(DTYPES["Q8_0"], packed[0], into)
    assert same(into.contiguous(), in_torch(DTYPES["Q8_0"], packed)[0])


def test_parameters_with_gradients_and_tensors_of_inference_mode_are_filled() -> None:
    packed = packed_of(DTYPES["Q8_0"], 4)
    expected = in_torch(DTYPES["Q8_0"], packed).bfloat16()
    parameter = torch.nn.Parameter(torch.zeros(4, 32, dtype=torch.bfloat16))
    with torch.inference_mode():
        inferred = torch.zeros(4, 32, dtype=torch.bfloat16)
    for into in (parameter, inferred):
        decode_into(DTYPES["Q8_0"], packed, into)
        assert same(into.detach(), expected)


def test_what_a_narrower_type_cannot_hold_is_counted() -> None:
    block = b"\xff\x7b" + bytes([1, 2, 127, 0] * 8)  # 65504 times 1, 2, 127 and 0
    packed = torch.frombuffer(bytearray(block), dtype=torch.uint8)
    assert decode_into(DTYPES["Q8_0"], packed, torch.zeros(32, dtype=torch.float16)) == Loss(overflow=16)
    assert decode_into(DTYPES["Q8_0"], packed, torch.zeros(32, dtype=torch.bfloat16)) == Loss()


def test_few_elements_are_decoded_at_once(monkeypatch: pytest.MonkeyPatch, without_numba: None) -> None:
    counts: list[int] = []

    def decoder(blocks: torch.Tensor) -> torch.Tensor:
        counts.append(len(blocks) * 32)
        return blocks.new_zeros((len(blocks), 32), dtype=torch.float32)

    monkeypatch.setattr(module, "_DECODERS", {"Q8_0": decoder})
    dequantize(DTYPES["Q8_0"], torch.zeros(7, 1000 * 34, dtype=torch.uint8))
    assert sum(counts) == 7 * 1000 * 32
    assert max(counts) <= 1 << 16


def test_numba_starts_once_it_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    monkeypatch.setattr(module, "kernel_of", used.append)
    monkeypatch.setattr(module, "_WORTH", {"cpu": 300})
    monkeypatch.setattr(module._Meter, "elements", {})
    monkeypatch.setattr(module._Meter, "foreseen", 0)
    counts = []
    for _ in range(5):
        decode_into(DTYPES["Q8_0"], packed_of(DTYPES["Q8_0"], 4), torch.zeros(4, 32, dtype=torch.bfloat16))
        counts.append(len(used))
    assert counts[:3] == [0, 0, 0]
    assert counts[4] > 0


def test_numba_starts_at_once_where_so_much_is_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    monkeypatch.setattr(module, "kernel_of", used.append)
    monkeypatch.setattr(module, "_WORTH", {"cpu": 300})
    monkeypatch.setattr(module._Meter, "elements", {})
    monkeypatch.setattr(module._Meter, "foreseen", 0)
    foresee(299)
    decode_into(DTYPES["Q8_0"], packed_of(DTYPES["Q8_0"], 1), torch.zeros(1, 32))
    assert used == []
    foresee(300)
    decode_into(DTYPES["Q8_0"], packed_of(DTYPES["Q8_0"], 1), torch.zeros(1, 32))
    assert used[0] == "Q8_0"


def test_a_numba_that_cannot_be_imported_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("numba")

    def refuse(_name: str) -> None:
        raise ImportError("numba needs another numpy")

    monkeypatch.setattr(module, "import_module", refuse)
    kernel_of.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert kernel_of("Q4_K") is None
    kernel_of.cache_clear()
    assert "without numba, which is slower: numba needs another numpy" in caplog.text


def test_numba_that_is_switched_off_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    kernel_of.cache_clear()
    assert kernel_of("Q4_K") is None
    kernel_of.cache_clear()


def test_types_that_nothing_decodes_are_refused() -> None:
    with pytest.raises(UnsupportedDtype, match="Q8_K blocks cannot be dequantized"):
        decode_into(DTYPES["Q8_K"], torch.zeros(292, dtype=torch.uint8), torch.zeros(256))
