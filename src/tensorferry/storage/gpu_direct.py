"""GPUDirect Storage through kvikio: a GPU reads files of a local storage by itself. Nothing here needs torch.

kvikio is imported when it is asked for. What it cannot read by the GPU it reads through memory of its own (its
"compatibility mode"), which is slower than what we do without it; so that is used only where it is asked for.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import Any, Literal, Self

from tensorferry.errors import ConfigError, ReadError, shown
from tensorferry.storage.base import File, Storage, SupportsLocalPath
from tensorferry.storage.folder import identity_of

__all__ = ["GpuDirect", "Use", "gpu_direct"]

Use = Literal["never", "auto", "always"]
"""always: in kvikio's compatibility mode, too."""


def gpu_direct(storage: Storage, use: Use) -> GpuDirect | None:
    """Return what reads files of `storage` into GPUs, or None where that is not to be used.

    Raises ConfigError where it is always to be used and cannot be: kvikio is not there, or files are not local.
    """
    if use == "never":
        return None
    if not isinstance(storage, SupportsLocalPath) or find_spec("kvikio") is None:
        if use == "always":
            raise ConfigError(_cannot(storage))
        return None
    return GpuDirect(storage, _kvikio()) if use == "always" or _gets_around_the_cpu() else None


def _cannot(storage: Storage) -> str:
    if isinstance(storage, SupportsLocalPath):
        return "gpu_direct 'always': kvikio is not installed: pip install 'tensorferry[gpu-direct]'"
    return f"gpu_direct 'always': {shown(storage.uri, 300)} is not on this machine, so no GPU can read it by itself"


def _kvikio() -> Any:  # a module of a library that may not be there
    return import_module("kvikio")


@cache
def _gets_around_the_cpu() -> bool:
    """Whether kvikio means to use GPUDirect Storage here, rather than its compatibility mode."""
    return not import_module("kvikio.defaults").is_compat_mode_preferred()


class GpuDirect:
    """Reads files of `storage`, which `SupportsLocalPath`, into GPUs; it `SupportsDevice`. Close it after use.

    A file is opened when it is first read, and stays open. May be used from several threads.
    """

    def __init__(self, storage: Storage, kvikio: Any) -> None:
        self._storage = storage
        self._kvikio = kvikio
        self._lock = Lock()
        self._open: dict[str, Any] = {}
        self._seen: dict[str, File] = {}

    def reaches(self, path: str) -> bool:
        """Whether `path` is a file of this machine."""
        return isinstance(self._storage, SupportsLocalPath) and self._storage.local_path(path) is not None

    def read_to_device(self, path: str, offset: int, out: Any) -> None:
        """Fill `out` from `offset` of `path`; see `SupportsDevice`. Returns when the bytes are there."""
        wanted = int(out.nbytes)
        try:
            got = int(self._file(path).pread(out, wanted, offset).get()) if wanted else 0
        except (RuntimeError, OSError) as error:
            raise ReadError(f"{path}: a GPU cannot read it by itself: {shown(str(error), 300)}") from error
        if got < wanted:
            raise ReadError(f"{path}: ends inside a read: wanted {wanted} bytes at offset {offset}, got {got}")

    def check_unchanged(self) -> None:
        """Raise ReadError if a file that was read is no longer the one that was opened."""
        for path, before in self._seen.items():
            if self._storage.stat(path).identity != before.identity:
                raise ReadError(f"{path}: changed while it was read: load again once nobody writes to it")

    def close(self) -> None:
        """Close all files; idempotent."""
        with self._lock:
            files = list(self._open.values())
            self._open.clear()
        for file in files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _file(self, path: str) -> Any:
        with self._lock:
            if path not in self._open:
                self._open[path] = self._opened(path)
            return self._open[path]

    def _opened(self, path: str) -> Any:
        """Open a file, which must be the one that the storage means: what is opened by its path may be another one."""
        assert isinstance(self._storage, SupportsLocalPath)
        meant, real = self._storage.stat(path), self._storage.local_path(path)
        if real is None:
            raise ReadError(f"{path}: it is not on this machine, so no GPU can read it by itself")
        file = self._kvikio.CuFile(real, "r")
        if identity_of(os.fstat(file.fileno())) != meant.identity:
            file.close()
            raise ReadError(f"{path}: changed while it was opened: load again once nobody writes to it")
        self._seen[path] = meant
        return file
