"""Keys of encrypted Tensorizer files: read from a file, derived from a passphrase, used on single boxes.

The ciphers are libsodium's, by PyNaCl. What is secret is in no message, log or repr.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import cast

from tensorferry.errors import AccessDenied, ConfigError, LocateError, shown
from tensorferry.formats.tensorizer_sealed import MAC_BYTES, NONCE_BYTES, Derivation

__all__ = ["KEY_BYTES", "Secret", "nonce_of", "open_box", "read_secret", "seal_box"]

KEY_BYTES = 32

_MAX_KEYFILE = 1 << 16


class Secret:
    """What a key file holds: a key, or a passphrase that a key is derived from. source: the file, for messages."""

    __slots__ = ("_content", "source")

    def __init__(self, content: bytes, source: str) -> None:
        self._content = content
        self.source = source

    def keys(self, derivation: Derivation | None) -> Iterator[bytes]:
        """Yield the keys that it can mean for a file whose key is derived so, or is not: the likeliest first.

        Raises ConfigError where it cannot mean any.
        """
        if len(self._content) == KEY_BYTES:
            yield self._content
        elif derivation is None:
            raise ConfigError(
                f"encryption_keyfile {self.source}: a key of {KEY_BYTES} bytes is expected, it has "
                f"{len(self._content)}; a passphrase is only for files that say how a key is made of it"
            )
        if derivation is not None:
            for passphrase in dict.fromkeys((self._content, self._content.rstrip(b"\r\n"))):
                if passphrase:
                    yield _derived(passphrase, derivation)

    def __repr__(self) -> str:
        return f"<Secret of {self.source}>"


def read_secret(path: str | os.PathLike[str]) -> Secret:
    """Return what the key file at `path` holds. Raises LocateError, AccessDenied and ConfigError."""
    where = shown(os.fspath(path), 300)
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_KEYFILE + 1)
    except PermissionError as error:
        raise AccessDenied(f"encryption_keyfile {where}: {error.strerror}") from None
    except OSError as error:
        raise LocateError(f"encryption_keyfile {where}: {error.strerror}") from None
    if not 0 < len(content) <= _MAX_KEYFILE:
        raise ConfigError(f"encryption_keyfile {where}: 1 to {_MAX_KEYFILE:,} bytes are expected")
    return Secret(content, where)


def nonce_of(first: bytes, box: int) -> bytes:
    """Return the nonce of a box: they count up from that of the first one, low byte first."""
    number = (int.from_bytes(first, "little") + box) % (1 << 8 * NONCE_BYTES)
    return number.to_bytes(NONCE_BYTES, "little")


def open_box(mac: bytes, sealed: bytes | bytearray, nonce: bytes, key: bytes) -> bytes | None:
    """Return the bytes in a box, or None where key, MAC and contents do not belong together."""
    bindings, wrong = _nacl(), import_module("nacl.exceptions").CryptoError
    try:
        return cast("bytes", bindings.crypto_secretbox_open(mac + sealed, nonce, key))
    except wrong:
        return None


def seal_box(plain: bytes, nonce: bytes, key: bytes) -> tuple[bytes, bytes]:
    """Return the MAC and the contents, as long as `plain`, of a new box."""
    box = cast("bytes", _nacl().crypto_secretbox(plain, nonce, key))
    return box[:MAC_BYTES], box[MAC_BYTES:]


@lru_cache(maxsize=8)
def _derived(passphrase: bytes, derivation: Derivation) -> bytes:
    bindings = _nacl()
    operations, memory, salt = derivation
    algorithm = bindings.crypto_pwhash_ALG_ARGON2ID13
    return cast("bytes", bindings.crypto_pwhash_alg(KEY_BYTES, passphrase, salt, operations, memory, algorithm))


def _nacl() -> ModuleType:
    try:
        return import_module("nacl.bindings")
    except ModuleNotFoundError:
        raise ConfigError(
            "encrypted Tensorizer files need PyNaCl, which is not installed: pip install 'tensorferry[tensorizer]'"
        ) from None
