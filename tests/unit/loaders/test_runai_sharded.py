"""Sharded states through the Run:ai streamer: by the ranks that saved them, and by others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar
from helpers.third_party import (
    need,
)
from tensorferry.config import ParallelConfig
from tensorferry.core.boxes import Box, Region
from tensorferry.core.target import Slot
from tensorferry.errors import ConfigError
from tensorferry.loaders import LoadConfig, ModelConfig, get_model_loader
from tensorferry.loaders.saving import save_sharded_state


class Half(nn.Module):
    """One of two ranks' columns of a matrix, and a copied vector."""

    def __init__(self, rank: int, size: int = 2, value: float | None = None) -> None:
        super().__init__()
        width = 8 // size
        self.slot = Slot(
            Region.whole((4, width)), (4, 8), Region((4, 8), Box((0, rank * width), (4, (rank + 1) * width)))
        )
        whole = ar(4, 8) if value is None else torch.full((4, 8), value)
        self.weight = nn.Parameter(whole[:, rank * width : (rank + 1) * width].clone())
        self.norm = nn.Parameter(ar(4, start=50) if value is None else torch.full((4,), value))

    def tensor_slots(self) -> dict[str, dict[str, Slot]]:
        return {"weight": {"": self.slot}}


@pytest.mark.parametrize(("size", "rank"), [(2, 1), (1, 0), (4, 2)])
def test_a_sharded_state_is_loaded_by_its_ranks_and_by_others(size: int, rank: int, tmp_path: Path) -> None:
    need("runai_streamer")
    for saving in range(2):
        save_sharded_state(Half(saving), tmp_path, parallel=ParallelConfig(tp_size=2, tp_rank=saving))
    parallel = ParallelConfig(tp_size=size, tp_rank=rank)
    loader = get_model_loader(LoadConfig(load_format="runai_streamer_sharded", parallel=parallel))
    model = loader.load_model(ModelConfig(str(tmp_path)), lambda config: Half(rank, size, value=-1.0))
    expected = Half(rank, size).state_dict()
    assert {n: t.tolist() for n, t in model.state_dict().items()} == {n: t.tolist() for n, t in expected.items()}
    assert loader.report is not None
    assert loader.report.executor == "RunaiExecutor"


def test_options_of_sharded_states_and_of_the_streamer_are_checked_together() -> None:
    for options in ({"memory_limit": -2}, {"pattern": 1}, {"distributed": True}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            get_model_loader(LoadConfig(load_format="runai_streamer_sharded", options=options))
