"""What callers hand over that is no model, rules or strictness, or a checkpoint that is not for this model."""

from __future__ import annotations

import json
import os

from torch import nn

from tensorferry.checkpoint import Checkpoint
from tensorferry.core.plan import Strictness
from tensorferry.core.rules import Rule
from tensorferry.core.ruleset import RuleSet
from tensorferry.errors import ConfigError, shown
from tensorferry.formats.sharded_state import POST_PROCESSED
from tensorferry.modules.finalize import hooked_modules

__all__ = ["refuse_nonsense", "refuse_processed"]


def refuse_nonsense(model: object, rules: object, strict: object) -> None:
    """Raise ConfigError for what is of another type: a state dict for a model, or torch's own ``strict=False``."""
    for name, value, kind in (("model", model, nn.Module), ("rules", rules, RuleSet), ("strict", strict, Strictness)):
        if isinstance(value, kind) or (value is None and name != "model"):
            continue
        raise ConfigError(f"{name}: a {kind.__name__} is expected, not {_found(value)}{_meant(name, value)}")


def refuse_processed(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Raise ConfigError where modules would post-process what they had post-processed before it was saved."""
    told = checkpoint.catalogue.metadata.get(POST_PROCESSED)
    again = hooked_modules(model).keys() & set(json.loads(told)) if told is not None else None
    if again:
        raise ConfigError(
            f"{shown(checkpoint.uri, 300)} was saved after post-processing, which {min(again) or 'the model'} would "
            "repeat: load it with get_model_loader(LoadConfig(load_format='sharded_state')), which leaves that out"
        )


def _found(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _meant(option: str, value: object) -> str:
    """Return, in words, what a value of another type was probably meant for."""
    if option == "model" and isinstance(value, type):
        return f": build one, {value.__name__}(...)"
    if option == "model" and isinstance(value, str | os.PathLike):
        return ": the model comes first, then the path"
    if option == "rules" and isinstance(value, Rule | list | tuple):
        return ": RuleSet(Place(...), ...)" if isinstance(value, Rule) else ": RuleSet(*rules)"
    if option == "strict" and value is True:
        return ": Strictness.strict() refuses tensors that the model does not want, too"
    return "; what torch calls strict=False is Strictness(missing='warn')" if value is False else ""
