"""Manifests: which sha256 the files of a checkpoint should have. Comparing them with what is there is for `verify`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tensorferry.errors import ConfigError, CorruptFile, LocateError, shown
from tensorferry.storage.base import Storage
from tensorferry.storage.reading import read_bytes

__all__ = ["BESIDE", "MAX_MANIFEST_BYTES", "Manifest", "given_manifest", "manifest_beside", "parse_manifest"]

BESIDE = "SHA256SUMS"
"""The manifest that is taken when it lies in the folder of a checkpoint."""

MAX_MANIFEST_BYTES = 16 << 20
"""Larger manifests are refused unread; 100,000 files with long names need less."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Digests to compare with. name: what messages call it. digests: path to 64 lower-case hex digits.

    binding: whether every file of the checkpoint must be in it, because the caller gave it.
    """

    name: str
    digests: Mapping[str, str]
    binding: bool = False

    def below(self, folder: str) -> Manifest:
        """Return what it says of the files in `folder`, by their paths there; itself if it says nothing of them."""
        inside = {p.removeprefix(f"{folder}/"): d for p, d in self.digests.items() if p.startswith(f"{folder}/")}
        return replace(self, digests=inside) if inside else self


def given_manifest(given: Mapping[str, str] | str | os.PathLike[str], root: str) -> Manifest:
    """Return the manifest that a caller gave for the checkpoint in the folder `root`.

    given: path to sha256, or a file as ``sha256sum`` writes it. Paths are relative to `root`; those of a file that
    lies in a folder further up may be relative to that. Raises ConfigError, LocateError, CorruptFile.
    """
    if isinstance(given, Mapping):
        return Manifest("the manifest", {path: _checked(path, digest) for path, digest in given.items()}, binding=True)
    if not isinstance(given, str | os.PathLike) or not given:
        raise ConfigError(f"manifest: a mapping of paths to sha256, or a file, is expected, not {given!r:.60}")
    where = shown(os.fspath(given), 300)
    try:
        with Path(given).open("rb") as file:  # perhaps a pipe, or what never ends: sizes say nothing
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise LocateError(f"{where}: the manifest cannot be read: {error.strerror}") from None
    if len(data) > MAX_MANIFEST_BYTES:
        raise CorruptFile(f"{where}: a manifest has at most {MAX_MANIFEST_BYTES:,} bytes")
    digests = parse_manifest(data.decode("utf-8", "surrogateescape"), what=where)
    manifest = Manifest("the manifest", digests, binding=True)
    below = os.path.relpath(os.path.realpath(root), os.path.realpath(Path(given).parent))
    return manifest if below == "." or below.startswith("..") else manifest.below(below)


def manifest_beside(storage: Storage) -> Manifest:
    """Return the manifest that lies with the files of `storage`; an empty one if there is none.

    Raises CorruptFile for one that is malformed, and UnsafeFile for one that leads out of the storage.
    """
    try:
        file = storage.stat(BESIDE)
    except LocateError:
        return Manifest(BESIDE, {})
    if file.size > MAX_MANIFEST_BYTES:
        raise CorruptFile(f"{BESIDE} ({storage.uri}): a manifest has at most {MAX_MANIFEST_BYTES:,} bytes")
    data = read_bytes(storage, BESIDE, 0, file.size)
    return Manifest(BESIDE, parse_manifest(data.decode("utf-8", "surrogateescape"), what=f"{BESIDE} ({storage.uri})"))


def parse_manifest(text: str, *, what: str) -> dict[str, str]:
    """Return path to sha256 from lines as ``sha256sum`` writes them; blank lines and ``#`` comments are passed over.

    `what` opens every message. Raises CorruptFile for any other line, and for a file with two digests.

    >>> parse_manifest("0" * 64 + "  ./model.safetensors", what="SHA256SUMS")["model.safetensors"][:4]
    '0000'
    """
    digests: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.removesuffix("\r"))
        if match is None:
            raise CorruptFile(f"{what}: line {number} is no sha256 and file name: {shown(line)!r}")
        path, digest = match[2].removeprefix("./"), match[1].lower()
        if digests.setdefault(path, digest) != digest:
            raise CorruptFile(f"{what}: line {number} gives {shown(path)} another sha256 than a line before")
    return digests


def _checked(path: str, digest: object) -> str:
    text = digest.lower() if isinstance(digest, str) else ""
    if not _SHA256.fullmatch(text):
        raise ConfigError(f"manifest: {shown(path)}: 64 hex digits of a sha256 are expected, not {digest!r}")
    return text
