"""Packed bytes go to the device and are decoded there, to the bits that the CPU makes, by torch and by kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorferry
from helpers.gguf_models import tiny_llama, write_gguf
from helpers.uploads import Uploads
from tensorferry import Add, PackedParameter, Place, ReadOptions, RuleSet, Transpose, load, open_checkpoint
from tensorferry.api import prepare
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.lower import lower
from tensorferry.execute.placing import perform
from tensorferry.numerics import dequantize as module
from tensorferry.numerics.dequantize import decode_into, decoders, device_fill

pytestmark = pytest.mark.gpu

MIB = 1 << 20
DEVICE = "cuda"
KINDS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["torch", "triton"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Decode on the device by this from the first element on."""
    if request.param == "triton":
        pytest.importorskip("triton")
        assert device_fill(torch.empty(0, device=DEVICE).device) is not None
    monkeypatch.setattr(module, "_WORTH", {DEVICE: 0} if request.param == "triton" else {})
    found: str = request.param
    return found


def packed_of(name: str, blocks: int) -> torch.Tensor:
    shape = (blocks, DTYPES[name].block_bytes)
    return torch.from_numpy(np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8))


def assert_same(there: torch.Tensor, here: torch.Tensor) -> None:
    """Bit for bit, where NaN is NaN whatever its bits."""
    there, numbers = there.detach().cpu().contiguous(), ~here.isnan()
    bits = torch.int32 if here.dtype == torch.float32 else torch.int16
    assert there.isnan().equal(~numbers)
    assert there.view(bits)[numbers].equal(here.contiguous().view(bits)[numbers])


@pytest.mark.parametrize("name", sorted(decoders()))
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_decodes_to_the_same_bits(name: str, kind: torch.dtype, how: str) -> None:
    dtype, packed = DTYPES[name], packed_of(name, 3000)
    here = torch.zeros(3000, dtype.block, dtype=kind)
    there = torch.zeros(3000, dtype.block, dtype=kind, device=DEVICE)
    assert decode_into(dtype, packed, here) == decode_into(dtype, packed, there)
    assert_same(there, here)


@pytest.mark.parametrize("kind", [*KINDS, torch.float64])
@pytest.mark.parametrize("view", ["rows", "columns", "turned", "stack turned", "vector"])
def test_any_part_of_a_tensor_is_filled_and_nothing_beside_it(view: str, kind: torch.dtype, how: str) -> None:
    def part(whole: torch.Tensor) -> torch.Tensor:
        return {
            "rows": whole[1:3],
            "columns": whole[:, 2:4, 32:64],
            "turned": whole[2, 32:, 3:20].t(),
            "stack turned": whole[1:5].transpose(1, 2)[:, 90:, 32:],
            "vector": whole.view(-1)[1::96],
        }[view]

    here = torch.full((6, 64, 96), 7, dtype=kind)
    there = here.to(DEVICE)
    packed = packed_of("Q4_1", part(here).numel() // 32).view(*part(here).shape[:-1], -1)
    packed[..., 1::20] = packed[..., 3::20] = 0x3C  # numbers, so that they can be compared as such
    decode_into(DTYPES["Q4_1"], packed, part(here))
    decode_into(DTYPES["Q4_1"], packed, part(there))
    assert torch.equal(there.cpu(), here)


def write_linears(folder: Path, count: int, rows: int, columns: int, kind: str = "Q4_0") -> Path:
    values = {f"w{i}": torch.linspace(-1 - i, 1, rows * columns).view(rows, columns) for i in range(count)}
    return write_gguf(folder / "m.gguf", "llama", {}, values, packed=dict.fromkeys(values, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 8])
def test_a_whole_file_is_loaded_as_on_the_cpu(kind: torch.dtype, threads: int, how: str, tmp_path: Path) -> None:
    path = write_linears(tmp_path, 16, 256, 512)
    rules = RuleSet(Place("w0", "w0", via=Transpose((1, 0))), Place("w1", "w1", via=Add(1.0)))
    options = ReadOptions(max_staging=MIB // 4, max_read=MIB // 16, threads=threads)
    models: list[Any] = []
    for device in ("cpu", DEVICE):
        shapes = {f"w{i}": (256, 512) if i else (512, 256) for i in range(16)}
        model = nn.ParameterDict(
            {n: nn.Parameter(torch.zeros(s, dtype=kind, device="meta")) for n, s in shapes.items()}
        )
        load(model, path, rules=rules, device=device, options=options)
        models.append(model)
    for name, here in models[0].items():
        assert_same(models[1][name], here.detach())


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_of_transformers_is_loaded_as_on_the_cpu(how: str, tmp_path: Path) -> None:
    changes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    file, _ = tiny_llama(tmp_path, changes=changes, packed={"weight": "Q8_0"})
    here: Any = tensorferry.load_model(file)
    there: Any = tensorferry.load_model(file, device=DEVICE)
    for name, tensor in here.state_dict().items():
        assert_same(there.state_dict()[name], tensor)


@pytest.mark.parametrize("via", [None, Transpose((1, 0)), Add(1.0)])
def test_only_packed_bytes_go_to_the_device(via: Any, how: str, tmp_path: Path) -> None:
    path = write_linears(tmp_path, 1, 256, 256)
    model = nn.ParameterDict({"p": nn.Parameter(torch.zeros(256, 256, dtype=torch.bfloat16, device=DEVICE))})
    with open_checkpoint(path) as checkpoint:
        plan = prepare(model, checkpoint, rules=RuleSet(Place("w0", "p", via=via))).plan
        packed = checkpoint.read("w0").flatten()
    schedule = lower(plan, max_gap=0, max_read=MIB, max_staging=MIB, waste=1.0)
    uploads = Uploads()
    with uploads:
        for batch in schedule.batches:
            for task in batch.tasks:
                perform(plan, task, [packed], model["p"])
    assert (uploads.types, uploads.bytes) == ({torch.uint8}, packed.nbytes)


def test_kernels_need_no_memory_beside_what_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(module, "_WORTH", {DEVICE: 0})
    path = write_linears(tmp_path, 8, 1024, 2048)
    names = [f"w{i}" for i in range(8)]
    assert device_fill(torch.empty(0, device=DEVICE).device) is not None
    model = nn.ParameterDict(
        {n: nn.Parameter(torch.zeros(1024, 2048, dtype=torch.bfloat16, device="meta")) for n in names}
    )
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    options = ReadOptions(max_staging=4 * MIB, max_read=MIB, threads=2)
    load(model, path, device=DEVICE, options=options)
    assert torch.cuda.memory_allocated() - before == 8 * 4 * MIB
    assert torch.cuda.max_memory_allocated() - before <= 8 * 4 * MIB + options.max_staging


def test_blocks_that_are_kept_lie_on_the_device_as_in_the_file(tmp_path: Path) -> None:
    path = write_linears(tmp_path, 1, 64, 96, "Q8_0")
    model: Any = nn.ParameterDict({"w0": PackedParameter.empty("Q8_0", (64, 96), device="meta")})
    load(model, path, device=DEVICE)
    with open_checkpoint(path) as checkpoint:
        stored = checkpoint.read("w0")
    kept = model["w0"].packed
    assert kept.blocks.device.type == DEVICE
    assert torch.equal(kept.blocks.cpu(), stored)
    assert torch.equal(kept.dequantize().cpu(), tensorferry.PackedTensor(stored, kept.dtype).dequantize())
