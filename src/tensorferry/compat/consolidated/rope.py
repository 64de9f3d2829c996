"""The rotary embedding that params.json describes, as transformers describes it."""

from __future__ import annotations

import math
from typing import Any

from tensorferry.compat.translation import Origin
from tensorferry.compat.translation.llama3_rope import llama3_parameters
from tensorferry.errors import ConfigError
from tensorferry.formats.params_json import Params

__all__ = ["rotary"]

_LLAMA_3_CONTEXT = 8192
_FACTOR, _FACTOR_OF_SMALL = 8.0, 32.0


def rotary(params: Params, kind: str, *, windowed: bool, tied: bool) -> tuple[dict[str, Any], Origin]:
    """Return ``rope_parameters`` and where they come from.

    kind: the ``model_type``. windowed: whether attention has a window. tied: whether the embeddings are the output's,
    which tells the small models of Llama 3.2, whose scaling is the only one with another factor.

    Raises ConfigError where scalings contradict each other or are incomplete.
    """
    theta = params.number("rope_theta")
    origin: Origin = "assumed" if theta is None else "read"
    base = _usual_theta(params, kind, windowed) if theta is None else theta
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if params.part("yarn") is not None:
        return parameters | _yarn(params), origin
    if params.part("llama_4_scaling") is not None:
        raise ConfigError(f"{params.where}: llama_4_scaling goes with yarn, which is not there: give a configuration")
    if not params.flag("use_scaled_rope"):
        return parameters, origin
    said = params.number("rope_scaling_factor")
    factor = said or (_FACTOR_OF_SMALL if tied else _FACTOR)
    scaled = llama3_parameters(factor=factor, original=_LLAMA_3_CONTEXT)
    if (high := params.number("rope_high_freq_factor")) is not None:
        scaled["high_freq_factor"] = high
    return parameters | scaled, origin if said else "assumed"


def _usual_theta(params: Params, kind: str, windowed: bool) -> float:
    """Return the base that the reference implementations take where the file says none."""
    if kind == "llama":
        return 500_000.0 if params.flag("use_scaled_rope") else 10_000.0
    return 10_000.0 if windowed else 1_000_000.0


def _yarn(params: Params) -> dict[str, Any]:
    yarn, scaling = params.part("yarn"), params.part("llama_4_scaling")
    assert yarn is not None
    factor, original = yarn.number("factor"), yarn.size("original_max_position_embeddings")
    if factor is None or original is None or not 0 < factor < math.inf:
        raise ConfigError(f"{yarn.where}: factor and original_max_position_embeddings are needed: give a configuration")
    found: dict[str, Any] = {
        "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
        "beta_fast": yarn.number("beta") or 32.0, "beta_slow": yarn.number("alpha") or 1.0,
    }  # fmt: skip
    if yarn.flag("apply_scale") is False:  # transformers' way to say that attention is not scaled
        found |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    if scaling is not None:
        also, beta = scaling.size("original_max_position_embeddings"), scaling.number("beta")
        if beta is None or also not in (None, original):
            raise ConfigError(
                f"{scaling.where}: beta = {beta}, original_max_position_embeddings = {also}, and yarn's is {original}: "
                "give a configuration"
            )
        found["llama_4_scaling_beta"] = beta
    return found
