"""Disks that fail, come short or change under a load: the right bytes or one clean error, and nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.reading_ways import WAYS, Disk, directly_readable, left_behind, right, write_checkpoint
from tensorferry.errors import ReadError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    if not directly_readable(folder):
        pytest.skip("temporary files lie where direct reads are impossible")
    return folder


def reads_of(way: str, folder: Path) -> int:
    """Return with how many system calls a way reads the checkpoint."""
    disk = Disk()
    with disk.attached():
        assert right(WAYS[way](folder))
    return disk.reads


@pytest.mark.parametrize("way", WAYS)
def test_reads_that_come_short_by_any_length_bring_the_right_bytes(folder: Path, way: str) -> None:
    chance, least = random.Random(way), 8192 if "direct" in way else 1  # the end of a file is what is less than a block
    disk = Disk(
        short=lambda got: got if got < 2 * least or chance.random() < 0.3 else chance.randint(max(least, got // 4), got)
    )
    with left_behind(folder) as left, disk.attached():
        assert right(WAYS[way](folder))
    assert left == []


@contextmanager
def interrupted_reads(*, main: bool) -> Iterator[tuple[Disk, Counter[str]]]:
    """Yield a disk whose reads wait in the kernel, and are interrupted there by a signal that is handled.

    main: whether the main thread takes the signal, else one of those that read.
    """
    came, (end, feed), stop = Counter[str](), os.pipe(), threading.Event()

    def send() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        while not stop.wait(0.001):
            os.kill(os.getpid(), signal.SIGUSR1)
            came["sent"] += 1
            if came["sent"] % 3 == 0:
                os.write(feed, b"x" * 8)

    def handle(number: int, frame: object) -> None:
        came["handled"] += 1

    before = signal.signal(signal.SIGUSR1, handle)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK if main else signal.SIG_BLOCK, {signal.SIGUSR1})
    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield Disk(before=lambda number: came.update(read=len(os.read(end, 1)))), came
    finally:
        stop.set()
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGUSR1, before)
        os.close(end)
        os.close(feed)


@pytest.mark.parametrize("main", [True, False])
@pytest.mark.parametrize("way", ["simple", "buffered", "direct", "prefetch", "streamed"])
def test_signals_that_interrupt_reads_change_nothing(folder: Path, way: str, main: bool) -> None:
    with interrupted_reads(main=main) as (disk, came), left_behind(folder) as left, disk.attached():
        assert right(WAYS[way](folder))
    assert left == []
    assert came["read"] == disk.reads
    assert came["handled"] or not main


@pytest.mark.parametrize("way", WAYS)
def test_a_disk_that_fails_at_any_read_is_one_clean_error(folder: Path, way: str) -> None:
    chance, reads = random.Random(way), reads_of(way, folder)
    for turn, code in enumerate([errno.EIO, errno.ESTALE, errno.ENOMEM, errno.EIO, errno.EIO]):
        at = chance.randint(1, reads * 2 // 3)  # some are looks at the page cache, which do no harm

        def fail(number: int, at: int = at, code: int = code, last: int = at if turn % 2 else reads * 2) -> None:
            if at <= number <= last:
                raise OSError(code, os.strerror(code))

        said = ""
        with left_behind(folder) as left, Disk(before=fail).attached():
            try:
                assert right(WAYS[way](folder))
            except ReadError as error:
                said = str(error)
        assert left == []
        assert ("model" in said and os.strerror(code) in said and "\n" not in said) or (turn % 2 and not said)
    assert right(WAYS[way](folder))


def changed_under(way: str, folder: Path, change: Any, at: int) -> str:
    """Return how a load ends under which the checkpoint changes before the read number `at`."""
    done = threading.Event()

    def before(number: int) -> None:
        if number == at:
            change()
            done.set()

    with left_behind(folder) as left, Disk(before=before).attached():
        try:
            ended = "right" if right(WAYS[way](folder)) else "wrong"
        except ReadError as error:
            ended = str(error)
    assert left == []
    return ended if done.is_set() else f"not changed: {ended}"


def rewrite(path: Path, data: bytes) -> None:
    with path.open("r+b") as file:
        file.write(data)


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_is_replaced_or_rewritten_during_a_load_is_one_clean_error(tmp_path: Path, way: str) -> None:
    folder, chance = write_checkpoint(tmp_path / "checkpoint"), random.Random(way)
    reads, ended = reads_of(way, folder), Counter[str]()
    for turn, file in enumerate(["model-1-of-2.safetensors", "model-2-of-2.safetensors"] * 2):
        write_checkpoint(folder)
        other = write_checkpoint(tmp_path / "other", add=1)

        def change(file: str = file, other: Path = other, turn: int = turn) -> None:
            if turn < 2:
                (other / file).replace(folder / file)
            else:
                rewrite(folder / file, (other / file).read_bytes())

        said = changed_under(way, folder, change, chance.randint(3, reads))
        ended[said[:5]] += 1
        assert "changed while it was in use" in said, said
        assert file in said
    assert ended["model"] == 4


TRUNCATED = """
import json, random, sys
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from pathlib import Path
from helpers.reading_ways import FILES, WAYS, Disk, left_behind, right, write_checkpoint
from tensorferry.errors import ReadError, FormatError

told = []
for way in WAYS:
    for turn in range(4):
        chance = random.Random(f"{way} {turn}")
        folder = write_checkpoint(Path(sys.argv[1]))
        file = folder / chance.choice(list(FILES))
        size, at = chance.randint(0, file.stat().st_size - 1), chance.randint(1, 60 if way != "simple" else 9)
        print(way, file.name, size, at, file=sys.stderr, flush=True)
        def cut(number):
            if number == at:
                with file.open("r+b") as opened:
                    opened.truncate(size)
        disk = Disk(before=cut)
        with left_behind(folder) as left, disk.attached():
            try:
                ended = "right" if right(WAYS[way](folder)) else "wrong"
            except (ReadError, FormatError) as error:
                ended = type(error).__name__ if file.name in str(error) else str(error)
        told.append([way, ended if disk.reads >= at else "too late", left])
print(json.dumps(told))
"""


def test_a_file_that_is_cut_during_a_load_is_one_clean_error_and_kills_nobody(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRUNCATED, str(tmp_path / "checkpoint"), str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [left for _, _, left in told if left] == []
    ended = Counter(how for _, how, _ in told)
    assert set(ended) <= {"ReadError", "CorruptFile", "FormatError", "too late"}, told
    assert {way for way, how, _ in told if how == "ReadError"} == set(WAYS)
