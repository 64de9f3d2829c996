"""Reading back what a conversion has written: its headers, and every byte of its tensors against their digests."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from tensorferry.checkpoint import Checkpoint
from tensorferry.core.catalogue import Catalogue
from tensorferry.core.planning import make_plan
from tensorferry.core.target import TargetTensor
from tensorferry.core.transforms import TensorSpec
from tensorferry.errors import CorruptFile, shown
from tensorferry.execute.base import Counters
from tensorferry.execute.production import Production
from tensorferry.formats.writing import new_file
from tensorferry.manifest import BESIDE as SHA256SUMS
from tensorferry.progress import Progress

__all__ = ["forget_cached", "read_back", "write_sums"]


def read_back(
    written: Checkpoint, specs: Mapping[str, TensorSpec], digests: Mapping[str, str], progress: Progress
) -> Counters:
    """Compare what `written` holds with what it should: the same names, types and shapes, and equal bytes.

    specs: of each tensor. digests: the sha256 of its row-major bytes. Returns what was read. Raises CorruptFile, naming
    the first tensor that differs, and what reading raises.
    """
    _compare_headers(written.catalogue, specs)
    target = {n: TargetTensor.plain(n, e.dtype, e.shape) for n, e in written.catalogue.items()}
    plan = make_plan(written.catalogue, target)
    plan.raise_for_problems()
    progress.start(sum(e.nbytes for e in written.catalogue.values()), "reading back")
    try:
        with Production(plan, written.storage, written.options, list(target), digested=True) as production:
            for name in target:
                for chunk in production.chunks(name):
                    progress.advance(len(chunk))
                if production.digests[name] != digests[name]:
                    raise CorruptFile(
                        f"tensor {shown(name)!r} is not what was written: its file was changed meanwhile, or the disk "
                        "or the memory is at fault; nothing was put in place"
                    )
            return production.counters
    finally:
        progress.finish()


def _compare_headers(found: Catalogue, specs: Mapping[str, TensorSpec]) -> None:
    odd = sorted(found.keys() ^ specs.keys())
    there = {name: TensorSpec(entry.dtype, entry.shape) for name, entry in found.items()}
    odd += [name for name, spec in specs.items() if name in there and there[name] != spec]
    if odd:
        raise CorruptFile(
            f"tensor {shown(odd[0])!r}: {_said(there.get(odd[0]))} was read back, and {_said(specs.get(odd[0]))} was "
            "written; nothing was put in place"
        )


def _said(spec: TensorSpec | None) -> str:
    return "no such tensor" if spec is None else f"{spec.dtype} {list(spec.shape)}"


def forget_cached(folder: Path) -> None:
    """Let the system drop its copies of the files below `folder`, so that the next read is of the disk."""
    for path in _files(folder):
        with suppress(OSError, AttributeError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_sums(folder: Path) -> None:
    """Write the sha256 of every file below `folder` into its SHA256SUMS, as ``sha256sum`` does."""
    lines = []
    for path in _files(folder):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines.append(f"{digest}  {path.relative_to(folder).as_posix()}\n")
    with new_file(folder / SHA256SUMS) as out:
        out.write("".join(lines).encode("utf-8", "surrogateescape"))


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
