"""`load_model`: from a folder with weights and a description, or a GGUF file, to a filled model of transformers."""

from __future__ import annotations

import copy
import json
import os
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, overload

import torch
from torch import nn

from tensorferry.api import prepare, refuse_misfit, run, scheduled
from tensorferry.checkpoint import OpeningOptions, open_checkpoint, refuse_unknown_options
from tensorferry.compat.transformers import internals
from tensorferry.compat.transformers.configs import (
    ConfigFile,
    chosen_class,
    chosen_dtype,
    loaded_config,
    refuse_impossible,
)
from tensorferry.compat.transformers.dividing import adapt_divided, ranks_of
from tensorferry.compat.transformers.gguf_files import config_from_file, differences
from tensorferry.compat.transformers.own_configs import brings_config, own_config
from tensorferry.config import ParallelConfig, ReadOptions
from tensorferry.core.catalogue import Catalogue
from tensorferry.core.plan import Strictness
from tensorferry.errors import ConfigError, shown
from tensorferry.execute.exchange import Party, sharing, told_of
from tensorferry.execute.threaded import ThreadedExecutor
from tensorferry.formats.download import local_path
from tensorferry.formats.side_files import Described, described
from tensorferry.modules.describe import places
from tensorferry.modules.surroundings import usable_device
from tensorferry.parallel import Agreement
from tensorferry.progress import SILENT, Progress, progress_of
from tensorferry.report import Report
from tensorferry.storage.base import Storage
from tensorferry.storage.object_uri import is_uri

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["build", "build_model", "load_model"]


@overload
def load_model(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    trust_remote_code: bool = False,
    strict: Strictness | None = None,
    options: ReadOptions | None = None,
    progress: Progress | bool = SILENT,
    auto_class: type | str | None = None,
    config: Any = None,
    revision: str | None = None,
    parallel: ParallelConfig | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    replicated: bool = False,
    return_report: Literal[False] = False,
    **opening: Unpack[OpeningOptions],
) -> PreTrainedModel: ...
@overload
def load_model(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    trust_remote_code: bool = False,
    strict: Strictness | None = None,
    options: ReadOptions | None = None,
    progress: Progress | bool = SILENT,
    auto_class: type | str | None = None,
    config: Any = None,
    revision: str | None = None,
    parallel: ParallelConfig | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    replicated: bool = False,
    return_report: Literal[True],
    **opening: Unpack[OpeningOptions],
) -> tuple[PreTrainedModel, Report]: ...
def load_model(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    trust_remote_code: bool = False,
    strict: Strictness | None = None,
    options: ReadOptions | None = None,
    progress: Progress | bool = SILENT,
    auto_class: type | str | None = None,
    config: Any = None,
    revision: str | None = None,
    parallel: ParallelConfig | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    replicated: bool = False,
    return_report: bool = False,
    **opening: Unpack[OpeningOptions],
) -> PreTrainedModel | tuple[PreTrainedModel, Report]:
    """Return the model that `path` describes, built by transformers and filled from its weights.

    `path` is a folder with config.json and weights, or a GGUF file, or a folder with one, or the address of any of
    these (``s3://bucket/model``), or the name of a repository on the Hub (``owner/model``; `revision` is a branch, tag
    or commit of it), of which only what is needed is fetched.
    The configuration of a GGUF file is made of its metadata, that of Meta's and Mistral's consolidated files of their
    params.json, unless a config.json lies beside; the report says what is inferred or assumed.

    The class is the one that config.json names under ``architectures``; the model equals that of
    ``Class.from_pretrained(path)``, is in eval mode, and lies on `device` (default: CPU). Nothing is given memory
    before the plan of the load has no problem.

    dtype: of the parameters; by default what config.json says, else what most bytes of the weights have, float32 for
    packed ones. Parts that the class keeps in float32 stay so. auto_class: an ``AutoModelFor…`` class, a concrete
    one, or the name of either, where `architectures` is absent or another class is wanted. config: used instead of
    config.json, and compared with what a GGUF file or params.json says.
    trust_remote_code: run Python code that came with the checkpoint; without it, such a model is refused.
    parallel: divide the model among ranks by the tensor- and expert-parallel plan of its class, and load this rank's
    part; it is run by all ranks together. group: of torch.distributed, the ranks that share the model; by default all.
    replicated: load a class without such a plan whole on every rank, instead of refusing it.
    strict, options, progress, opening: as in `tensorferry.load`. return_report: return (model, report) instead.

    Raises ConfigError and UnsafeFile for a configuration that cannot or must not be built, and what `load` raises.
    Where one rank fails, all raise what it met.
    """
    parallel = parallel or ParallelConfig()
    mine = ranks_of(parallel, group)
    ranks = Agreement(mine, group, device=device)
    with ExitStack() as until_loaded:
        with ranks.together():
            refuse_unknown_options(load_model, opening)
            _refuse_stages(parallel)
            telling = SILENT if progress is True and mine.rank else progress_of(progress)
            name, settled = os.fspath(path), usable_device(device)
            path = local_path(path, revision=revision, **opening)
            checkpoint = until_loaded.enter_context(open_checkpoint(path, options=options, **opening))
            model, notes = build_model(
                path,
                checkpoint.catalogue,
                subfolder=opening.get("subfolder"),
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                auto_class=auto_class,
                config=config,
                name=name,
            )
            how = adapt_divided(model, checkpoint, parallel, group, replicated=replicated)
            prepared = prepare(model, checkpoint, strict=strict, adapted=how)
            prepared = replace(prepared, notes=(*notes, *prepared.notes))
            refuse_misfit(prepared, model)
            hands_on = checkpoint.options.among(mine.rank, mine.size).hands_on and settled.type == "cpu"
            schedule = scheduled(prepared) if hands_on else None
            party = until_loaded.enter_context(closing(Party(schedule, checkpoint.storage)))
            told = json.dumps([party.offer, told_of(checkpoint.storage, checkpoint.catalogue.files)])
        offers, files = zip(*map(json.loads, ranks.exchanged(told)), strict=True)
        reading = checkpoint.options  # a rank that can ask nobody has these, whatever its number
        if len(files) > 1:
            reading = reading.among(*sharing(files, mine.rank))
        with (
            ranks.together(touches=True),
            party.meet(offers, mine.rank, reading.workers) or nullcontext() as exchange,
        ):
            executor = ThreadedExecutor.of(reading, exchange)
            report = run(
                model, prepared, device=settled, executor=executor, progress=telling, watch=ranks.watch,
                schedule=schedule,
            )  # fmt: skip
    built = cast("PreTrainedModel", model)
    return (built, report) if return_report else built


