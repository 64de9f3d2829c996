"""How the bytes of an encrypted tensor are sealed, as its header says. Knows no key and decrypts nothing.

The layout is that of the `tensorizer` library, 2.12, module _crypt_info: boxes of XSalsa20 and Poly1305 (NaCl's
secretbox) over equal pieces of the data, their nonces counting up, and how a key is made of a passphrase (Argon2id).
"""

from __future__ import annotations

from typing import NamedTuple

from tensorferry.errors import UnknownFormat
from tensorferry.formats.tensorizer_cursor import Cursor

__all__ = ["MAC_BYTES", "MAX_BOX", "NONCE_BYTES", "Derivation", "Sealed", "read_sealed"]

NONCE_BYTES, MAC_BYTES = 24, 16
DERIVED, BOXES, ONE_BOX = 1, 2, 3
"""Numbers of what a header can say: a key is derived; there are boxes of equal size; there is one."""
MAX_BOX = 64 << 20
"""Bytes that are decrypted at once at most. The library makes boxes of 2 MiB."""

_ARGON2ID = 2
_BY_PASSWORD = 1
_MOST_OPERATIONS, _MOST_MEMORY = 4, 1 << 30  # libsodium's "sensitive"
_LEAST_BOX, _QUANTUM = 1024, 64
_MAX_PARTS = 8


class Derivation(NamedTuple):
    """How a key is made of a passphrase: Argon2id with so many operations, so many bytes of memory, and a salt."""

    operations: int
    memory: int
    salt: bytes


class Sealed(NamedTuple):
    """How a tensor's data are sealed. start, stop: which bytes of the file say so.

    size: bytes of data in each box, but for the last. nonce: of the first box. macs: where in the file their MACs are,
    one after the other. An empty tensor has no box, and a size of 0.
    """

    start: int
    stop: int
    size: int = 0
    nonce: bytes = b""
    macs: int = 0
    derivation: Derivation | None = None


def read_sealed(cursor: Cursor, length: int) -> Sealed:
    """Return how `length` bytes of data are sealed; `cursor` is where the header says it.

    Raises CorruptFile, and UnknownFormat for ways of sealing that are not known here.
    """
    start = cursor.at
    end = cursor.number("Q", "the length of how it is encrypted") + cursor.at
    if end > cursor.stop:
        raise cursor.corrupt(f"truncated: how it is encrypted ends at byte {end:,}, its header at {cursor.stop:,}")
    derivation, boxes = None, None
    parts = cursor.number("H", "how many things it says of its encryption")
    if parts > _MAX_PARTS:
        raise cursor.corrupt(f"it says {parts:,} things of its encryption, the limit is {_MAX_PARTS}")
    for _ in range(parts):
        size, number = cursor.numbers("QH", "what it says of its encryption")
        stop = cursor.at - 2 + size
        if number == DERIVED and derivation is None:
            derivation = _derivation(cursor)
        elif number in (BOXES, ONE_BOX) and boxes is None:
            boxes = _boxes(cursor, length) if number == BOXES else _one_box(cursor, length)
        else:
            raise UnknownFormat(f"{cursor.what}: {cursor.subject}: encryption of kind {number} is not known here")
        _refuse_ending_elsewhere(cursor, stop)
    _refuse_ending_elsewhere(cursor, end)
    if length and boxes is None:
        raise cursor.corrupt("it is not encrypted, and its file says that all are")
    size, nonce, macs = boxes or (0, b"", 0)
    return Sealed(start, end, size, nonce, macs, derivation)


def _derivation(cursor: Cursor) -> Derivation:
    method, operations, memory, algorithm, length = cursor.numbers("HQQiH", "how its key is derived")
    salt = cursor.take(length, "the salt")
    if method != _BY_PASSWORD or algorithm != _ARGON2ID:
        raise UnknownFormat(f"{cursor.what}: its key is derived by {method}, {algorithm}, which is not known here")
    if operations > _MOST_OPERATIONS or memory > _MOST_MEMORY or len(salt) != 16:
        raise cursor.corrupt(
            f"its key takes {operations:,} operations over {memory:,} bytes and a salt of {len(salt)}: "
            f"{_MOST_OPERATIONS}, {_MOST_MEMORY:,} and 16 are the limits"
        )
    return Derivation(operations, memory, salt)


def _boxes(cursor: Cursor, length: int) -> tuple[int, bytes, int]:
    size, nonce = cursor.number("Q", "the size of its boxes"), cursor.take(NONCE_BYTES, "its nonce")
    count = cursor.number("Q", "the number of its MACs")
    if size < _LEAST_BOX or size % _QUANTUM:
        raise cursor.corrupt(f"boxes of {size:,} bytes: multiples of {_QUANTUM} from {_LEAST_BOX:,} are expected")
    if count != -(-length // size):
        raise cursor.corrupt(f"{length:,} bytes in boxes of {size:,} have {-(-length // size):,} MACs, not {count:,}")
    at = cursor.at
    cursor.skip(count * MAC_BYTES, "its MACs")
    return _bounded(cursor, min(size, length)), nonce, at


def _one_box(cursor: Cursor, length: int) -> tuple[int, bytes, int]:
    nonce, at = cursor.take(NONCE_BYTES, "its nonce"), cursor.at
    cursor.skip(MAC_BYTES, "its MAC")
    return _bounded(cursor, length), nonce, at


def _bounded(cursor: Cursor, size: int) -> int:
    if size > MAX_BOX:
        raise UnknownFormat(
            f"{cursor.what}: {cursor.subject}: sealed in boxes of {size:,} bytes, of which each has to be decrypted at "
            f"once; the limit is {MAX_BOX:,}"
        )
    return size


def _refuse_ending_elsewhere(cursor: Cursor, stop: int) -> None:
    if cursor.at != stop:
        raise cursor.corrupt(f"what it says of its encryption ends at byte {cursor.at:,}, its length says {stop:,}")
