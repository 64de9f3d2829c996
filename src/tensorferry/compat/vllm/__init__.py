"""The plug-in for vLLM: ``vllm serve MODEL --load-format tensorferry``. vLLM calls `register` in each of its processes.

vLLM itself is imported by `engine`, `loader` and what they need, and only when it calls.
"""

from __future__ import annotations

from functools import cache

__all__ = ["LOAD_FORMAT", "register"]

LOAD_FORMAT = "tensorferry"


@cache
def register() -> None:
    """Make `TensorferryLoader` the loader of load format tensorferry in this process; again, it changes nothing.

    This is the entry point of the group ``vllm.general_plugins``.
    """
    from tensorferry.compat.vllm.engine import register_model_loader
    from tensorferry.compat.vllm.loader import TensorferryLoader

    register_model_loader(LOAD_FORMAT)(TensorferryLoader)
