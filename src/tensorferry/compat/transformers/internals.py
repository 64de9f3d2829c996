"""The parts of transformers that change between releases, each with what to do where it is absent.

Nothing else in this package touches names that begin with an underscore, or modules that are not documented. Written
for transformers 5.2 and later.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from tensorferry.core.names import natural_key
from tensorferry.modules.surroundings import building

__all__ = [
    "Converter",
    "adopt_generation_config",
    "construction",
    "dtype_plan",
    "flag_filled",
    "ignored_when_missing",
    "ignored_when_unexpected",
    "initialize",
    "keep_conversions",
    "mapping_of",
    "natural_order",
    "number_pattern",
    "renamer",
    "retie",
    "run_converter",
    "tied_names",
    "untie",
]

Converter: TypeAlias = Any
"""A `WeightConverter` of transformers, which has no stable type."""

Model: TypeAlias = Any
"""A `PreTrainedModel`: what is asked of it here, other releases do not declare."""


@contextmanager
def construction(kind: type[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Build models on meta, untied, with `dtype` as the default, as ``from_pretrained`` does."""
    with building(dtype), ExitStack() as stack:
        for context in _contexts(kind, dtype):
            stack.enter_context(context)
        yield


def _contexts(kind: type[nn.Module], dtype: torch.dtype) -> Iterable[AbstractContextManager[Any]]:
    make = getattr(kind, "get_init_context", None)
    for arguments in ((dtype, False, False, False), (dtype, False, False), (dtype, False)):
        if make is not None:
            try:
                made = list(make(*arguments))
            except TypeError:
                continue
            return made
    return [_no_tying(), torch.device("meta")]


@contextmanager
def _no_tying() -> Iterator[None]:
    from transformers import PreTrainedModel

    base: Model = PreTrainedModel
    before = base.tie_weights
    base.tie_weights = lambda *_, **__: None
    try:
        yield
    finally:
        base.tie_weights = before


def dtype_plan(model: Model, dtype: torch.dtype) -> list[tuple[re.Pattern[str], torch.dtype]]:
    """Return which names keep a dtype of their own in a model of `dtype`: float32 islands."""
    make = getattr(model, "_get_dtype_plan", None)
    plan: Mapping[str, torch.dtype] = make(dtype) if make is not None else _float32_islands(model, dtype)
    return [(re.compile(name.replace("*", ".*")), kept) for name, kept in plan.items()]


def _float32_islands(model: Model, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
    names: set[str] = set()
    if dtype == torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype in (torch.float16, torch.bfloat16):
        names |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return dict.fromkeys(names, torch.float32)


def mapping_of(model: Model) -> list[Any]:
    """Return the renamings and converters that transformers applies to checkpoints of `model`, in order."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return []
    return list(get_model_conversion_mapping(model))


def renamer(
    model: Model, mapping: Sequence[Any], wanted: Mapping[str, object]
) -> Callable[[str], tuple[str, Converter | None, str]]:
    """Return what says of a name in the checkpoint: its name in the model, the converter, and the pattern it matched.

    The name is that of the converter's first target where there is a converter. Call it in `natural_order`: some
    renamings depend on what came before.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix = getattr(model, "base_model_prefix", None)

    known: Any = wanted  # declared as a dict; what is used of it is `get` and `in`

    def rename(name: str) -> tuple[str, Converter | None, str]:
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in wanted and name in wanted:
            renamed, pattern = rename_source_key(name, [], [], prefix, known)
        return renamed, by_pattern.get(pattern or ""), pattern or ""

    return rename


def natural_order(names: Iterable[str]) -> list[str]:
    """Return `names` in the order in which transformers hands them to its converters."""
    try:
        from transformers.core_model_loading import dot_natural_key
    except ImportError:
        return sorted(names, key=natural_key)
    return sorted(names, key=dot_natural_key)


def number_pattern(pattern: str) -> re.Pattern[str] | None:
    """Return what finds the number of a list's member in a name that matched `pattern`; None where it has no list."""
    if "*." not in pattern:
        return None
    return re.compile(pattern.replace("*.", r"(?P<member>\d+)\.", 1).replace("*.", r".*\."))


def run_converter(converter: Converter, tensors: Mapping[str, list[Any]], name: str, model: Model) -> dict[str, Any]:
    """Run a converter on the tensors of one layer, by pattern, and return what it makes, by full name."""
    fresh = copy.deepcopy(converter)
    fresh.collected_tensors = {pattern: list(some) for pattern, some in tensors.items()}
    made: Mapping[str, Any] = fresh.convert(name, model=model, config=getattr(model, "config", None))
    return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}


