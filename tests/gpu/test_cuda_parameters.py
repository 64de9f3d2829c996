"""Loading onto a CUDA device: equal values, staged through host memory, and nothing left behind on either side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from tensorferry import ConfigError, Feeder, Place, ReadOptions, RuleSet, Strictness, load, open_checkpoint
from tensorferry.api import prepare, run
from tensorferry.core.transforms import Transpose
from tensorferry.execute import SimpleExecutor, ThreadedExecutor

pytestmark = pytest.mark.gpu

MIB = 1 << 20
OPTIONS = ReadOptions(max_staging=4 * MIB, max_read=MIB, threads=4)


def _cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _checkpoint(folder: Path, count: int = 8) -> dict[str, torch.Tensor]:
    """Write tensors of 2 MiB each, so that every one of them takes several staged reads."""
    tensors = {f"w{i}": ar(1024, 512, start=i) for i in range(count)}
    write_safetensors(folder / "model.safetensors", tensors)
    return tensors


def _model(names: Any, device: torch.device | str, dtype: torch.dtype = torch.float32) -> nn.ParameterDict:
    return nn.ParameterDict({n: nn.Parameter(torch.zeros(1024, 512, dtype=dtype, device=device)) for n in names})


@pytest.mark.parametrize("start", ["cuda", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parameters_on_the_device_are_filled(tmp_path: Path, start: str, dtype: torch.dtype) -> None:
    tensors = _checkpoint(tmp_path)
    model = _model(tensors, start, dtype)
    report = load(model, tmp_path, device="cuda", options=OPTIONS)
    assert report.devices == {str(_cuda()): 8}
    assert report.direct_bytes == 0
    assert 0 < report.staging_peak <= OPTIONS.max_staging
    for name, tensor in tensors.items():
        assert torch.equal(model[name].cpu(), tensor.to(dtype)), name


@pytest.mark.parametrize("executor", [SimpleExecutor(), ThreadedExecutor(1), ThreadedExecutor(8)])
def test_every_executor_gives_the_same(tmp_path: Path, executor: Any) -> None:
    tensors = _checkpoint(tmp_path)
    model = _model(tensors, "meta")
    with open_checkpoint(tmp_path, options=OPTIONS) as checkpoint:
        run(model, prepare(model, checkpoint), device="cuda", executor=executor)
    assert all(torch.equal(model[n].cpu(), t) for n, t in tensors.items())


def test_a_staging_block_is_not_used_again_before_its_copy_is_done(tmp_path: Path) -> None:
    tensors = _checkpoint(tmp_path, count=64)
    model = _model(tensors, "meta")
    busy = torch.ones(4096, 4096, device="cuda")
    for _ in range(200):  # the device has work to do before it comes to our copies
        busy = busy @ busy / 4096
    load(model, tmp_path, device="cuda", options=ReadOptions(max_staging=MIB, max_read=MIB, threads=2))
    assert all(torch.equal(model[n].cpu(), t) for n, t in tensors.items())


def test_transforms_strides_and_boxes_reach_the_device(tmp_path: Path) -> None:
    values = ar(512, 1024)
    write_safetensors(tmp_path / "model.safetensors", {"kernel": values, "conv": ar(8, 4, 3, 3)})
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(1024, 512, device="cuda"))})
    model["conv"] = nn.Parameter(torch.zeros(8, 4, 3, 3, device="cuda").to(memory_format=torch.channels_last))
    load(model, tmp_path, rules=RuleSet(Place("kernel", "w", via=Transpose((1, 0)))), options=OPTIONS)
    assert torch.equal(model["w"].cpu(), values.t())
    assert torch.equal(model["conv"].cpu(), ar(8, 4, 3, 3))
    assert model["conv"].is_contiguous(memory_format=torch.channels_last)


def test_losses_are_counted_from_the_device(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"w": torch.tensor([1, 1e5, -1e30, 1e-30])})
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(4, dtype=torch.float16, device="cuda"))})
    report = load(model, tmp_path, strict=Strictness(lossy="warn"))
    assert report.losses == {"w": (2, 1)}


@pytest.mark.parametrize("name", ["bool", "uint16", "float8_e4m3fn", "int64", "complex64", "bfloat16"])
def test_every_sort_of_number_arrives_bit_by_bit(tmp_path: Path, name: str) -> None:
    values = (torch.arange(64) % 2).to(torch.uint8).view(getattr(torch, name))
    write_safetensors(tmp_path / "model.safetensors", {"b": values})
    model: Any = nn.Module()
    model.register_buffer("b", torch.empty_like(values, device="cuda"))
    load(model, tmp_path)
    assert torch.equal(model.b.cpu().view(torch.uint8), values.view(torch.uint8))


def test_a_model_may_lie_on_several_devices(tmp_path: Path) -> None:
    tensors = _checkpoint(tmp_path, count=3)
    model = nn.ParameterDict({"w0": nn.Parameter(torch.zeros(1024, 512))})
    model["w1"] = nn.Parameter(torch.zeros(1024, 512, device="cuda"))
    model["w2"] = nn.Parameter(torch.zeros(1024, 512, device="meta"))
    report = load(model, tmp_path, device="cuda", options=OPTIONS)
    assert report.devices == {"cpu": 1, str(_cuda()): 2}
    assert report.direct_bytes == 2 * MIB
    assert all(torch.equal(model[n].cpu(), t) for n, t in tensors.items())


def test_a_device_to_which_nothing_would_go_is_refused(tmp_path: Path) -> None:
    model = _model(_checkpoint(tmp_path, count=1), "cuda")
    with pytest.raises(ConfigError, match="have memory on cuda:0 already"):
        load(model, tmp_path, device="cpu")


def test_run_06_what_post_processing_makes_is_on_the_device_of_its_layer(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        def process_weights_after_loading(self) -> None:
            self.scale = nn.Parameter(torch.ones(2))

    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(2, 2), "bias": ar(2)})
    with torch.device("meta"):
        model = Scaled(2, 2)
    assert load(model, tmp_path, device="cuda").devices == {str(_cuda()): 3}


def test_the_device_holds_the_parameters_and_nothing_else(tmp_path: Path) -> None:
    tensors = _checkpoint(tmp_path, count=32)
    model = _model(tensors, "meta", torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    load(model, tmp_path, device="cuda", options=OPTIONS)
    assert torch.cuda.memory_allocated() - before == 32 * MIB
    assert torch.cuda.max_memory_allocated() - before <= 32 * MIB + OPTIONS.max_staging


def test_tensors_may_be_fed_from_the_host_and_from_the_device(tmp_path: Path) -> None:
    tensors = _checkpoint(tmp_path, count=2)
    model = _model(tensors, "cuda")
    with open_checkpoint(tmp_path) as checkpoint:
        prepared = prepare(model, checkpoint)
    feeder = Feeder(prepared.plan, dict(model.named_parameters()))
    feeder.feed("w0", tensors["w0"])
    feeder.feed("w1", tensors["w1"].cuda())
    feeder.finish()
    assert all(torch.equal(model[n].cpu(), t) for n, t in tensors.items())
