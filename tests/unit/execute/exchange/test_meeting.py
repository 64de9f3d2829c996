"""Who ranks let in when they meet: those that were told of, of the same user, who say what is expected."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tensorferry.execute.exchange import links
from tensorferry.execute.exchange.links import Door, Link, connected, neighbourhood
from tensorferry.execute.exchange.trays import Trays

pytestmark = pytest.mark.skipif(not neighbourhood(), reason="this system has no such memory and sockets")


def together(works: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(60) for future in [pool.submit(work) for work in works]]


def test_who_says_something_else_is_not_let_in() -> None:
    door, trays = Door(), Trays.made(1, 16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(f"\0{door.address}")
        stranger.send(b"hello")
        assert connected(door, 0, {1: "nobody"}, trays, 0.3) == {}
    door.close()
    trays.close()


def test_a_rank_that_comes_and_goes_keeps_no_other_from_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    def greet(one: socket.socket, rank: int, trays: Trays) -> None:
        if rank == 0 and not hasattr(greet, "once"):
            greet.once = True  # type: ignore[attr-defined]
            raise BrokenPipeError
        original(one, rank, trays)

    original = links._greet
    monkeypatch.setattr(links, "_greet", greet)
    doors, trays = [Door() for _ in range(3)], [Trays.made(1, 16) for _ in range(3)]
    addresses = {rank: door.address for rank, door in enumerate(doors)}

    def met(rank: int) -> dict[int, Link]:
        others = {other: address for other, address in addresses.items() if other != rank}
        return connected(doors[rank], rank, others, trays[rank], 1.0)

    found = together([lambda: met(0), lambda: met(1), lambda: met(2)])
    assert len(found[0]) == 1
    for mine in found:
        for link in mine.values():
            link.close()
    for door, tray in zip(doors, trays, strict=True):
        door.close()
        tray.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_not_let_in() -> None:
    door, trays = Door(), Trays.made(1, 16)
    os.seteuid(65534)
    try:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(f"\0{door.address}")
        socket.send_fds(stranger, [links._HELLO.pack(1, 1, 16)], [trays.fd])
    finally:
        os.seteuid(0)
    with stranger:
        assert connected(door, 0, {1: "nobody"}, trays, 0.3) == {}
    door.close()
    trays.close()
