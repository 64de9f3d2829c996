"""One folder's files sorted by what their names say, and how to tell a person what lies there. Chooses nothing."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tensorferry.core.amounts import counted, few
from tensorferry.core.names import natural_key
from tensorferry.errors import LocateError, shown
from tensorferry.formats.file_names import (
    FAMILIES,
    Family,
    IndexName,
    WeightName,
    format_of,
    matches_any,
    parse_index_name,
    parse_weight_name,
    relative,
    what_else,
)
from tensorferry.storage.base import File

__all__ = ["FolderFiles"]


@dataclass(frozen=True, slots=True)
class FolderFiles:
    """The files directly in `path` ("" for the top) of a listing, without dot files.

    where: the place, in words. weights, indexes, others: its files by name. excluded: weight files that a pattern of
    the caller leaves out. variant: the one asked for. files: all of the listing by path, nested ones too. stat and
    nested: as in `selection.choose`.
    """

    path: str
    where: str
    variant: str | None
    files: Mapping[str, File]
    weights: tuple[WeightName, ...]
    indexes: tuple[IndexName, ...]
    others: tuple[str, ...]
    excluded: frozenset[str]
    stat: Callable[[str], File] | None = field(repr=False)
    nested: Callable[[], Iterable[str]] = field(repr=False)

    @classmethod
    def of(
        cls,
        files: Sequence[File],
        path: str,
        variant: str | None,
        ignore_patterns: Sequence[str],
        *,
        where: str,
        stat: Callable[[str], File] | None,
        nested: Callable[[], Iterable[str]],
    ) -> FolderFiles:
        """Sort the files of a listing that lie directly in `path`, leaving out what `ignore_patterns` match.

        What lies below `path` is matched as if that were all there is, as it is where a folder on disk is opened.
        """
        by_path = {file.path: file for file in files}
        excluded = frozenset(p for p in by_path if _is_excluded(relative(p, path), ignore_patterns))
        direct = [p for p in sorted(by_path, key=natural_key) if _is_direct(p, path) and p not in excluded]
        weights = {p: name for p in direct if (name := parse_weight_name(p, variant)) is not None}
        indexes = {p: index for p in direct if (index := parse_index_name(p, variant)) is not None}
        return cls(
            path,
            where,
            variant,
            by_path,
            tuple(weights.values()),
            tuple(indexes.values()),
            tuple(p for p in direct if p not in weights and p not in indexes),
            excluded,
            stat,
            nested,
        )

    def has(self, name: str) -> bool:
        """Tell whether a file called `name` lies directly in the folder."""
        return self.inside(name) in self.files

    def inside(self, name: str) -> str:
        """Return the path in the listing of `name`, which is relative to the folder."""
        return posixpath.join(self.path, name)

    def find(self, path: str) -> File:
        """Return the file at `path`, which has bytes unless it is really empty.

        Raises LocateError with what is known beyond its absence (a broken link, a pattern that leaves it out), or
        with no words; and what `stat` raises for a path that must not be opened.
        """
        if path in self.excluded:
            raise LocateError("left out by ignore_patterns")
        file = self.files.get(path)
        if file is not None and file.size:
            return file
        if file is not None and file.broken is not None:
            raise LocateError(f"broken link {shown(path)} -> {shown(file.broken)}: what it points to is not there")
        if file is None and (self.stat is None or _is_direct(path, self.path)):
            raise LocateError("")
        return self.stat(path) if self.stat is not None else File(path, 0, ())

    def weights_of(self, family: Family) -> list[WeightName]:
        """Return the files of `family` and of the variant asked for that may be base weights."""
        return [n for n in self.weights if family.takes(n) and not n.role and n.variant == self.variant]

    def indexes_of(self, family: Family) -> list[IndexName]:
        """Return the indexes of `family` and of the variant asked for."""
        weights = ((index, index.weights) for index in self.indexes)
        return [i for i, n in weights if family.takes(n) and not n.role and n.variant == self.variant]

    def left_out(self, chosen: set[str], otherwise: str) -> tuple[tuple[str, str], ...]:
        """Return each weight file that is not `chosen`, and why: `otherwise` where its name does not say."""
        out = [(n.path, self._reason(n, otherwise)) for n in self.weights if n.path not in chosen]
        out += [(path, kind) for path in self.others if (kind := what_else(path)) is not None]
        excluded = (p for p in self.excluded if _is_direct(p, self.path) and format_of(p) is not None)
        out += [(path, "left out by ignore_patterns") for path in excluded]
        return tuple(sorted(out, key=lambda pair: natural_key(pair[0])))

    def _reason(self, name: WeightName, otherwise: str) -> str:
        if name.role:
            return name.role
        if name.variant != self.variant:
            return f"variant {name.variant}" if name.variant else f"not variant {self.variant}"
        return otherwise

    def inventory(self) -> str:
        """Return one sentence that lists what the folder holds, by kind."""
        kinds: dict[str, list[str]] = {}
        for name in self.weights:
            kinds.setdefault(_kind(name), []).append(name.path)
        for path in self.others:
            if (kind := what_else(path)) is not None:
                kinds.setdefault(kind, []).append(path)
        if self.indexes:
            kinds["shard index"] = [index.path for index in self.indexes]
        for path in self._nested_weights():
            kinds.setdefault(f"sub-folder {shown(posixpath.dirname(path))}/", []).append(path)
        if self.excluded:
            kinds["left out by ignore_patterns"] = sorted(self.excluded, key=natural_key)
        return _sentence(kinds, self.others)

    def hint(self, families: Sequence[Family]) -> str:
        """Return what to do about a folder in which none of `families` was found, with a space before, or ""."""
        adapters = [n.path for n in self.weights if n.role == "adapter"]
        variants = sorted({n.variant for n in self.weights if n.variant and n.variant != self.variant and not n.role})
        usable = [f.label for f in FAMILIES.values() if f not in families and self.weights_of(f)]
        nested = sorted({posixpath.dirname(path) for path in self._nested_weights()})
        if adapters:
            return (
                f" This is an adapter ({shown(adapters[0])}), not a model: load its base model, which"
                " adapter_config.json names, and apply the adapter to that."
            )
        if variants:
            return f" Pass variant={variants[0]!r} to load that variant."
        if usable:
            return f" Another load_format takes the {usable[0]} files."
        if nested:
            return f" Pass subfolder={nested[0]!r} to load from there."
        return ""

    def _nested_weights(self) -> list[str]:
        paths = {p for p in self.files if not _is_direct(p, self.path)} | set(self.nested())
        return sorted((p for p in paths if format_of(p) or what_else(p)), key=natural_key)


def _is_direct(path: str, folder: str) -> bool:
    parent, base = posixpath.split(path)
    return parent == folder and not base.startswith(".")


def _is_excluded(path: str, patterns: Sequence[str]) -> bool:
    """Tell whether patterns leave `path` out; an index goes with the weights that it stands for."""
    if not patterns:
        return False
    index = parse_index_name(path)
    return matches_any(path, patterns) or (index is not None and matches_any(index.weights.path, patterns))


def _kind(name: WeightName) -> str:
    if name.role:
        return name.role
    label = next(f.label for f in FAMILIES.values() if f.takes(name))
    variant = f" of variant {name.variant}" if name.variant else ""
    return f"{label}{' shards' if name.count else ''}{variant}"


def _sentence(kinds: Mapping[str, Sequence[str]], others: Sequence[str]) -> str:
    if not kinds:
        found = f"only {_counted(others)}" if others else "nothing at all"
        return f"There is no weight file of any known kind: {found}."
    return f"There is: {'; '.join(f'{kind}: {_counted(paths)}' for kind, paths in kinds.items())}."


def _counted(paths: Sequence[str]) -> str:
    return f"{counted(len(paths), 'file')} ({few(map(shown, paths), 2)})"
