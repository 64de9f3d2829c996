"""What goes from the CPU to another device, noted as it happens; meta is one for this purpose."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Uploads"]


class Uploads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes, in the thread that enters it, the types of tensors that go from the CPU elsewhere, and their bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.types: set[torch.dtype] = set()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        source = args[1] if "copy_" in str(func) else args[0] if args else None
        if isinstance(source, torch.Tensor) and isinstance(out, torch.Tensor) and source.is_cpu and not out.is_cpu:
            self.types.add(source.dtype)
            self.bytes += source.nbytes
        return out
