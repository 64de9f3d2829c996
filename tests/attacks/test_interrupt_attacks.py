"""Ctrl-C at any moment of a load, also while a read hangs: the load ends, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from helpers.reading_ways import write_checkpoint

TESTS = str(Path(__file__).parents[1])

OFTEN = """
import json, random, signal, sys, time
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from pathlib import Path
from helpers.reading_ways import WAYS, Disk, left_behind, right

folder, told = Path(sys.argv[1]), []
signal.signal(signal.SIGALRM, signal.default_int_handler)

def attempt(way, delay):
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        try:
            found = WAYS[way](folder)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return "interrupted"
    return "right" if right(found) else "wrong"

for way in WAYS:
    chance = random.Random(way)
    with Disk().attached():
        WAYS[way](folder)
        begun = time.monotonic()
        assert right(WAYS[way](folder))
        took = time.monotonic() - begun
    for turn in range(int(sys.argv[3])):
        delay = chance.uniform(0.0001, took)
        with left_behind(folder, collect=True) as left, Disk().attached():
            how = attempt(way, delay)
        told.append([way, how, left])
    assert right(WAYS[way](folder))
print(json.dumps(told))
"""


def test_an_interrupt_at_any_moment_ends_a_load_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    command = [sys.executable, "-c", OFTEN, str(folder), TESTS, "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    left = [each for _, _, left in told for each in left]
    assert [each for each in left if not each.startswith("descriptor")] == []
    assert len(left) <= 2  # an interrupt between opening and the next step of Python: nobody knows the number
    ended = Counter(how for _, how, _ in told)
    assert ended["wrong"] == 0
    assert ended["interrupted"]


AT_STEPS = """
import json, sys, time
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from pathlib import Path
from helpers.interrupts import interrupted_at
from helpers.reading_ways import WAYS, left_behind, right

folder, told = Path(sys.argv[1]), []

def attempt(way, step):
    begun = time.monotonic()
    with left_behind(folder, collect=True) as left, interrupted_at(step, *sys.argv[4:]) as steps:
        try:
            WAYS[way](folder)
            how = "ended"
        except BaseException as error:
            how = repr(error)
    return steps.seen, how, time.monotonic() - begun, left

for way in WAYS:
    WAYS[way](folder)
    count = attempt(way, 0)[0]
    for turn in range(int(sys.argv[3])):
        told.append([way, *attempt(way, 1 + turn * count // int(sys.argv[3]))[1:]])
    assert right(WAYS[way](folder))
print(json.dumps(told))
"""
SEEN = ["/execute/", "/loaders/strategies", "/in_threads", "/waiting", "/threading", "/queue", "/concurrent/"]


def test_an_interrupt_at_a_step_of_waiting_comes_as_it_is_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    command = [sys.executable, "-c", AT_STEPS, str(folder), TESTS, "24", *SEEN]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    ended = Counter(how for _, how, _, _ in told)
    assert ended["KeyboardInterrupt()"] >= 0.95 * len(told)  # fewer steps were needed, or it came in a destructor
    assert ended.keys() <= {"KeyboardInterrupt()", "ended"}
    assert [way for way, _, seconds, _ in told if seconds > 10] == []
    left = [each for *_, left in told for each in left]
    assert [each for each in left if not each.startswith("thread ")] == []
    assert len(left) <= 0.05 * len(told)  # one in the midst of Thread.start may stand where it was


HANGING = """
import sys, threading
sys.path.insert(0, sys.argv[2])
import torch
from pathlib import Path
from helpers.reading_ways import WAYS, Disk

folder, way, at = Path(sys.argv[1]), sys.argv[3], int(sys.argv[4])

def hang(number):
    if number == at:
        print("hanging", flush=True)
        threading.Event().wait()

with Disk(before=hang).attached():
    WAYS[way](folder)
"""


@pytest.mark.parametrize(("way", "at"), [("direct", 20), ("streamed", 9), ("simple", 2)])
def test_an_interrupt_ends_the_process_while_a_read_hangs(tmp_path: Path, way: str, at: int) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    files, temporary = set(folder.iterdir()), tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-c", HANGING, str(folder), TESTS, way, str(at)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "hanging\n"
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=60)  # hours, if anybody waited for the read
    assert child.returncode == -signal.SIGINT
    assert said.rstrip().splitlines()[-1].startswith(("KeyboardInterrupt", "tensorferry: "))
    assert "KeyboardInterrupt" in said
    assert set(folder.iterdir()) == files
    assert list(temporary.iterdir()) == []
