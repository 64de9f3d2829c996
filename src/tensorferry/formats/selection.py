"""Decides which files of a folder are the checkpoint, from their names and the shard index. Opens no weight file."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from tensorferry.core.amounts import counted, few
from tensorferry.core.names import natural_key
from tensorferry.errors import AccessDenied, ConfigError, CorruptFile, FormatError, LocateError, shown
from tensorferry.formats.base import Selection
from tensorferry.formats.file_names import (
    CANONICAL_STEMS,
    FAMILIES,
    LOAD_FORMATS,
    Family,
    IndexName,
    WeightName,
    format_of,
    matches_any,
    parse_index_name,
    parse_weight_name,
)
from tensorferry.formats.folder import FolderFiles
from tensorferry.formats.index import read_index
from tensorferry.formats.part_files import complete_parts
from tensorferry.storage.base import File, Storage

__all__ = ["Wanted", "choose", "select", "select_file"]

IndexReader = Callable[[File], dict[str, str]]
"""Reads an index of the listing: tensor name to shard, relative to the index's folder."""

_MAX_ABSENT = 100
_MOST_LOOKED_UP = 4096
_ADVICE = "Fetch what is missing, or name the files to load with allow_patterns."
_ADVICE_FOR = {
    "npcache": " A NumPy cache is for torch files (.bin, .pt), whose tensors it makes files of plain bytes; those of"
    " other formats lie as plain bytes already and would gain nothing."
}
_VARIANT = re.compile(r"[\w-]+")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the caller asks for; checked when it is made.

    load_format: a key of `LOAD_FORMATS`. subfolder: where in a recursive listing to look, "" for its top. variant: the
    word in ``model.fp16.safetensors``. allow_patterns: shell patterns for file names; given, they decide alone.
    ignore_patterns: files to leave out of everything; those in `subfolder` by their paths there. allow_pickle: whether
    auto and hf may fall back to torch files (read without executing anything in them).
    """

    load_format: str = "auto"
    subfolder: str = ""
    variant: str | None = None
    allow_patterns: Sequence[str] | None = None
    ignore_patterns: Sequence[str] = ()
    allow_pickle: bool = True

    def __post_init__(self) -> None:
        for option in ("load_format", "subfolder", "variant"):
            value = getattr(self, option)
            if not isinstance(value, str) and (value is not None or option != "variant"):
                raise ConfigError(f"{option} {value!r}: text is expected, not {type(value).__name__}")
        if self.load_format not in LOAD_FORMATS:
            known = ", ".join(LOAD_FORMATS)
            raise ConfigError(f"load_format {self.load_format!r} is not known here; one of {known} is expected")
        if self.variant is not None and not _VARIANT.fullmatch(self.variant):
            raise ConfigError(f"variant {self.variant!r}: one word, such as 'fp16', is expected")
        if self.subfolder and not _is_plain(self.subfolder):
            raise ConfigError(f"subfolder {self.subfolder!r}: a relative path without '..' is expected")
        object.__setattr__(self, "ignore_patterns", _patterns("ignore_patterns", self.ignore_patterns or ()))
        if self.allow_patterns is not None:
            object.__setattr__(self, "allow_patterns", _patterns("allow_patterns", self.allow_patterns))


def _patterns(option: str, given: object) -> tuple[str, ...]:
    patterns = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (None,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        what = "not one string" if isinstance(given, str) else "each of them text"
        raise ConfigError(f"{option} {given!r}: a sequence of patterns is expected, {what}")
    return patterns


def select(storage: Storage, wanted: Wanted = Wanted(), *, nested: Callable[[], Iterable[str]] = tuple) -> Selection:
    """Return which files directly in `storage` are the checkpoint; see `choose`.

    nested: called when nothing is found, for paths in sub-folders that the message should mention.
    """
    if wanted.subfolder:
        raise ConfigError(f"subfolder {wanted.subfolder!r}: a storage lists one folder; open it at the sub-folder")
    return choose(
        storage.list(),
        lambda file: read_index(storage, file),
        wanted,
        stat=storage.stat,
        where=shown(storage.uri, 300),
        nested=nested,
    )


def select_file(storage: Storage, path: str) -> Selection:
    """Return the weight file at `path` as the checkpoint; the set of files where `path` is a shard index, or a part of
    a split GGUF model.

    format is "" where the name of a weight file does not tell. Raises LocateError, CorruptFile and UnsafeFile.
    """
    index = parse_index_name(path)
    file = storage.stat(path)
    if index is None:
        _refuse_empty(file)
        name = parse_weight_name(path)
        if name is not None and name.count is not None and FAMILIES["gguf"].takes(name):
            return _all_parts(storage, name)
        return Selection(format_of(path) or "", (file,), f"{shown(path)} was named")
    weight_map = read_index(storage, file)
    files = [f for f in _beside(storage, sorted(set(weight_map.values()))) if f.path != path]
    where = shown(storage.uri, 300)
    folder = FolderFiles.of(files, "", index.weights.variant, (), where=where, stat=storage.stat, nested=tuple)
    family = next(family for family in FAMILIES.values() if family.takes(index.weights))
    return _by_index(folder, family, index, weight_map)


def _all_parts(storage: Storage, name: WeightName) -> Selection:
    """Return the set of files that the split of which `name` is a part is made of."""
    where = shown(storage.uri, 300)
    files = _beside(storage, (_numbered(name, number) for number in range(1, (name.count or 0) + 1)))
    folder = FolderFiles.of(files, "", None, (), where=where, stat=storage.stat, nested=tuple)
    parts = [n for n in folder.weights if (n.stem, n.suffix, n.count) == (name.stem, name.suffix, name.count)]
    _refuse_incomplete(folder, name.count or 0, parts)
    reason = f"{shown(name.path)} was named, part of a complete set of {counted(len(parts), 'file')}"
    return _selection(folder, "gguf", [folder.files[n.path] for n in parts], reason, "not part of the set")


def _beside(storage: Storage, wanted: Iterable[str]) -> Sequence[File]:
    """Return the files directly in `storage`; where that may not be listed, those of the `wanted` that are there."""
    try:
        return storage.list()
    except AccessDenied:
        looked_up = (_if_there(storage, path) for path in islice(wanted, _MOST_LOOKED_UP))
        return [file for file in looked_up if file is not None]


def _if_there(storage: Storage, path: str) -> File | None:
    try:
        return storage.stat(path)
    except AccessDenied:
        raise
    except LocateError:
        return None


def choose(
    files: Sequence[File],
    read_index: IndexReader,
    wanted: Wanted = Wanted(),
    *,
    stat: Callable[[str], File] | None = None,
    where: str = "the listing",
    nested: Callable[[], Iterable[str]] = tuple,
) -> Selection:
    """Return which of `files` are the checkpoint, and why.

    An index decides over whatever lies beside it. Without one, a file with a canonical name, one complete set of
    numbered shards, or the plain files of one kind are taken; two sets that could each be meant are refused.

    stat: looks a shard up that the index names and the listing lacks (a nested one); None if the listing is
    recursive. where: the place, in words for messages. nested: as in `select`.

    Raises LocateError where nothing fits, with what lies there instead, or where shards are absent, by name;
    FormatError where it is ambiguous; CorruptFile for an empty weight file or a malformed index.
    """
    folder = FolderFiles.of(
        files, wanted.subfolder, wanted.variant, wanted.ignore_patterns, where=where, stat=stat, nested=nested
    )
    if wanted.allow_patterns is not None:
        return _by_patterns(folder, wanted.allow_patterns)
    stale: _StaleIndex | None = None
    for family in _families(folder, wanted):
        try:
            selection = _of_family(folder, family, read_index)
        except _StaleIndex as error:
            stale = stale or error
            continue
        if selection is not None:
            return selection if stale is None else _instead_of(stale, selection)
    raise LocateError(str(stale)) if stale is not None else _nothing(folder, wanted)


class _StaleIndex(LocateError):
    """An index of which not one file is there, so another set may be meant. `finding` is its message's first part."""

    def __init__(self, finding: str, rest: str) -> None:
        super().__init__(f"{finding}. {rest}")
        self.finding = finding


