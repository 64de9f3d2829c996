"""Three questions that an object store is asked, and their answers: a list, what an object is now, a range of it.

What obstore raises ends here: errors are ours, and keep nothing of its own, which may quote signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock, Thread, current_thread, main_thread
from typing import Any, NamedTuple, TypeVar

from tensorferry.errors import ReadError, TensorferryError
from tensorferry.storage.object_errors import LISTING, explained, is_changed, said_by
from tensorferry.waiting import Outcome, joined, started

__all__ = ["ObjectClient", "Replaced", "Traffic", "Version"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Traffic:
    """What was asked of a store, and answered. bytes_read: that came, with what was read ahead; reads: requests for
    them. looks: requests for lists and for what an object is.
    """

    bytes_read: int = 0
    reads: int = 0
    looks: int = 0


class Replaced(ReadError):
    """The server says that an object is no longer the version that was asked for."""


class Version(NamedTuple):
    """Which contents an object has. tag: its ETag without quotes, "" where there is none; weak ones begin with W/."""

    size: int
    tag: str
    moment: str

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Version:
        """Return what obstore says of an object."""
        tag, moment = str(meta.get("e_tag") or ""), meta.get("last_modified")
        plain = tag.removeprefix("W/").strip('"')
        weak = "W/" if tag.startswith("W/") else ""
        return cls(int(meta["size"]), weak + plain, moment.isoformat() if moment is not None else "")

    @property
    def identity(self) -> str:
        """What is another one for other contents, as far as the store tells."""
        return self.tag.removeprefix("W/") or f"{self.moment} {self.size}"

    @property
    def condition(self) -> dict[str, str]:
        """What has a server refuse a range of another version. Weak tags match nothing, by the rules of HTTP."""
        return {"if_match": f'"{self.tag}"'} if self.tag and not self.tag.startswith("W/") else {}

    def differs(self, now: Version) -> str:
        """Return in words how `now` is another one, or ""."""
        if now.size != self.size:
            return f"its size went from {self.size} to {now.size} bytes"
        if self.tag and now.tag:
            return "" if self.identity == now.identity else "another object took its place (its ETag is another)"
        return "" if self.moment == now.moment else "it was written to (its modification time moved)"


class ObjectClient:
    """Asks `store`, which is of obstore. access: with which credentials, in words that hold none.

    label: what errors call that which is asked for. Raises what `explained` returns, and ReadError after `close`.
    """

    def __init__(self, store: Any, where: str, access: str) -> None:
        self._store, self._where, self._access = store, where, access
        self._lock = Lock()
        self._traffic = Traffic()

    @property
    def traffic(self) -> Traffic:
        """What was asked so far."""
        return self._traffic

    def list(self, prefix: str) -> tuple[Sequence[Mapping[str, Any]], Sequence[str]]:
        """Return what obstore says of each object directly below `prefix`, and the prefixes that lie there."""
        found = self._answer(lambda: self._open.list_with_delimiter(prefix or None), prefix, self._where, LISTING)
        self._count(looks=1)
        return found["objects"], found["common_prefixes"]

    def look(self, key: str, label: str, *, by_getting: bool = False) -> Version:
        """Return what an object is now. by_getting: ask for a byte of it, where nothing else is allowed."""

        def ask() -> Version:
            if by_getting:
                return Version.of(self._open.get(key, options={"range": (0, 1)}).meta)
            return Version.of(self._open.head(key))

        found = self._answer(ask, key, label, "looking for it")
        self._count(looks=1)
        return found

    def range(self, key: str, offset: int, length: int, version: Version | None, label: str) -> tuple[Version, Any]:
        """Return a range of `version` as a buffer of exactly so many bytes, and which version it is of.

        version: None for whatever is there. Raises also Replaced.
        """
        options = {"range": (offset, offset + length), **({} if version is None else version.condition)}
        doing = f"reading {length} bytes at offset {offset}"

        def ask() -> tuple[Version, tuple[int, int], Any]:
            found = self._open.get(key, options=options)
            return Version.of(found.meta), tuple(found.range), found.bytes()

        found, answered, data = self._answer(ask, key, label, doing)
        if answered != (offset, offset + length) or len(data) != length:
            raise ReadError(
                f"{label}: the server answers with another part than was asked for, {len(data)} bytes at offset"
                f" {answered[0]}, while {doing}"
            )
        self._count(nbytes=length)
        return found, data

    def close(self) -> None:
        """Let go of connections; idempotent."""
        self._store = None

    @property
    def _open(self) -> Any:
        store = self._store
        if store is None:
            raise ReadError(f"{self._where}: its storage was closed")
        return store

    def _count(self, *, nbytes: int = 0, looks: int = 0) -> None:
        with self._lock:
            before = self._traffic
            self._traffic = Traffic(before.bytes_read + nbytes, before.reads + 1 - looks, before.looks + looks)

    def _answer(self, ask: Callable[[], _T], key: str, label: str, doing: str) -> _T:
        try:
            return _interruptible(ask)
        except TensorferryError:
            raise
        except Exception as error:  # noqa: BLE001 - obstore is an extra, and of its errors some are builtin ones
            said = said_by(error, self._where, key)
            fault = (
                Replaced(f"{label}: was replaced")
                if is_changed(error, said)
                else explained(error, said, label, doing, self._access)
            )
        raise fault  # not within: it would keep what it is about


def _interruptible(ask: Callable[[], _T]) -> _T:
    """Return ``ask()``. obstore looks at no signal while it waits: the main thread, which they come to, lets another
    one ask, and leaves it alone where it is interrupted.
    """
    if current_thread() is not main_thread():
        return ask()
    outcome = Outcome[_T]()
    asking = Thread(target=outcome.done_by, args=(ask,), name="tensorferry-asking", daemon=True)
    started(asking)
    joined(asking)
    return outcome.result()
