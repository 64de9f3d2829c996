"""Sharded states: folders into which every rank wrote the tensors that it has. Chooses files, and makes catalogues.

One rank's files hold parts of tensors. With the manifests of all ranks they are read as whole tensors, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from tensorferry.core.amounts import counted, few
from tensorferry.core.catalogue import Catalogue, Span, TensorEntry
from tensorferry.errors import ConfigError, CorruptFile, FormatError, LocateError, shown
from tensorferry.formats.base import Selection
from tensorferry.formats.sharded_state_join import alias_entries, joined_entries
from tensorferry.formats.sharded_state_manifest import FORMAT, RankManifest, read_manifest
from tensorferry.formats.sharded_state_names import (
    PartNames,
    RankNumbers,
    manifest_name,
    manifests_in,
    written_by_a_rank,
)
from tensorferry.formats.sniff import SNIFF_BYTES, describe_foreign
from tensorferry.storage.base import File, Storage
from tensorferry.storage.reading import read_bytes

__all__ = [
    "POST_PROCESSED",
    "join",
    "joined",
    "one_rank",
    "rank_catalogue",
    "read_all",
    "select_all",
    "select_rank",
    "select_state",
]

POST_PROCESSED = "tensorferry.post_processed"
"""In the metadata of a catalogue: the names of the modules that had been post-processed, as a list in JSON."""


def select_state(storage: Storage, otherwise: Callable[[], Selection]) -> Selection:
    """Return the files of a whole state: of all ranks where there are manifests, of the only one where there are none.

    Raises LocateError where a rank's files are missing, ConfigError where several ranks have files and nothing says how
    they go together, and what `read_all` raises.
    """
    files = storage.list()
    if not manifests_in(files):
        return _select_only(storage, files)
    return select_all(storage, read_all(storage))


def select_all(storage: Storage, manifests: Sequence[RankManifest]) -> Selection:
    """Return the files that the manifests of all ranks name; raises as `select_rank` does."""
    chosen = [file for manifest in manifests for file in _files_of(storage, manifest)]
    sizes = ", ".join(f"{what} {size}" for what, size in manifests[0].ranks.sizes.items() if size > 1)
    reason = f"{counted(len(chosen), 'file')} of {counted(len(manifests), 'rank')}, which their manifests name"
    reason += f"; saved for {sizes}" if sizes else ""
    return Selection("safetensors", tuple(chosen), reason, layout="sharded-state")


def _select_only(storage: Storage, files: Sequence[File]) -> Selection:
    names = PartNames.of(None, RankNumbers())
    others = [f.path for f in files if written_by_a_rank(f.path) and names.number(f.path) is None]
    if others:
        listed = few(map(shown, others), 3)
        raise ConfigError(
            f"{shown(storage.uri, 300)}: several ranks have files ({listed}), and there is"
            " no manifest that says how they go together: load them rank by rank, with LoadConfig(parallel=...) and"
            " load_format 'sharded_state'"
        )
    return select_rank(storage, names)


def select_rank(storage: Storage, names: PartNames, manifest: RankManifest | None = None) -> Selection:
    """Return the files of one rank, those that its manifest names where it has one.

    Raises LocateError where files are missing, naming what is there instead; CorruptFile for a file of another size
    than the manifest says.
    """
    where = shown(storage.uri, 300)
    if manifest is not None:
        chosen = _files_of(storage, manifest)
        reason = f"{manifest_name(manifest.ranks)} names {counted(len(chosen), 'file')}"
    else:
        chosen = [storage.stat(file.path) for file in names.parts(storage.list(), where)]
        reason = f"{counted(len(chosen), 'file')} of {names.ranks}, without a manifest"
    return Selection("safetensors", tuple(chosen), reason, layout="sharded-rank")


def _files_of(storage: Storage, manifest: RankManifest) -> list[File]:
    there = {file.path for file in storage.list()}
    found = []
    for name, size in manifest.files.items():
        if name not in there:
            raise LocateError(
                f"{shown(storage.uri, 300)}: {manifest_name(manifest.ranks)} names {shown(name)}, which is not there"
            )
        file = storage.stat(name)
        if file.size != size:
            head = read_bytes(storage, name, 0, min(file.size, SNIFF_BYTES))
            what = None if head.startswith(b"{", 8) else describe_foreign(head)
            raise CorruptFile(
                f"{shown(name)}: {file.size:,} bytes, and {manifest_name(manifest.ranks)} says {size:,}: it is"
                f" {what or 'of another save, or cut off'}"
            )
        found.append(file)
    return found


def read_all(storage: Storage) -> list[RankManifest]:
    """Return the manifests of all ranks, in their order.

    Raises CorruptFile and UnknownFormat for one that cannot be believed, FormatError where they are not of one state,
    LocateError where a rank has none.
    """
    manifests = [read_manifest(storage, file) for file in manifests_in(storage.list())]
    where = shown(storage.uri, 300)
    first = manifests[0]
    members = {first.ranks.member: first}
    for other in manifests[1:]:
        _refuse_unlike(where, first, other)
        if members.setdefault(other.ranks.member, other) is not other:
            raise FormatError(f"{where}: {other.ranks} has two manifests: remove one")
    if len(members) < first.ranks.members:
        stages, inside = first.ranks.pp_size, first.ranks.members // first.ranks.pp_size
        absent = next((p, r) for p in range(stages) for r in range(inside) if (p, r) not in members)
        stage = f"stage {absent[0]}, " if stages > 1 else ""
        raise LocateError(
            f"{where}: it was saved by {first.ranks.members} ranks, and {counted(len(members), 'manifest')} are there:"
            f" {stage}rank {absent[1]} has none"
        )
    return [members[key] for key in sorted(members)]


def _refuse_unlike(where: str, one: RankManifest, other: RankManifest) -> None:
    def differ(what: str, first: object, second: object) -> FormatError:
        return FormatError(
            f"{where}: manifests of different states: {what} {first} for {one.ranks}, {second} for {other.ranks}:"
            " remove what does not belong to the state"
        )

    for what, size in one.ranks.sizes.items():
        if other.ranks.sizes[what] != size:
            raise differ(what, size, other.ranks.sizes[what])
    for what in ("label", "quantization"):
        if getattr(one, what) != getattr(other, what):
            raise differ(what, *(shown(repr(getattr(m, what))) for m in (one, other)))
    if (one.post_processed is None) != (other.post_processed is None):
        words = ["before post-processing" if m.post_processed is None else "after it" for m in (one, other)]
        raise differ("saved", *words)


def one_rank(storage: Storage, selection: Selection, parts: Sequence[Catalogue]) -> Catalogue:
    """Return what the files of one rank hold that has no manifest; see `opening.LAYOUTS`."""
    return rank_catalogue(None, parts)


def rank_catalogue(manifest: RankManifest | None, parts: Sequence[Catalogue]) -> Catalogue:
    """Return one catalogue of a rank's parts, held against the manifest.

    Raises FormatError for a tensor that is there twice; CorruptFile for parts that are of another save than the
    manifest, or of one that did not end, and for tensors that are not as it says.
    """
    _refuse_torn(manifest, parts)
    whole = Catalogue(
        (entry for part in parts for entry in part.values()),
        format="sharded_state",
        files=[file for part in parts for file in part.files],
    )
    if manifest is not None:
        _refuse_other_tensors(manifest, whole)
    return whole


def _refuse_torn(manifest: RankManifest | None, parts: Sequence[Catalogue]) -> None:
    for part in parts:
        state = part.metadata.get(FORMAT)
        if manifest is None and state is not None:
            raise CorruptFile(
                f"{shown(part.files[0])} was written by tensorferry, and the manifest is not there: the save did not"
                " end, or not all of its files were copied; save it again"
            )
        if manifest is not None and state != manifest.state:
            raise CorruptFile(
                f"{shown(part.files[0])} is of another save than {manifest_name(manifest.ranks)}: a save into this"
                " folder did not end, or files were mixed; save it again"
            )


def _refuse_other_tensors(manifest: RankManifest, whole: Catalogue) -> None:
    name = manifest_name(manifest.ranks)
    for tensor in manifest.tensors.keys() ^ whole.keys():
        has, lacks = (name, "its files lack it") if tensor in manifest.tensors else ("a file", f"{name} does not")
        raise CorruptFile(f"{has} has the tensor {shown(tensor)!r}, and {lacks}")
    for tensor, saved in manifest.tensors.items():
        entry = whole[tensor]
        if (entry.dtype, entry.shape) != (saved.dtype, saved.shape):
            raise CorruptFile(
                f"{shown(entry.files[0])}: tensor {shown(tensor)!r} is {entry.dtype} {list(entry.shape)}, and {name}"
                f" says {saved.dtype} {list(saved.shape)}"
            )


def join(storage: Storage, selection: Selection, parts: Sequence[Catalogue]) -> Catalogue:
    """Return the whole tensors that all ranks together hold, under every name that they have; see `opening.LAYOUTS`."""
    manifests = read_all(storage)
    whole = joined(manifests, parts)
    aliases = {alias: owner for manifest in manifests for alias, owner in manifest.aliases.items()}
    processed = list(dict.fromkeys(name for m in manifests for name in m.post_processed or ()))
    named = few((shown(name) or "the model" for name in processed), 3)
    note = f"saved after post-processing ({named}), which must not be run again: the loader sharded_state leaves it out"
    return Catalogue(
        (*whole.values(), *alias_entries(whole, manifests, aliases)),
        format=whole.format,
        files=whole.files,
        metadata={POST_PROCESSED: json.dumps(processed)} if processed else {},
        notes=[note] if processed else [],
    )


def joined(manifests: Sequence[RankManifest], parts: Sequence[Catalogue]) -> Catalogue:
    """Return the whole tensors that ranks hold, of which `parts` are the files, rank by rank.

    A tensor of a layer that declares slots comes as one entry for each, called ``parameter[slot]``. Raises FormatError
    where the state cannot be put together, saying why.
    """
    left = list(parts)
    wholes: list[Catalogue] = []
    for manifest in manifests:
        count = len(manifest.parts)
        wholes.append(rank_catalogue(manifest, left[:count]))
        del left[:count]
    spans = [{name: _span(entry) for name, entry in whole.items()} for whole in wholes]
    files = [file for part in parts for file in part.files]
    return Catalogue(joined_entries(manifests, spans), format="sharded_state", files=files)


def _span(entry: TensorEntry) -> Span:
    span = entry.span
    if span is None:
        raise CorruptFile(f"tensor {shown(entry.name)!r} does not lie in one piece")
    return span
