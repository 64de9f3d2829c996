"""GPUDirect Storage through kvikio, which is made up here: when it is chosen, what it reads, and what it refuses."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.memory_storage import MemoryStorage
from tensorferry.errors import ConfigError, ReadError
from tensorferry.storage import gpu_direct as module
from tensorferry.storage.base import SupportsDevice
from tensorferry.storage.gpu_direct import GpuDirect, gpu_direct
from tensorferry.storage.local import LocalStorage


class Future:
    def __init__(self, got: int) -> None:
        self.got = got

    def get(self) -> int:
        return self.got


class File:
    """What kvikio.CuFile is, for bytes in memory of the CPU."""

    open_files = 0

    def __init__(self, path: str, flags: str) -> None:
        assert flags == "r"
        self.file = Path(path).open("rb")  # noqa: SIM115 - closed by `close`
        type(self).open_files += 1

    def fileno(self) -> int:
        return self.file.fileno()

    def pread(self, out: Any, size: int, offset: int) -> Future:
        self.file.seek(offset)
        data = self.file.read(size)
        out[: len(data)] = data
        return Future(len(data))

    def close(self) -> None:
        self.file.close()
        type(self).open_files -= 1


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a kvikio that prefers its compatibility mode as `compat` says."""
    library: Any = ModuleType("kvikio")
    library.CuFile, library.compat = File, False
    library.__spec__ = ModuleSpec("kvikio", None)
    defaults: Any = ModuleType("kvikio.defaults")
    defaults.is_compat_mode_preferred = lambda: library.compat
    monkeypatch.setitem(sys.modules, "kvikio", library)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", defaults)
    module._gets_around_the_cpu.cache_clear()
    yield library
    module._gets_around_the_cpu.cache_clear()
    assert File.open_files == 0


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    (tmp_path / "f").write_bytes(bytes(range(200)))
    return LocalStorage(tmp_path)


def test_nothing_is_chosen_unless_it_is_asked_for(kvikio: Any, storage: LocalStorage) -> None:
    assert gpu_direct(storage, "never") is None
    assert isinstance(gpu_direct(storage, "auto"), GpuDirect)


def test_where_kvikio_is_absent_it_is_never_chosen_and_refused_if_it_must_be(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert gpu_direct(storage, "auto") is None
    with pytest.raises(ConfigError, match=r"kvikio is not installed: pip install 'tensorferry\[gpu-direct\]'"):
        gpu_direct(storage, "always")


def test_its_compatibility_mode_is_used_only_where_it_must_be(kvikio: Any, storage: LocalStorage) -> None:
    kvikio.compat = True
    assert gpu_direct(storage, "auto") is None
    assert gpu_direct(storage, "always") is not None


def test_files_that_are_not_on_this_machine_are_refused_if_it_must_be(kvikio: Any) -> None:
    assert gpu_direct(MemoryStorage({}), "auto") is None
    with pytest.raises(ConfigError, match="memory is not on this machine"):
        gpu_direct(MemoryStorage({}), "always")


def test_bytes_come_from_their_offset_and_files_are_closed(kvikio: Any, storage: LocalStorage) -> None:
    with GpuDirect(storage, kvikio) as direct:
        assert isinstance(direct, SupportsDevice)
        out = memoryview(bytearray(5))
        direct.read_to_device("f", 100, out)
        assert bytes(out) == bytes(range(100, 105))
        assert direct.reaches("f")
        assert File.open_files == 1
        direct.check_unchanged()


def test_a_file_that_is_too_short_is_told(kvikio: Any, storage: LocalStorage) -> None:
    with GpuDirect(storage, kvikio) as direct, pytest.raises(ReadError, match="wanted 9 bytes at offset 195, got 5"):
        direct.read_to_device("f", 195, memoryview(bytearray(9)))


def test_what_kvikio_cannot_do_is_a_read_error(
    kvikio: Any, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Future:
        raise RuntimeError("cuFile: 5016")

    monkeypatch.setattr(File, "pread", fail)
    with GpuDirect(storage, kvikio) as direct, pytest.raises(ReadError, match=r"f: a GPU cannot read it.*5016"):
        direct.read_to_device("f", 0, memoryview(bytearray(1)))


def test_a_file_that_changes_is_told(kvikio: Any, storage: LocalStorage, tmp_path: Path) -> None:
    with GpuDirect(storage, kvikio) as direct:
        direct.read_to_device("f", 0, memoryview(bytearray(1)))
        (tmp_path / "f").write_bytes(b"other")
        with pytest.raises(ReadError, match="changed while it was read"):
            direct.check_unchanged()
