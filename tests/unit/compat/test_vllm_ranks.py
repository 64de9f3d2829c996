"""Ranks of vLLM: what they do as one, and who belongs together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import write_safetensors
from helpers.fake_vllm import FakeVllm, installed, model_config
from helpers.old_loaders import NanoModel, nano_checkpoint, poisoned
from helpers.ranks import Fault, Ranks
from helpers.vllm_loading import is_untouched, load, rewrite
from tensorferry import PlanError, ReadOptions
from tensorferry.execute.exchange import links, neighbours
from tensorferry.execute.exchange.links import neighbourhood
from tensorferry.execute.threaded import ThreadedExecutor
from tensorferry.execute.ways import Ways


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return nano_checkpoint(tmp_path)


def load_on_a_rank(rank: int, size: int, folders: list[Path]) -> list[str]:
    import torch.distributed as dist

    with installed() as vllm:
        vllm.share(size, rank, dist.group.WORLD)
        model = poisoned(NanoModel(size, rank))
        try:
            load(vllm, folders[rank], model)
        except PlanError as error:
            return [type(error).__name__, str(error), str(error.touched), str(is_untouched(model))]
        return ["filled"]


def test_ranks_fill_their_parts_together(two_ranks: Ranks, folder: Path) -> None:
    assert two_ranks.run(load_on_a_rank, [folder, folder]) == [["filled"]] * 2


def test_a_rank_whose_checkpoint_lacks_a_tensor_stops_all_before_anything_is_touched(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    good, bad = nano_checkpoint(tmp_path / "good"), nano_checkpoint(tmp_path / "bad")
    rewrite(bad, norm__weight=None)
    found = two_ranks.run(load_on_a_rank, [good, bad])
    assert not any(isinstance(one, Fault) for one in found)
    assert found[0] == found[1]
    assert found[0][0] == "PlanError"
    assert found[0][1].startswith("rank 1 of 2: ")
    assert found[0][2:] == ["False", "True"]


def share_norm_once_planned() -> None:
    """Let one parameter become a single value when the plan is made; one that is so before is streamed."""
    from tensorferry.compat.vllm import loader

    planned = vars(loader)["planned"]

    def planned_and_shared(model: nn.Module, *args: Any, **more: Any) -> Any:
        load = planned(model, *args, **more)
        single = torch.full((1,), 77.0).expand(model.get_parameter("norm.weight").shape)
        model.get_submodule("norm").weight = nn.Parameter(single)
        return load

    vars(loader)["planned"] = planned_and_shared


def load_what_cannot_be_written(rank: int, size: int, folder: Path) -> list[Any]:
    import torch.distributed as dist

    with installed() as vllm:
        vllm.share(size, rank, dist.group.WORLD)
        model = poisoned(NanoModel(size, rank))
        if rank == 1:
            share_norm_once_planned()
        try:
            load(vllm, folder, model)
        except PlanError as error:
            return [str(error), error.touched, is_untouched(model)]
        return ["filled"]


def test_a_parameter_that_one_rank_cannot_write_stops_all_before_anything_is_touched(
    two_ranks: Ranks, folder: Path
) -> None:
    found = two_ranks.run(load_what_cannot_be_written, folder)
    assert found[0] == found[1]
    assert found[0][0].startswith("rank 1 of 2: norm.weight has shape")
    assert found[0][1:] == [False, True]


class Expert(nn.Module):
    """Takes what is called like its rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.w = nn.Parameter(torch.empty(4))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, value in weights:
            if name == f"experts.{self.rank}":
                self.w.data.copy_(value)


def load_one_expert(rank: int, size: int, folder: Path) -> list[Any]:
    import torch.distributed as dist

    with installed() as vllm:
        vllm.share(size, rank, dist.group.WORLD)
        report = load(vllm, folder, Expert(rank), strictness={"unexpected": "warn"}).report
        return [report.bytes_needed, report.unexpected, report.dropped]