def _families(folder: FolderFiles, wanted: Wanted) -> list[Family]:
    names = list(LOAD_FORMATS[wanted.load_format])
    if wanted.load_format == "auto" and not folder.has("params.json"):
        # Only params.json makes it Mistral's own folder; otherwise a pickled HF set is more likely what is meant.
        names.append(names.pop(names.index("mistral")))
    families = [FAMILIES[name] for name in names]
    if wanted.load_format in ("auto", "hf") and not wanted.allow_pickle:
        return [family for family in families if not family.pickled]
    return families


def _of_family(folder: FolderFiles, family: Family, read_index: IndexReader) -> Selection | None:
    """Return the choice among the files of one family, or None if it has none."""
    index = _index_of(folder, family)
    if index is not None:
        return _by_index(folder, family, index, read_index(folder.find(index.path)))
    names = folder.weights_of(family)
    if not names:
        return None
    chosen, reason = _by_names(folder, family, names)
    files = [folder.files[n.path] for n in chosen]
    return replace(_selection(folder, family.format, files, reason, f"not {family.label}"), layout=family.layout)


def _index_of(folder: FolderFiles, family: Family) -> IndexName | None:
    indexes = sorted(folder.indexes_of(family), key=lambda index: _rank(index.weights.stem))
    if len(indexes) > 1 and _rank(indexes[0].weights.stem) == _rank(indexes[1].weights.stem):
        names = " and ".join(shown(index.path) for index in indexes)
        raise FormatError(f"{folder.where}: {names} each name a set of files: choose one with allow_patterns")
    return indexes[0] if indexes else None


