"""A process that loads again and again, or may open next to nothing, ends as it began."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from helpers.checkpoints import ar, write_index, write_safetensors
from helpers.reading_ways import write_checkpoint

TESTS = str(Path(__file__).parents[1])


def told_by(script: str, *arguments: str) -> Any:
    """Run `script` in a child and return what it told as JSON."""
    command = [sys.executable, "-c", script, TESTS, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


FEW = """
import json, resource, sys
sys.path.insert(0, sys.argv[1])
import torch
from torch import nn
from tensorferry import ReadOptions, ReadError, load, open_checkpoint
from tensorferry.api import prepare, run
from tensorferry.loaders.strategies import EagerExecutor, PrefetchExecutor

resource.setrlimit(resource.RLIMIT_NOFILE, (32, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
folder, told = sys.argv[2], {}

def loaded(executor=None, **options):
    model = nn.ParameterDict({f"t{n}": nn.Parameter(torch.empty(1024, 80, device="meta")) for n in range(1, 101)})
    with open_checkpoint(folder, options=ReadOptions(**options)) as checkpoint:
        run(model, prepare(model, checkpoint), executor=executor)
    return all(model[f"t{n}"][0, 0] == n and model[f"t{n}"][-1, -1] == n + 81919 for n in range(1, 101))

def streamed(**options):
    with open_checkpoint(folder, options=ReadOptions(**options)) as checkpoint:
        return [values[0, 0].item() for _, values in checkpoint.tensors()] == [*range(1, 101)]

for name, how in {
    "buffered": lambda: loaded(direct="never"),
    "direct": lambda: loaded(direct="always"),
    "automatic": lambda: loaded(),
    "uncached": lambda: loaded(keep_cache=False),
    "eager": lambda: loaded(EagerExecutor(ReadOptions())),
    "prefetch": lambda: loaded(PrefetchExecutor(ReadOptions())),
    "streamed": lambda: streamed(direct="always"),
    "mapped": lambda: loaded(mapped=True),
}.items():
    try:
        told[name] = how()
    except ReadError as error:
        told[name] = str(error)
print(json.dumps(told))
"""


def test_a_hundred_shards_are_loaded_with_thirty_two_descriptors(tmp_path: Path) -> None:
    names = {f"t{n}": f"model-{n:05}-of-00100.safetensors" for n in range(1, 101)}
    for n, (name, file) in enumerate(names.items(), 1):
        write_safetensors(tmp_path / file, {name: ar(1024, 80, start=n)})  # large enough to be read directly
    write_index(tmp_path / "model.safetensors.index.json", names)
    told = told_by(FEW, str(tmp_path))
    assert "Too many open files" in told.pop("mapped")  # each mapping has a descriptor, as its error says
    assert set(told.values()) == {True}, told


MANY = """
import errno, gc, json, os, sys, threading
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from pathlib import Path
from torch import nn
from helpers.reading_ways import WAYS, Disk
from tensorferry import Reloader, TensorferryError, load

folder, small = Path(sys.argv[2]), Path(sys.argv[3])
fed = nn.Linear(64, 64)
reloader = Reloader(fed)

def meta():
    with torch.device("meta"):
        return nn.Linear(64, 64)

def fails(way, at):
    def fail(number):
        if number == at:
            raise OSError(errno.EIO, "no")
    with Disk(before=fail).attached():
        try:
            way(folder)
        except TensorferryError:
            pass

def misfit():
    try:
        load(nn.Linear(3, 3), small / "safetensors")
    except TensorferryError:
        pass

ways = list(WAYS.values())
loads = [lambda way=way: way(folder) for way in ways]
loads += [lambda way=way, n=n: fails(way, 4 + n) for n, way in enumerate(ways)]
loads += [lambda kind=kind: load(meta(), small / kind) for kind in ("safetensors", "torch", "old")] * 3
loads += [lambda atomic=atomic: reloader.load(small / "safetensors", atomic=atomic) for atomic in (True, False)] * 5
loads += [misfit] * 5

def held():
    gc.collect()
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    maps = Path("/proc/self/maps").read_text()
    return {
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "files": maps.count(str(folder)) + maps.count(str(small)),
        "maps": maps.count("\\n"),
        "resident": resident,
    }

told, done = [], 0
while done < 1000 + 3 * len(loads):
    for each in loads:
        each()
    done += len(loads)
    if done % (5 * len(loads)) == 3 * len(loads):
        told.append(held())
told.append(held())
print(json.dumps([done, told]))
"""


def test_a_thousand_loads_leave_no_threads_descriptors_maps_or_memory(tmp_path: Path) -> None:
    tensors = {"weight": ar(64, 64), "bias": ar(64)}
    write_safetensors(tmp_path / "small" / "safetensors" / "model.safetensors", tensors)
    for kind, new in {"torch": True, "old": False}.items():
        (tmp_path / "small" / kind).mkdir()
        torch.save(tensors, tmp_path / "small" / kind / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    folder = write_checkpoint(tmp_path / "checkpoint")
    done, told = told_by(MANY, str(folder), str(tmp_path / "small"))
    assert done >= 1000
    first, last = told[0], told[-1]
    assert (last["threads"], last["descriptors"], last["files"]) == (first["threads"], first["descriptors"], 0)
    assert last["maps"] <= first["maps"] + 16
    assert last["resident"] <= first["resident"] + (32 << 20)  # one load is 4 MiB, all of them would be gibibytes
