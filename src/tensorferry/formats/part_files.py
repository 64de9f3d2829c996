"""Which files ``consolidated.NN.pth`` make one set: as many as there were ranks in training, counted from 0."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tensorferry.core.amounts import few
from tensorferry.errors import FormatError, LocateError, shown
from tensorferry.formats.file_names import WeightName

__all__ = ["complete_parts"]

_NUMBERED = re.compile(r"(?P<stem>.*)\.(?P<number>\d{1,4})")
_SHOWN = 4


def complete_parts(names: Sequence[WeightName], *, where: str, advice: str) -> list[WeightName]:
    """Return the numbered files of `names` in the order of their numbers; all of them where none has a number.

    Raises LocateError where a number is missing below the highest one, FormatError where one is there twice. That the
    highest ones are missing shows only in the sizes of tensors; see `model_parallel`.
    """
    numbered: dict[int, WeightName] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name.stem)
        if match is None:
            continue
        other = numbered.setdefault(int(match["number"]), name)
        if other is not name:
            raise FormatError(f"{where}: {shown(other.path)} and {shown(name.path)} are the same part: remove one")
    missing = [number for number in range(max(numbered, default=-1) + 1) if number not in numbered]
    if missing:
        first = next(iter(numbered.values()))
        absent = few((shown(_other(first, number)) for number in missing), _SHOWN)
        raise LocateError(
            f"{where}: of the model-parallel parts {absent} is missing, and every tensor lies in all of them. {advice}"
        )
    return [numbered[number] for number in sorted(numbered)] or list(names)


def _other(name: WeightName, number: int) -> str:
    """Return the path of the part with another number than `name`."""
    return re.sub(r"\.(\d+)(?=\.[^.]*$)", lambda m: f".{number:0{len(m[1])}}", name.path)
