"""Reported failures of processes: many small reads, dirty mappings, interrupts, ranks that read everything, locks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from tensorferry import Box, ConfigError, Region, Slot, load, open_checkpoint
from tensorferry.storage.local import LocalStorage

MIB = 1 << 20


def test_run_01_bytes_come_in_few_large_reads_and_not_page_by_page(tmp_path: Path) -> None:
    tensors = {f"w{i:03}": ar(256, 256, start=i) for i in range(64)}  # 256 KiB each, 16 MiB in all
    write_safetensors(tmp_path / "model.safetensors", tensors)
    model = nn.ParameterDict({n: nn.Parameter(torch.empty(256, 256, device="meta")) for n in tensors})
    with open_checkpoint(tmp_path) as checkpoint:
        storage = checkpoint.storage
        assert isinstance(storage, LocalStorage)
        before = storage.counters
        report = load(model, checkpoint)
        reads, nbytes = storage.counters.reads - before.reads, storage.counters.bytes_read - before.bytes_read
    assert (report.reads, report.bytes_read) == (reads, nbytes)
    assert nbytes // reads >= MIB
    assert report.executor == "ThreadedExecutor"
    assert all(torch.equal(model[n], t) for n, t in tensors.items())


def _mappings_of(path: Path) -> list[tuple[str, dict[str, int]]]:
    """Return the permissions of each mapping of a file, and what the kernel counts of it, in KiB."""
    found: list[tuple[str, dict[str, int]]] = []
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *rest = line.split(maxsplit=1)
        if not head.endswith(":"):
            ours = line.endswith(str(path))
            if ours:
                found.append((rest[0].split()[0], {}))
        elif ours and rest and rest[0].endswith("kB"):
            found[-1][1][head[:-1]] = int(rest[0].split()[0])
    return found


def test_run_04_mappings_are_read_only_and_stay_clean(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", {"w": ar(512, 512)})
    with path.open("rb") as file:
        os.fsync(file.fileno())  # or the kernel would count what was just written, not what we wrote
    with open_checkpoint(path) as checkpoint:
        ((_, mapped),) = checkpoint.tensors(mapped=True)
        assert mapped.sum() > 0
        ((permissions, counted),) = _mappings_of(path)
    assert permissions == "r--p"
    assert counted["Private_Dirty"] == counted["Anonymous"] == 0
    assert counted["Rss"] >= 1024


def test_run_06_the_report_tells_devices_and_an_option_without_effect_is_an_error(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(2, 2), "bias": ar(2)})
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    assert load(model, tmp_path, device="cpu").devices == {"cpu": 2}
    with pytest.raises(ConfigError, match="device 'cuda:0': the model's tensors have memory on cpu already"):
        load(model, tmp_path, device="cuda:0")


def test_run_06_what_post_processing_makes_follows_its_layer(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        def process_weights_after_loading(self) -> None:
            self.scale = nn.Parameter(torch.ones(2))

    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(2, 2), "bias": ar(2)})
    model = Scaled(2, 2)
    with torch.device("meta"):
        report = load(model, tmp_path)
    assert report.devices == {"cpu": 3}


INTERRUPTED = """
import sys, threading
import torch
import tensorferry
from tensorferry import ReadOptions
from tensorferry.storage.local import LocalStorage

inner, lock, never, reads = LocalStorage.read_vector, threading.Lock(), threading.Event(), 0

def slow(self, path, offset, outs):
    global reads
    with lock:
        reads += 1
        if reads == 5:
            print("reading", flush=True)
    never.wait(0.02)
    inner(self, path, offset, outs)

def load():
    model = torch.nn.ParameterDict({"w": torch.empty(1024, 1024, device="meta")})
    tensorferry.load(model, checkpoint)

def stream():
    for _ in checkpoint.tensors():
        pass

try:
    with tensorferry.open_checkpoint(sys.argv[1], options=ReadOptions(max_read=4096, max_staging=65536)) as checkpoint:
        LocalStorage.read_vector = slow
        {"load": load, "stream": stream}[sys.argv[2]]()
except KeyboardInterrupt:
    print("interrupted after", reads, [t.name for t in threading.enumerate()], flush=True)
    raise
"""


@pytest.mark.parametrize("how", ["load", "stream"])
def test_run_10_an_interrupt_ends_the_load_and_its_threads(tmp_path: Path, how: str) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"w": ar(1024, 1024)})  # 1024 reads of 4 KiB
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "reading\n"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=120)
    words = out.split()
    assert words[:2] == ["interrupted", "after"], err
    assert int(words[2]) < 1024
    assert words[3:] == ["['MainThread']"]
    assert child.returncode == -signal.SIGINT
    assert err.count("Traceback (most recent call last)") == 1
    assert "Exception in thread" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


class Rows(nn.Module):
    """The rows of one rank of a weight that is split by its outputs."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.rows = rank, 1024 // size
        self.weight = nn.Parameter(torch.empty(self.rows, 1024))

    def tensor_slots(self) -> Mapping[str, Mapping[str, Slot]]:
        window = Region((1024, 1024), Box((self.rank * self.rows, 0), ((self.rank + 1) * self.rows, 1024)))
        return {"weight": {"": Slot(Region.whole((self.rows, 1024)), (1024, 1024), window)}}


@pytest.mark.parametrize("rank", range(4))
def test_run_11_a_rank_reads_its_rows_and_the_header(tmp_path: Path, rank: int) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", {"weight": ar(1024, 1024)})
    header = path.stat().st_size - 4 * MIB
    with torch.device("meta"):
        model = Rows(rank, 4)
    with open_checkpoint(tmp_path) as checkpoint:
        report = load(model, checkpoint)
        assert isinstance(checkpoint.storage, LocalStorage)
        assert checkpoint.storage.counters.bytes_read <= MIB + header
    assert report.bytes_read == report.bytes_needed == MIB
    assert torch.equal(model.weight, ar(1024, 1024)[rank * 256 : (rank + 1) * 256])


def _held(path: Path) -> list[str]:
    """Return how this process still holds a file: descriptors and mappings."""
    held = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:
            continue
        held += [target] if str(path) in target else []
    return held


def test_run_13_nothing_holds_the_file_after_a_load(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", {"weight": ar(2, 2), "bias": ar(2)})
    model = nn.Linear(2, 2)
    load(model, tmp_path)
    assert _held(path) == []
    path.unlink()
    assert torch.equal(model.weight, ar(2, 2))


def test_run_13_nothing_holds_the_file_after_mapped_tensors_are_gone(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", {"weight": ar(2, 2)})
    with open_checkpoint(tmp_path) as checkpoint:
        tensors = dict(checkpoint.tensors(mapped=True))
    assert _held(path) != []
    del tensors
    assert _held(path) == []