def keep_conversions(model: Model, mapping: Sequence[Any]) -> None:
    """Let ``save_pretrained`` write the names that the checkpoint had, by what was used of `mapping`."""
    if all(hasattr(m, "was_used") for m in mapping):
        model._weight_conversions = [m for m in mapping if m.was_used()]


def tied_names(model: Model) -> Mapping[str, str]:
    """Return the ties that the model's configuration asks for: tied name to the name it shares."""
    tied = getattr(model, "all_tied_weights_keys", None)
    if tied is None:
        expand = getattr(model, "get_expanded_tied_weights_keys", None)
        tied = expand(all_submodels=True) if expand is not None else {}
    return dict(tied)


def untie(model: Model, names: Iterable[str]) -> None:
    """Take names out of the ties of the model, so that nothing ties them again."""
    tied = getattr(model, "all_tied_weights_keys", None)
    for name in names:
        if isinstance(tied, dict):
            tied.pop(name, None)


def retie(model: Model, aliases: Iterable[str]) -> None:
    """Let the model note its ties, of which only the tensors are set: the sizes of heads, for example."""
    tie = getattr(model, "tie_weights", None)
    if tie is None:
        return
    try:
        tie(missing_keys=set(aliases), recompute_mapping=False)
    except TypeError:
        tie()


def ignored_when_missing(model: Model) -> re.Pattern[str] | None:
    """Return which parameters the class lets be missing, to be found in a name; None for none."""
    return _any_of(getattr(model, "_keys_to_ignore_on_load_missing", None))


def ignored_when_unexpected(model: Model) -> re.Pattern[str] | None:
    """Return which entries the class knows to be of no use to it, to be found in a name; None for none."""
    return _any_of(getattr(model, "_keys_to_ignore_on_load_unexpected", None))


def _any_of(patterns: Iterable[str] | None) -> re.Pattern[str] | None:
    known = sorted(patterns or ())
    return re.compile("|".join(f"({p})" for p in known)) if known else None


def flag_filled(tensor: torch.Tensor) -> None:
    """Note that a tensor has its values, so that `initialize` leaves it alone."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def initialize(model: Model) -> None:
    """Let the model give values to the tensors that were not flagged; its non-persistent buffers are among them."""
    whole = getattr(model, "initialize_weights", None)
    if whole is not None:
        whole()
    else:
        model.apply(model._initialize_weights)


def adopt_generation_config(model: Model, folder: str, *, trust_remote_code: bool) -> None:
    """Give `model` the generation settings beside its weights, as ``from_pretrained`` does."""
    can_generate = getattr(model, "can_generate", None)
    if can_generate is None or not can_generate():
        return
    from transformers import GenerationConfig

    adjust = getattr(model, "adjust_generation_fn", None)
    if not any(Path(folder, name).is_file() for name in ("generation_config.json", "config.json")):
        model.generation_config = GenerationConfig.from_model_config(model.config)
        return
    if adjust is not None:
        adjust(
            None, False, None, folder, cache_dir=None, force_download=False, proxies=None, local_files_only=True,
            token=None, revision="main", subfolder="", trust_remote_code=trust_remote_code,
        )  # fmt: skip
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        model.generation_config = GenerationConfig.from_model_config(model.config)