def _rank(stem: str) -> int:
    return CANONICAL_STEMS.index(stem) if stem in CANONICAL_STEMS else len(CANONICAL_STEMS)


def _by_index(folder: FolderFiles, family: Family, index: IndexName, weight_map: dict[str, str]) -> Selection:
    shards = sorted(set(weight_map.values()), key=natural_key)
    _refuse_disagreeing_counts(index.path, shards)
    files, absent = _look_up(folder, [folder.inside(shard) for shard in shards])
    if absent:
        raise _absent(folder, index.path, shards, absent, stale=not files)
    reason = f"{shown(index.path)} names {counted(len(files), 'file')}"
    selection = _selection(folder, family.format, files, reason, f"not named by {shown(index.path)}")
    placed = {name: folder.inside(shard) for name, shard in weight_map.items()} if folder.path else weight_map
    return replace(selection, index=placed, index_file=index.path)


def _look_up(folder: FolderFiles, paths: Sequence[str]) -> tuple[list[File], dict[str, str]]:
    """Return the files at `paths`, and for each absent one what is known; it stops after `_MAX_ABSENT` of these."""
    files: list[File] = []
    absent: dict[str, str] = {}
    for path in paths:
        try:
            files.append(folder.find(path))
        except AccessDenied:
            raise  # it is there
        except LocateError as error:
            absent[path] = str(error)
            if len(absent) == _MAX_ABSENT:
                break
    return files, absent


def _absent(
    folder: FolderFiles, index: str, shards: Sequence[str], absent: dict[str, str], *, stale: bool
) -> LocateError:
    names = few(map(shown, absent), 5)
    count = f"{len(absent)}{' or more' if len(absent) == _MAX_ABSENT else ''}"
    share = "none of them is there" if stale else f"{count} of them {_is(len(absent))} not there"
    why = few(filter(None, absent.values()), 2, between="; ")
    found = f"{names}{f' ({why})' if why else ''}"
    text = f"{folder.where}: {shown(index)} names {counted(len(shards), 'file')} and {share}: {found}"
    rest = f"{folder.inventory()} {_ADVICE}"
    return _StaleIndex(text, rest) if stale else LocateError(f"{text}. {rest}")


def _refuse_disagreeing_counts(index: str, shards: Iterable[str]) -> None:
    """Raise CorruptFile if shards of one stem say that they are parts of sets of different sizes."""
    counts: dict[tuple[str, str | None], WeightName] = {}
    for shard in shards:
        name = parse_weight_name(shard)
        if name is None or name.count is None:
            continue
        first = counts.setdefault((posixpath.dirname(shard) + name.stem, name.variant), name)
        if first.count != name.count:
            raise CorruptFile(
                f"{shown(index)}: {shown(first.path)} and {shown(name.path)} are parts of sets of {first.count} and of"
                f" {name.count}: the index mixes two checkpoints"
            )


def _by_names(folder: FolderFiles, family: Family, names: Sequence[WeightName]) -> tuple[list[WeightName], str]:
    """Return the files that the names alone make the checkpoint, and why; there is no index."""
    if family.layout == FAMILIES["parts"].layout:
        names = complete_parts(names, where=folder.where, advice=f"{folder.inventory()} {_ADVICE}")
    sets = _sets(folder, family, names)
    if len(sets) > 1:
        listed = " or ".join(few((shown(n.path) for n in each), 2) for each in sets)
        raise FormatError(
            f"{folder.where}: no index says which of {len(sets)} sets of files is the checkpoint: {listed}. Remove"
            " one of them, or name its files with allow_patterns."
        )
    chosen = sets[0]
    if chosen[0].count is not None:
        return chosen, f"a complete set of {counted(len(chosen), 'file')} without an index"
    if len(chosen) == 1:
        return chosen, f"{shown(chosen[0].path)} is the {family.label} file"
    return chosen, f"all {counted(len(chosen), 'file')} of the kind {family.label}, without an index"