def test_experts_of_another_rank_are_not_read_and_not_unexpected(two_ranks: Ranks, tmp_path: Path) -> None:
    experts = {f"experts.{n}": torch.ones(4) for n in range(3)}
    write_safetensors(tmp_path / "model.safetensors", experts)
    first, second = two_ranks.run(load_one_expert, tmp_path)
    assert first == [16, ("experts.2",), {"experts.1": "another rank needs it"}]
    assert second == [16, ("experts.2",), {"experts.0": "another rank needs it"}]


class Columns(nn.Module):
    """Takes its half of the columns of a matrix."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.w = nn.Parameter(torch.zeros(1024, 512))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, value in weights:
            self.w.data.copy_(value.narrow(1, 512 * self.rank, 512))


def load_columns(rank: int, size: int, folder: Path, read: dict[str, Any]) -> list[Any]:
    import torch.distributed as dist

    with installed() as vllm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ways, "find_cached", lambda self, reads: False)  # as on a disk
        vllm.share(size, rank, dist.group.WORLD)
        model = Columns(rank)
        report = load(vllm, folder, model, read=read).report
        return [bool(model.w.detach().eq(torch.arange(1024).view(-1, 1)).all()), report.bytes_read, dict(report.ways)]


@pytest.mark.parametrize("read", [{}, {"exchange": False}, {"shared": False}])
def test_ranks_read_columns_for_each_other(two_ranks: Ranks, tmp_path: Path, read: dict[str, Any]) -> None:
    matrix = torch.arange(1024, dtype=torch.float32).view(-1, 1).expand(1024, 1024).contiguous()
    write_safetensors(tmp_path / "model.safetensors", {"w": matrix})
    found = two_ranks.run(load_columns, tmp_path, read)
    assert [right for right, *_ in found] == [True, True]
    handed_on = [ways.get("from another rank", 0) for *_, ways in found]
    if read or not neighbourhood():
        assert handed_on == [0, 0]
    else:
        assert handed_on == [matrix.nbytes // 4] * 2
        assert sum(nbytes for _, nbytes, _ in found) == matrix.nbytes


def load_and_tell(rank: int, size: int, folders: list[Path], machines: int, read: dict[str, Any]) -> list[Any]:
    """Load on one of some machines, from one of some folders; return how that was done."""
    import torch.distributed as dist

    used: list[ReadOptions] = []
    made = ThreadedExecutor.of

    def of(options: ReadOptions, exchange: Any = None) -> ThreadedExecutor:
        used.append(options)
        return made(options, exchange)

    with installed() as vllm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadedExecutor, "of", of)
        for module in (neighbours, links):
            patch.setattr(module, "boot", lambda: f"machine{rank * machines // size}")
        vllm.share(size, rank, dist.group.WORLD)
        model = Columns(rank % 2)
        load(vllm, folders[rank % len(folders)], model, read=read)
        right = bool(model.w.detach().eq(torch.arange(1024).view(-1, 1)).all())
        return [right, used[-1].is_shared, used[-1].settled_turn]


@pytest.mark.parametrize(
    ("copies", "machines", "read", "turns"),
    [
        (1, 1, {}, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        (1, 2, {}, [(0, 2), (1, 2), (0, 2), (1, 2)]),
        (1, 4, {}, None),
        (2, 1, {}, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (4, 1, {}, None),
        (1, 1, {"shared": False}, None),
        (1, 1, {"shared": True}, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        (4, 1, {"shared": True}, [(0, 1)] * 4),
    ],
)
def test_ranks_find_out_who_shares_their_files(
    four_ranks: Ranks, tmp_path: Path, copies: int, machines: int, read: dict[str, Any], turns: Any
) -> None:
    matrix = torch.arange(1024, dtype=torch.float32).view(-1, 1).expand(1024, 1024).contiguous()
    folders = [tmp_path / str(n) for n in range(copies)]
    for folder in folders:
        write_safetensors(folder / "model.safetensors", {"w": matrix})
    found = four_ranks.run(load_and_tell, folders, machines, read)
    assert found == [[True, turns is not None, turn] for turn in turns or [(0, 1)] * 4]


@pytest.mark.parametrize("drafted", [False, True])
def test_ranks_of_the_last_stage_agree_on_a_draft_model_alone(vllm: FakeVllm, folder: Path, drafted: bool) -> None:
    from tensorferry.compat.vllm import engine

    served = model_config(folder)
    vllm.config = SimpleNamespace(model_config=served, parallel_config=SimpleNamespace(data_parallel_size=1))
    vllm.share(4, 3)
    vllm.groups["tp"] = SimpleNamespace(world_size=2, rank_in_group=1, cpu_group=None)
    asked = engine.agreement(model_config(folder) if drafted else served)
    assert repr(asked._ranks) == ("Ranks(size=2, rank=1)" if drafted else "Ranks(size=4, rank=3)")


@pytest.mark.parametrize("machines", [1, 2])
def test_replicas_of_data_parallelism_do_not_wait_for_each_other(vllm: FakeVllm, folder: Path, machines: int) -> None:
    """The sixth of two replicas of six ranks; vLLM has a group for one replica only where that has several machines."""
    from tensorferry.compat.vllm import engine

    served = model_config(folder)
    vllm.config = SimpleNamespace(model_config=served, parallel_config=SimpleNamespace(data_parallel_size=2))
    vllm.share(12, 5)
    for name, size, rank in [("tp", 2, 1), ("pcp", 1, 0), ("pp", 3, 2), ("inner_dp_world", 6, 5)]:
        if machines > 1 or name != "inner_dp_world":
            vllm.groups[name] = SimpleNamespace(world_size=size, rank_in_group=rank, cpu_group=None)
    assert repr(engine.agreement(served)._ranks) == "Ranks(size=6, rank=5)"
    assert not engine.is_first_rank()


def share_stages(vllm: FakeVllm, rank: int) -> None:
    """Make this process one of two tensor-parallel ranks of two stages, as vLLM has them where there are replicas."""
    import torch.distributed as dist

    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    vllm.config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2))
    vllm.groups["tp"] = SimpleNamespace(world_size=2, rank_in_group=rank % 2, cpu_group=rows[rank // 2])
    vllm.groups["pcp"] = SimpleNamespace(world_size=1, rank_in_group=0, cpu_group=None)
    vllm.groups["pp"] = SimpleNamespace(world_size=2, rank_in_group=rank // 2, cpu_group=columns[rank % 2])


def load_in_stages(rank: int, size: int, folders: list[Path]) -> list[Any]:
    with installed() as vllm:
        share_stages(vllm, rank)
        model = Expert(rank)
        model.w.data.fill_(77)
        try:
            report = load(vllm, folders[rank], model, strictness={"unexpected": "error"}).report
        except PlanError as error:
            return [str(error), error.touched, is_untouched(model)]
        return [model.w.tolist(), sorted(report.dropped)]


def experts(folder: Path, *, bad: int | None = None) -> Path:
    folder.mkdir()
    values = {f"experts.{n}": torch.full((3 if n == bad else 4,), float(n)) for n in range(4)}
    write_safetensors(folder / "model.safetensors", values)
    return folder


def test_stages_of_one_of_several_replicas_know_what_the_others_use(four_ranks: Ranks, tmp_path: Path) -> None:
    found = four_ranks.run(load_in_stages, [experts(tmp_path / "weights")] * 4)
    assert found == [[[float(n)] * 4, [f"experts.{m}" for m in range(4) if m != n]] for n in range(4)]


def test_a_stage_of_one_of_several_replicas_that_fails_stops_the_others(four_ranks: Ranks, tmp_path: Path) -> None:
    good, bad = experts(tmp_path / "good"), experts(tmp_path / "bad", bad=3)
    found = four_ranks.run(load_in_stages, [good, good, good, bad])
    assert found == [found[0]] * 4
    assert found[0][0].startswith("rank 3 of 4: ")
    assert found[0][1:] == [False, True]
