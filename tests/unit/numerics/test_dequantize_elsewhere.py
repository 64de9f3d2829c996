"""What decodes where: kernels on GPUs once they are worth it, torch on any device; only packed bytes go there.

There need be no GPU: CPUs are decoded on as GPUs are, by kernels that Triton interprets, and tensors on meta lie on a
device that is not the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers.gguf_models import write_gguf
from helpers.uploads import Uploads
from tensorferry import Place, RuleSet, open_checkpoint
from tensorferry.api import prepare, run
from tensorferry.core.dtypes import DTYPES, DType, Kind
from tensorferry.core.lower import lower
from tensorferry.core.transforms import Add, Chain, Custom, Permute, TensorSpec, Transform, Transpose
from tensorferry.execute import ThreadedExecutor
from tensorferry.execute.placing import perform
from tensorferry.numerics import dequantize as module
from tensorferry.numerics.casts import Loss
from tensorferry.numerics.dequantize import decode_into, decoders, device_fill

Q8_0 = DTYPES["Q8_0"]
ROWS, COLUMNS = 24, 64


def packed_of(rows: int, blocks: int) -> torch.Tensor:
    raw = np.random.default_rng(5).integers(0, 256, (rows, blocks, 34), dtype=np.uint8)
    raw[:, :, 1] = 0x3C
    return torch.from_numpy(raw.reshape(rows, -1))


def in_torch(packed: torch.Tensor) -> torch.Tensor:
    return decoders()["Q8_0"](packed.reshape(-1, 34)).reshape(len(packed), -1)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.dtype]]:
    """Let CPUs be decoded on by Triton's interpreter; yields the types of what was filled so."""
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are compiled on this machine: tests/gpu runs them")
    filled: list[torch.dtype] = []
    by_triton = module._COMPILED["cuda"]

    def spied(dtype: Any, packed: torch.Tensor, into: torch.Tensor) -> Loss | None:
        loss = by_triton(dtype, packed, into)
        filled.extend([into.dtype] if loss is not None else [])
        return loss

    monkeypatch.setattr(module, "_COMPILED", {"cpu": spied})
    monkeypatch.setattr(module, "_WORTH", {"cpu": 0})
    device_fill.cache_clear()
    with np.errstate(all="ignore"):
        yield filled
    device_fill.cache_clear()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_a_kernel_fills_the_destination_itself(kind: torch.dtype, as_on_a_gpu: list[torch.dtype]) -> None:
    packed = packed_of(5, 2)
    whole = torch.zeros(5, 96, dtype=kind)
    assert decode_into(Q8_0, packed, whole[:, 16:80]) == Loss()
    assert as_on_a_gpu == [kind]
    assert torch.equal(whole[:, 16:80], in_torch(packed).to(kind))


def test_types_that_a_kernel_does_not_round_to_come_by_float32(as_on_a_gpu: list[torch.dtype]) -> None:
    packed = packed_of(5, 2)
    into = torch.zeros(5, 64, dtype=torch.float64)
    decode_into(Q8_0, packed, into)
    assert as_on_a_gpu == [torch.float32]
    assert torch.equal(into, in_torch(packed).double())


def test_big_endian_floats_have_no_kernel(as_on_a_gpu: list[torch.dtype]) -> None:
    into = torch.zeros(2)
    decode_into(DType("F32 big-endian", Kind.PACKED, 4), torch.tensor([63, 128, 0, 0, 64, 0, 0, 0]).byte(), into)
    assert (into.tolist(), as_on_a_gpu) == ([1, 2], [])


