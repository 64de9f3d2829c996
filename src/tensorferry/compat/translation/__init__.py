"""What a checkpoint in another layout is to transformers: the values that all such layouts share. Imports no torch.

What each layout calls its tensors, and says of its model, is in a folder beside; which of them one has is in `foreign`.
"""

from __future__ import annotations

from tensorferry.compat.translation.inferred import InferredConfig, Origin
from tensorferry.compat.translation.naming import Naming
from tensorferry.compat.translation.sizes import Sizes

__all__ = ["InferredConfig", "Naming", "Origin", "Sizes"]
