"""Pinned memory, streams and events on a real device: who waits for whom, equal bits with and without, no leaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from tensorferry import Place, ReadOptions, Reloader, RuleSet, Strictness, Transpose, load
from tensorferry.execute.device import Cuda

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SMALL: dict[str, Any] = {"max_staging": 4 * MIB, "max_read": MIB, "threads": 4}


def written(folder: Path, count: int = 16, start: int = 0) -> dict[str, torch.Tensor]:
    tensors = {f"w{i}": ar(1024, 512, start=start + i) for i in range(count)}
    write_safetensors(folder / "model.safetensors", tensors)
    return tensors


def model_of(tensors: dict[str, torch.Tensor], device: str = "meta", dtype: torch.dtype = torch.float32) -> Any:
    return nn.ParameterDict(
        {n: nn.Parameter(torch.zeros(t.shape, dtype=dtype, device=device)) for n, t in tensors.items()}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("via", [None, Transpose((1, 0))])
def test_pinned_and_not_pinned_give_the_same_bits(dtype: torch.dtype, via: Any, tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(512, 512) for i in range(8)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    rules = RuleSet(*(Place(n, n, via=via) for n in tensors)) if via else None
    found = []
    for pinned in (True, False):
        model = model_of(tensors, dtype=dtype)
        load(model, tmp_path, device="cuda", rules=rules, options=ReadOptions(pinned=pinned, **SMALL))
        found.append(model)
    assert all(torch.equal(found[0][name], found[1][name]) for name in tensors)


def test_losses_are_the_same_pinned_and_not(tmp_path: Path) -> None:
    values = torch.randn(1 << 20) * 1e5
    write_safetensors(tmp_path / "model.safetensors", {"w": values})
    losses = []
    for pinned in (True, False):
        model = model_of({"w": values}, "cuda", torch.float16)
        report = load(model, tmp_path, strict=Strictness(lossy="warn"), options=ReadOptions(pinned=pinned))
        losses.append(report.losses)
    assert losses[0] == losses[1] != {}


def test_what_runs_in_the_callers_stream_comes_before_and_after(tmp_path: Path) -> None:
    tensors = written(tmp_path)
    model = model_of(tensors, "cuda")
    busy = torch.ones(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(100):
            busy = busy @ busy / 4096
        old = [model[n].detach() + busy[0, 0] - 1 for n in tensors]  # reads old values, late
        load(model, tmp_path, options=ReadOptions(**SMALL))
        sums = [model[n].detach().sum() for n in tensors]  # reads new ones, at once
    stream.synchronize()
    assert all(not values.any() for values in old)
    assert [s.item() for s in sums] == [t.cuda().sum().item() for t in tensors.values()]


def test_memory_that_the_caller_has_just_freed_is_not_written_too_early(tmp_path: Path) -> None:
    tensors = written(tmp_path, count=32)
    busy = torch.ones(4096, 4096, device="cuda")
    for _ in range(100):
        busy = busy @ busy / 4096
    scratch = [torch.full((1024, 512), 7.0, device="cuda") for _ in range(32)]
    late = [block + busy[0, 0] for block in scratch]
    del scratch  # its memory goes to the parameters, while it is still to be read
    model = model_of(tensors)
    load(model, tmp_path, device="cuda", options=ReadOptions(**SMALL))
    assert all(bool((values == 8).all()) for values in late)
    assert all(torch.equal(model[n].cpu(), t) for n, t in tensors.items())


def test_hooks_run_when_their_bytes_are_there(tmp_path: Path) -> None:
    class Halved(nn.Linear):
        def process_weights_after_loading(self) -> None:
            self.weight = nn.Parameter(self.weight / 2, requires_grad=False)

    with torch.device("meta"):
        model: Any = nn.ModuleList(Halved(512, 1024, bias=False) for _ in range(16))
    tensors = {f"{i}.weight": ar(1024, 512, start=i) for i in range(16)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    load(model, tmp_path, device="cuda", options=ReadOptions(**SMALL))
    assert all(torch.equal(layer.weight.cpu(), tensors[f"{i}.weight"] / 2) for i, layer in enumerate(model))


@pytest.mark.parametrize("atomic", [False, True])
def test_a_model_on_the_device_is_reloaded_in_place(atomic: bool, tmp_path: Path) -> None:
    model = model_of(written(tmp_path / "a"), "cuda")
    reloader = Reloader(model, options=ReadOptions(**SMALL))
    reloader.load(tmp_path / "a")
    at = [p.data_ptr() for p in model.values()]
    tensors = written(tmp_path / "b", start=500)
    reloader.load(tmp_path / "b", atomic=atomic)
    assert [p.data_ptr() for p in model.values()] == at
    assert all(torch.equal(model[n].cpu(), t) for n, t in tensors.items())


def test_memory_is_pinned_until_it_is_let_go() -> None:
    block = torch.empty(MIB, dtype=torch.uint8)
    release = Cuda().pin(block, torch.device("cuda", torch.cuda.current_device()))
    assert block.is_pinned()
    release()
    assert not block.is_pinned()


@pytest.mark.parametrize("use", ["auto", "always"])
def test_devices_read_by_themselves_where_kvikio_is(use: Any, tmp_path: Path) -> None:
    pytest.importorskip("kvikio", reason="the extra gpu-direct is not installed")
    tensors = written(tmp_path)
    model = model_of(tensors)
    report = load(model, tmp_path, device="cuda", options=ReadOptions(gpu_direct=use, **SMALL))
    assert all(torch.equal(model[n].cpu(), t) for n, t in tensors.items())
    assert use == "auto" or "by the device" in report.ways


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_model_may_lie_on_two_devices(tmp_path: Path) -> None:
    tensors = written(tmp_path)
    model = nn.ParameterDict(
        {n: nn.Parameter(torch.zeros(1024, 512, device=f"cuda:{i % 2}")) for i, n in enumerate(tensors)}
    )
    load(model, tmp_path, options=ReadOptions(**SMALL))
    assert all(torch.equal(model[n].cpu(), t) for n, t in tensors.items())
