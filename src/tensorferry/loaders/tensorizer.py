"""The loader of Tensorizer files: of a whole model for any number of ranks, or one file for each rank."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from tensorferry import api
from tensorferry.checkpoint import Checkpoint
from tensorferry.checks import expect
from tensorferry.config import LoadConfig, ModelConfig, ParallelConfig
from tensorferry.core.amounts import few, human_bytes
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Target, TargetTensor
from tensorferry.errors import ConfigError, LocateError, shown
from tensorferry.formats.places import place_of
from tensorferry.formats.tensorizer_hashes import verify_hashes
from tensorferry.loaders import building, sources
from tensorferry.loaders.default import DefaultModelLoader
from tensorferry.loaders.sources import NameFilter, locate, open_sources, sieve
from tensorferry.loaders.strategies import halved
from tensorferry.modules.describe import describe, places
from tensorferry.modules.finalize import hooked_modules
from tensorferry.report import Report
from tensorferry.storage.object_uri import is_uri
from tensorferry.timing import timed

__all__ = ["TensorizerLoader", "TensorizerOptions"]

_FILE = "model.tensors"
_RANK = re.compile(r"%0(\d)d")
_ANY_NUMBER = re.compile(r"%\d*d")
_MARKER = "vllm_tensorized_marker"
"""A tensor by which vLLM tells files of its own, whose weights have been post-processed."""


@dataclass(frozen=True, slots=True)
class TensorizerOptions:
    """Where the file is, and how it is read. Checked when it is made; raises ConfigError.

    tensorizer_uri: the file, or its address; one of each rank where ``%03d`` stands for the tensor-parallel rank.
    tensorizer_dir: the folder of ``model.tensors``. Without either, ``ModelConfig.model`` says it, and it says in any
    case where a config.json is. verify_hash: compare the hashes in the file before anything is loaded, which reads it
    once more. num_readers: reader threads, as ``LoadConfig.threads``. encryption_keyfile: a file with the key, or the
    passphrase.
    """

    tensorizer_uri: str | os.PathLike[str] | None = None
    tensorizer_dir: str | os.PathLike[str] | None = None
    verify_hash: bool = True
    num_readers: int | None = None
    encryption_keyfile: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("tensorizer_uri", "tensorizer_dir", "encryption_keyfile"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str | os.PathLike) and os.fspath(value)):
                raise ConfigError(f"{name} {value!r}: a path is expected, not {type(value).__name__}")
        if self.tensorizer_uri is not None and self.tensorizer_dir is not None:
            raise ConfigError("tensorizer_uri and tensorizer_dir both say where the file is: give one of them")
        expect("verify_hash", self.verify_hash, bool, "true or false")
        if self.num_readers is not None:
            expect("num_readers", self.num_readers, int, "a number of threads")
            if self.num_readers < 1:
                raise ConfigError(f"num_readers {self.num_readers}: at least 1 is expected")

    @property
    def uri(self) -> str | None:
        """The file, where these options say it."""
        if self.tensorizer_dir is not None:
            return f"{os.fspath(self.tensorizer_dir).rstrip('/') or '/'}/{_FILE}"
        return None if self.tensorizer_uri is None else os.fspath(self.tensorizer_uri)


class TensorizerLoader(DefaultModelLoader):
    """Loads ``.tensors`` files of the tensorizer library: load_format tensorizer. Options: `TensorizerOptions`.

    A file of a whole model is planned as any other checkpoint, so that each rank takes its part of it. Files of single
    ranks hold what was in the parameters of each, by their names, and are read as they are; they are for the number of
    ranks that they were written for. Buffers that the model computes itself are left where they are.
    """

    Options = TensorizerOptions

    def __init__(self, load_config: LoadConfig | None = None, *, weight_name_filter: NameFilter | None = None) -> None:
        super().__init__(load_config, weight_name_filter=weight_name_filter)
        if self.options.num_readers is not None:
            self.load_config = replace(self.load_config, threads=self.options.num_readers)
        self._verified = api.Prepared.verified

    def download_model(self, model_config: ModelConfig) -> None:
        """Fetch the file from the Hub, unless it is here."""
        super().download_model(self._at(model_config))

    def build(self, model_config: ModelConfig) -> nn.Module:
        """Return the transformers model that the config.json of ``ModelConfig.model`` describes, on meta."""
        at = self._at(model_config)
        described = at if self.options.uri is None else model_config
        path = locate(sources.Source(described.model, described.revision), self.load_config, self._format)
        with self._opened([sources.Source(at.model, at.revision, at.subfolder)]) as checkpoint:
            return building.from_config(path, model_config, checkpoint.catalogue)

    def sources_of(self, model_config: ModelConfig, model: nn.Module) -> list[sources.Source]:
        """Return where the weights of `model` come from, the Tensorizer file first."""
        return super().sources_of(self._at(model_config), model)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> Report:
        """Fill `model` from its file, post-process it, and return the report; see `DefaultModelLoader`.

        Raises also AccessDenied without the right key, CorruptFile where a hash differs, and ConfigError where there
        are files of another number of ranks; the model is as it was then.
        """
        if _RANK.search(self._uri(model_config)):
            report = self._as_it_is(model, model_config)
        else:
            report = super().load_weights(model, model_config)
        return replace(report, verified=self._verified)

    def _as_it_is(self, model: nn.Module, model_config: ModelConfig) -> Report:
        seconds: dict[str, float] = {}
        with timed(seconds, "open"):
            checkpoint, dropped = self._wanted(model_config, model)
        with checkpoint:
            strict, target = self.load_config.strictness, _without_slots(model)
            prepared = api.prepare(model, checkpoint, target=target, rules=RuleSet(), strict=strict)
            executor = self.reading.executor
            report = api.run(model, prepared, device=self.load_config.device, executor=executor, progress=self.progress)
        return replace(report, dropped={**dropped, **report.dropped}, seconds={**seconds, **report.seconds})

    def _wanted(self, model_config: ModelConfig, model: nn.Module) -> tuple[Checkpoint, Mapping[str, str]]:
        checkpoint, dropped = super()._wanted(model_config, model)
        try:
            _refuse_processed(checkpoint, model)
            needless = _needless(checkpoint, model)
            checkpoint, _ = sieve(checkpoint, lambda name: name not in needless)
            _refuse_locked(checkpoint)
            if self.options.verify_hash:
                self._verified = self._verify(checkpoint)
        except BaseException:
            checkpoint.close()
            raise
        return checkpoint, {**dropped, **needless}

    def _verify(self, checkpoint: Checkpoint) -> str:
        entries = list(checkpoint.catalogue.values())
        starts = {(span.file, span.offset) for entry in entries if (span := entry.span) is not None}
        self.progress.start(sum(entry.nbytes for entry in entries), "verifying")
        try:
            told = [
                verify_hashes(
                    checkpoint.storage, file, only=starts, workers=checkpoint.options.workers,
                    advance=self.progress.advance,
                )
                for file in checkpoint.selection.files
            ]  # fmt: skip
        finally:
            self.progress.finish()
        files = ", ".join(shown(file.path) for file in checkpoint.selection.files)
        return f"hashes in {files} verified, of {human_bytes(sum(told))}"

    def _opened(self, wanted: list[sources.Source]) -> Checkpoint:
        key = self.options.encryption_keyfile
        options = halved(self.load_config)
        return open_sources(wanted, self.load_config, self._format, options, encryption_keyfile=key)

    def _uri(self, model_config: ModelConfig) -> str:
        return self.options.uri or model_config.model

    def _at(self, model_config: ModelConfig) -> ModelConfig:
        """Return `model_config` with the file of this rank as its model."""
        uri = self._uri(model_config)
        if self.options.uri is None:
            return replace(model_config, model=_of_rank(uri, self.load_config.parallel))
        return replace(model_config, model=_of_rank(uri, self.load_config.parallel), subfolder=None, revision=None)

    @property
    def _format(self) -> str:
        return "tensorizer"


def _of_rank(uri: str, parallel: ParallelConfig) -> str:
    """Return the file of this rank where `uri` has a number for it; itself where it has none.

    Raises LocateError where that is absent, and ConfigError where there are files of more ranks than there are now.
    """
    numbers = _RANK.findall(uri)
    if not numbers:
        if (odd := _ANY_NUMBER.search(uri)) and not is_uri(uri) and not Path(uri).expanduser().exists():
            raise ConfigError(f"{shown(uri, 300)}: {odd[0]} is no number of the rank: write %03d, of so many digits")
        return uri
    folder, name = posixpath.split(uri if is_uri(uri) else str(Path(uri).expanduser()))
    if len(numbers) > 1 or not _RANK.search(name):
        raise ConfigError(f"{shown(uri, 300)}: one %0Nd, in the name of the file, stands for the rank")
    width, mine, size = int(numbers[0]), parallel.tp_rank, parallel.tp_size
    there = _ranks_among(_names_in(folder), name, width)
    found = f"{shown(uri, 300)}: there are files of {_listed(there)}, for tp_size {len(there)}"
    if mine not in there:
        raise LocateError(
            f"{found}; none is of rank {mine} of {size}: write them again for {size}, or load a whole file"
        )
    if there != set(range(size)):
        raise ConfigError(
            f"{found}, and tp_size is {size}: write them again for {size}, or load a file of the whole model"
        )
    return posixpath.join(folder, _RANK.sub(f"{mine:0{width}}", name))


def _names_in(folder: str) -> list[str]:
    if not is_uri(folder):
        return [file.name for file in Path(folder).iterdir()] if Path(folder).is_dir() else []
    with closing(place_of(folder).storage) as storage:
        return [file.path for file in storage.list()]


def _ranks_among(names: Iterable[str], name: str, width: int) -> set[int]:
    before, _, after = _RANK.split(name, maxsplit=1)
    pattern = re.compile(f"{re.escape(before)}([0-9]{{{width},}}){re.escape(after)}")
    found = (match[1] for one in names if (match := pattern.fullmatch(one)))
    return {int(digits) for digits in found if digits == f"{int(digits):0{width}}"}


def _listed(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"ranks {few(map(str, listed), 8)}" if listed else "no rank"


def _without_slots(model: nn.Module) -> Target:
    """Return what `model` needs where each parameter is filled as it lies in this rank's memory."""
    return {
        name: tensor if tensor.alias_of is not None else TargetTensor.plain(name, tensor.dtype, tensor.shape)
        for name, tensor in describe(model).items()
    }


