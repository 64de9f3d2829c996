"""The rotary embedding of a GGUF file, as transformers describes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from tensorferry.compat.gguf.collecting import Collector
from tensorferry.compat.translation import Origin
from tensorferry.compat.translation.llama3_rope import divisors_of, llama3_parameters
from tensorferry.errors import ConfigError, shown

__all__ = ["rotary"]

_TOLERANCE = 1e-4


def rotary(found: Collector, *, theta: float = 10000.0) -> tuple[dict[str, Any], Origin]:
    """Return ``rope_parameters`` and where they come from. theta: what is assumed where the file does not say."""
    base = found.get("rope.freq_base", "number")
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta if base is None else base}
    origin: Origin = "assumed" if base is None else "read"
    kind = found.metadata.text(f"{found.architecture}.rope.scaling.type") or "none"
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ConfigError(f"rope.scaling.type {shown(kind)!r} is not known here: give a configuration")
    linear = found.get("rope.scale_linear", "number")
    if kind == "linear" or (kind == "none" and linear not in (None, 1.0)):
        parameters |= {"rope_type": "linear", "factor": _positive(found, linear)}
    elif kind == "yarn":
        parameters |= {**_yarn(found), "factor": _positive(found)}
    elif kind == "longrope" or "rope_factors_long.weight" in found.values:
        parameters |= _long(found)
    elif divisors := found.values.get("rope_freqs.weight"):
        return parameters | _divided(divisors, parameters["rope_theta"], found), "inferred"
    return parameters, origin


def _positive(found: Collector, otherwise: float | None = None) -> float:
    """Return the factor of a scaling. Raises ConfigError where there is none that could be one."""
    factor = found.get("rope.scaling.factor", "number") or otherwise
    if factor is None or not 0 < factor < math.inf:
        raise ConfigError(f"{found.architecture}.rope.scaling.factor must be positive, found {factor}")
    return float(factor)


def _yarn(found: Collector) -> dict[str, Any]:
    keys = {
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow", "attention_factor": "rope.scaling.yarn_attn_factor",
    }  # fmt: skip
    read = {name: found.get(key, "number") for name, key in keys.items()}
    original = found.get("rope.scaling.original_context_length")
    return {
        "rope_type": "yarn",
        **{name: value for name, value in read.items() if value is not None},
        **({} if original is None else {"original_max_position_embeddings": original}),
    }


def _long(found: Collector) -> dict[str, Any]:
    original = found.get("rope.scaling.original_context_length") or found.get("context_length")
    factors = {end: list(found.values.get(f"rope_factors_{end}.weight", ())) for end in ("long", "short")}
    if not original or original < 2:
        raise ConfigError(f"{found.architecture}.rope.scaling.original_context_length is {original}")
    attention = found.get("rope.scaling.attn_factor", "number")
    if attention is not None and math.isclose(attention, _usual_attention(found, original), rel_tol=1e-5):
        attention = None
    return {
        "rope_type": "longrope",
        "long_factor": [_nice(value) for value in factors["long"]],
        "short_factor": [_nice(value) for value in factors["short"]],
        "original_max_position_embeddings": original,
        **({} if attention is None else {"attention_factor": attention}),
    }


def _usual_attention(found: Collector, original: int) -> float:
    """Return the factor that transformers takes where the configuration gives none."""
    scale = found.get("context_length") / original
    return math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0


def _nice(value: float) -> float:
    return float(f"{value:.7g}")


def _divided(divisors: Sequence[float], theta: float, found: Collector) -> dict[str, Any]:
    """Return the parameters behind a table of divisors: Llama 3's where they make it, else the table itself."""
    rotated = found.get("rope.dimension_count") or found.config["head_dim"]
    if len(divisors) != rotated // 2 or not all(0 < value < math.inf for value in divisors):
        raise ConfigError(f"rope_freqs.weight must hold {rotated // 2} positive divisors: give a configuration")
    if all(value == 1.0 for value in divisors):
        return {}
    context = found.get("context_length") or 8192
    for original in _originals(context):
        parameters = llama3_parameters(factor=_nice(max(divisors)), original=original)
        made = divisors_of(parameters, theta, len(divisors))
        if all(abs(a - b) <= _TOLERANCE * b for a, b in zip(made, divisors, strict=True)):
            return parameters
    table = list(divisors)
    return {
        "rope_type": "longrope", "long_factor": table, "short_factor": table, "attention_factor": 1.0,
        "factor": 1.0, "original_max_position_embeddings": context,
    }  # fmt: skip


def _originals(context: int) -> Iterator[int]:
    """Yield context lengths that a model may have been trained with, the usual one first."""
    yield 8192
    size = 1
    while size <= context:
        yield size
        size *= 2
