"""The loader of sharded states: every rank reads the files that it wrote, or its part of what other ranks wrote."""

from __future__ import annotations

import os
import posixpath
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from tensorferry import api
from tensorferry.checkpoint import Checkpoint
from tensorferry.checks import expect
from tensorferry.config import ModelConfig, folders
from tensorferry.core.amounts import few
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Target, TargetTensor
from tensorferry.errors import ConfigError, FormatError, LocateError, TensorferryError, shown
from tensorferry.formats.download import refuse_revision
from tensorferry.formats.file_names import is_side_file
from tensorferry.formats.opening import Opened, open_selection
from tensorferry.formats.places import place_of
from tensorferry.formats.sharded_state import joined, rank_catalogue, read_all, select_all, select_rank
from tensorferry.formats.sharded_state_manifest import RankManifest, read_manifest
from tensorferry.formats.sharded_state_names import (
    PartNames,
    RankNumbers,
    manifest_name,
    manifests_in,
    written_by_a_rank,
)
from tensorferry.loaders import building
from tensorferry.loaders.base import BaseModelLoader
from tensorferry.loaders.reading import OwnReading, Reading
from tensorferry.loaders.resharding import other_types, reshard_rules, with_aliases
from tensorferry.loaders.restoring import Restored, misfits, other_layout, refuse_other_method, restored, sub_views
from tensorferry.loaders.saving import ranks_of
from tensorferry.modules.adapters import Derive, adapt
from tensorferry.modules.describe import describe
from tensorferry.modules.finalize import derive_buffers, hooked_modules
from tensorferry.modules.processed import lay_out
from tensorferry.report import Report
from tensorferry.storage.base import Storage
from tensorferry.storage.hub import Listing, fetch_snapshot
from tensorferry.storage.object_uri import is_uri
from tensorferry.timing import timed

__all__ = ["ShardedStateLoader", "ShardedStateOptions"]

_LISTED = 20


@dataclass(frozen=True, slots=True)
class ShardedStateOptions:
    """What the loader of sharded states takes.

    pattern: of the names of the files, with the fields pp_rank, tp_rank, rank, ep_rank and part; None for vLLM's.
    post_processed: of states without a manifest, whether they were saved after post-processing, so that it is left out.
    reshard: whether a state that was saved for other ranks is put together and taken apart anew, where it can be.
    """

    pattern: str | None = None
    post_processed: bool | None = None
    reshard: bool = True

    def __post_init__(self) -> None:
        if self.pattern is not None:
            expect("pattern", self.pattern, str, "text")
        if self.post_processed is not None:
            expect("post_processed", self.post_processed, bool, "true or false")
        expect("reshard", self.reshard, bool, "true or false")