def _needless(checkpoint: Checkpoint, model: nn.Module) -> dict[str, str]:
    """Return the entries that no model is filled from, with the reason of each."""
    computed = {place.name for place in places(model) if not place.persistent}
    why = {name: "a buffer that the model computes itself" for name in checkpoint.catalogue if name in computed}
    return {**why, **({_MARKER: "a marker of vLLM, not a weight"} if _MARKER in checkpoint.catalogue else {})}


def _refuse_processed(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Raise ConfigError where weights were post-processed before they were written, and would be a second time."""
    hooked = [name or "the model" for name in hooked_modules(model)]
    if _MARKER in checkpoint.catalogue and hooked:
        raise ConfigError(
            f"{shown(checkpoint.uri, 300)} was written by vLLM after post-processing, which {hooked[0]} would repeat: "
            "load the original checkpoint"
        )


def _refuse_locked(checkpoint: Checkpoint) -> None:
    """Raise AccessDenied where tensors are encrypted and the key is not known, by reading a byte of each file."""
    seen: set[str] = set()
    for entry in checkpoint.catalogue.values():
        span = entry.span
        if span is not None and span.length and span.file not in seen:
            seen.add(span.file)
            checkpoint.storage.read_into(span.file, span.offset, memoryview(bytearray(1)))
