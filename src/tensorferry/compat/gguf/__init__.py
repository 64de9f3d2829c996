"""GGUF files as checkpoints of transformers' models: the names of tensors, and the configuration. Imports no torch.

Both directions of a name are data; what a file does not say of a configuration is marked as inferred or assumed.
"""

from __future__ import annotations

from tensorferry.compat.gguf.configs import infer_config
from tensorferry.compat.gguf.naming import architecture_of, naming

__all__ = ["architecture_of", "infer_config", "naming"]
