"""Dividing a transformers model among ranks, as the tensor- and expert-parallel plan of its class says.

Linear layers and embeddings are exchanged for ours, experts and the like get parameters of their part and hooks for
what ranks tell each other. Which part a rank has is declared by our layers, or by `parts`; nothing is read here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tensorferry.checkpoint import Checkpoint
from tensorferry.compat.transformers import expert_hooks
from tensorferry.compat.transformers.adapting import adapt
from tensorferry.compat.transformers.parts import RankPart, cut_dim, cut_experts, cut_packed, whole
from tensorferry.config import ParallelConfig
from tensorferry.core.amounts import few
from tensorferry.core.dividing import divided
from tensorferry.core.target import Target, TargetTensor
from tensorferry.errors import ConfigError
from tensorferry.modules.adapters import Adapted
from tensorferry.parallel import ColumnParallelLinear, Ranks, RowParallelLinear, VocabParallelEmbedding, split_heads
from tensorferry.parallel.groups import with_the_same_experts

__all__ = ["Division", "adapt_divided", "divide", "ranks_of"]

_GATHERED = ("colwise_gather_output", "colwise_rep")
_SPLITTING = ("rowwise_split_input", "rowwise_rep")
_SUMMED = ("moe_tp_experts", "all_reduce")
_NOTHING = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "replicate", "local_params")
"""Styles that change gradients, or what is a DTensor; a forward pass by itself needs nothing of them."""

_SHOWN = 10

_EXPERT_PARAMETERS, _EXPERTS = "grouped_gemm", ("ep_dispatch_experts", "moe_tp_experts")


@dataclass(frozen=True)
class Division:
    """What a rank has of each parameter that is divided; all others are whole."""

    parts: Mapping[str, RankPart] = field(default_factory=dict)

    def of(self, target: Target) -> Target:
        """Return what this rank needs of what `target` says of the whole model."""
        return {
            name: tensor if (part := self.parts.get(name)) is None else _divided(tensor, part)
            for name, tensor in target.items()
        }


def ranks_of(parallel: ParallelConfig, group: torch.distributed.ProcessGroup | None = None) -> Ranks:
    """Return the ranks that share a model: tensor-parallel ones, or expert-parallel ones where these are more."""
    if parallel.tp_size >= parallel.ep_size:
        return Ranks(parallel.tp_size, parallel.tp_rank, group)
    return Ranks(parallel.ep_size, parallel.ep_rank, group)


def adapt_divided(
    model: nn.Module,
    checkpoint: Checkpoint,
    parallel: ParallelConfig | None,
    group: torch.distributed.ProcessGroup | None = None,
    *,
    replicated: bool = False,
) -> Adapted | None:
    """Divide `model`, which is on meta, and return how its rank's part is filled; None where it is not divided."""
    if parallel is None or parallel == ParallelConfig():
        return None
    how = adapt(model, checkpoint.catalogue)
    if how is None:
        raise ConfigError(f"{type(model).__name__} is no model of transformers, so there is no plan to divide it by")
    return replace(how, target=divide(model, parallel, group, replicated=replicated).of(how.target))


def divide(
    model: nn.Module,
    parallel: ParallelConfig,
    group: torch.distributed.ProcessGroup | None = None,
    *,
    replicated: bool = False,
) -> Division:
    """Give `model`, on meta, the layers and parameters of one rank, and return what these are of the whole ones.

    group: of the ranks that share the model; None for the default one, which is needed when the model runs.
    replicated: whether a class without a plan is left whole, so that every rank has and does everything.

    Raises ConfigError for a class that has no plan, for sizes that the ranks do not divide, and for a style that is
    not known here; the model is of no use then.
    """
    styles = _Styles.of(model, parallel)
    if styles.is_empty:
        if replicated:
            return Division()
        raise ConfigError(
            f"{type(model).__name__} has no {styles.kind}-parallel plan in this version of transformers: load it whole "
            "on every rank with replicated=True, or on one"
        )
    dividing, problems = _Dividing(model, styles, parallel, group), []
    for name, module in list(model.named_modules()):
        try:
            dividing.module(name, module)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(_undividable(model, problems))
    return Division(dividing.parts)


def _undividable(model: nn.Module, problems: list[str]) -> str:
    """Return what cannot be divided, in a line for each sort of it, numbers of layers folded."""
    sorts = list(dict.fromkeys(_starred(problem) for problem in problems))
    lines = few(sorts, _SHOWN, between="\n  ")
    return f"{type(model).__name__} cannot be divided so:\n  {lines}"


