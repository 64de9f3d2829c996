"""Planning a conversion: which tensors are written, under which names and types, into which files, and what beside."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tensorferry.checkpoint import Checkpoint
from tensorferry.conversion.beside import Beside, made_config, read_config, side_files
from tensorferry.conversion.naming import Named, named
from tensorferry.conversion.report import Conversion
from tensorferry.conversion.types import NUMBERS, settled_types
from tensorferry.conversion.wanted import WantedConversion
from tensorferry.core.amounts import counted, few, human_bytes
from tensorferry.core.dtypes import DTYPES, DType
from tensorferry.core.plan import Plan, problem_lines
from tensorferry.core.planning import make_plan
from tensorferry.core.target import TargetTensor
from tensorferry.errors import ConfigError, PlanError, shown
from tensorferry.formats.sharded_state import POST_PROCESSED
from tensorferry.formats.writing import CheckpointWriter, NewFile, NewTensor, PlansFiles

__all__ = ["Job", "planned"]

_TEMPLATE = "chat_template.jinja"
_TEMPLATE_KEY = "tokenizer.chat_template"


@dataclass(frozen=True)
class Job:
    """A conversion that has been planned and not begun.

    destination: free of links. tensors: without chunks. files: empty where not known.
    """

    checkpoint: Checkpoint
    writer: CheckpointWriter
    destination: Path
    single: bool
    named: Named
    plan: Plan
    tensors: Mapping[str, NewTensor]
    metadata: Mapping[str, str]
    max_shard_size: int | None
    beside: Beside
    files: tuple[NewFile, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(t.dtype.nbytes(t.shape) for t in self.tensors.values())

    @property
    def needed(self) -> int:
        """Bytes that all files take, as far as they are known."""
        return (sum(file.nbytes for file in self.files) or self.nbytes) + self.beside.nbytes

    @property
    def order(self) -> list[str]:
        """The tensors in the order in which the writer is expected to ask for them."""
        return [name for file in self.files for name in file.tensors] or list(self.tensors)

    def account(self) -> Conversion:
        """Return what will be done, as far as it is known."""
        return Conversion(
            source=self.checkpoint.uri,
            destination=str(self.destination),
            format=self.checkpoint.catalogue.format,
            to=self.writer.name,
            tensors=len(self.tensors),
            nbytes=self.nbytes,
            files=self._named({file.name: file.nbytes for file in self.files}),
            side_files=self.beside.done,
            left_behind=self.beside.left,
            renamed=self.named.renamed,
            dropped={**self.named.dropped, **dict.fromkeys(self._unknown, "no rule names it")},
            casts={f"{a} -> {b}": n for (a, b), n in self.plan.casts.items()},
            kept=self.kept,
            warnings=(*self.checkpoint.warnings, *self.named.notes, *self.notes),
        )

    def _named(self, files: Mapping[str, int]) -> Mapping[str, int]:
        return dict.fromkeys([self.destination.name], sum(files.values())) if self.single and files else files

    @property
    def _unknown(self) -> Sequence[str]:
        return [name for name in self.named.unknown if name not in self.tensors]


def planned(
    checkpoint: Checkpoint,
    writer: CheckpointWriter,
    wanted: WantedConversion,
    destination: Path,
    *,
    single: bool,
    named: bool,
) -> Job:
    """Return the conversion of `checkpoint` that is wanted, without problems. Reads side files, and no weights.

    single: `destination` is to be a file. named: one file of the source's folder was named. Raises ConfigError,
    PlanError with every problem, and FormatError for a tensor that the new format cannot hold.
    """
    _refuse_processed(checkpoint)
    config = read_config(checkpoint.storage)
    found = _with_names(checkpoint, wanted, config)
    types, kept = settled_types(found.catalogue, wanted.dtype)
    plan = make_plan(found.catalogue, {n: TargetTensor.plain(n, types[n], e.shape) for n, e in found.catalogue.items()})
    _refuse_problems(plan, checkpoint)
    beside = Beside()
    if not single:
        news = _made_files(checkpoint, found, types)
        beside = side_files(checkpoint, config, named=named, dtype=wanted.dtype, made=news, renamed=found.renamed)
    job = Job(
        checkpoint=checkpoint,
        writer=writer,
        destination=destination,
        single=single,
        named=found,
        plan=plan,
        tensors={name: NewTensor(spec.dtype, spec.shape, ()) for name, spec in plan.parameters.items()},
        metadata=_metadata(checkpoint),
        max_shard_size=None if single else wanted.max_shard_size,
        beside=beside,
        kept=kept,
        notes=tuple(_notes(checkpoint, destination, beside, single=single)),
    )
    job = replace(job, files=_files(job))
    return replace(job, notes=(*job.notes, *_lacking_room(job)))


def _refuse_processed(checkpoint: Checkpoint) -> None:
    if POST_PROCESSED in checkpoint.catalogue.metadata:
        raise ConfigError(
            f"{shown(checkpoint.uri, 300)} was saved after post-processing, which no other checkpoint can say, so that "
            "a model would do it again: convert what the model was loaded from"
        )


def _lacking_room(job: Job) -> Iterator[str]:
    """Yield a warning where the disk is too small by what is known; others may free it meanwhile, or fill it."""
    free = shutil.disk_usage(job.destination.parent).free
    if free < job.needed:
        yield f"{human_bytes(job.needed)} are needed, and {human_bytes(free)} are free"


def _files(job: Job) -> tuple[NewFile, ...]:
    """Return what will be written; nothing where the writer does not know before."""
    if not isinstance(job.writer, PlansFiles):
        return ()
    return tuple(job.writer.files(job.tensors, metadata=job.metadata, max_shard_size=job.max_shard_size))


def _with_names(checkpoint: Checkpoint, wanted: WantedConversion, config: Mapping[str, Any] | None) -> Named:
    """Return the tensors to write: those of the source, without what no rule names where that is allowed."""
    found = named(checkpoint, wanted.names, config)
    if found.unknown and wanted.strict.unexpected == "error":
        raise PlanError(
            f"{shown(checkpoint.uri, 300)}: no rule says what transformers calls "
            f"{few(map(shown, found.unknown), 5)}: keep all names with names='keep', or pass "
            "Strictness(unexpected='warn') to leave them out"
        )
    left = [entry for name, entry in found.catalogue.items() if name not in set(found.unknown)]
    return replace(found, catalogue=found.catalogue.replacing(left)) if found.unknown else found


def _refuse_problems(plan: Plan, checkpoint: Checkpoint) -> None:
    if plan.fatal:
        count = counted(len(plan.fatal), "problem")
        head = f"{shown(checkpoint.uri, 300)} cannot be converted: {count}; nothing was written"
        raise PlanError("\n".join([head, *problem_lines(plan.fatal)]), plan.fatal)


def _metadata(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return what a safetensors file says beside its tensors; other formats say nothing that would be understood."""
    catalogue = checkpoint.catalogue
    return {"format": "pt", **(catalogue.metadata if catalogue.format == "safetensors" else {})}