def test_kernels_are_started_once_they_are_worth_it(
    as_on_a_gpu: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WORTH", {"cpu": 300})
    monkeypatch.setattr(module._Meter, "elements", {})
    monkeypatch.setattr(module._Meter, "foreseen", 0)
    for _ in range(4):
        decode_into(Q8_0, packed_of(2, 2), torch.zeros(2, 64))
    assert len(as_on_a_gpu) == 1


@pytest.mark.parametrize("error", [RuntimeError("Failed to find C compiler"), ImportError("no triton for this torch")])
def test_a_triton_that_fails_is_done_without(
    error: Exception, as_on_a_gpu: list[torch.dtype], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_name: str) -> None:
        raise error

    monkeypatch.setattr(module, "import_module", refuse)
    into = torch.zeros(5, 64)
    with caplog.at_level(logging.WARNING):
        decode_into(Q8_0, packed_of(5, 2), into)
        decode_into(Q8_0, packed_of(5, 2), into)
    assert torch.equal(into, in_torch(packed_of(5, 2)))
    assert [r.getMessage() for r in caplog.records] == [
        f"packed tensors are decoded on cpu without Triton, which is slower: {error}"
    ]


def test_without_triton_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _name: None)
    device_fill.cache_clear()
    assert device_fill(torch.device("cpu")) is None
    device_fill.cache_clear()


HALVES = Permute((3, 4, 2, COLUMNS), (0, 2, 1, 3))
DOUBLED = Custom("doubled", TensorSpec(DTYPES["F32"], (ROWS, COLUMNS)), lambda parts: parts[0] * 2)
RULES: dict[str, tuple[Transform | None, bool]] = {
    "plain": (None, True),
    "rows moved": (HALVES, True),
    "turned": (Transpose((1, 0)), True),
    "added to": (Add(1.0), True),
    "moved and added to": (Chain((HALVES, Add(1.0))), True),
    "a function": (DOUBLED, False),
}


def checkpoint_of(folder: Path, count: int = 1) -> Path:
    values = {f"w{i}": torch.linspace(-1 - i, 1, ROWS * COLUMNS).view(ROWS, COLUMNS) for i in range(count)}
    return write_gguf(folder / "m.gguf", "llama", {}, values, packed=dict.fromkeys(values, "Q8_0"))


@pytest.mark.parametrize("how", RULES)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_only_packed_bytes_go_to_the_device(how: str, kind: torch.dtype, tmp_path: Path) -> None:
    via, travels_packed = RULES[how]
    shape = (COLUMNS, ROWS) if how == "turned" else (ROWS, COLUMNS)
    model = nn.ParameterDict({"p": nn.Parameter(torch.zeros(shape, dtype=kind, device="meta"))})
    with open_checkpoint(checkpoint_of(tmp_path)) as checkpoint:
        plan = prepare(model, checkpoint, rules=RuleSet(Place("w0", "p", via=via))).plan
        packed = checkpoint.read("w0").flatten()
    schedule = lower(plan, max_gap=0, max_read=1 << 20, max_staging=1 << 20, waste=1.0)
    moved = Uploads()
    with moved:
        for batch in schedule.batches:
            for task in batch.tasks:
                perform(plan, task, [packed], model["p"])
    if travels_packed:
        assert (moved.types, moved.bytes) == ({torch.uint8}, packed.nbytes)
    else:
        assert moved.bytes == ROWS * COLUMNS * 4


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_a_load_gives_the_same_whatever_decodes(
    threads: int, kind: torch.dtype, tmp_path: Path, as_on_a_gpu: list[torch.dtype]
) -> None:
    names = [f"w{i}" for i in range(4)]
    model = nn.ParameterDict({n: nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=kind)) for n in names})
    model["w1"] = nn.Parameter(torch.zeros(COLUMNS, ROWS, dtype=kind))
    rules = RuleSet(
        Place("w0", "w0", via=HALVES), Place("w1", "w1", via=Transpose((1, 0))), Place("w2", "w2", via=Add(1.0))
    )
    path = checkpoint_of(tmp_path, 4)
    with open_checkpoint(path) as checkpoint:
        run(model, prepare(model, checkpoint, rules=rules), executor=ThreadedExecutor(threads))
        values = [in_torch(checkpoint.read(name)) for name in names]
    assert kind in as_on_a_gpu
    assert torch.equal(model["w0"], values[0].view(3, 4, 2, COLUMNS).transpose(1, 2).reshape(ROWS, COLUMNS).to(kind))
    assert torch.equal(model["w1"], values[1].t().to(kind))
    assert torch.equal(model["w2"], (values[2] + 1).to(kind))
    assert torch.equal(model["w3"], values[3].to(kind))
