"""Which file system an open file lies on, by the numbers that Linux has for them (linux/magic.h)."""

from __future__ import annotations

import ctypes
from typing import Literal, NamedTuple

from tensorferry.storage.libc import libc

__all__ = ["FileSystem", "file_system_of"]


class FileSystem(NamedTuple):
    """A kind of file system. where: on a disk of this machine, with another machine or a process that asks one, or
    neither, such as in memory, or nobody knows."""

    name: str
    where: Literal["disk", "elsewhere", "other"]


_KNOWN = {
    0xEF53: FileSystem("ext", "disk"), 0x58465342: FileSystem("XFS", "disk"), 0x9123683E: FileSystem("Btrfs", "disk"),
    0xF2F52010: FileSystem("F2FS", "disk"), 0xCA451A4E: FileSystem("bcachefs", "disk"),
    0x794C7630: FileSystem("an overlay", "disk"),
    0x6969: FileSystem("NFS", "elsewhere"), 0xFF534D42: FileSystem("CIFS", "elsewhere"),
    0xFE534D42: FileSystem("SMB", "elsewhere"), 0x65735546: FileSystem("FUSE", "elsewhere"),
    0x0BD00BD0: FileSystem("Lustre", "elsewhere"), 0x00C36400: FileSystem("Ceph", "elsewhere"),
    0x47504653: FileSystem("GPFS", "elsewhere"), 0x19830326: FileSystem("BeeGFS", "elsewhere"),
    0x01021994: FileSystem("tmpfs", "other"), 0x858458F6: FileSystem("ramfs", "other"),
    0x01021997: FileSystem("9p", "other"), 0x2FC12FC1: FileSystem("ZFS", "other"),
    0x6A656A63: FileSystem("virtiofs", "other"),
}  # fmt: skip


def file_system_of(fd: int) -> FileSystem:
    """Return which file system the open file `fd` lies on, in words where it is none that is known here."""
    magic = _magic(fd)
    name = f"a file system of type {magic:#x}" if magic else "an unknown file system"
    return _KNOWN.get(magic, FileSystem(name, "other"))


def _magic(fd: int) -> int:
    library, told = libc("fstatfs"), (ctypes.c_long * 64)()
    return 0 if library is None or library.fstatfs(fd, told) else int(told[0]) & 0xFFFFFFFF