def _sets(folder: FolderFiles, family: Family, names: Sequence[WeightName]) -> list[list[WeightName]]:
    """Return the sets of files that could each be the checkpoint: every split, and the plain files."""
    splits: dict[tuple[str, int], list[WeightName]] = {}
    plain: list[WeightName] = []
    for name in names:
        if name.count is None:
            plain.append(name)
        else:
            splits.setdefault((name.stem, name.count), []).append(name)
    for (_, count), parts in splits.items():
        _refuse_incomplete(folder, count, parts)
    if family.whole:
        return [*splits.values(), *([name] for name in plain)]
    canonical = sorted((name for name in plain if name.stem in CANONICAL_STEMS), key=lambda name: _rank(name.stem))
    whole = canonical[:1] or plain
    return [*splits.values(), whole] if whole else list(splits.values())


def _refuse_incomplete(folder: FolderFiles, count: int, parts: Sequence[WeightName]) -> None:
    """Raise if `parts` are not exactly the numbers 1 to `count`, or 0 to `count` - 1."""
    numbers = {part.part for part in parts}
    first = parts[0]
    start = 0 if 0 in numbers else 1
    expected = range(start, start + count)
    missing = list(islice((number for number in expected if number not in numbers), 4))
    if missing:
        names = few((shown(_numbered(first, number)) for number in missing), 3)
        raise LocateError(
            f"{folder.where}: the set that {shown(first.path)} belongs to is incomplete: {len(parts)} of {count} files"
            f" are there, without {names}. {folder.inventory()} {_ADVICE}"
        )
    if len(parts) != count:
        raise FormatError(
            f"{folder.where}: {len(parts)} files for {count} numbers:"
            f" {few((shown(p.path) for p in parts), 5)}; remove what does not belong to the set"
        )


def _numbered(name: WeightName, number: int) -> str:
    """Return the path of another part of the set that `name` belongs to."""
    return re.sub(r"-(\d+)-of-", lambda m: f"-{number:0{len(m[1])}}-of-", name.path)


def _by_patterns(folder: FolderFiles, patterns: Sequence[str]) -> Selection:
    """Return the weight files that `patterns` name, whatever index or role they have."""
    hits = [name for name in folder.weights if matches_any(name.path, patterns)]
    if not hits:
        raise LocateError(
            f"{folder.where}: no weight file matches allow_patterns {list(patterns)}. {folder.inventory()}"
        )
    best = next(f.format for f in FAMILIES.values() if any(format_of(n.path) == f.format for n in hits))
    files = [folder.files[name.path] for name in hits if format_of(name.path) == best]
    reason = f"named by allow_patterns {list(patterns)}"
    selection = _selection(folder, best, files, reason, "not named by allow_patterns")
    parts = FAMILIES["parts"]
    return replace(selection, layout=parts.layout) if all(map(parts.takes, hits)) else selection


def _selection(folder: FolderFiles, format: str, files: Iterable[File], reason: str, else_reason: str) -> Selection:
    chosen = [folder.find(file.path) for file in sorted(files, key=lambda file: natural_key(file.path))]
    for file in chosen:
        _refuse_empty(file)
    return Selection(format, tuple(chosen), reason, ignored=folder.left_out({f.path for f in chosen}, else_reason))


def _refuse_empty(file: File) -> None:
    if not file.size:
        raise CorruptFile(f"{shown(file.path)}: 0 bytes, an interrupted download or copy: fetch it again")


def _instead_of(stale: _StaleIndex, selection: Selection) -> Selection:
    files = [selection.index_file] if selection.index_file else [file.path for file in selection.files[:3]]
    used = ", ".join(map(shown, files))
    return replace(selection, warnings=(*selection.warnings, f"{stale.finding}; {used} is used instead"))


def _nothing(folder: FolderFiles, wanted: Wanted) -> LocateError:
    families = _families(folder, wanted)
    kinds = ", ".join(family.label for family in families)
    asked = f" of variant {wanted.variant!r}" if wanted.variant else ""
    text = f"{folder.where}: no weights{asked} for load_format {wanted.load_format!r} ({kinds}). {folder.inventory()}"
    return LocateError(f"{text}{folder.hint(families)}{_ADVICE_FOR.get(wanted.load_format, '')}")


def _is_plain(path: str) -> bool:
    plain = posixpath.normpath(path) == path != "." and "\0" not in path
    return plain and not path.startswith("/") and ".." not in path.split("/")


def _is(count: int) -> str:
    return "is" if count == 1 else "are"
