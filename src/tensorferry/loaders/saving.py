"""Writes sharded states: what one rank has of a model, as it is in memory, and the manifest that says what that is."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tensorferry.checks import expect
from tensorferry.config import ParallelConfig
from tensorferry.core.target import TargetTensor, owner_of
from tensorferry.errors import ConfigError, FormatError, shown
from tensorferry.formats.safetensors import SAFETENSORS_DTYPES
from tensorferry.formats.safetensors_write import write_safetensors
from tensorferry.formats.sharded_state_manifest import FORMAT, RankManifest, SavedTensor, manifest_json
from tensorferry.formats.sharded_state_names import PartNames, RankNumbers, manifest_name
from tensorferry.formats.writing import NewTensor, new_file
from tensorferry.modules.describe import Place, declares_slots, describe, places
from tensorferry.modules.distributed import is_dtensor
from tensorferry.modules.finalize import hooked_modules
from tensorferry.modules.processed import changes_of
from tensorferry.numerics.memory import bytes_of

__all__ = ["method_of", "ranks_of", "save_sharded_state"]

_CHUNK = 16 << 20


def save_sharded_state(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    parallel: ParallelConfig | None = None,
    max_part_size: int | None = 5 << 30,
    pattern: str | None = None,
    post_processed: bool = True,
    quantization: str | None = None,
    label: str = "",
) -> tuple[str, ...]:
    """Write this rank's parameters and persistent buffers into `folder`, which is made; return the names of the files.

    Every rank calls it with its own `parallel`, in any order or at once. The files are vLLM's: safetensors in parts of
    at most `max_part_size` bytes (None for one part), called after `pattern`, and last a manifest of this rank.
    Tensors are copied in pieces of 16 MiB. Tied tensors are written once, and the manifest says what is tied.

    post_processed: whether the ``process_weights_after_loading`` hooks of the model have run, as they have once it is
    loaded; loading the state then leaves them out. quantization: the method, which is compared when it is loaded.
    label: a text that all ranks of one save give alike, such as a step of training, so that ranks of different saves
    are not put together.

    What a rank has saved there before is replaced: its manifest goes first, so that a save that is killed leaves what
    cannot be taken for a state. One folder holds one state.

    Raises ConfigError for a pattern that does not suit the ranks, for DTensors and tensors on meta; FormatError for a
    type that safetensors lacks, or tensors of a post-processed module that are neither parameters nor buffers; OSError.
    """
    _check_arguments(model, max_part_size, post_processed, label)
    ranks = ranks_of(parallel or ParallelConfig())
    names = PartNames.of(pattern, ranks)
    saved = _owners(model)
    _refuse_unsavable(model, saved, post_processed)
    split = list(_parts(saved, max_part_size))
    if len(split) > 1 and names.one_file:
        raise ConfigError(f"pattern {shown(names.pattern)!r} lacks {{part}}, and there are {len(split)} parts")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return _Save(path, model, ranks, names, saved, post_processed).write(split, quantization, label)


def ranks_of(parallel: ParallelConfig) -> RankNumbers:
    """Return the ranks that a configuration says, as formats know them."""
    return RankNumbers(*(getattr(parallel, field) for field in RankNumbers._fields))


def method_of(module: nn.Module) -> str:
    """Return what quantizes a module, by the name of its class, or ""."""
    method = getattr(module, "quant_method", None)
    return "" if method is None else type(method).__name__


class _Owner(NamedTuple):
    """A tensor to save: where it hangs, what it is, and the other names of it."""

    place: Place
    tensor: TargetTensor
    aliases: tuple[str, ...]


def _owners(model: nn.Module) -> dict[str, _Owner]:
    """Return what to save, by the least of the names of each tensor, under which vLLM expects it, in module order."""
    target = describe(model)
    names: dict[str, list[str]] = {}
    for name in target:
        names.setdefault(owner_of(target, name), []).append(name)
    where = {place.name: place for place in places(model)}
    return {min(tied): _Owner(where[owner], target[owner], tuple(sorted(tied)[1:])) for owner, tied in names.items()}


class _Save:
    """One rank's save: writes the parts, and keeps what the manifest needs."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        ranks: RankNumbers,
        names: PartNames,
        saved: Mapping[str, _Owner],
        post_processed: bool,
    ) -> None:
        self.folder, self.model, self.ranks, self.names, self.saved = folder, model, ranks, names, saved
        self.hooked = hooked_modules(model) if post_processed else None
        self.state = secrets.token_hex(16)
        self.declared = _declared(model)
        self.digests: dict[str, str] = {}

    def write(self, split: Sequence[Sequence[str]], quantization: str | None, label: str) -> tuple[str, ...]:
        """Write the parts that `split` names the tensors of, then the manifest."""
        manifest = self.folder / manifest_name(self.ranks)
        manifest.unlink(missing_ok=True)
        sizes = [self._write_part(n, part) for n, part in enumerate(split)]
        self._remove_stale(len(sizes))
        with new_file(manifest) as out:
            for piece in manifest_json(self._manifest(sizes, quantization, label)):
                out.write(piece)
        return (*(self.names.name(n) for n in range(len(sizes))), manifest.name)

    def _write_part(self, number: int, part: Sequence[str]) -> int:
        path = self.folder / self.names.name(number)
        specs = {name: self.saved[name].tensor for name in part}
        new = {name: NewTensor(spec.dtype, spec.shape, self._chunks(name)) for name, spec in specs.items()}
        write_safetensors(path, new, metadata={"format": "pt", FORMAT: self.state})
        return path.stat().st_size

    def _remove_stale(self, count: int) -> None:
        """Remove parts of an earlier save of this rank that had more of them: readers go by the names."""
        for path in self.folder.iterdir():
            number = self.names.number(path.name)
            if number is not None and number >= count and path.is_file():
                path.unlink()

    def _chunks(self, name: str) -> Iterator[memoryview]:
        digest = hashlib.sha256() if self._compares(name) else None
        for chunk in _bytes(self.saved[name].place.tensor):
            if digest is not None:
                digest.update(chunk)
            yield chunk
        if digest is not None:
            self.digests[name] = digest.hexdigest()

    def _compares(self, name: str) -> bool:
        return self.ranks.members > 1 and self.saved[name].place.name not in self.declared

    def _manifest(self, sizes: Sequence[int], quantization: str | None, label: str) -> RankManifest:
        methods = {name: method_of(module) for name, module in self.model.named_modules() if method_of(module)}
        changes = {} if self.hooked is None else changes_of(self.model)
        return RankManifest(
            ranks=self.ranks,
            pattern=self.names.pattern,
            parts=tuple(sizes),
            state=self.state,
            tensors={name: self._entry(name, changes) for name in self.saved},
            label=label,
            quantization=quantization,
            methods=methods,
            post_processed=None if self.hooked is None else tuple(self.hooked),
            aliases={alias: name for name, owner in self.saved.items() for alias in owner.aliases},
            changed=changes,
            unset=tuple(_unset(self.hooked or {})),
        )

    def _entry(self, name: str, changes: Mapping[str, object]) -> SavedTensor:
        place, tensor, aliases = self.saved[name]
        processed = any(n in changes or _relaid(n, self.hooked or {}) for n in (name, *aliases))
        declares = place.name in self.declared and not processed
        return SavedTensor(
            tensor.dtype,
            tensor.shape,
            slots=dict(tensor.slots) if declares else None,
            default=tensor.default if declares else None,
            buffer=not place.is_parameter,
            digest=self.digests.get(name, ""),
            processed=processed,
        )


