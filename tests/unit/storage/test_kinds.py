"""Reads are chosen for the kind of storage that a checkpoint is found to lie on, but for what the caller has said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from helpers.memory_storage import MemoryStorage
from tensorferry import ConfigError, ReadOptions, load, open_checkpoint
from tensorferry.cli.inspecting import inspection, inspection_text
from tensorferry.core.cost import LOCAL, NETWORK, REMOTE
from tensorferry.storage import file_systems
from tensorferry.storage.base import SupportsKind
from tensorferry.storage.joined import JoinedStorage
from tensorferry.storage.local import LocalStorage

MIB = 1 << 20
NFS, CIFS, LUSTRE, FUSE, EXT4, TMPFS = 0x6969, 0xFF534D42, 0x0BD00BD0, 0x65735546, 0xEF53, 0x01021994


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(2, 2), "bias": ar(2)})
    return tmp_path


def lies_on(magic: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_systems, "_magic", lambda fd: magic)


def options_on(magic: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ReadOptions:
    """Return how a checkpoint on that file system is read."""
    lies_on(magic, monkeypatch)
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.options


@pytest.mark.parametrize("magic", [NFS, CIFS, LUSTRE, FUSE])
def test_a_file_system_of_another_machine_gets_larger_reads(
    folder: Path, magic: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_on(magic, folder, monkeypatch)
    assert (options.storage_kind, options.max_read, options.max_gap) == ("network", 2 * NETWORK.best, NETWORK.gap)
    assert options.workers == 8


@pytest.mark.parametrize("magic", [EXT4, TMPFS, 0])
def test_disks_and_memory_of_this_machine_and_what_nobody_knows_are_local(
    folder: Path, magic: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_on(magic, folder, monkeypatch)
    assert (options.storage_kind, options.max_read, options.max_gap) == ("local", 2 * LOCAL.best, LOCAL.gap)


def test_what_the_caller_gives_stays_even_where_it_is_what_local_disks_get(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies_on(NFS, monkeypatch)
    given = ReadOptions(max_gap=LOCAL.gap, threads=3)
    with open_checkpoint(folder, options=given) as checkpoint:
        options = checkpoint.options
    assert (options.max_read, options.max_gap, options.workers) == (2 * NETWORK.best, LOCAL.gap, 3)
    with open_checkpoint(folder, options=ReadOptions(storage_kind="local")) as checkpoint:
        assert checkpoint.options == ReadOptions(storage_kind="local")


def test_reads_are_never_larger_than_what_may_be_staged() -> None:
    options = replace(ReadOptions(max_staging=16 * MIB), threads=2).settled("network")
    assert (options.max_read, options.max_staging, options.threads) == (16 * MIB, 16 * MIB, 2)


def test_a_kind_can_be_named_and_then_nothing_is_looked_at() -> None:
    assert ReadOptions.suited_to("remote", max_gap=0) == ReadOptions(storage_kind="remote", max_gap=0)
    assert ReadOptions(storage_kind="remote").settled("network").max_gap == REMOTE.gap
    with pytest.raises(ConfigError, match="storage_kind 'nfs': one of auto, local, network, remote is expected"):
        ReadOptions(storage_kind="nfs")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="storage kind 'nfs': one of local, network, remote is expected"):
        ReadOptions.suited_to("nfs")


def test_the_report_and_inspect_say_what_reads_were_chosen_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "storage" not in str(load(nn.Linear(2, 2), folder))
    lies_on(NFS, monkeypatch)
    report = load(nn.Linear(2, 2), folder)
    assert report.storage_kind == report.to_dict()["storage_kind"] == "network"
    assert "reads chosen for network storage" in str(report)
    with open_checkpoint(folder) as checkpoint:
        assert inspection(checkpoint)["storage_kind"] == "network"
        told = inspection_text(checkpoint)
    assert "storage: network, read at most 32.0 MiB at a time, over holes of at most 132.0 KiB" in told


def test_parts_of_a_joined_storage_are_asked_and_those_that_do_not_know_are_local(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies_on(NFS, monkeypatch)
    with LocalStorage(folder) as local:
        assert isinstance(local, SupportsKind)
        joined = JoinedStorage({"a": local, "b": MemoryStorage({"w": b"x"})})
        assert (joined.kind("a/model.safetensors"), joined.kind("b/w")) == ("network", "local")