@dataclass(frozen=True)
class _Styles:
    """Styles by name, with stars for numbers, as transformers writes them. kind: of parallelism, in words."""

    tensor: Mapping[str, str]
    expert: Mapping[str, str]
    kind: str

    @classmethod
    def of(cls, model: Any, parallel: ParallelConfig) -> _Styles:
        tensor = dict(getattr(model, "tp_plan", None) or {}) if parallel.tp_size > 1 else {}
        expert = dict(_expert_plan(model)) if parallel.ep_size > 1 else {}
        return cls(tensor, expert, "expert" if parallel.ep_size > 1 and parallel.tp_size == 1 else "tensor")

    @property
    def is_empty(self) -> bool:
        ends = ("lm_head", "embed_tokens")  # every class is given these, whether it has a plan of its own or not
        return not self.expert and all(name.rpartition(".")[2] in ends for name in self.tensor)


def _expert_plan(model: Any) -> Mapping[str, str]:
    found = getattr(model, "ep_plan", None)
    if found:
        return dict(found)
    prefix = getattr(model, "base_model_prefix", "")
    below = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    config = model.config.get_text_config()
    return {f"{below}{name}": style for name, style in (getattr(config, "base_model_ep_plan", None) or {}).items()}


class _Dividing:
    """The work of `divide`, module by module."""

    def __init__(
        self, model: nn.Module, styles: _Styles, parallel: ParallelConfig, group: torch.distributed.ProcessGroup | None
    ) -> None:
        self.model, self.styles, self.parallel, self.group = model, styles, parallel, group
        self.ranks = Ranks(parallel.tp_size, parallel.tp_rank, group)
        self.parts: dict[str, RankPart] = {}

    def module(self, name: str, module: nn.Module) -> None:
        starred = _starred(name)
        style, experts = self.styles.tensor.get(starred), self.styles.expert.get(starred)
        if experts in _EXPERTS or style in _SUMMED:
            self._experts(name, module, style, experts)
        elif style is not None and style not in _NOTHING:
            self._styled(name, module, style)
        else:
            for leaf in list(module._parameters):
                if (own := self.styles.tensor.get(f"{starred}.{leaf}")) is not None:
                    self._parameter(name, module, leaf, own)

    def _styled(self, name: str, module: nn.Module, style: str) -> None:
        if style == "embedding_rowwise" and isinstance(module, nn.Embedding):
            self._embedding(name, module)
        elif style == "moe_identity_expert":
            module.register_forward_pre_hook(lambda _, given: (given[0] / self.ranks.size, *given[1:]))
        elif style == "embedding_colwise" and isinstance(module, nn.Embedding):
            self._cut(name, module, "weight", cut_dim(whole(module.weight), 1, self.ranks, name))
            module.register_forward_hook(lambda _, __, out: self.ranks.join(out))
        elif isinstance(module, nn.Linear):
            self._linear(name, module, style)
        else:
            raise ConfigError(f"{name}: the style {style!r} of {type(module).__name__} is not known here")

    def _linear(self, name: str, module: nn.Linear, style: str) -> None:
        heads = self._shared_heads(name, module) if style == "colwise" else None
        if heads is None and style != "packed_colwise":
            self._exchange(name, module, self._ours(name, module, style))
            return
        for leaf in ("weight", "bias"):
            if (parameter := module._parameters[leaf]) is not None:
                all_of_it = whole(parameter)
                part = all_of_it.rows(heads) if heads is not None else cut_packed(all_of_it, 0, self.ranks, name)
                self._cut(name, module, leaf, part)

    def _ours(self, name: str, module: nn.Linear, style: str) -> ColumnParallelLinear | RowParallelLinear:
        sizes = (module.in_features, module.out_features, module.bias is not None)
        common: dict[str, Any] = {"parallel": self.parallel, "group": self.group, "dtype": module.weight.dtype}
        try:
            with torch.device("meta"):
                if style == "colwise" or style in _GATHERED:
                    gathered = style in _GATHERED
                    return ColumnParallelLinear(*sizes, gather_output=gathered, pad=gathered, **common)
                if style == "rowwise" or style in _SPLITTING:
                    split = style in _SPLITTING
                    return RowParallelLinear(*sizes, input_is_parallel=not split, pad=split, **common)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        raise ConfigError(f"{name}: the style {style!r} of {type(module).__name__} is not known here")

    def _shared_heads(self, name: str, module: nn.Linear) -> range | None:
        """Return the rows of a key or value projection whose heads several ranks have; None where each has its own.

        Raises ConfigError where ranks would have parts of heads.
        """
        parent = self.model.get_submodule(name.rpartition(".")[0])
        size, leaf = getattr(parent, "head_dim", None), name.rpartition(".")[2]
        if not isinstance(size, int) or module.out_features % size or leaf not in ("q_proj", "k_proj", "v_proj"):
            return None
        heads, ranks = module.out_features // size, self.ranks
        groups = getattr(parent, "num_key_value_groups", 1)
        if heads % ranks.size == 0:
            return None
        if leaf == "q_proj":
            raise ConfigError(f"{name}: {heads} heads cannot be divided among {ranks.size} ranks")
        try:
            mine = split_heads(heads * groups, heads, ranks.size, ranks.rank)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        if leaf == "v_proj":  # once for both
            parent.num_key_value_groups = len(mine.query)  # type: ignore[assignment]
        return range(mine.kv.start * size, mine.kv.stop * size)

    def _exchange(self, name: str, old: nn.Module, new: Any) -> None:
        """Put one of our layers in the place of one of torch's, and note what its parameters are of the whole ones."""
        parent, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(parent), leaf, new)
        for parameter, layout in new.tensor_slots().items():
            slot, shape = layout.slots[""], tuple(new.get_parameter(parameter).shape)
            self.parts[f"{name}.{parameter}"] = RankPart(slot.window, shape, slot.local, layout.default)
        new.train(old.training)

    def _embedding(self, name: str, module: nn.Embedding) -> None:
        with torch.device("meta"):
            ours = VocabParallelEmbedding(
                module.num_embeddings, module.embedding_dim, padding_size=self.ranks.size, parallel=self.parallel,
                group=self.group, dtype=module.weight.dtype,
            )  # fmt: skip
        if type(module) is nn.Embedding:
            self._exchange(name, module, ours)
            return
        layout = ours.tensor_slots()["weight"]
        slot = layout.slots[""]
        self._cut(name, module, "weight", RankPart(slot.window, tuple(ours.weight.shape), slot.local, layout.default))
        module.padding_idx = None
        expert_hooks.look_up_by_rank(module, ours)

    def _experts(self, name: str, module: nn.Module, style: str | None, experts: str | None) -> None:
        """Divide experts by number, and what ranks with the same ones have by their inner dimension."""
        starred, sharing = _starred(name), self._sharing(experts is not None)
        count: int | None = None
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            part, where = whole(parameter), f"{starred}.{leaf}"
            if self.styles.expert.get(where) == _EXPERT_PARAMETERS:
                count = parameter.shape[0]
                part = cut_experts(part, self.parallel, name)
            own = self.styles.tensor.get(where)
            if own is not None:
                packed = own == "colwise" and leaf == "gate_up_proj" and getattr(module, "is_concatenated", True)
                # Plans say colwise where the tensor on disk has gate and up in turns; what is divided here has not.
                part = _cut_by("packed_colwise" if packed else own, part, sharing, f"{name}.{leaf}")
            elif leaf.endswith("bias") and sharing.rank:
                part = replace(part, default=0.0, nothing=True)  # each rank would add it
            if part != whole(parameter):
                self._cut(name, module, leaf, part)
        expert_hooks.sum_over_ranks(module, ranks_of(self.parallel, self.group))
        if count is not None:
            expert_hooks.choose_own_experts(module, count, self.parallel)

    def _sharing(self, by_number: bool) -> Ranks:
        """Return the ranks that have the same experts, and divide their inner dimension."""
        if not by_number:
            return self.ranks
        tp, ep = self.parallel.tp_size, self.parallel.ep_size
        if ep > tp > 1:  # expert_hooks adds up over one group, which all that is divided shares
            raise ConfigError(
                f"experts: {ep} expert-parallel ranks are more than the {tp} tensor-parallel ones: give ep_size {tp} or"
                " less, or tp_size 1"
            )
        return with_the_same_experts(self.parallel)

    def _parameter(self, name: str, module: nn.Module, leaf: str, style: str) -> None:
        parameter = module._parameters[leaf]
        if parameter is not None and style not in _NOTHING:
            self._cut(name, module, leaf, _cut_by(style, whole(parameter), self.ranks, f"{name}.{leaf}"))

    def _cut(self, name: str, module: nn.Module, leaf: str, part: RankPart) -> None:
        old = module._parameters[leaf]
        assert old is not None
        made = torch.empty(part.shape, dtype=old.dtype, device="meta")
        module._parameters[leaf] = nn.Parameter(made, requires_grad=False)
        self.parts[f"{name}.{leaf}"] = part


def _cut_by(style: str, part: RankPart, ranks: Ranks, what: str) -> RankPart:
    """Return the part of a bare parameter that a style gives a rank."""
    dims = len(part.shape)
    if style == "rowwise":
        return part if dims == 1 else cut_dim(part, dims - 1, ranks, what)
    if style == "colwise":
        return cut_dim(part, max(0, dims - 2), ranks, what)
    if style == "packed_colwise":
        return cut_packed(part, max(0, dims - 2), ranks, what)
    if style == "packed_rowwise":
        return part if dims == 1 else cut_packed(part, dims - 1, ranks, what)
    raise ConfigError(f"{what}: the style {style!r} of a parameter is not known here")


def _divided(tensor: TargetTensor, part: RankPart) -> TargetTensor:
    if part.nothing:
        absent = frozenset(tensor.slots)
        return replace(tensor, shape=part.shape, slots={}, default=part.default, absent=absent)
    return replace(divided(tensor, part.region, part.shape, into=part.into), default=part.default)


def _starred(name: str) -> str:
    """Return a name as plans write it: numbers are stars.

    >>> _starred("model.layers.3.mlp.experts")
    'model.layers.*.mlp.experts'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
