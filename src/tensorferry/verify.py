"""Verifying a checkpoint: headers, index, every byte, and digests where some are to be had. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

from tensorferry.checkpoint import Checkpoint, OpeningOptions, open_checkpoint, refuse_unknown_options
from tensorferry.config import ReadOptions
from tensorferry.core.amounts import counted, few, human_bytes
from tensorferry.errors import AccessDenied, CorruptFile, LocateError, ReadError, shown
from tensorferry.formats.file_names import format_of
from tensorferry.in_threads import in_threads
from tensorferry.manifest import Manifest, given_manifest, manifest_beside
from tensorferry.progress import SILENT, Progress, progress_of
from tensorferry.storage.base import File, Storage
from tensorferry.storage.object_uri import is_uri
from tensorferry.storage.reading import seen
from tensorferry.waiting import Flag

__all__ = ["FileVerified", "Verified", "verify", "verify_files"]

_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOCK = 8 << 20


@dataclass(frozen=True, slots=True)
class FileVerified:
    """One file, read to its end. sha256: of its contents. against: what that was compared with, or "".

    checksummed: bytes that were compared with checksums (CRC-32, and sha256 in Tensorizer files) that the file itself
    holds.
    """

    path: str
    size: int
    sha256: str
    against: str = ""
    checksummed: int = 0


@dataclass(frozen=True, slots=True)
class Verified:
    """A checkpoint whose headers, index and bytes are sound; `files` say which had something to compare with.

    files: the index, if one was used, then the weight files.
    """

    source: str
    format: str
    tensors: int
    nbytes: int
    files: tuple[FileVerified, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data: the fields and `summary`. The keys stay as they are."""
        data = asdict(self)
        return {**data, "files": list(data["files"]), "warnings": list(self.warnings), "summary": self.summary}

    @property
    def summary(self) -> str:
        """How the contents were checked, in one clause."""
        compared = [f.against for f in self.files if f.against]
        parts = []
        if compared:
            against = ", ".join(dict.fromkeys(compared))
            without = [shown(f.path) for f in self.files if not f.against]
            rest = f" (none for {few(without, 3)})" if without else ""
            parts.append(f"sha256 of {len(compared)} of {len(self.files)} files verified against {against}{rest}")
        if checksummed := [f for f in self.files if f.checksummed]:
            parts.append(f"checksums inside {len(checksummed)} of {len(self.files)} files verified")
        return "; ".join(parts) or "contents read, not verified: there was no digest to compare with"

    def __str__(self) -> str:
        source = shown(self.source, 300)
        lines = [
            f"{source}: {counted(self.tensors, 'tensor')}, {human_bytes(self.nbytes)} ({self.format}); {self.summary}"
        ]
        lines += [f"  {f.sha256}  {shown(f.path)}" + (f"  = {f.against}" if f.against else "") for f in self.files]
        return "\n".join([*lines, *(f"  warning: {shown(w, 1000)}" for w in self.warnings)])


def verify(
    path: str | os.PathLike[str],
    *,
    manifest: Mapping[str, str] | str | os.PathLike[str] | None = None,
    progress: Progress | bool = SILENT,
    options: ReadOptions | None = None,
    **opening: Unpack[OpeningOptions],
) -> Verified:
    """Check headers and index of the checkpoint at `path`, read every byte, and compare digests.

    manifest: file path to sha256, or a file as ``sha256sum`` writes it; it must have all weight files of the
    checkpoint. Without one, a ``SHA256SUMS`` in the folder is used for the files that it has. A file that neither
    has is compared with the name of its blob, where it lies in a hub cache. What a manifest says of files that are
    not part of the checkpoint is not looked at. Checksums inside torch files, and hashes inside Tensorizer files, are
    compared, too; those of encrypted files only with their key, which is needed where there is no other digest.

    Raises CorruptFile naming every file that differs and both digests, LocateError where the manifest lacks a file,
    and what `open_checkpoint` raises.
    """
    refuse_unknown_options(verify, opening)
    telling = progress_of(progress)
    with open_checkpoint(path, options=options, **opening) as checkpoint:
        return verify_files(checkpoint, manifest=manifest, progress=telling)


def verify_files(
    checkpoint: Checkpoint,
    *,
    manifest: Mapping[str, str] | str | os.PathLike[str] | None = None,
    progress: Progress = SILENT,
) -> Verified:
    """Read the files of an open checkpoint whole and compare their digests; see `verify`."""
    storage, catalogue = checkpoint.storage, checkpoint.catalogue
    known = manifest_beside(storage) if manifest is None else given_manifest(manifest, storage.uri)
    _refuse_uncovered(known, checkpoint)
    files = _files(checkpoint)
    digests = _digests(checkpoint, files, progress)
    checked = _compared(checkpoint, zip(files, digests, strict=True), known)
    storage.check_unchanged()
    warnings = (*checkpoint.warnings, *_absent(known, checkpoint))
    return Verified(storage.uri, catalogue.format, len(catalogue), catalogue.nbytes, checked, warnings)


