"""All ways in which bytes of one small checkpoint come into memory, and a disk under them that does what a test says.

Imported by tests, and by child processes for what could end the process.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helpers.checkpoints import ar, write_index, write_safetensors
from helpers.fake_device import Elsewhere, FakeDevices
from tensorferry import ReadOptions, load, open_checkpoint
from tensorferry.api import prepare, run
from tensorferry.core.boxes import Box, Region
from tensorferry.core.lower import lower
from tensorferry.core.target import Slot
from tensorferry.execute import Executor, SimpleExecutor, ThreadedExecutor
from tensorferry.execute.device import DeviceExecutor
from tensorferry.loaders.strategies import EagerExecutor, PrefetchExecutor
from tensorferry.storage.local import LocalStorage
from tensorferry.waiting import joined

__all__ = [
    "WAYS",
    "Disk",
    "Model",
    "Values",
    "directly_readable",
    "is_leased",
    "left_behind",
    "let_go",
    "right",
    "write_checkpoint",
]

Values = dict[str, torch.Tensor]
Way = Callable[[Path], Values]

SIZES = {"plain": (300, 1024), "cast": (65, 1024), "columns": (40, 8192), "small": (3,), "last": (129, 1024)}
FILES = {"model-1-of-2.safetensors": ("plain", "cast"), "model-2-of-2.safetensors": ("columns", "small", "last")}
FIRST, WIDE = 1024, 1024
"""Which columns are wanted: so few of each row that the others are not read."""


_ALIVE: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Model(nn.ParameterDict):
    """Parameters on meta: one that is read as it is, one that is cast, one of a few columns, and small ones."""

    def __init__(self) -> None:
        super().__init__({name: nn.Parameter(torch.empty(size, device="meta")) for name, size in SIZES.items()})
        self["cast"] = nn.Parameter(torch.empty(SIZES["cast"], device="meta", dtype=torch.float64))
        self["columns"] = nn.Parameter(torch.empty(SIZES["columns"][0], WIDE, device="meta"))
        _ALIVE.add(self)

    def tensor_slots(self) -> Mapping[str, Mapping[str, Slot]]:
        rows, columns = SIZES["columns"]
        window = Region((rows, columns), Box((0, FIRST), (rows, FIRST + WIDE)))
        return {"columns": {"": Slot(Region.whole((rows, WIDE)), (rows, columns), window)}}


def contents(add: float = 0) -> Values:
    """Return what the checkpoint holds, `add` more of everything."""
    return {name: ar(*size, start=n + add) for n, (name, size) in enumerate(SIZES.items())}


def write_checkpoint(folder: Path, *, add: float = 0) -> Path:
    """Write the checkpoint in two files that are on the disk, were last written long ago, and are in no cache."""
    values = contents(add)
    for file, names in FILES.items():
        write_safetensors(folder / file, {name: values[name] for name in names})
        let_go(folder / file)
        os.utime(folder / file, ns=(10**18, 10**18))
    write_index(folder / "model.safetensors.index.json", {n: f for f, names in FILES.items() for n in names})
    return folder


def let_go(path: Path) -> None:
    """Have the page cache let go of a file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def directly_readable(folder: Path) -> bool:
    """Whether files there can be read past the page cache."""
    with LocalStorage(folder) as storage:
        return all(storage.uncached(name).possible for name in FILES)


def right(found: Values, *, add: float = 0) -> bool:
    """Whether values are those of the checkpoint; of `columns`, all of them or those that the model takes."""
    expected = contents(add)
    if found["columns"].shape[1] == WIDE:
        expected["columns"] = expected["columns"][:, FIRST : FIRST + WIDE]
    return found.keys() == expected.keys() and all(
        torch.equal(tensor.detach(), expected[name].to(tensor.dtype)) for name, tensor in found.items()
    )


SMALL: dict[str, Any] = {"max_read": 64 << 10, "max_staging": 1 << 20, "threads": 3}
"""Many reads, of which several are under way at a time. Large enough to be read past the page cache is `plain`."""


def _loaded(**options: Any) -> Way:
    def way(folder: Path) -> Values:
        model = Model()
        load(model, folder, options=ReadOptions(**{**SMALL, **options}))
        return dict(model.items())

    return way


def _executed(executor: Callable[[], Executor]) -> Way:
    def way(folder: Path) -> Values:
        model = Model()
        with open_checkpoint(folder, options=ReadOptions(**SMALL)) as checkpoint:
            run(model, prepare(model, checkpoint), executor=executor())
        return dict(model.items())

    return way


