"""The sizes that transforms of tensors depend on, taken from a configuration as transformers writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensorferry.errors import ConfigError, shown

__all__ = ["Sizes"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model: counts and extents of tensors, 0 where a model has no such thing.

    width: of the hidden state. key, value: of one head. nope: the part of a latent key that is not rotated.
    latent: rank of latent keys and values. expert_width: of the hidden layer of one expert.
    """

    width: int
    heads: int
    kv_heads: int
    key: int
    value: int
    nope: int
    latent: int
    experts: int
    expert_width: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes:
        """Return the sizes that `config` gives. Raises ConfigError where one that all models have is absent."""
        width, heads = _needed(config, "hidden_size"), _needed(config, "num_attention_heads")
        key = _number(config, "head_dim") or width // heads
        experts = _number(config, "num_local_experts", "num_experts", "n_routed_experts")
        return cls(
            width=width,
            heads=heads,
            kv_heads=_number(config, "num_key_value_heads") or heads,
            key=key,
            value=_number(config, "v_head_dim") or key,
            nope=_number(config, "qk_nope_head_dim"),
            latent=_number(config, "kv_lora_rank"),
            experts=experts,
            expert_width=_number(config, "moe_intermediate_size", "intermediate_size") if experts else 0,
        )


def _number(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return 0


def _needed(config: Mapping[str, Any], name: str) -> int:
    value = _number(config, name)
    if not value:
        raise ConfigError(f"the configuration gives no {name}, found {shown(repr(config.get(name)))}")
    return value
