"""A load holds the parameters and a bounded part of the checkpoint besides, however large that is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import ar, write_index, write_safetensors
from helpers.measuring import measured
from tensorferry.storage.local import LocalStorage

MIB = 1 << 20
SLACK = 64 * MIB

LAYERS, WIDTH = 32, 4096  # 32 MiB each in bfloat16: 1 GiB in all

GIBIBYTE = """
kind = {"same": torch.bfloat16, "cast": torch.float32, "direct": torch.bfloat16}[sys.argv[2]]
with torch.device("meta"):
    model = torch.nn.ParameterDict({f"w{i}": torch.empty(4096, 4096, dtype=kind) for i in range(32)})
direct = "always" if sys.argv[2] == "direct" else "never"
options = ReadOptions(max_staging=int(sys.argv[3]), direct=direct)
told["peak"], told["after"] = peak.of(lambda: tensorferry.load(model, folder, options=options))
told["parameters"] = sum(p.nbytes for p in model.values())
told["staged"], told["read"] = peak.result.staging_peak, peak.result.bytes_read
told["right"] = all(bool((model[f"w{i}"] == i).all()) for i in range(32))
"""


@pytest.fixture(scope="module")
def gibibyte(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of 1 GiB in four shards, removed when the tests of this module are done."""
    folder = tmp_path_factory.mktemp("gibibyte")
    where: dict[str, str] = {}
    for shard in range(4):
        name = f"model-{shard + 1:05}-of-00004.safetensors"
        mine = range(shard * 8, shard * 8 + 8)
        write_safetensors(
            folder / name, {f"w{i}": torch.full((WIDTH, WIDTH), float(i), dtype=torch.bfloat16) for i in mine}
        )
        where |= {f"w{i}": name for i in mine}
    write_index(folder / "model.safetensors.index.json", where)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("kind", ["same", "cast", "direct"])
def test_a_gibibyte_onto_meta_takes_its_parameters_the_staging_bound_and_little_more(gibibyte: Path, kind: str) -> None:
    bound = 64 * MIB
    with LocalStorage(gibibyte) as storage:
        if kind == "direct" and not storage.uncached("model-00001-of-00004.safetensors").possible:
            pytest.skip("temporary files lie where direct reads are impossible")
    told = measured(GIBIBYTE, gibibyte, kind, str(bound))
    assert told["right"]
    assert told["read"] == 1024 * MIB
    assert told["staged"] <= (bound if kind == "cast" else 0)
    assert told["peak"] <= told["parameters"] + bound + SLACK
    assert told["after"] <= told["parameters"] + SLACK


STREAM = """
held = {}
def take():
    with tensorferry.open_checkpoint(folder, options=ReadOptions(max_staging=int(sys.argv[2]))) as checkpoint:
        for name, tensor in checkpoint.tensors():
            held[name] = int(tensor[0, 0])
told["peak"], _ = peak.of(take)
told["right"] = held == {f"w{i}": i for i in range(32)}
"""


def test_run_02_streaming_a_gibibyte_holds_the_bound_and_what_the_consumer_holds(gibibyte: Path) -> None:
    told = measured(STREAM, gibibyte, str(64 * MIB))
    assert told["right"]
    assert told["peak"] <= 64 * MIB + 2 * 32 * MIB + SLACK  # two tensors: the consumer's, and the next it waits for


CONVERT = """
kind = getattr(torch, sys.argv[2])
model = torch.nn.ParameterDict({f"w{i}": torch.empty(1024, 2048, device="meta", dtype=kind) for i in range(16)})
options = ReadOptions(max_staging=16 << 20, max_read=4 << 20)
told["peak"], told["after"] = peak.of(lambda: tensorferry.load(model, folder, options=options))
told["parameters"] = sum(p.nbytes for p in model.values())
"""


@pytest.mark.parametrize("kind", ["float32", "float16"])  # counting what float16 cannot hold takes no more
def test_run_05_converting_holds_two_tensors_and_the_window_beside_the_parameters(tmp_path: Path, kind: str) -> None:
    tensors = {f"w{i}": ar(1024, 2048, dtype=torch.bfloat16) % 128 for i in range(16)}  # 4 MiB each
    write_safetensors(tmp_path / "model.safetensors", tensors)
    told = measured(CONVERT, tmp_path, kind)
    assert told["parameters"] == 16 * 2 * MIB * getattr(torch, kind).itemsize
    assert told["peak"] - told["after"] <= 2 * 4 * MIB + 16 * MIB


EXPERTS = """
from tensorferry import Join, RuleSet
from tensorferry.core.transforms import Chain, Stack, Transpose
rules = RuleSet(Join(("e.{i}.w",), "w", Chain((Stack(0), Transpose((0, 2, 1))))))
model = torch.nn.ParameterDict({"w": torch.empty(32, 2048, 1024, device="meta")})
options = ReadOptions(max_staging=64 << 20, threads=8)
told["peak"], told["after"] = peak.of(lambda: tensorferry.load(model, folder, rules=rules, options=options))
told["parameters"] = model["w"].nbytes
told["right"] = all(bool((model["w"][i] == torch.arange(1024) + i).all()) for i in range(32))
"""


def test_stacked_and_turned_experts_are_moved_into_place_without_a_copy_beside(tmp_path: Path) -> None:
    rows = torch.arange(1024)[:, None].expand(1024, 2048)
    tensors = {f"e.{i}.w": (rows + i).to(torch.float16) for i in range(32)}  # 4 MiB each
    write_safetensors(tmp_path / "model.safetensors", tensors)
    told = measured(EXPERTS, tmp_path)
    assert told["right"]
    assert told["peak"] <= told["parameters"] + 64 * MIB + SLACK
    assert told["after"] <= told["parameters"] + SLACK


QUANTIZE = """
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(2048, 2048, device="meta"), requires_grad=False)
    def process_weights_after_loading(self):
        self.weight = torch.nn.Parameter(self.weight.to(torch.int8), requires_grad=False)
model = torch.nn.Sequential(*(Layer() for _ in range(32)))
options = ReadOptions(max_staging=64 << 20, max_read=16 << 20)
told["peak"], told["after"] = peak.of(lambda: tensorferry.load(model, folder, options=options))
told["types"] = sorted({str(p.dtype) for p in model.parameters()})
"""


def test_run_05_a_model_that_is_quantized_as_it_comes_never_is_whole_before(tmp_path: Path) -> None:
    tensors = {f"{i}.weight": torch.full((2048, 2048), float(i)) for i in range(32)}  # 16 MiB each, 512 MiB in all
    write_safetensors(tmp_path / "model.safetensors", tensors)
    told = measured(QUANTIZE, tmp_path)
    assert told["types"] == ["torch.int8"]
    # 128 MiB in the end; besides, layers whose reads are in flight, one that is being quantized, and slack.
    assert told["peak"] <= 128 * MIB + (4 + 2) * 16 * MIB + SLACK