def _check_arguments(model: object, max_part_size: object, post_processed: object, label: object) -> None:
    expect("model", model, nn.Module, "an nn.Module")
    expect("post_processed", post_processed, bool, "true or false")
    expect("label", label, str, "text")
    if max_part_size is not None:
        expect("max_part_size", max_part_size, int, "a number of bytes")
        if isinstance(max_part_size, int) and max_part_size < 1:
            raise ConfigError(f"max_part_size {max_part_size}: at least 1 is expected")


def _refuse_unsavable(model: nn.Module, saved: Mapping[str, _Owner], post_processed: bool) -> None:
    if not saved:
        raise ConfigError(f"{type(model).__name__} has no parameters and no persistent buffers to save")
    for name, (place, tensor, _) in saved.items():
        if place.tensor.is_meta:
            raise ConfigError(f"{name} is on meta, where tensors have no values: load the model before it is saved")
        if is_dtensor(place.tensor):
            raise ConfigError(
                f"{name} is a DTensor, and a sharded state does not say how that lies on the ranks: save the model by "
                "torch.distributed.checkpoint, or the values of full_tensor()"
            )
        if SAFETENSORS_DTYPES.get(tensor.dtype.name) != tensor.dtype:
            raise FormatError(f"{name} is of the type {tensor.dtype}, which safetensors lacks; nothing was written")
    kept = {id(p.tensor) for p in places(model)}
    for name, module in hooked_modules(model).items() if post_processed else ():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and id(value) not in kept:
                raise FormatError(
                    f"{name + '.' if name else ''}{attribute} is a tensor of a post-processed module and neither a"
                    " parameter nor a buffer, so that a state would lack it: register it as a buffer"
                )


def _declared(model: nn.Module) -> set[str]:
    """Return the names of the tensors whose layers say how they are laid out."""
    found: set[str] = set()
    for prefix, module in model.named_modules():
        if declares_slots(module):
            found |= {f"{prefix}.{leaf}" if prefix else leaf for leaf in module.tensor_slots()}
    return found


def _relaid(name: str, hooked: Mapping[str, nn.Module]) -> bool:
    """Whether a hook may have laid a tensor out anew, as no module around it says that it does not."""
    return any(not prefix or name.startswith(prefix + ".") for prefix, m in hooked.items() if not _keeps_layout(m))


def _keeps_layout(module: Any) -> bool:
    method = getattr(module, "quant_method", None)
    return any(getattr(owner, "processing_keeps_layout", False) is True for owner in (module, method))


def _unset(hooked: Mapping[str, nn.Module]) -> Iterator[str]:
    for prefix, module in hooked.items():
        for leaf, value in (*module._parameters.items(), *module._buffers.items()):
            if value is None:
                yield f"{prefix}.{leaf}" if prefix else leaf


def _parts(saved: Mapping[str, _Owner], most: int | None) -> Iterator[list[str]]:
    """Yield the names of each part, in the order of the model, as many as `most` bytes allow and at least one."""
    part: list[str] = []
    size = 0
    for name, owner in saved.items():
        more = owner.tensor.dtype.nbytes(owner.tensor.shape)
        if part and most is not None and size + more > most:
            yield part
            part, size = [], 0
        part.append(name)
        size += more
    yield part


def _bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, row-major, a piece after the other; each is good until the next is asked for."""
    with torch.inference_mode(False), torch.no_grad():
        tensor = tensor.detach()
        flat = tensor.view(-1) if tensor.is_contiguous() else None
        rows = tensor if flat is None else flat
        each = max(1, rows.nbytes // max(rows.shape[0], 1)) if rows.dim() else 1
        for piece in torch.split(rows, max(1, _CHUNK // each)) if rows.numel() else ():
            here = piece.resolve_conj().resolve_neg().contiguous().cpu()
            yield bytes_of(here)
