"""Whether the parts of a split GGUF model belong together and are all there. Judges catalogues; reads nothing.

A split model lies in ``PREFIX-00001-of-00003.gguf`` and so on; each part says its number (from 0), how many there are,
and how many tensors all of them hold: https://github.com/ggml-org/llama.cpp (tools/gguf-split).
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorferry.core.catalogue import Catalogue
from tensorferry.errors import CorruptFile, LocateError, shown
from tensorferry.storage.base import File

__all__ = ["check_split"]


def check_split(files: Sequence[File], parts: Sequence[Catalogue]) -> None:
    """Raise unless `parts`, the catalogues of `files` in their order, are one whole model.

    Raises LocateError where parts are absent, CorruptFile where they contradict each other or hold a tensor twice.
    """
    counts = [_said(file, part, "split.count") for file, part in zip(files, parts, strict=True)]
    if counts in ([None], [1]):
        return
    if len(parts) == 1 and counts[0] != 0:
        number = _said(files[0], parts[0], "split.no")
        where = "" if number is None else f" {number + 1}"
        raise LocateError(
            f"{shown(files[0].path)}: it is part{where} of {counts[0]} of a split model, without the others: put them "
            "beside it, all of them under their names (PREFIX-00001-of-00002.gguf and so on)"
        )
    for at, (file, part) in enumerate(zip(files, parts, strict=True)):
        _check_part(file, part, at, len(files))
    _check_tensors(files, parts)


def _said(file: File, part: Catalogue, key: str) -> int | None:
    text = part.metadata.get(key)
    if text is not None and not text.isdecimal():
        raise CorruptFile(f"{shown(file.path)}: {key} must be a whole number, it is {shown(text)!r}")
    return None if text is None else int(text)


def _check_part(file: File, part: Catalogue, at: int, count: int) -> None:
    for key, expected in (("split.count", count), ("split.no", at)):
        found = _said(file, part, key)
        if found != expected:
            said = "is not there" if found is None else f"is {found}"
            raise CorruptFile(
                f"{shown(file.path)}: {key} {said}, {expected} is expected of part {at + 1} of {count}: its name and "
                "its contents disagree"
            )


def _check_tensors(files: Sequence[File], parts: Sequence[Catalogue]) -> None:
    places: dict[str, File] = {}
    for file, part in zip(files, parts, strict=True):
        if twice := places.keys() & part.keys():
            name = min(twice)
            raise CorruptFile(
                f"{shown(places[name].path)} and {shown(file.path)} both hold tensor {shown(name)!r}"
                f"{f' and {len(twice) - 1} others' if len(twice) > 1 else ''}: they are not parts of one model"
            )
        places.update(dict.fromkeys(part, file))
    for file, part in zip(files, parts, strict=True):
        declared = _said(file, part, "split.tensors.count")
        if declared != len(places):
            raise CorruptFile(
                f"{shown(file.path)}: split.tensors.count is {declared}, the {len(parts)} parts hold "
                f"{len(places)} tensors"
            )