def _files(checkpoint: Checkpoint) -> tuple[File, ...]:
    selection = checkpoint.selection
    index = [checkpoint.storage.stat(selection.index_file)] if selection.index_file else []
    return (*index, *selection.files)


def _refuse_uncovered(known: Manifest, checkpoint: Checkpoint) -> None:
    uncovered = [shown(f.path) for f in checkpoint.selection.files if f.path not in known.digests]
    if known.binding and uncovered:
        raise LocateError(f"{known.name} has no sha256 of {few(uncovered, 5)} of {checkpoint.uri}")


def _absent(known: Manifest, checkpoint: Checkpoint) -> Iterable[str]:
    """Yield a warning of weight files that the manifest has and the folder lacks: perhaps a download stopped."""
    there = {f.path for f in seen(checkpoint.storage)} | {f.path for f in checkpoint.selection.files}
    kind = checkpoint.catalogue.format
    absent = [shown(p) for p in known.digests if p not in there and "/" not in p and format_of(p) == kind]
    if absent:
        yield f"{known.name} also has {few(absent, 5)}, which the folder lacks"


def _digests(checkpoint: Checkpoint, files: Sequence[File], progress: Progress) -> list[str]:
    stop = Flag()
    progress.start(sum(f.size for f in files), "verifying")

    def advance(nbytes: int) -> None:
        if stop.is_set():
            raise ReadError(f"verifying {checkpoint.uri} was stopped")
        progress.advance(nbytes)

    try:  # after an error or Ctrl-C, the threads end at their next block instead of at the end of their files
        return in_threads(
            lambda f: _digest(checkpoint.storage, f, advance), files, checkpoint.options.workers, stop=stop
        )
    finally:
        progress.finish()


def _digest(storage: Storage, file: File, advance: Callable[[int], None]) -> str:
    digest, at = hashlib.sha256(), 0
    buffer = memoryview(bytearray(min(_BLOCK, file.size)))
    while at < file.size:
        part = buffer[: min(len(buffer), file.size - at)]
        storage.read_into(file.path, at, part)
        digest.update(part)
        at += len(part)
        advance(len(part))
    return digest.hexdigest()


def _compared(checkpoint: Checkpoint, pairs: Iterable[tuple[File, str]], known: Manifest) -> tuple[FileVerified, ...]:
    checked, faults = [], []
    for file, digest in pairs:
        try:
            checked.append(_compare(checkpoint, file, digest, known))
        except CorruptFile as error:
            faults.append(str(error))
    if faults:
        raise CorruptFile(
            f"{shown(checkpoint.uri, 300)}: contents are not what they should be, so fetch them again: "
            f"{few(faults, 20, between='; ', what='file')}"
        )
    return tuple(checked)


def _compare(checkpoint: Checkpoint, file: File, digest: str, known: Manifest) -> FileVerified:
    expected, against = known.digests.get(file.path), known.name
    if expected is None:
        expected, against = _blob_name(checkpoint, file), "the hub's blob name"
    if expected not in (None, digest):
        raise CorruptFile(f"{shown(file.path)}: sha256 is {digest}, but {against} says {expected}")
    try:
        checksummed = _checksummed(checkpoint, file)
    except AccessDenied:
        if expected is None:
            raise
        checksummed = 0
    return FileVerified(file.path, file.size, digest, against if expected else "", checksummed)


def _blob_name(checkpoint: Checkpoint, file: File) -> str | None:
    """Return the sha256 that a hub cache stores a large file under, where `file` is a link to one."""
    if is_uri(checkpoint.uri):
        return None
    target = Path(os.path.realpath(Path(checkpoint.uri, file.path)))
    return target.name if target.parent.name == "blobs" and _SHA256.fullmatch(target.name) else None


def _checksummed(checkpoint: Checkpoint, file: File) -> int:
    # Imported here: most formats have no checksums.
    if checkpoint.catalogue.format == "tensorizer":
        from tensorferry.formats.tensorizer_hashes import verify_hashes

        return verify_hashes(checkpoint.storage, file, workers=checkpoint.options.workers)
    if checkpoint.catalogue.format != "torch":
        return 0
    from tensorferry.formats.torch_file import verify_crc

    return verify_crc(checkpoint.storage, file)
