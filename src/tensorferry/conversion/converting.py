"""`convert`: plan what is to be written, write it beside, read it back, put it in place. Start reading here."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from tensorferry.checkpoint import Checkpoint, OpeningOptions, open_checkpoint, refuse_unknown_options
from tensorferry.config import ReadOptions
from tensorferry.conversion.beside import write_side_files
from tensorferry.conversion.checking import forget_cached, read_back, write_sums
from tensorferry.conversion.place import building, real_destination, refuse_taken, telling_of_the_disk
from tensorferry.conversion.planning import Job, planned
from tensorferry.conversion.report import Conversion
from tensorferry.conversion.wanted import DEFAULT_SHARD, Names, WantedConversion, parse_size
from tensorferry.core.amounts import counted, few, human_bytes
from tensorferry.core.plan import Strictness
from tensorferry.errors import ConfigError, FinalizeError, FormatError, shown
from tensorferry.execute.production import Production
from tensorferry.formats.download import local_path
from tensorferry.formats.file_names import LOAD_FORMATS, format_of
from tensorferry.formats.writing import WritesOneFile, checkpoint_writer
from tensorferry.progress import SILENT, Progress, progress_of
from tensorferry.storage.object_uri import ObjectUri, is_uri
from tensorferry.timing import timed

if TYPE_CHECKING:
    import torch

__all__ = ["convert"]

logger = logging.getLogger(__name__)


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str = "safetensors",
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str | None = DEFAULT_SHARD,
    names: Names = "auto",
    strict: Strictness | None = None,
    overwrite: bool = False,
    verify: bool = True,
    sha256sums: bool = False,
    dry_run: bool = False,
    options: ReadOptions | None = None,
    progress: Progress | bool = SILENT,
    revision: str | None = None,
    **opening: Unpack[OpeningOptions],
) -> Conversion:
    """Write the checkpoint at `src` as another one at `dst`, and return the account of it.

    `dst` is a folder, or a file where the format has such and the name ends like one (``model.safetensors``). It is
    built beside and renamed when all is written, on the disk, and read back: whatever happens, `dst` is as it was or
    the whole conversion. Memory is bounded by ``options.max_staging``, however large the checkpoint or a tensor is.

    src: a folder, a weight file, an index, the address of one of these (``s3://bucket/model``), or the name of a
    repository on the Hub (`revision` of it).
    to: safetensors, or another format that is written here; see `tensorferry.formats.writing.WRITERS`.
    dtype: what floating-point tensors of 16 bits and more become; others, and scales of quantized weights, keep their
    types. Packed blocks of GGUF become numbers in any case, float32 without it.
    max_shard_size: such as ``"5GB"``, ``"500MiB"``, a number of bytes, or None for no limit.
    names: "auto" for those of transformers where the source is GGUF or in Meta's and Mistral's layout, "keep" for its
    own, "hf" for an error where neither is known.
    strict: what stops it: by default values that `dtype` cannot hold, and tensors whose names no rule knows.
    overwrite: replace what is at `dst`, at the end. verify: read everything back. sha256sums: write digests of all
    files beside them. dry_run: write nothing, and return what would be. opening: options of `open_checkpoint`.

    Raises ConfigError, LocateError, FormatError, PlanError, ReadError; FinalizeError for values that were lost in a
    cast; CorruptFile for what is read back different; WriteError where the disk refuses.
    """
    refuse_unknown_options(convert, opening)
    wanted = WantedConversion.of(
        to=to, dtype=dtype, max_shard_size=max_shard_size, names=names, strict=strict,
        overwrite=overwrite, verify=verify, sha256sums=sha256sums,
    )  # fmt: skip
    writer, telling = checkpoint_writer(wanted.to), progress_of(progress)
    destination = real_destination(dst)
    single = isinstance(writer, WritesOneFile) and destination.suffix == writer.suffix and not destination.is_dir()
    _refuse_other_kind(destination, wanted, single=single, shards=writer.has_shards)
    path = local_path(src, revision=revision, **opening)
    if not is_uri(path):
        _refuse_overlap(Path(path), destination, single=single)
    refuse_taken(destination, single=single, overwrite=overwrite)
    seconds: dict[str, float] = {}
    with open_checkpoint(path, options=options, **opening) as checkpoint:
        _refuse_own_file(checkpoint, destination)
        with timed(seconds, "plan"):
            job = planned(checkpoint, writer, wanted, destination, single=single, named=_is_named(path, checkpoint))
        if dry_run:
            return replace(job.account(), destination=os.fspath(dst), seconds=seconds, dry_run=True)
        made = replace(_done(job, wanted, telling, seconds), destination=os.fspath(dst))
    for warning in made.warnings[len(checkpoint.warnings) :]:  # of those, opening has told
        logger.warning("%s: %s", shown(str(destination), 300), shown(warning, 1000))
    return made


def _refuse_other_kind(destination: Path, wanted: WantedConversion, *, single: bool, shards: bool) -> None:
    """Raise ConfigError for a folder that is called like a weight file, and for what a single file cannot have."""
    where = shown(str(destination), 300)
    if not single and not destination.is_dir() and format_of(destination.name.lower()) is not None:
        raise ConfigError(f"{where} ends like a file, and {wanted.to} would make a folder of it: give another name")
    if single and wanted.sha256sums:
        raise ConfigError(
            f"sha256sums: digests go into the folder that is written, and {where} is a file: leave it out"
        )
    if wanted.max_shard_size in (None, parse_size(DEFAULT_SHARD)):
        return
    if not shards:
        raise ConfigError(f"max_shard_size: {wanted.to} has no shards: leave it out")
    if single:
        raise ConfigError(f"max_shard_size: {where} is one file, and holds all of it: give a folder, or leave it out")


def _refuse_overlap(source: Path, destination: Path, *, single: bool) -> None:
    """Raise ConfigError where replacing the destination would take the source away."""
    real = Path(os.path.realpath(source))
    if real == destination or (not single and destination in real.parents):
        raise ConfigError(f"{shown(str(destination), 300)} is, or holds, what is to be converted: give another place")


def _refuse_own_file(checkpoint: Checkpoint, destination: Path) -> None:
    """Raise ConfigError where the destination is a file of the source, or holds one."""
    if is_uri(checkpoint.uri):
        return
    index = checkpoint.selection.index_file
    for path in (*(file.path for file in checkpoint.selection.files), *([] if index is None else [index])):
        real = Path(os.path.realpath(Path(checkpoint.uri, path)))
        if real == destination or destination in real.parents:
            raise ConfigError(
                f"{shown(str(destination), 300)} is, or holds, what is to be converted ({shown(path)}): give another "
                "place"
            )


def _is_named(path: str | os.PathLike[str], checkpoint: Checkpoint) -> bool:
    """Whether one weight file was named, in a folder that may hold files of anything else."""
    if isinstance(path, str) and is_uri(path):
        name = ObjectUri.parse(path).name
        is_file = name in {file.path for file in checkpoint.selection.files}
    else:
        is_file = Path(path).is_file()
    return is_file and checkpoint.selection.index is None


def _done(job: Job, wanted: WantedConversion, progress: Progress, seconds: dict[str, float]) -> Conversion:
    with (
        telling_of_the_disk(job.destination, job.needed),
        building(job.destination, single=job.single, overwrite=wanted.overwrite) as folder,
    ):
        with timed(seconds, "write"), _production(job, wanted) as production:
            files = _written(job, production, folder, wanted, progress)
        account = replace(_counted(job.account(), production), files=_sizes(job, folder, files))
        if wanted.verify:
            with timed(seconds, "read back"):
                account = _read_back(job, production.digests, folder, account, progress)
        if wanted.sha256sums and not job.single:
            write_sums(folder)
    return replace(account, seconds=seconds)


def _production(job: Job, wanted: WantedConversion) -> Production:
    checkpoint = job.checkpoint
    return Production(job.plan, checkpoint.storage, checkpoint.options, job.order, digested=wanted.verify)


def _written(
    job: Job, production: Production, folder: Path, wanted: WantedConversion, progress: Progress
) -> Sequence[str]:
    """Write weights and side files into `folder`; return the names of the former."""

    def chunks(name: str) -> Iterator[memoryview]:
        for chunk in production.chunks(name):
            if wanted.strict.lossy == "error":
                _refuse_losses(production)
            yield chunk
            progress.advance(len(chunk))

    tensors = {name: tensor._replace(chunks=chunks(name)) for name, tensor in job.tensors.items()}
    progress.start(job.nbytes, "converting")
    try:
        files = job.writer.write(folder, tensors, metadata=job.metadata, max_shard_size=job.max_shard_size)
    finally:
        progress.finish()
    if job.single and len(files) != 1:
        raise FormatError(f"{job.writer.name} takes {counted(len(files), 'file')} for this: give a folder")
    write_side_files(job.beside, job.checkpoint.storage, folder)
    job.checkpoint.storage.check_unchanged()
    return files


def _refuse_losses(production: Production) -> None:
    lost = dict(production.counters.losses)  # at once: the next portion is being made
    spoiled = {name: loss for name, loss in lost.items() if loss.overflow}
    if spoiled:
        first = few((f"{shown(name)}: {loss}" for name, loss in spoiled.items()), 5, between="; ")
        raise FinalizeError(
            f"values that the new type cannot hold ({first}): convert to a wider type such as bfloat16 or float32, or "
            "pass Strictness(lossy='warn'); nothing was written"
        )


def _counted(account: Conversion, production: Production) -> Conversion:
    counters = production.counters
    return replace(
        account,
        bytes_read=counters.bytes_read,
        reads=counters.reads,
        staging_peak=counters.staging_peak,
        losses={name: (loss.overflow, loss.underflow) for name, loss in counters.losses.items()},
    )


def _sizes(job: Job, folder: Path, files: Sequence[str]) -> Mapping[str, int]:
    sizes = {name: (folder / name).stat().st_size for name in files}
    return {job.destination.name: sum(sizes.values())} if job.single else sizes


def _read_back(
    job: Job, digests: Mapping[str, str], folder: Path, account: Conversion, progress: Progress
) -> Conversion:
    forget_cached(folder)
    only = next(folder.iterdir()) if job.single else folder
    load_format = job.writer.name if job.writer.name in LOAD_FORMATS else "auto"
    options = job.checkpoint.options
    if is_uri(job.checkpoint.uri):  # what was written lies here
        options = replace(options, storage_kind="auto")
    with open_checkpoint(only, load_format=load_format, options=options) as written:
        counters = read_back(written, job.plan.parameters, digests, progress)
    return replace(
        account,
        bytes_read=account.bytes_read + counters.bytes_read,
        reads=account.reads + counters.reads,
        staging_peak=max(account.staging_peak, counters.staging_peak),
        verified=f"{counted(account.tensors, 'tensor')}, {human_bytes(account.nbytes)}, read back and equal",
    )
