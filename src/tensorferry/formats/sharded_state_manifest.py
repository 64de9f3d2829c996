"""The manifest of one rank's part of a sharded state: what was saved, as what, for which ranks. Reads and writes JSON.

Everything in it is checked before it is believed; whether the files are as it says, `sharded_state` looks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any

from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.dtypes import DType
from tensorferry.core.target import Slot, TargetTensor
from tensorferry.core.transforms import TensorSpec
from tensorferry.errors import ConfigError, CorruptFile, UnknownFormat, shown
from tensorferry.formats.safetensors import MAX_RANK, SAFETENSORS_DTYPES, fills_bytes
from tensorferry.formats.sharded_state_names import PartNames, RankNumbers, manifest_name
from tensorferry.formats.strict_json import JsonStream, json_kind, refuse_ambiguous
from tensorferry.storage.base import File, Storage
from tensorferry.storage.reading import read_bytes

__all__ = ["FORMAT", "MAX_MANIFEST_BYTES", "RankManifest", "SavedTensor", "manifest_json", "read_manifest"]

FORMAT = "tensorferry-sharded-state"
"""What a manifest calls itself, and the key under which each part names the save that it belongs to."""

MAX_MANIFEST_BYTES = 64 << 20
"""Larger manifests are refused unread; 90,000 tensors need some 20 MB."""

_VERSION = 1
_MEMBER_LIMIT = 4 << 20  # characters of anything but the tensors, and of one tensor
_MAX_DEPTH = 100  # or names of nothing but dots would take forever
_MAX_TENSORS = 1 << 18
_MAX_PARTS = 1 << 16
_WINDOW = 1 << 20
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor as one rank saved it.

    slots: how its layer lays it out, or None where no layer says; default: what fills the rest of it. buffer: whether
    it is one. digest: sha256 of its bytes, where no slots tell the copies of several ranks from parts. processed:
    whether it may have been laid out anew after it was loaded, so that slots say nothing of it.
    """

    dtype: DType
    shape: Shape
    slots: Mapping[str, Slot] | None = None
    default: float | None = None
    buffer: bool = False
    digest: str = ""
    processed: bool = False

    @property
    def spec(self) -> TensorSpec:
        """Its type and shape."""
        return TensorSpec(self.dtype, self.shape)

    def alone(self, name: str) -> TargetTensor:
        """Return it as something to be filled with just what was saved, whatever it is a part of."""
        return TargetTensor.plain(name, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class RankManifest:
    """What one rank saved.

    pattern: of the names of its parts; parts: the size of each, in bytes. state: the save that they belong to, a text
    that no two have in common. label: what the ranks of one save were given alike. quantization: the method of the
    model; methods: of its modules. post_processed: the modules whose hooks had run, None if the state is from before.
    aliases: tied names to what they are tied to. changed: tensors that hooks have replaced, added or removed, to what
    they were before, None for nothing. unset: names that are registered and None, in modules with hooks.
    """

    ranks: RankNumbers
    pattern: str
    parts: tuple[int, ...]
    state: str
    tensors: Mapping[str, SavedTensor]
    label: str = ""
    quantization: str | None = None
    methods: Mapping[str, str] = field(default_factory=dict)
    post_processed: tuple[str, ...] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    changed: Mapping[str, TensorSpec | None] = field(default_factory=dict)
    unset: tuple[str, ...] = ()

    @property
    def files(self) -> dict[str, int]:
        """The names of the parts in order, and the size of each."""
        names = PartNames(self.pattern, self.ranks)
        return {names.name(n): size for n, size in enumerate(self.parts)}


def manifest_json(manifest: RankManifest) -> Iterator[bytes]:
    """Yield `manifest` as JSON, piece by piece; the tensors come last, one a line."""
    head = {
        "format": FORMAT,
        "version": _VERSION,
        "state": manifest.state,
        "label": manifest.label,
        "parallel": manifest.ranks._asdict(),
        "pattern": manifest.pattern,
        "parts": list(manifest.parts),
        "quantization": manifest.quantization,
        "methods": dict(manifest.methods),
        "post_processed": None if manifest.post_processed is None else list(manifest.post_processed),
        "aliases": dict(manifest.aliases),
        "changed": {name: spec and _spec_out(spec) for name, spec in manifest.changed.items()},
        "unset": list(manifest.unset),
    }
    lines = [f"{json.dumps(key)}: {_dumped(value)}" for key, value in head.items()]
    yield ("{" + ",\n".join(lines) + ',\n"tensors": {').encode()
    for n, (name, tensor) in enumerate(manifest.tensors.items()):
        yield f"{',' if n else ''}\n{json.dumps(name)}: {_dumped(_tensor_out(tensor))}".encode()
    yield b"\n}}\n"


def read_manifest(storage: Storage, file: File) -> RankManifest:
    """Return the manifest in `file`, checked but for what it says of other files.

    It is read in pieces up to its first fault. Raises CorruptFile where it is malformed or contradicts itself or its
    name, UnknownFormat for a version that is not known here.
    """
    what = f"{shown(file.path)} ({shown(storage.uri, 300)})"
    if not 0 < file.size <= MAX_MANIFEST_BYTES:
        raise CorruptFile(f"{what}: {file.size:,} bytes; a manifest has 1 to {MAX_MANIFEST_BYTES:,}")
    stream = JsonStream(_windows(storage, file), what=what)
    fields: dict[str, Any] = {}
    for key, value in stream.members(limit=_MEMBER_LIMIT, descend="tensors"):
        if key in fields:
            raise CorruptFile(f"{what}: duplicate key {shown(key)!r}")
        refuse_ambiguous(value, what=what)
        fields[key] = value
        if key == "version":
            _refuse_other(fields, what)
        elif key == "tensors":
            _refuse_other(fields, what)
            fields[key] = _tensors(stream, what)
    stream.end()
    _refuse_other(fields, what)
    try:
        manifest = _manifest(fields)
    except ValueError as error:
        raise CorruptFile(f"{what}: {error}") from None
    if manifest_name(manifest.ranks) != file.path:
        raise CorruptFile(
            f"{what}: it is the manifest of {manifest.ranks}, which is called {manifest_name(manifest.ranks)}"
        )
    return manifest


def _windows(storage: Storage, file: File) -> Iterator[bytes]:
    for at in range(0, file.size, _WINDOW):
        yield read_bytes(storage, file.path, at, min(_WINDOW, file.size - at))


def _refuse_other(fields: Mapping[str, Any], what: str) -> None:
    if fields.get("format") != FORMAT:
        raise CorruptFile(f"{what}: its format is not {FORMAT!r}: no manifest of a sharded state")
    version = fields.get("version")
    if isinstance(version, bool) or version != _VERSION:
        found = shown(str(version))
        raise UnknownFormat(f"{what}: version {found}, and version {_VERSION} is read here: use a newer tensorferry")


def _tensors(stream: JsonStream, what: str) -> dict[str, SavedTensor]:
    if (begin := stream.peek()) != "{":
        raise CorruptFile(f"{what}: tensors must be a JSON object, found {begin!r}")
    found: dict[str, SavedTensor] = {}
    for name, value in stream.members(limit=_MEMBER_LIMIT):
        if name in found or len(found) == _MAX_TENSORS:
            fault = f"duplicate key {shown(name)!r}" if name in found else f"over {_MAX_TENSORS:,} tensors"
            raise CorruptFile(f"{what}: {fault}")
        refuse_ambiguous(value, what=what)
        try:
            found[name] = _tensor_in(value)
        except ValueError as error:
            raise CorruptFile(f"{what}: tensor {shown(name)!r}: {error}") from None
    return found


def _manifest(fields: Mapping[str, Any]) -> RankManifest:
    ranks = _ranks_in(fields.get("parallel"))
    try:
        pattern = PartNames.of(_text(fields.get("pattern"), "pattern"), ranks).pattern
    except ConfigError as error:
        raise ValueError(str(error)) from None
    processed = fields.get("post_processed")
    manifest = RankManifest(
        ranks=ranks,
        pattern=pattern,
        parts=_numbers(fields.get("parts"), "parts", most=_MAX_PARTS),
        state=_text(fields.get("state"), "state"),
        tensors=fields.get("tensors") or {},
        label=_text(fields.get("label"), "label"),
        quantization=None if fields.get("quantization") is None else _text(fields["quantization"], "quantization"),
        methods={n: _text(m, "methods") for n, m in _members(fields.get("methods"), "methods").items()},
        post_processed=None if processed is None else _texts(processed, "post_processed"),
        aliases={n: _text(o, "aliases") for n, o in _members(fields.get("aliases"), "aliases").items()},
        changed={n: s and _spec_in(s) for n, s in _members(fields.get("changed"), "changed").items()},
        unset=_texts(fields.get("unset"), "unset"),
    )
    _refuse_contradictions(manifest)
    return manifest


def _refuse_contradictions(manifest: RankManifest) -> None:
    if not manifest.parts:
        raise ValueError("parts: at least one is expected")
    if len(manifest.parts) > 1 and PartNames(manifest.pattern, manifest.ranks).one_file:
        raise ValueError("several parts, and a pattern without {part}")
    for alias, owner in manifest.aliases.items():
        if owner not in manifest.tensors or alias in manifest.tensors:
            raise ValueError(f"{shown(alias)!r} is tied to {shown(owner)!r}, and one of them alone is to be saved")
    processed = set(manifest.post_processed or ())
    for name in (*manifest.changed, *manifest.unset):
        if processed.isdisjoint(_modules_around(name)):
            raise ValueError(f"{shown(name)!r} was changed by post-processing, and no module around it was processed")


def _modules_around(name: str) -> Iterator[str]:
    """Yield the names of the modules that a tensor is in, the whole model last, up to a depth that no model has."""
    for _ in range(_MAX_DEPTH):
        if not name:
            return
        name = name.rpartition(".")[0]
        yield name


def _dumped(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _tensor_out(tensor: SavedTensor) -> dict[str, Any]:
    out: dict[str, Any] = {"dtype": tensor.dtype.name, "shape": tensor.shape}
    if tensor.slots is not None:
        out["slots"] = {name: _slot_out(slot) for name, slot in tensor.slots.items()}
    if tensor.default is not None:
        out["default"] = tensor.default if isfinite(tensor.default) else str(tensor.default)
    out |= {key: value for key in ("buffer", "digest", "processed") if (value := getattr(tensor, key))}
    return out


def _tensor_in(value: object) -> SavedTensor:
    fields = _members(value, "it", known=("dtype", "shape", "slots", "default", "buffer", "digest", "processed"))
    spec = _spec_in([fields.get("dtype"), fields.get("shape")])
    slots = None
    if "slots" in fields:
        slots = {name: _slot_in(slot, spec.shape) for name, slot in _members(fields["slots"], "slots").items()}
    for flag in ("buffer", "processed"):
        if not isinstance(fields.get(flag, False), bool):
            raise ValueError(f"{flag}: true or false is expected")
    return SavedTensor(
        spec.dtype,
        spec.shape,
        slots,
        _default_in(fields.get("default")),
        fields.get("buffer", False),
        _text(fields.get("digest", ""), "digest"),
        fields.get("processed", False),
    )


def _default_in(value: object) -> float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    if value in ("inf", "-inf", "nan"):
        return float(str(value))
    raise ValueError(f"default: a number is expected, not {json_kind(value)}")


def _spec_out(spec: TensorSpec) -> list[Any]:
    return [spec.dtype.name, list(spec.shape)]


def _spec_in(value: object) -> TensorSpec:
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str):
        raise ValueError("a type and a shape are expected")
    dtype = SAFETENSORS_DTYPES.get(value[0])
    if dtype is None:
        raise ValueError(f"the type {shown(value[0])!r} is none of safetensors")
    shape = _numbers(value[1], "shape", most=MAX_RANK)
    if prod(shape) > _INT64_MAX // max(dtype.block_bytes, 1) or not fills_bytes(dtype, shape):
        raise ValueError(f"{dtype} of shape {list(shape)} is no tensor")
    return TensorSpec(dtype, shape)


def _slot_out(slot: Slot) -> list[Any]:
    return [*_region_out(slot.local), slot.logical, *_region_out(slot.window)]


def _region_out(region: Region) -> list[Any]:
    return [region.view, region.box.start, region.box.stop]


def _slot_in(value: object, shape: Shape) -> Slot:
    if not isinstance(value, list) or len(value) != 7:
        raise ValueError("a slot is seven lists of numbers: view, start and stop, logical shape, view, start and stop")
    lists = [_numbers(numbers, "slot", most=MAX_RANK) for numbers in value]
    local, window = (Region(view, Box(start, stop)) for view, start, stop in (lists[:3], lists[4:]))
    if prod(lists[3]) > _INT64_MAX or not local.fits(shape) or not window.fits(lists[3]):
        raise ValueError(f"slot {local} of shape {list(shape)}, {window} of {list(lists[3])}: not inside of these")
    return Slot(local, lists[3], window)


def _ranks_in(value: object) -> RankNumbers:
    fields = _members(value, "parallel", known=RankNumbers._fields)
    if any(isinstance(n, bool) or not isinstance(n, int) for n in fields.values()):
        raise ValueError("parallel: numbers are expected")
    ranks = RankNumbers(**fields)
    if ranks.fault:
        raise ValueError(f"parallel: {ranks.fault}")
    return ranks


def _members(value: object, what: str, *, known: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return an object as a dict; it comes as pairs, or as a list where it is none."""
    if not isinstance(value, tuple):
        raise ValueError(f"{what}: an object is expected, found {json_kind(value)}")
    found = dict(value)
    odd = [key for key in found if known is not None and key not in known]
    if odd:
        raise ValueError(f"{what}: there is no field {shown(odd[0])!r}")
    return found


def _numbers(value: object, what: str, *, most: int) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"{what}: a list of at most {most} numbers is expected")
    if any(isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= _INT64_MAX for n in value):
        raise ValueError(f"{what}: whole numbers from 0 up are expected")
    return tuple(value)


def _texts(value: object, what: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{what}: a list is expected, found {json_kind(value)}")
    return tuple(_text(item, what) for item in value)


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what}: text is expected, found {json_kind(value)}")
    return value
