"""Memory that ranks share: it cannot be cut short, and bytes lie in it as they do in their file."""

from __future__ import annotations

import fcntl
import os

import pytest

from tensorferry.execute.exchange.links import neighbourhood
from tensorferry.execute.exchange.trays import Trays

pytestmark = pytest.mark.skipif(not neighbourhood(), reason="this system has no such memory and sockets")


def test_memory_that_could_be_cut_short_is_refused() -> None:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 3 * 4096)
    with pytest.raises(OSError, match="not what it said"):
        Trays.opened(fd, 1, 8192)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    mine = Trays.made(1, 8192)
    empty = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(empty, fcntl.F_ADD_SEALS, fcntl.fcntl(mine.fd, fcntl.F_GET_SEALS))
    with pytest.raises(OSError, match="not what it said"):
        Trays.opened(empty, 0, 8192)
    with pytest.raises(OSError, match="not what it said"):
        Trays.opened(os.dup(mine.fd), 2, 8192)
    with pytest.raises(PermissionError):
        os.ftruncate(mine.fd, 4096)
    assert fcntl.fcntl(mine.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    mine.close()


def test_bytes_lie_in_a_tray_as_they_do_in_the_file() -> None:
    mine = Trays.made(2, 5000)
    there = mine.at(1, 4096 * 7 + 1000, 5000)
    assert (there.data_ptr() % 4096, there.nbytes) == (1000, 5000)
    mine.close()
