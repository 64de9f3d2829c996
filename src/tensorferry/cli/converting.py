"""What ``tensorferry convert`` does: options to arguments, and the account to text. Imports torch when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry.core.plan import Strictness
from tensorferry.progress import Progress

if TYPE_CHECKING:
    from tensorferry.conversion import Conversion

__all__ = ["Asked", "converted"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for beside `tensorferry.convert`'s own options, which are `options`.

    allow_lossy: values may overflow. allow_unknown: tensors that no rule names are left out.
    """

    source: str | Path
    destination: str | Path
    allow_lossy: bool
    allow_unknown: bool
    options: Mapping[str, Any]
    opening: Mapping[str, Any]


def converted(asked: Asked, progress: Progress) -> Conversion:
    """Convert, and return the account. Raises what `tensorferry.convert` raises."""
    from tensorferry.conversion import convert

    strict = Strictness(
        lossy="warn" if asked.allow_lossy else "error", unexpected="warn" if asked.allow_unknown else "error"
    )
    # As text: a path may be a name on the Hub.
    return convert(
        str(asked.source), asked.destination, strict=strict, progress=progress, **asked.options, **asked.opening
    )
