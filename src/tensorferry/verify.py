"""Verifying a checkpoint: headers, index, every byte, and digests where some are to be had. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tensorferry.checkpoint import Checkpoint, open_checkpoint
from tensorferry.core.explain import human_bytes
from tensorferry.errors import CorruptFile, LocateError, shown
from tensorferry.formats.torch_file import verify_crc
from tensorferry.progress import SILENT, Progress
from tensorferry.storage.base import File

__all__ = ["FileVerified", "Verified", "read_manifest", "verified_how", "verify", "verify_files"]

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MANIFEST_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_BLOCK = 8 << 20


@dataclass(frozen=True, slots=True)
class FileVerified:
    """One file, read to its end. sha256: of its contents. against: what that was compared with, or ""."""

    path: str
    size: int
    sha256: str
    against: str


@dataclass(frozen=True, slots=True)
class Verified:
    """A checkpoint whose headers, index and bytes are sound; `files` say which had a digest to compare with."""

    source: str
    format: str
    tensors: int
    nbytes: int
    files: tuple[FileVerified, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data; the keys are the fields and stay as they are."""
        return asdict(self)

    @property
    def summary(self) -> str:
        """How the contents were checked, in one clause."""
        return verified_how(self.files)

    def __str__(self) -> str:
        lines = [f"{self.source}: {self.tensors:,} tensors, {human_bytes(self.nbytes)} ({self.format}); {self.summary}"]
        lines += [f"  {f.sha256}  {f.path}" + (f"  = {f.against}" if f.against else "") for f in self.files]
        return "\n".join([*lines, *(f"  warning: {w}" for w in self.warnings)])


def verify(
    path: str | os.PathLike[str],
    *,
    manifest: Mapping[str, str] | str | os.PathLike[str] | None = None,
    progress: Progress = SILENT,
    **opening: Any,
) -> Verified:
    """Check headers and index of the checkpoint at `path`, read every byte, and compare digests.

    manifest: file path to sha256, or a file as ``sha256sum`` writes it. Without one, a ``SHA256SUMS`` file in the
    folder is used, and in a hub cache the names of the blobs. Checksums inside torch files are compared, too.

    Raises CorruptFile naming the file and both digests, LocateError for a file of the manifest that is not there, and
    what `open_checkpoint` raises.
    """
    with open_checkpoint(path, **opening) as checkpoint:
        files = verify_files(checkpoint, manifest=manifest, progress=progress)
        catalogue = checkpoint.catalogue
        return Verified(
            checkpoint.uri, catalogue.format, len(catalogue), catalogue.nbytes, files, tuple(checkpoint.warnings)
        )


def verify_files(
    checkpoint: Checkpoint,
    *,
    manifest: Mapping[str, str] | str | os.PathLike[str] | None = None,
    progress: Progress = SILENT,
) -> tuple[FileVerified, ...]:
    """Read the files of an open checkpoint whole and compare their digests; see `verify`."""
    known, source = _known_digests(checkpoint, manifest)
    files = checkpoint.selection.files
    progress.start(sum(f.size for f in files), "verifying")
    try:
        with ThreadPoolExecutor(checkpoint.options.workers) as pool:
            digests = pool.map(lambda f: _digest(checkpoint, f, progress), files)
            checked = tuple(_compared(checkpoint, f, d, known, source) for f, d in zip(files, digests, strict=True))
        checkpoint.storage.check_unchanged()
    finally:
        progress.finish()
    return checked


def verified_how(files: Sequence[FileVerified]) -> str:
    """Return in one clause what the digests of `files` were compared with."""
    compared = sum(bool(f.against) for f in files)
    if not compared:
        return "contents read, not verified: no digests were given"
    against = ", ".join(sorted({f.against for f in files if f.against}))
    return f"sha256 of {compared} of {len(files)} files verified against {against}"


def read_manifest(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return file path to sha256 from lines as ``sha256sum`` writes them; raises CorruptFile for any other line."""
    digests: dict[str, str] = {}
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            match = _MANIFEST_LINE.fullmatch(line)
            if match is None:
                raise CorruptFile(f"{os.fspath(path)}: line {number} is no sha256 and file name: {shown(line)!r}")
            digests[match[2].removeprefix("./")] = match[1].lower()
    return digests


def _known_digests(
    checkpoint: Checkpoint, manifest: Mapping[str, str] | str | os.PathLike[str] | None
) -> tuple[Mapping[str, str], str]:
    if manifest is None:
        beside = Path(checkpoint.uri, "SHA256SUMS")
        return (read_manifest(beside), "SHA256SUMS") if beside.is_file() else ({}, "")
    known = manifest if isinstance(manifest, Mapping) else read_manifest(manifest)
    absent = [f.path for f in checkpoint.selection.files if f.path not in known]
    if absent:
        raise LocateError(f"the manifest has no digest for {', '.join(map(shown, absent[:5]))} of {checkpoint.uri}")
    return known, "the manifest"


def _digest(checkpoint: Checkpoint, file: File, progress: Progress) -> str:
    digest, at = hashlib.sha256(), 0
    buffer = memoryview(bytearray(min(_BLOCK, file.size)))
    while at < file.size:
        part = buffer[: min(len(buffer), file.size - at)]
        checkpoint.storage.read_into(file.path, at, part)
        digest.update(part)
        at += len(part)
        progress.advance(len(part))
    return digest.hexdigest()


def _compared(checkpoint: Checkpoint, file: File, digest: str, known: Mapping[str, str], source: str) -> FileVerified:
    expected, against = known.get(file.path), source
    if expected is None:
        expected, against = _blob_name(checkpoint, file), "the hub's blob name"
    if expected is None:
        against = ""
    elif expected != digest:
        raise CorruptFile(
            f"{checkpoint.uri}: {shown(file.path)}: its contents are not what they should be: sha256 is {digest}, but "
            f"{against} says {expected}; fetch the file again"
        )
    if checkpoint.catalogue.format == "torch":
        verify_crc(checkpoint.storage, file)
    return FileVerified(file.path, file.size, digest, against)


def _blob_name(checkpoint: Checkpoint, file: File) -> str | None:
    """Return the sha256 that a hub cache stores a large file under, where `file` is a link to one."""
    target = Path(os.path.realpath(Path(checkpoint.uri, file.path)))
    return target.name if target.parent.name == "blobs" and _SHA256.fullmatch(target.name) else None
