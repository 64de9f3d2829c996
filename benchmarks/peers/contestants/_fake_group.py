"""A process group of one process that says it is a rank of several, for libraries that want one."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.peers.works import RANK, RANKS


def fake_mesh() -> Any:
    """Return a mesh of `RANKS` in which this process is `RANK`; nothing may be sent in it."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        os.environ |= {"RANK": str(RANK), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(RANK)}
        dist.init_process_group(backend="fake", rank=RANK, world_size=RANKS, store=FakeStore())
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
