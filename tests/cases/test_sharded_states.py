"""Reported failures of saved states: read with another layout, processed twice, parts taken for wholes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from helpers.sharded_models import Layer, load_rank, part
from tensorferry import ModelConfig, ParallelConfig, save_sharded_state
from tensorferry.core.target import Layout
from tensorferry.errors import ConfigError, LocateError
from tensorferry.loaders import LoadConfig, get_model_loader


class Undeclared(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(ar(rows, 2))


def at(rank: int, size: int) -> ParallelConfig:
    return ParallelConfig(tp_size=size, tp_rank=rank)


def test_life_05_a_state_of_two_ranks_is_no_state_of_four_and_says_so(tmp_path: Path) -> None:
    for rank in range(2):
        save_sharded_state(Undeclared(4), tmp_path, parallel=at(rank, 2))
    for rank in range(4):
        model = Undeclared(2)
        with torch.no_grad():
            model.weight.fill_(-1)
        with pytest.raises(ConfigError, match="saved for tensor-parallel size 2, load asks for 4"):
            load_rank(tmp_path, model, at(rank, 4), options={"reshard": False})
        assert (model.weight == -1).all()


def test_life_05_a_rank_without_files_never_reads_those_of_another(tmp_path: Path) -> None:
    for rank in (1, 10, 30):
        write_safetensors(tmp_path / f"model-rank-{rank}-part-0.safetensors", {"weight": ar(2, 2)})
    for rank in (0, 3, 11):
        with pytest.raises(LocateError, match=f"rank {rank} has no files .*There is: model-rank-1-part-0.safetensors"):
            load_rank(tmp_path, Undeclared(2), at(rank, 32))


class Packing(nn.Module):
    """Packs once what it is given; a second time would be wrong, as with the 1536 that became 6144."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 8), requires_grad=False)
        vars(self.weight)["weight_loader"] = self.load

    def load(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        parameter.copy_(values)

    def process_weights_after_loading(self) -> None:
        assert tuple(self.weight.shape) == (4, 8), "packed twice"
        self.weight = nn.Parameter(self.weight.reshape(16, 2).to(torch.uint8), requires_grad=False)


def test_life_05_life_09_a_packed_layout_is_never_packed_again_and_loads_twice(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "source" / "model.safetensors", {"weight": ar(4, 8)})
    model = get_model_loader(LoadConfig()).load_model(ModelConfig(str(tmp_path / "source")), lambda _: Packing())
    save_sharded_state(model, tmp_path / "state")
    fresh: Any = Packing()
    for _ in range(2):
        load_rank(tmp_path / "state", fresh)
        assert torch.equal(fresh.weight, ar(16, 2).to(torch.uint8))
        assert fresh.weight.weight_loader == fresh.load


def test_life_02_a_state_that_was_saved_anew_is_read_anew(tmp_path: Path) -> None:
    model = Undeclared(2)
    save_sharded_state(model, tmp_path)
    fresh = Undeclared(2)
    load_rank(tmp_path, fresh)
    with torch.no_grad():
        model.weight.add_(50)
    save_sharded_state(model, tmp_path)
    load_rank(tmp_path, fresh)
    assert torch.equal(fresh.weight, ar(2, 2, start=50))


class KeyNorm(Layer):
    """A norm of two heads of two, for ranks of which several have the same head."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        heads = max(1, 2 // size)
        first = rank * 2 // size
        slot = part((heads * 2,), 0, (4,), first * 2, (first + heads) * 2)
        self.declare("weight", (heads * 2,), Layout({"": slot}))


def test_tp_02_replicated_heads_are_saved_by_all_and_taken_once(tmp_path: Path) -> None:
    for rank, values in enumerate(([0, 1], [0, 1], [2, 3], [2, 3])):
        norm = KeyNorm(rank, 4)
        norm.weight.copy_(torch.tensor(values))
        save_sharded_state(norm, tmp_path, parallel=at(rank, 4))
    assert load_rank(tmp_path, KeyNorm(0, 1))[0].get_parameter("weight").tolist() == [0, 1, 2, 3]
    assert load_rank(tmp_path, KeyNorm(1, 2), at(1, 2))[0].get_parameter("weight").tolist() == [2, 3]


class Uneven(Layer):
    """Ten rows in parts of 3, 3, 2 and 2."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        least, more = divmod(10, size)
        first = rank * least + min(rank, more)
        rows = least + (rank < more)
        self.declare("weight", (rows, 4), Layout({"": part((rows, 4), 0, (10, 4), first, first + rows)}))


def test_tp_07_parts_of_different_sizes_lose_no_remainder(tmp_path: Path) -> None:
    counts = []
    for rank in range(4):
        layer = Uneven(rank, 4)
        counts.append(len(layer.weight))
        first = sum(counts[:-1])
        layer.weight.copy_(ar(10, 4)[first : first + len(layer.weight)])
        save_sharded_state(layer, tmp_path, parallel=at(rank, 4))
    assert counts == [3, 3, 2, 2]
    for size in (1, 3):
        parts = [load_rank(tmp_path, Uneven(rank, size), at(rank, size))[0] for rank in range(size)]
        assert torch.equal(torch.cat([p.get_parameter("weight") for p in parts]), ar(10, 4))


class GateUp(Layer):
    """Gate and up one after the other, each divided by itself."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        each = 4 // size
        shape = (2 * each, 1)
        slots = {
            name: part(shape, n * each, (4, 1), rank * each, (rank + 1) * each) for n, name in enumerate(("gate", "up"))
        }
        self.declare("weight", shape, Layout(slots))


def test_tp_08_each_part_of_a_fused_weight_is_divided_by_itself(tmp_path: Path) -> None:
    whole = GateUp(0, 1)
    whole.weight.copy_(ar(8, 1))
    save_sharded_state(whole, tmp_path)
    halves = [load_rank(tmp_path, GateUp(rank, 2), at(rank, 2))[0].get_parameter("weight") for rank in range(2)]
    assert [half.flatten().tolist() for half in halves] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_tp_09_ranks_come_from_what_is_passed_and_not_from_the_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    save_sharded_state(Undeclared(4), tmp_path)
    assert load_rank(tmp_path, Undeclared(4))[0].get_parameter("weight").shape == (4, 2)
