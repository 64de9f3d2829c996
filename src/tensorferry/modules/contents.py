"""What a piece of memory holds while a loader is traced: patches of checkpoint entries, or values nobody can follow.

Positions are element positions in the memory. Nothing here knows torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tensorferry.core.boxes import Region
from tensorferry.core.catalogue import TensorEntry
from tensorferry.core.dtypes import Cast, DType, cast_kind
from tensorferry.core.mapped import parts_of
from tensorferry.modules.views import Copy, TooScattered, between, through

__all__ = ["Contents", "Patch"]


class Patch(NamedTuple):
    """Elements of an entry, or one value, that lie in a piece of memory.

    copy: from positions in the entry to positions in the memory. entry: None where `fill` is there instead.
    rounded: the type that the values were rounded to on their way, None where they are those of the entry.
    """

    copy: Copy
    entry: TensorEntry | None
    fill: float = 0.0
    rounded: DType | None = None

    def written_as(self, dtype: DType) -> Patch | None:
        """Return this patch in memory of `dtype`; None where that rounds values a second time."""
        held = dtype if self.entry is None else self.rounded or self.entry.dtype
        if held == dtype or cast_kind(held, dtype) is Cast.EXACT:
            return self
        return self._replace(rounded=dtype) if self.rounded is None else None

    def along(self, copy: Copy) -> Patch:
        """Return what the patch has, lying as `copy` says."""
        return Patch(copy, self.entry, self.fill, self.rounded)


@dataclass(slots=True)
class Contents:
    """What is known of `size` elements of `dtype`.

    patches: disjoint, by first position. base: the value below them, if the whole was filled with one. lost: why
    the rest of what is there cannot be followed, None while everything can. taint: names of all entries that had
    any part in it.
    """

    dtype: DType
    size: int
    patches: list[Patch] = field(default_factory=list)
    base: float | None = None
    lost: str | None = None
    taint: set[str] = field(default_factory=set)
    _is_plain: bool = False  # whether this is one patch that moves nothing: what stands for an entry
    _apart: bool = True  # whether the patches do not even interlace, so that neighbours are all that can overlap

    @classmethod
    def of_entry(cls, entry: TensorEntry, dtype: DType, size: int) -> Contents:
        """Return the contents of the memory that stands for `entry`, seen as `size` elements of `dtype`."""
        parts = parts_of(entry)
        if parts is not None:
            return cls(dtype, size, taint={entry.name})._put_together(parts)
        return cls(dtype, size, [Patch(Copy.whole(size), entry)], taint={entry.name}, _is_plain=True)

    def _put_together(self, parts: Iterable[tuple[TensorEntry, Region, Region]]) -> Contents:
        """Write what an entry is put together of: each part with the region that is taken of it, and where to."""
        for part, window, into in parts:
            try:
                copy = between(into, window)
            except TooScattered:
                self.lose("comes from a tensor that is put together irregularly")
                break
            moved = Patch(copy, part).written_as(self.dtype)
            self.write([moved] if moved is not None else [])
        return self

    @property
    def touched(self) -> bool:
        """Whether anything was written here that the memory itself does not show."""
        return bool(self.patches or self.taint or self.lost or self.base is not None)

    def lose(self, why: str) -> None:
        """Note that values were written here that cannot be followed."""
        self.lost = self.lost or why

    def read(self, copy: Copy) -> list[Patch] | None:
        """Return what `copy` reads here, as patches of what it writes; None where that is not wholly known."""
        if self.lost is not None:
            return None
        if self._is_plain:
            return [self.patches[0].along(copy)]
        try:
            found = self.covered(copy)
        except TooScattered:
            return None
        if not found and self.base is not None:
            return [Patch(copy.constant, None, self.base)]
        return found if sum(p.copy.size for p in found) == copy.size else None

    def covered(self, copy: Copy) -> list[Patch]:
        """Return what `copy` reads from patches, as patches of what it writes; raises TooScattered."""
        low, high = copy.source, copy.source + sum((a.size - 1) * a.source for a in copy.axes)
        return [patch.along(part) for patch in self._near(low, high) for part in through(copy, patch.copy)]

    def fill(self, copy: Copy, value: float) -> None:
        """Write one value to all that `copy` writes."""
        if copy.size == self.size:
            self.patches, self.base = [], value
            self.lost, self._apart, self._is_plain = None, True, False
        else:
            self.write([Patch(copy, None, value)])

    def write(self, patches: Iterable[Patch]) -> None:
        """Write `patches` over what is there."""
        self._is_plain = False
        for patch in patches:
            tidy = patch.along(patch.copy.tidy())
            if tidy.copy.size:
                self._write(tidy)

    def _write(self, patch: Patch) -> None:
        if not patch.copy.nested:
            self.lose("elements are written in an irregular order")
            return
        if patch.copy.size == self.size:
            self.patches, self.base, self.lost, self._apart = [patch], None, None, True
            return
        for old in self._near(patch.copy.into, patch.copy.last):
            self._overwrite(old, patch)
        self._insert(patch)

    def _overwrite(self, old: Patch, new: Patch) -> None:
        try:
            common = sum(c.size for c in through(new.copy.image, old.copy.image))
        except TooScattered:
            common = 1
        if common == old.copy.size:
            self.patches.remove(old)
        elif common:
            self.lose("is written twice in part")

    def _insert(self, patch: Patch) -> None:
        at = bisect_right(self.patches, patch.copy.into, key=lambda p: p.copy.into)
        before = at == 0 or self.patches[at - 1].copy.last < patch.copy.into
        after = at == len(self.patches) or patch.copy.last < self.patches[at].copy.into
        self._apart = self._apart and before and after
        self.patches.insert(at, patch)

    def _near(self, low: int, high: int) -> Sequence[Patch]:
        """Return the patches that have a position from `low` to `high`, and perhaps some others."""
        stop = bisect_right(self.patches, high, key=lambda p: p.copy.into)
        start = 0
        if self._apart:
            start = max(0, bisect_right(self.patches, low, key=lambda p: p.copy.into) - 1)
        return [p for p in self.patches[start:stop] if p.copy.last >= low]