def _refuse_stages(parallel: ParallelConfig) -> None:
    if parallel.pp_size > 1:
        raise ConfigError(
            f"pp_size {parallel.pp_size}: load_model knows no pipeline stages, which can be planned with plan_cluster:"
            " divide the model by tp_size and ep_size"
        )


def build_model(
    path: str | os.PathLike[str],
    catalogue: Catalogue,
    *,
    subfolder: str | None = None,
    dtype: torch.dtype | str | None = None,
    trust_remote_code: bool = False,
    auto_class: type | str | None = None,
    config: Any = None,
    name: str | None = None,
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model that the folder or address `path` describes, empty and on meta, and what is to be told of it.

    name: what the configuration says where the model is from, by default `path`. catalogue: what its weights hold, to
    refuse a configuration that cannot be theirs, and for a dtype that nothing names. The other options and the errors
    are those of `load_model`.
    """
    with described(path, subfolder) as beside:
        config, file, told = _configured(beside, catalogue, config, auto_class, trust_remote_code=trust_remote_code)
        kind = chosen_class(config, file, auto_class, trust_remote_code=trust_remote_code)
        dtype, notes = chosen_dtype(dtype, config, catalogue)
        config.name_or_path = _told(os.fspath(path) if name is None else name)
        model = build(kind, config, dtype)
        internals.adopt_generation_config(model, os.fspath(beside.folder), trust_remote_code=trust_remote_code)
    return model, (*told, *notes)


def _told(place: str) -> str:
    """Return where a model is from as it may be written down: without what signs an address."""
    return shown(place, len(place) + 1) if is_uri(place) else place


def _configured(
    beside: Described, catalogue: Catalogue, config: Any, auto_class: type | str | None, *, trust_remote_code: bool
) -> tuple[Any, ConfigFile | None, tuple[str, ...]]:
    """Return the configuration, the file that it is from, and what to tell: as given, of config.json, or its own."""
    folder, storage = beside
    if config is None and not (folder / "config.json").is_file() and brings_config(storage, catalogue):
        own = own_config(storage, catalogue)
        refuse_impossible(own.found.config, catalogue, own.where)
        return config_from_file(own.found), None, own.notes
    file = ConfigFile(folder, f"{storage.uri}/config.json") if config is None else None
    if file is not None:
        file.refuse_impossible(catalogue)
        config = loaded_config(file, auto_class, trust_remote_code=trust_remote_code)
    else:
        config = copy.deepcopy(config)
    return config, file, _disagreements(storage, catalogue, config)


def _disagreements(storage: Storage, catalogue: Catalogue, config: Any) -> tuple[str, ...]:
    if not brings_config(storage, catalogue):
        return ()
    try:
        return differences(config, own_config(storage, catalogue).found)
    except ConfigError:  # the file is of an architecture of which only the one who gave the configuration knows more
        return ()


def build(kind: type[nn.Module], config: Any, dtype: torch.dtype) -> nn.Module:
    """Return an empty `kind` on meta, untied, in `dtype` but for the parts that the class keeps in float32.

    Sets the dtype of `config` and of its parts, as transformers does. Raises ConfigError where it cannot be built.
    """
    for part in (config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", ()))):
        if part is not None:
            part.dtype = dtype
    try:
        with internals.construction(kind, dtype):
            model = kind(copy.deepcopy(config))
    except (ValueError, TypeError, LookupError, AttributeError, ImportError, RuntimeError, ArithmeticError) as error:
        raise ConfigError(
            f"{kind.__name__} cannot be built from its configuration: {shown(str(error), 500)}"
        ) from error
    _set_dtypes(model, dtype)
    return model


def _set_dtypes(model: nn.Module, dtype: torch.dtype) -> None:
    """Give float32 islands their type, and let every floating-point parameter need a gradient."""
    plan = internals.dtype_plan(model, dtype)
    changed: dict[int, nn.Parameter] = {}
    for place in list(places(model)):
        kept = next((kept for pattern, kept in plan if pattern.search(place.name)), place.tensor.dtype)
        if place.is_parameter:
            if kept != place.tensor.dtype or place.tensor.requires_grad != place.tensor.is_floating_point():
                data = place.tensor.detach().to(kept)
                made = changed.setdefault(id(place.tensor), nn.Parameter(data, requires_grad=data.is_floating_point()))
                place.module._parameters[place.leaf] = made
        elif place.persistent and kept != place.tensor.dtype:
            place.module._buffers[place.leaf] = place.tensor.to(kept)
