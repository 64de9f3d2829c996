"""Connections between processes of one machine: short messages of whole numbers, and a descriptor each at first."""

from __future__ import annotations

import os
import selectors
import socket
import struct
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tensorferry.execute.exchange.neighbours import boot
from tensorferry.execute.exchange.trays import Trays

__all__ = ["Door", "Link", "Message", "connected", "listen", "neighbourhood"]

_HELLO = struct.Struct("=III")
_MESSAGE = struct.Struct("=IIII")
_CREDENTIALS = struct.Struct("=iII")

Message = tuple[int, int, int, int]
"""What it is about, and three numbers."""


def neighbourhood() -> str:
    """Return what tells processes that can reach each other from others; empty where none can.

    They are of the same user, on one machine, and see the same network.
    """
    if not (hasattr(socket, "SO_PEERCRED") and hasattr(os, "memfd_create")):
        return ""
    try:
        machine, network = boot(), Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return ""
    return machine and f"{machine} {network} {os.geteuid()}"


class Door:
    """Where others find this process, once they know its `address`. Raises OSError where there can be none."""

    def __init__(self) -> None:
        self.address = f"tensorferry-{uuid.uuid4().hex}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.socket.bind(_name(self.address))
            self.socket.listen(64)
        except BaseException:
            self.socket.close()
            raise

    def close(self) -> None:
        """Let nobody in any more."""
        self.socket.close()


class Link(NamedTuple):
    """The connection to another rank, and its trays."""

    socket: socket.socket
    trays: Trays

    def send(self, message: Message) -> bool:
        """Send a message; return whether that went well: not where the other one is gone, or listens no more."""
        try:
            return self.socket.send(_MESSAGE.pack(*message)) == _MESSAGE.size
        except OSError:
            return False

    def end(self) -> None:
        """Have both sides see that nothing more comes."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, when nobody listens any more; what lies in the trays can still be read."""
        self.socket.close()
        self.trays.close()


def connected(door: Door, rank: int, addresses: Mapping[int, str], trays: Trays, patience: float) -> dict[int, Link]:
    """Return links to the ranks of `addresses`, all of which do the same at about this time.

    Those that cannot be reached within `patience` seconds are left out. trays: handed to each of them.
    """
    deadline = time.monotonic() + patience
    waiting: dict[int, socket.socket] = {}
    for other in sorted(n for n in addresses if n < rank):
        with suppress(OSError):
            waiting[other] = _connect(addresses[other], deadline)
            _greet(waiting[other], rank, trays)
    links: dict[int, Link] = {}
    try:
        for other, link in _let_in(door, {n for n in addresses if n > rank}, deadline):
            links[other] = link
            try:
                _greet(link.socket, rank, trays)
            except OSError:  # it came and went; others may still come
                links.pop(other).close()
    except OSError:
        pass
    for other, one in waiting.items():
        with suppress(OSError):
            said, theirs = _greeted(one, deadline)
            if said == other:
                links[other] = Link(one, theirs)
            else:
                theirs.close()
    for other, one in waiting.items():
        if other not in links:
            one.close()
    for link in links.values():
        link.socket.settimeout(patience)
    return links


def listen(links: Mapping[int, Link], heard: Callable[[int, Message], None], gone: Callable[[int], None]) -> None:
    """Tell of the messages of all links as they come, and of each that has ended, until all have."""
    with selectors.DefaultSelector() as selector:
        for rank, link in links.items():
            selector.register(link.socket, selectors.EVENT_READ, rank)
        while selector.get_map():
            for key, _ in selector.select():
                data = _received(links[key.data].socket)
                if len(data) == _MESSAGE.size:
                    heard(key.data, _MESSAGE.unpack(data))
                else:
                    selector.unregister(key.fileobj)
                    gone(key.data)


def _received(one: socket.socket) -> bytes:
    try:
        return one.recv(_MESSAGE.size)
    except OSError:
        return b""


def _name(address: str) -> str:
    return f"\0{address}"  # in the abstract name space, which leaves no file behind


def _connect(address: str, deadline: float) -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        one.settimeout(max(deadline - time.monotonic(), 0.001))
        one.connect(_name(address))
        _refuse_strangers(one)
    except BaseException:
        one.close()
        raise
    return one


def _let_in(door: Door, awaited: Collection[int], deadline: float) -> Iterable[tuple[int, Link]]:
    """Yield those of the ranks `awaited` that come in time."""
    left = set(awaited)
    while left and (patience := deadline - time.monotonic()) > 0:
        door.socket.settimeout(patience)
        one, _ = door.socket.accept()
        try:
            _refuse_strangers(one)
            rank, trays = _greeted(one, deadline)
        except OSError:
            one.close()
            continue
        if rank not in left:
            Link(one, trays).close()
            continue
        left.discard(rank)
        yield rank, Link(one, trays)


def _refuse_strangers(one: socket.socket) -> None:
    """Raise OSError where somebody else is at the other end: names of sockets are no secret."""
    _, user, _ = _CREDENTIALS.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise OSError("another user is at the other end")


def _greet(one: socket.socket, rank: int, trays: Trays) -> None:
    socket.send_fds(one, [_HELLO.pack(rank, trays.count, trays.size)], [trays.fd])


def _greeted(one: socket.socket, deadline: float) -> tuple[int, Trays]:
    one.settimeout(max(deadline - time.monotonic(), 0.001))
    data, fds, *_ = socket.recv_fds(one, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
    if len(data) != _HELLO.size or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise OSError("the other end says something else")
    rank, count, size = _HELLO.unpack(data)
    return rank, Trays.opened(fds[0], count, size)
