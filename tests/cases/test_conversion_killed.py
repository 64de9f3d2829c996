"""A conversion that is killed at any moment leaves what was there or the whole, and the next one completes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.checkpoints import ar, write_safetensors

CHILD = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
import tensorferry
from tensorferry import ReadOptions, convert

source, other, out, how = sys.argv[1:]
overwrite, options = how == "replacing", ReadOptions(max_staging=16384, max_read=4096, threads=1)
number, watching = 0, False
WRITING = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "fcntl.flock"}

def killing(event, arguments):
    global number
    if watching and event in WRITING:
        number -= 1
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(killing)

def state():
    if not os.path.isdir(out):
        return None
    return [[path, os.path.getsize(os.path.join(out, path))] for path in sorted(os.listdir(out))]

def killed_at(n):
    global number, watching
    child = os.fork()
    if child == 0:
        number, watching = n, True
        convert(source, out, overwrite=overwrite, max_shard_size=30000, options=options)
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL

def reset():
    if overwrite:
        convert(other, out, overwrite=True)

reset()
before, states, n = state(), [], 0
while True:
    n += 1
    was_killed = killed_at(n)
    states.append(state())
    if not was_killed:
        break
    if n % 7 == 0:  # the others come on top of what the one before has left
        convert(source, out, overwrite=True, options=options)
    if state() != before:
        if overwrite:
            reset()
        else:
            import shutil; shutil.rmtree(out)
print(json.dumps({"before": before, "states": states, "beside": sorted(os.listdir(os.path.dirname(out)))}))
"""


@pytest.mark.parametrize("how", ["new", "replacing"])
def test_a_conversion_killed_at_any_of_its_moments_leaves_all_or_nothing(tmp_path: Path, how: str) -> None:
    source = write_safetensors(
        tmp_path / "src" / "model.safetensors", {"a": ar(100, 100), "b": ar(50), "c": ar(90, 70)}
    ).parent
    (source / "config.json").write_text("{}")
    other = write_safetensors(tmp_path / "other" / "model.safetensors", {"x": ar(2)}).parent
    (tmp_path / "there").mkdir()
    out = tmp_path / "there" / "out"
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(source), str(other), str(out), how],
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    whole = told["states"][-1]
    assert [name for name, _ in whole] == [
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]  # fmt: skip
    assert all(state in (told["before"], whole) for state in told["states"])
    assert len(told["states"]) > 20
    assert told["beside"] == ["out"]