def _made_files(checkpoint: Checkpoint, found: Named, types: Mapping[str, DType]) -> dict[str, bytes]:
    """Return the files that are made of what a source says in its own way."""
    made = {}
    if found.config is not None:
        made["config.json"] = made_config(found.config, _most_bytes(found, types))
    template = checkpoint.catalogue.metadata.get(_TEMPLATE_KEY)
    if checkpoint.catalogue.format == "gguf" and template:
        made[_TEMPLATE] = template.encode("utf-8", "surrogatepass")
    return made


def _most_bytes(found: Named, types: Mapping[str, DType]) -> DType:
    sizes: Counter[DType] = Counter()
    for name, entry in found.catalogue.items():
        if types[name] in NUMBERS:
            sizes[types[name]] += types[name].nbytes(entry.shape)
    return sizes.most_common(1)[0][0] if sizes else DTYPES["F32"]


def _notes(checkpoint: Checkpoint, destination: Path, beside: Beside, *, single: bool) -> Iterator[str]:
    catalogue = checkpoint.catalogue
    if single:
        yield "a single file was asked for: nothing was taken along beside it"
    elif catalogue.format == "gguf" and not any(path.startswith("tokenizer") for path in beside.done):
        yield (
            "no tokenizer is written: transformers builds it of the source, with AutoTokenizer.from_pretrained(folder, "
            f"gguf_file={shown(catalogue.files[0])!r}).save_pretrained({shown(destination.name)!r})"
        )
    spans = Counter(entry.span for entry in catalogue.values() if entry.span is not None and entry.nbytes)
    shared = [name for name, entry in catalogue.items() if entry.span is not None and spans[entry.span] > 1]
    if shared:
        yield f"share their bytes in the source, and each has its own now: {few(map(shown, shared), 4)}"
