"""What is taken from vLLM, and where it keeps it: nothing else here imports vLLM.

Written for vLLM 0.12 to 0.32; what only some versions have is looked for.
Nothing of vLLM is changed; the loader is registered as vLLM lets plug-ins do it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn
from vllm.distributed import parallel_state
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from tensorferry.modules.snapshot import Setting
from tensorferry.parallel import Agreement, Ranks

__all__ = [
    "BaseModelLoader",
    "agreement",
    "from_modelscope",
    "has_default_scales",
    "is_drafted",
    "is_first_rank",
    "loading_for",
    "log",
    "quantizes_while_loading",
    "ranks",
    "register_model_loader",
    "shared_with_served",
]

log: logging.Logger = init_logger("vllm.tensorferry")
"""vLLM's log: only loggers under its own name have its handlers."""

_EAGLE = ("eagle", "eagle3")
"""Methods of speculation whose heads may do without an embedding and an output layer of their own."""

_given: ContextVar[Any] = ContextVar("_given", default=None)
"""The configuration that vLLM loads a model with; before 0.14 it is not the current one by then."""


@contextmanager
def loading_for(vllm_config: Any) -> Iterator[None]:
    """Have `vllm_config` count as vLLM's configuration while this lasts."""
    token = _given.set(vllm_config)
    try:
        yield
    finally:
        _given.reset(token)


def agreement(model_config: Any) -> Agreement:
    """Return what the ranks that load this model do as one: all of the engine, those of other replicas left out.

    Draft models are loaded by the last pipeline stage alone, so only its ranks agree on one.
    """
    return Agreement(ranks(model_config), [group.cpu_group for group in _groups(model_config)])


def ranks(model_config: Any) -> Ranks:
    """Return the ranks that load this model, and which of them this one is."""
    return _counted(_groups(model_config))


def is_drafted(model_config: Any) -> bool:
    """Whether this is not the model that is served, but one that drafts for it.

    vLLM loads some drafts with a configuration of their own, of which only the part for speculation tells.
    """
    config = _current_config()
    if getattr(_speculation(config), "draft_model_config", None) is model_config:
        return True
    served = getattr(config, "model_config", None)
    return served is not None and served is not model_config


def shared_with_served(model: nn.Module, model_config: Any, settings: Iterable[Setting]) -> dict[str, str]:
    """Return the parameters of a draft model that vLLM takes from the served one, since `model` has found none itself.

    Only EAGLE heads have such, and their loader sets flags for what it has found. An embedding is shared where all is
    one stage.
    """
    config = _current_config()
    if not is_drafted(model_config) or getattr(_speculation(config), "method", None) not in _EAGLE:
        return {}
    is_one_stage = config.parallel_config.pipeline_parallel_size == 1
    is_as_wide = config.model_config.get_hidden_size() == model_config.get_hidden_size()
    flags = {s.attribute: s.value for s in settings if not (s.module or s.is_gone)}

    def has_own(layer: str) -> bool:
        flag = f"has_own_{layer}"
        return bool(flags.get(flag, getattr(model, flag, True)))

    prefixes = {
        "lm_head.": has_own("lm_head"),
        "model.embed_tokens.": has_own("embed_tokens") or not (is_one_stage and is_as_wide),
    }
    missing = tuple(prefix for prefix, is_own in prefixes.items() if not is_own)
    return {n: "taken from the served model" for n, _ in model.named_parameters() if n.startswith(missing)}


def is_first_rank() -> bool:
    """Whether this process is the first of its engine, which tells of progress for all."""
    return _counted(_world()).rank == 0


def quantizes_while_loading(model: nn.Module) -> bool:
    """Whether layers of `model` have no memory yet, and are quantized by their own loaders when they are complete."""
    return any(getattr(getattr(m, "quant_method", None), "uses_meta_device", False) for m in model.modules())


def has_default_scales(module: nn.Module) -> bool:
    """Whether `module` has scales for a key-value cache, which vLLM sets where the checkpoint has none."""
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    return isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)


def from_modelscope(name: str, revision: str | None) -> str | None:
    """Return where vLLM has put the model `name` of ModelScope; None where it is not told to use that."""
    try:
        from vllm.model_executor.model_loader.weight_utils import maybe_download_from_modelscope
    except ImportError:
        return None
    found: str | None = maybe_download_from_modelscope(name, revision)
    return found


def _groups(model_config: Any) -> list[Any]:
    """Return the group of the ranks that load this model, or those that divide them like a grid; none for one alone."""
    return _several("get_tp_group") if is_drafted(model_config) else _world()


def _world() -> list[Any]:
    """Return the groups of the ranks of this engine, all its stages; replicas of data parallelism are engines, too.

    vLLM makes a group of just these where one of several replicas has ranks on several machines. Elsewhere its other
    groups span them: in vLLM's order, tensor-parallel ranks are neighbours, and stages are farthest apart.
    """
    config = _current_config()
    if config is None or config.parallel_config.data_parallel_size == 1:
        return _several("get_world_group")
    if _known("get_inner_dp_world_group") is not None:
        return _several("get_inner_dp_world_group")
    return _several("get_tp_group", "get_pcp_group", "get_pp_group")


def _several(*names: str) -> list[Any]:
    """Return those of vLLM's groups that are there and have more than one rank."""
    return [group for group in map(_known, names) if group is not None and group.world_size > 1]


def _counted(groups: Iterable[Any]) -> Ranks:
    """Return the ranks of a grid, and which of them this one is, counted along the first group first."""
    size, rank = 1, 0
    for group in groups:
        rank += size * group.rank_in_group
        size *= group.world_size
    return Ranks(size, rank)


def _known(name: str) -> Any:
    """Return the group that vLLM calls so; None where this version has no such group, or has not made it."""
    found = getattr(parallel_state, name, None)
    try:
        return None if found is None else found()
    except AssertionError:
        return None


def _speculation(config: Any) -> Any:
    return getattr(config, "speculative_config", None)


def _current_config() -> Any:
    from vllm import config

    if (given := _given.get()) is not None:
        return given
    if hasattr(config, "get_current_vllm_config_or_none"):
        return config.get_current_vllm_config_or_none()
    try:
        return config.get_current_vllm_config()
    except AssertionError:
        return None