class ShardedStateLoader(BaseModelLoader):
    """Loads sharded states: load_format sharded_state. Which rank this is, ``LoadConfig.parallel`` says.

    A state with manifests must be what the model is: of its types, shapes and quantization method. Ranks that differ
    from those that saved it get their part of the whole, where all manifests are there and layers declare their slots.
    What was post-processed before it was saved is not post-processed again. A state without a manifest, as vLLM writes
    it, must have the names and shapes of the model's tensors.
    """

    Options = ShardedStateOptions

    def download_model(self, model_config: ModelConfig) -> None:
        """Fetch the files of this rank from the Hub, of all where it has none, unless the model is a folder here."""
        self._located(model_config)

    def build(self, model_config: ModelConfig) -> nn.Module:
        """Return the transformers model that config.json describes, on meta."""
        return building.from_config(self._located(model_config), model_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> Report:
        """Fill `model`, post-process what has not been, and return the report.

        Raises ConfigError for a state that is not of this model or these ranks, with what was found and expected;
        LocateError, FormatError, PlanError with every problem; ReadError, FinalizeError. All but the last two before
        anything was read or written.
        """
        seconds: dict[str, float] = {}
        links_to = folders("links_to", self.load_config.links_to)
        place = place_of(self._located(model_config), subfolder=model_config.subfolder, links_to=links_to)
        with closing(place.storage) as storage:
            if place.name is not None:
                raise LocateError(f"{shown(model_config.model, 300)}: is a file, and the folder of a state is expected")
            with timed(seconds, "open"):
                load = self._load(storage, model, model_config)
            report = self._run(model, load)
        return replace(report, seconds={**seconds, **report.seconds})

    def _load(self, storage: Storage, model: nn.Module, model_config: ModelConfig) -> _Load:
        """Return what is to be done, once everything that the manifest says was held against model and ranks."""
        manifests = {file.path: file for file in manifests_in(storage.list())}
        if not manifests:
            return self._without_manifest(storage, model)
        mine = manifests.get(manifest_name(self._ranks))
        manifest = read_manifest(storage, mine or next(iter(manifests.values())))
        refuse_other_method(model, manifest, model_config.quantization)
        self._refuse_other_pattern(manifest)
        target = describe(model)
        why = _other_sizes(manifest.ranks, self._ranks)
        if not why and mine is None:
            PartNames(manifest.pattern, self._ranks).parts(storage.list(), shown(storage.uri, 300))
            raise LocateError(
                f"{shown(storage.uri, 300)}: {self._ranks} has parts and no manifest: its save did not end"
            )
        why = why or other_layout(target, manifest)
        if why:
            return self._resharded(storage, model, target, why)
        return self._as_saved(storage, model, target, manifest)

    def _without_manifest(self, storage: Storage, model: nn.Module) -> _Load:
        names = PartNames.of(self.options.pattern, self._ranks)
        selection = select_rank(storage, names)
        hooked, processed = tuple(hooked_modules(model)), self.options.post_processed
        if hooked and processed is None:
            raise ConfigError(
                f"{shown(storage.uri, 300)} has no manifest, and {hooked[0] or 'the model'} post-processes its weights:"
                " say whether they were saved after that, with options={'post_processed': True} or False"
            )
        opened = open_selection(storage, selection)
        inner, target = sub_views(model), describe(model)
        kept = {name: t for name, t in target.items() if name in opened.catalogue or name not in inner}
        # Each rank's own part fills a parameter, whatever part of a whole its layer says that it is.
        plain = {n: t if t.alias_of is not None else TargetTensor.plain(n, t.dtype, t.shape) for n, t in kept.items()}
        return _Load(opened, plain, hooked if processed else ())

    def _as_saved(self, storage: Storage, model: nn.Module, target: Target, manifest: RankManifest) -> _Load:
        wrong = misfits(model, target, manifest, self.load_config.strictness)
        _refuse(storage, wrong)
        selection = select_rank(storage, PartNames(manifest.pattern, manifest.ranks), manifest)
        opened = open_selection(storage, selection, merge=lambda _, __, parts: rank_catalogue(manifest, parts))
        found = restored(target, manifest)
        opened = with_aliases(opened, [manifest], found.target)
        return _Load(opened, found.target, manifest.post_processed or (), layout=(found, manifest))

    def _resharded(self, storage: Storage, model: nn.Module, target: Target, why: str) -> _Load:
        where = shown(storage.uri, 300)
        if not self.options.reshard:
            raise ConfigError(f"{where}: {why}")
        try:
            manifests = read_all(storage)
            selection = select_all(storage, manifests)
            opened = open_selection(storage, selection, merge=lambda _, __, parts: joined(manifests, parts))
        except (FormatError, LocateError) as error:
            raise ConfigError(f"{where}: {why}, and the state cannot be resharded: {error}") from error
        _refuse(storage, other_types(target, manifests))
        rules = reshard_rules(model, target, manifests, stage=self._ranks.pp_size > 1)
        processed = dict.fromkeys(name for m in manifests for name in m.post_processed or ())
        opened = with_aliases(opened, manifests, target)
        return _Load(opened, target, tuple(processed), rules, notes=(f"{why}: the state was resharded",))

    def _run(self, model: nn.Module, load: _Load) -> Report:
        strict = replace(self.load_config.strictness, unexpected="error")
        checkpoint = Checkpoint.of(load.opened, self.load_config.reading)
        prepared = api.prepare(model, checkpoint, target=load.target, rules=load.rules, strict=strict)
        notes = (*prepared.notes, *load.notes)
        prepared = replace(prepared, processed=load.processed, derive=_derive(model), notes=notes)
        api.refuse_misfit(prepared)
        changed = _laid_out(model, load)
        try:
            return api.run(
                model, prepared, device=self.load_config.device, executor=self.reading.executor, progress=self.progress
            )
        except TensorferryError as error:
            error.touched = error.touched or bool(changed)
            raise

    @property
    def reading(self) -> Reading:
        """How bytes are read: by the strategy that is configured."""
        return OwnReading(self.load_config)

    @property
    def _ranks(self) -> RankNumbers:
        return ranks_of(self.load_config.parallel)

    def _refuse_other_pattern(self, manifest: RankManifest) -> None:
        if self.options.pattern not in (None, manifest.pattern):
            raise ConfigError(
                f"the state was saved with the pattern {shown(manifest.pattern)!r}, and the load asks for"
                f" {shown(self.options.pattern)!r}: leave it out"
            )

    def _located(self, model_config: ModelConfig) -> str | Path:
        """Return the folder of the model or its address, below which its `subfolder` is; fetched from the Hub if it is
        neither.
        """
        if is_uri(model_config.model):
            refuse_revision(model_config.model, model_config.revision)
            return model_config.model
        path = Path(model_config.model).expanduser()
        if path.exists():
            return path
        names = PartNames.of(self.options.pattern, self._ranks)
        snapshot = fetch_snapshot(
            os.fspath(model_config.model),
            lambda listing: _wanted(listing, names, model_config.subfolder or ""),
            revision=model_config.revision,
            cache_dir=self.load_config.download_dir,
        )
        return snapshot.path


@dataclass(frozen=True, slots=True)
class _Load:
    """What is to be done: a catalogue, what it fills, by which rules, and the modules whose hooks are not to run.

    layout: how the model's tensors are to be laid out first, as the state is from after post-processing.
    """

    opened: Opened
    target: Target
    processed: tuple[str, ...]
    rules: RuleSet = field(default_factory=RuleSet)
    layout: tuple[Restored, RankManifest] | None = None
    notes: tuple[str, ...] = ()


def _laid_out(model: nn.Module, load: _Load) -> set[str]:
    if load.layout is None:
        return set()
    found, manifest = load.layout
    return lay_out(model, found.wanted, manifest.aliases, found.removed, manifest.unset)


def _other_sizes(saved: RankNumbers, asked: RankNumbers) -> str:
    """Return in which sizes two divisions differ, with both, or ""."""
    pairs = ((what, size, asked.sizes[what]) for what, size in saved.sizes.items())
    return "; ".join(f"saved for {what} {one}, load asks for {two}" for what, one, two in pairs if one != two)


def _refuse(storage: Storage, wrong: list[str]) -> None:
    if wrong:
        lines = few(wrong, _LISTED, between="\n  ")
        raise ConfigError(f"{shown(storage.uri, 300)} is not a state of this model; nothing was read:\n  {lines}")


def _derive(model: nn.Module) -> Derive:
    adapted = adapt(model, building.NO_WEIGHTS)
    return derive_buffers if adapted is None else adapted.derive


def _wanted(listing: Listing, names: PartNames, subfolder: str) -> list[str]:
    """Return this rank's files, all ranks' where it has none, and the small ones beside them."""
    inside = [replace(f, path=posixpath.relpath(f.path, subfolder or ".")) for f in listing.files]
    mine = [f for f in inside if names.number(f.path) is not None]
    chosen = mine or [f for f in inside if written_by_a_rank(f.path)]
    if not chosen:
        names.parts(inside, listing.where)
    weights = [posixpath.join(subfolder, f.path) for f in chosen]
    return [*weights, *(f.path for f in listing.files if is_side_file(f.path, f.size))]
