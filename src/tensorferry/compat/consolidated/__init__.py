"""Checkpoints in Meta's and Mistral's own layout as those of transformers: names, row orders, configuration. No torch.

Both directions of a name are data; what params.json does not say of a configuration is marked as inferred or assumed.
"""

from __future__ import annotations

from tensorferry.compat.consolidated.configs import infer_config
from tensorferry.compat.consolidated.naming import has_native_names, naming, rules_for

__all__ = ["has_native_names", "infer_config", "naming", "rules_for"]
