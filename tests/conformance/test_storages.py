"""The storages keep to what every storage keeps to; see `StorageConformance`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from helpers.storage_conformance import StorageConformance
from tensorferry.storage.base import Storage
from tensorferry.storage.joined import JoinedStorage
from tensorferry.storage.local import LocalStorage


def _written(files: Mapping[str, bytes], folder: Path) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


class TestLocalStorage(StorageConformance):
    def storage(self, files: Mapping[str, bytes], folder: Path) -> Storage:
        return LocalStorage(_written(files, folder))


class TestLocalStorageWithFewHandles(StorageConformance):
    def storage(self, files: Mapping[str, bytes], folder: Path) -> Storage:
        return LocalStorage(_written(files, folder), max_open=1)


class TestJoinedStorage(StorageConformance):
    prefix = "part/"

    def storage(self, files: Mapping[str, bytes], folder: Path) -> Storage:
        return JoinedStorage({"part": LocalStorage(_written(files, folder))})
