"""If one rank fails, all raise the same error soon, and none hangs."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.ranks import Fault, Ranks
from helpers.tiny_transformers import saved
from tensorferry import ConfigError, ParallelConfig, PlanError, ReadError, UnknownFormat, load_model
from tensorferry.compat.transformers import loading
from tensorferry.parallel import Agreement
from tensorferry.parallel import Ranks as Sharing
from tensorferry.storage.local import LocalStorage

pytestmark = pytest.mark.transformers


def load_from(rank: int, size: int, folders: list[Path]) -> str:
    load_model(folders[rank], parallel=ParallelConfig(tp_size=size, tp_rank=rank))
    return "loaded"


def load_with_a_bad_disk(rank: int, size: int, folder: Path, bad: int, after: int) -> str:
    """Let reading fail in rank `bad`, after so many good reads."""
    reads = 0
    original = LocalStorage._read

    def failing(self: LocalStorage, path: str, offset: int, outs: Any, *, touch: bool) -> None:
        nonlocal reads
        reads += 1
        if rank == bad and reads > after:
            raise ReadError(f"{path}: the disk is broken")
        original(self, path, offset, outs, touch=touch)

    LocalStorage._read = failing  # type: ignore[method-assign]
    try:
        return load_from(rank, size, [folder] * size)
    finally:
        LocalStorage._read = original  # type: ignore[method-assign]


def same(faults: list[Any]) -> Fault:
    assert all(isinstance(fault, Fault) for fault in faults)
    kinds_and_words = {(fault.kind, fault.words) for fault in faults}
    assert len(kinds_and_words) == 1
    first: Fault = faults[0]
    return first


def test_a_rank_whose_files_are_damaged_stops_all_before_anything_is_touched(two_ranks: Ranks, tmp_path: Path) -> None:
    good, bad = saved("Llama", tmp_path / "good"), saved("Llama", tmp_path / "bad")
    file = bad / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    fault = same(two_ranks.tried(load_from, [good, bad]))
    assert fault.kind == "CorruptFile"
    assert fault.words.startswith("rank 1 of 2: model.safetensors")
    assert not fault.touched


def test_a_rank_that_fails_while_it_reads_stops_all(four_ranks: Ranks, tmp_path: Path) -> None:
    folder = saved("Llama", tmp_path)
    fault = same(four_ranks.tried(load_with_a_bad_disk, folder, 2, 1))
    assert fault.kind == "ReadError"
    assert fault.words.startswith("rank 2 of 4: ")
    assert "the disk is broken" in fault.words


def test_ranks_go_on_after_a_failure(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = saved("Llama", tmp_path)
    same(two_ranks.tried(load_from, [folder, tmp_path / "nothing"]))
    assert two_ranks.run(load_from, [folder, folder]) == ["loaded", "loaded"]


def agree(rank: int, size: int) -> str:
    agreement = Agreement(Sharing(size, rank))
    for _ in range(2):
        with agreement.together():
            pass
    return "agreed"


def agree_alone_first(rank: int, size: int) -> str:
    """Let one rank load things by itself before, so that ranks have done different numbers of things."""
    for _ in range(rank):
        with Agreement(Sharing()).together():
            pass
    return agree(rank, size)


def test_what_ranks_did_before_does_not_matter(two_ranks: Ranks) -> None:
    assert two_ranks.run(agree_alone_first) == ["agreed", "agreed"]


def pairs() -> list[Any]:
    return [dist.new_group([0, 1]), dist.new_group([2, 3])]


def fail_in_one_pair(rank: int, size: int) -> str:
    agreement = Agreement(Sharing(2, rank % 2), pairs()[rank // 2])
    with agreement.together():
        if rank == 0:
            raise PlanError("nothing fits")
        until = time.monotonic() + (60 if rank == 1 else 0.5)
        while time.monotonic() < until:
            agreement.watch()
    return "went on"


def test_a_failure_in_one_group_is_none_of_another_s(four_ranks: Ranks) -> None:
    """Rank 1 would go on for a minute if it was not told; ranks 2 and 3 must not hear of it."""
    found = four_ranks.tried(fail_in_one_pair)
    assert same(found[:2])[:2] == ("PlanError", "rank 0 of 2: nothing fits")
    assert found[2:] == ["went on", "went on"]


def grid(rank: int) -> list[Any]:
    """Return the groups of two rows and two columns that a rank of four is in."""
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return [pairs()[rank // 2], columns[rank % 2]]


def tell_in_a_grid(rank: int, size: int) -> list[str]:
    agreement = Agreement(Sharing(size, rank), grid(rank))
    with agreement.together():
        pass
    return agreement.exchanged(f"{rank}" * 100 * rank)


def test_what_is_told_goes_along_rows_and_columns(four_ranks: Ranks) -> None:
    assert four_ranks.run(tell_in_a_grid) == [[f"{rank}" * 100 * rank for rank in range(4)]] * 4


def fail_in_a_grid(rank: int, size: int) -> None:
    agreement = Agreement(Sharing(size, rank), grid(rank))
    with agreement.together():
        if rank == 3:
            raise PlanError("nothing fits")
        until = time.monotonic() + 60
        while time.monotonic() < until:
            agreement.watch()


def test_a_failure_stops_ranks_that_share_no_group_with_it(four_ranks: Ranks) -> None:
    assert same(four_ranks.tried(fail_in_a_grid, timeout=30))[:2] == ("PlanError", "rank 3 of 4: nothing fits")


def agree_without_a_group(rank: int, size: int) -> str:
    return agree(rank % 2, 2)


def agree_as_the_first(rank: int, size: int) -> str:
    return agree(0, size)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (agree_without_a_group, "0 of 2, 1 of 2, 0 of 2, 1 of 2"),
        (agree_as_the_first, "0 of 4, 0 of 4, 0 of 4, 0 of 4"),
    ],
)
def test_ranks_that_are_not_those_of_the_group_are_refused_by_all(four_ranks: Ranks, wrong: Any, told: str) -> None:
    fault = same(four_ranks.tried(wrong))
    assert fault.kind == "ConfigError"
    assert told in fault.words
    assert four_ranks.run(agree) == ["agreed"] * 4


def agree_in_the_first_pair(rank: int, size: int) -> str:
    with Agreement(Sharing(2, rank % 2), pairs()[0]).together():
        return "agreed"


def test_a_process_that_is_no_member_of_the_group_is_told_so(four_ranks: Ranks) -> None:
    found = four_ranks.tried(agree_in_the_first_pair)
    assert found[:2] == ["agreed", "agreed"]
    assert all(fault.kind == "ConfigError" and "no member" in fault.words for fault in found[2:])


def fail_in_a_way_of_its_own(rank: int, size: int) -> None:
    class OwnError(ConfigError):
        pass

    with Agreement(Sharing(size, rank)).together():
        if rank == 1:
            raise OwnError("not so")


def fail_in_two_ways(rank: int, size: int) -> str:
    class Both(UnknownFormat, PlanError):
        pass

    try:
        with Agreement(Sharing(size, rank)).together():
            if rank == 1:
                raise Both("both")
    except PlanError as error:
        return "an UnknownFormat, too" if isinstance(error, UnknownFormat) else "a PlanError"
    return "nothing"


def fail_as_python_does(rank: int, size: int) -> None:
    with Agreement(Sharing(size, rank)).together(touches=True):
        if rank == 1:
            raise KeyError("missing")


def test_errors_of_other_classes_come_as_the_nearest_of_ours(two_ranks: Ranks) -> None:
    assert same(two_ranks.tried(fail_in_a_way_of_its_own))[:2] == ("ConfigError", "rank 1 of 2: not so")
    assert two_ranks.run(fail_in_two_ways) == ["an UnknownFormat, too"] * 2
    faults = two_ranks.tried(fail_as_python_does)
    assert same(faults)[:2] == ("ReadError", "rank 1 of 2: KeyError: 'missing'")
    assert [fault.touched for fault in faults] == [True, True]


def is_killed(rank: int, size: int, when: str, in_a_grid: bool) -> None:
    """Let the last rank be killed before or after it has met the others."""
    agreement = Agreement(Sharing(size, rank), grid(rank) if in_a_grid else None)
    if when == "after":
        with agreement.together():
            pass
    with agreement.together():
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("in_a_grid", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rank_that_is_killed_is_missed_by_all(when: str, in_a_grid: bool) -> None:
    """In a ring of four, only two are connected to the one that is lost; in a grid, one is in no group with it."""
    with closing(Ranks(4)) as ranks:
        found = ranks.tried(is_killed, when, in_a_grid, timeout=60)
    assert [fault.kind for fault in found] == ["ReadError"] * 3 + ["Ended"]
    assert all(f"rank {rank} of 4 has lost another rank" in found[rank].words for rank in range(3))


def load_what_cannot_be_written(rank: int, size: int, folder: Path) -> None:
    """Have rank 1 build a model of which one parameter is a single value."""
    build = loading.build_model

    def built(*args: Any, **kwargs: Any) -> Any:
        model, notes = build(*args, **kwargs)
        if rank == 1:
            single = torch.zeros(1).expand(model.get_parameter("model.norm.weight").shape)
            model.get_submodule("model.norm").weight = nn.Parameter(single)
        return model, notes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "build_model", built)
        load_from(rank, size, [folder] * size)


def test_a_parameter_that_one_rank_cannot_write_stops_all_before_anything_is_touched(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    fault = same(two_ranks.tried(load_what_cannot_be_written, saved("Llama", tmp_path)))
    assert fault.kind == "PlanError"
    assert fault.words.startswith("rank 1 of 2: model.norm.weight has shape")
    assert not fault.touched


def load_onto(rank: int, size: int, folder: Path, devices: list[str]) -> None:
    load_model(folder, device=devices[rank], parallel=ParallelConfig(tp_size=size, tp_rank=rank))


def test_an_option_that_is_wrong_in_one_rank_stops_all(two_ranks: Ranks, tmp_path: Path) -> None:
    fault = same(two_ranks.tried(load_onto, saved("Llama", tmp_path), ["cpu", "meta"]))
    assert fault.kind == "ConfigError"
    assert fault.words.startswith("rank 1 of 2: device 'meta'")


def load_in_stages(rank: int, size: int, folder: Path) -> None:
    load_model(folder, parallel=ParallelConfig(tp_size=size, tp_rank=rank, pp_size=2))


def test_stages_and_quantized_weights_are_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = saved("Llama", tmp_path)
    assert "pp_size 2" in same(two_ranks.tried(load_in_stages, folder)).words
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    fault = same(two_ranks.tried(load_from, [folder, folder]))
    assert fault.kind == "FormatError"
    assert "quantized with 'fp8'" in fault.words