def _streamed(**options: Any) -> Way:
    def way(folder: Path) -> Values:
        with open_checkpoint(folder, options=ReadOptions(**{**SMALL, **options})) as checkpoint:
            return dict(checkpoint.tensors())

    return way


def _on_devices(folder: Path) -> Values:
    model, executor = Model(), ThreadedExecutor(2, pinned=False)
    with open_checkpoint(folder) as checkpoint:
        plan = prepare(model, checkpoint).plan
        schedule = lower(plan, max_gap=4096, max_read=64 << 10, max_staging=1 << 20, waste=4096.0)
        found = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in model.items()}
        devices = FakeDevices(names=("cuda:0",))
        there = Elsewhere(found, {name: "cuda:0" for name in found if name != "small"})
        DeviceExecutor(2, executor, accelerator=devices).run(schedule, checkpoint.storage, there)
        checkpoint.storage.check_unchanged()
    return found


WAYS: dict[str, Way] = {
    "simple": _executed(SimpleExecutor),
    "automatic": _loaded(max_read=1 << 20),
    "buffered": _loaded(direct="never"),
    "direct": _loaded(direct="always"),
    "uncached": _loaded(direct="never", keep_cache=False),
    "mapped": _loaded(mapped=True),
    "eager": _executed(lambda: EagerExecutor(ReadOptions(**SMALL))),
    "prefetch": _executed(lambda: PrefetchExecutor(ReadOptions(**SMALL))),
    "streamed": _streamed(),
    "streamed directly": _streamed(direct="always"),
    "devices": _on_devices,
}
"""From a folder to the values that came. All of them end with a look whether the files are still the same."""


class Disk:
    """Counts reads, and calls `before` with the number of each before it is done. short: how much of a read comes.

    short: from the bytes that came to those that are told of; the others are spoiled.
    """

    def __init__(
        self, before: Callable[[int], None] = lambda n: None, short: Callable[[int], int] = lambda n: n
    ) -> None:
        self.reads = 0
        self._before, self._short = before, short
        self._lock = threading.Lock()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Have all reads of this process done by this disk."""
        self._preadv = os.preadv
        setattr(os, "preadv", self._read)  # noqa: B010 - typed otherwise
        try:
            yield
        finally:
            os.preadv = self._preadv

    def _read(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0, /) -> int:
        with self._lock:
            self.reads += 1
            number = self.reads
        self._before(number)
        got = self._preadv(fd, buffers, offset, flags)
        told = self._short(got)
        _spoil(buffers, told, got)
        return told


def _spoil(buffers: Sequence[Any], first: int, last: int) -> None:
    at = 0
    for buffer in buffers:
        view = memoryview(buffer)
        a, b = max(first - at, 0), min(last - at, len(view))
        if a < b:
            view[a:b] = b"\xee" * (b - a)
        at += len(view)


@contextmanager
def left_behind(folder: Path, *, collect: bool = False) -> Iterator[list[str]]:
    """Yield a list that afterwards names what the block left behind: threads, descriptors, maps, models, new files.

    Without the garbage collector unless it is to `collect`: who has no memory for a load tries again at once.
    """
    left: list[str] = []
    if _ALIVE:
        gc.collect()  # what others have left behind
    threads, files, held = set(threading.enumerate()), set(folder.rglob("*")), _held(folder)
    gc.disable()
    try:
        yield left
    finally:
        gc.enable()
    if collect and (_ALIVE or _held(folder) - held or set(threading.enumerate()) - threads):
        gc.collect()
    for thread in set(threading.enumerate()) - threads:
        joined(thread, 2.0)  # what is interrupted does not always see its threads end
        left += [f"thread {thread.name}"] if thread.is_alive() else []
    left += ["a model"] * len(_ALIVE)
    left += [f"file {path}" for path in set(folder.rglob("*")) - files]
    left += (_held(folder) - held).elements()


def _held(folder: Path) -> Counter[str]:
    """Return how this process holds files of a folder: descriptors and mappings, and how many of each."""
    held = Counter(line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line)
    for fd in Path("/proc/self/fd").iterdir():
        path = os.path.realpath(fd)
        held += Counter([f"descriptor of {path}"] if str(folder) in path else [])
    return held


def is_leased(path: Path) -> bool:
    """Whether who wants to write to the file would have to wait. Who holds the lease is told that somebody does."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    except BlockingIOError:
        return True
    return False
