"""What of a vLLM model no checkpoint need hold, told from its modules: element-exact for everything else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Any

from torch import nn

from tensorferry.core.plan import Plan
from tensorferry.modules.describe import Place, offers, places, walked_once
from tensorferry.problems import Problem, ProblemKind

__all__ = ["HasDefaultScales", "IsPadding", "computed", "padding_of", "without_computed", "without_padding"]

_SCALES = {"q_scale", "k_scale", "v_scale", "prob_scale", "q_zero_point", "k_zero_point", "v_zero_point"}
_CONFIGURED = {"input_scale_ub"}
"""Parameters whose values vLLM takes from the configuration."""

_EXPERT_BIASES = {"w13_bias", "w2_bias"}
"""Parameters that some layers have whatever the architecture says, and drop after loading if nothing came for them."""

HasDefaultScales = Callable[[nn.Module], bool]

IsPadding = Callable[[str, int, int], bool]
"""Whether a parameter lacks just padding: told its name, how many elements of it are filled, and how many it has."""


def computed(model: nn.Module, has_default_scales: HasDefaultScales) -> dict[str, str]:
    """Return the tensors of `model` that have their values before anything is loaded, with where these are from.

    These are buffers, which vLLM's constructors compute, except the statistics of batch norms; scales of a key-value
    cache, which have a default; biases of experts that have none; and what is taken from the configuration.
    """
    found: dict[str, str] = {}
    for place in places(model):
        if place.persistent and (why := _origin(place, has_default_scales)) is not None:
            found[place.name] = why
    return found


def _origin(place: Place, has_default_scales: HasDefaultScales) -> str | None:
    if not place.is_parameter:
        is_statistic = isinstance(place.module, nn.modules.batchnorm._NormBase)
        return None if is_statistic else "a buffer that the constructor fills"
    if place.leaf in _EXPERT_BIASES and _has_no_bias(place.module):
        return "a bias that these experts do not have"
    if place.leaf in _SCALES and has_default_scales(place.module):
        return "a scale of the key-value cache, which has a default"
    return "set by the configuration" if place.leaf in _CONFIGURED else None


def _has_no_bias(module: nn.Module) -> bool:
    config = getattr(module, "moe_config", None) if offers(module, "moe_config") else None
    return getattr(config, "has_bias", None) is False


def padding_of(model: nn.Module) -> IsPadding:
    """Return what knows the padding of the experts of `model`.

    Kernels may want experts of larger sizes than the checkpoint has; the layer says of which. The elements that are
    filled must be exactly as many as that leaves.
    """
    shares = dict(_shares(model))

    def is_padding(name: str, filled: int, total: int) -> bool:
        return filled in {total * share for share in shares.get(name, ())}

    return is_padding


def without_padding(plan: Plan, is_padding: IsPadding) -> Plan:
    """Return `plan` without the finding that parameters are not filled where just their padding is left over."""
    covered = _covered(plan) if plan.missing else {}

    def is_settled(problem: Problem) -> bool:
        name = problem.subject
        if problem.kind is not ProblemKind.MISSING or name not in plan.parameters:
            return False
        return is_padding(name, covered.get(name, 0), prod(plan.parameters[name].shape))

    return _without(plan, is_settled)


def _without(plan: Plan, is_settled: Callable[[Problem], bool]) -> Plan:
    return replace(plan, problems=tuple(p for p in plan.problems if not is_settled(p)))


def _shares(model: nn.Module) -> Iterator[tuple[str, set[Fraction]]]:
    """Yield parameters of experts that are padded, with the shares of them that a checkpoint may fill."""
    for dot, module in walked_once(model):
        if not offers(module, "moe_config"):
            continue
        config: Any = getattr(module, "moe_config", None)
        hidden = _ratio(config, "hidden_dim")
        inner = _ratio(config, "intermediate_size_per_partition")
        shares = {hidden, inner, hidden * inner} - {Fraction(1)}
        if shares:
            yield from ((dot + name, shares) for name, _ in module.named_parameters(recurse=False))


def _ratio(config: Any, size: str) -> Fraction:
    padded, wanted = getattr(config, size, None), getattr(config, f"{size}_unpadded", None)
    if not isinstance(padded, int) or not isinstance(wanted, int) or not 0 < wanted <= padded:
        return Fraction(1)
    return Fraction(wanted, padded)


def _covered(plan: Plan) -> Mapping[str, int]:
    elements: Counter[str] = Counter()
    for step in plan.steps:
        elements[step.parameter] += step.into.size
    return elements


def without_computed(plan: Plan, names: Iterable[str]) -> Plan:
    """Return `plan` without the finding that tensors are missing that have their values already."""
    known = set(names)
    return _without(plan, lambda p: p.kind is ProblemKind.MISSING and p.subject in known)
