"""LIFE-06: Tensorizer files of single ranks and of whole models, and what another number of ranks does with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar
from helpers.tensorizer_library import key_file, new_tensor
from tensorferry import Box, Region, Slot
from tensorferry.errors import AccessDenied, ConfigError, LocateError
from tensorferry.formats.tensorizer_write import write_tensorizer
from tensorferry.loaders import LoadConfig, ModelConfig, get_model_loader

WHOLE = ar(8, 3)


class Rows(nn.Module):
    """One rank's rows of a weight, as a tensor-parallel layer holds them."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.rows = rank, 8 // size
        self.weight = nn.Parameter(torch.zeros(self.rows, 3))

    def tensor_slots(self) -> Mapping[str, Mapping[str, Slot]]:
        start = self.rank * self.rows
        window = Region((8, 3), Box((start, 0), (start + self.rows, 3)))
        return {"weight": {"": Slot(Region.whole((self.rows, 3)), (8, 3), window)}}


def rows(rank: int, size: int) -> torch.Tensor:
    return WHOLE.chunk(size)[rank]


def loaded(path: Path, rank: int, size: int, **options: object) -> torch.Tensor:
    parallel = {"tp_rank": rank, "tp_size": size}
    config = LoadConfig.from_dict({"load_format": "tensorizer", "parallel": parallel, "options": options})
    model = get_model_loader(config).load_model(ModelConfig(str(path)), build=lambda _: Rows(rank, size))
    return model.get_parameter("weight").detach()


@pytest.fixture
def pattern(tmp_path: Path) -> Path:
    """Files that two ranks wrote of what they held."""
    for rank in range(2):
        write_tensorizer(tmp_path / f"model-{rank:03}.tensors", {"weight": new_tensor(rows(rank, 2))})
    return tmp_path / "model-%03d.tensors"


@pytest.mark.parametrize("rank", [0, 1])
def test_life_06_each_rank_reads_its_own_file(rank: int, pattern: Path) -> None:
    assert torch.equal(loaded(pattern, rank, 2), rows(rank, 2))


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_life_06_a_file_of_the_whole_model_is_for_any_number_of_ranks(rank: int, size: int, tmp_path: Path) -> None:
    write_tensorizer(tmp_path / "model.tensors", {"weight": new_tensor(WHOLE)})
    assert torch.equal(loaded(tmp_path / "model.tensors", rank, size), rows(rank, size))


def test_life_06_files_of_more_ranks_than_there_are_now_are_refused(pattern: Path) -> None:
    with pytest.raises(ConfigError, match=r"files of ranks 0, 1, for tp_size 2, and tp_size is 1"):
        loaded(pattern, 0, 1)


@pytest.mark.parametrize("rank", [0, 3])
def test_life_06_files_of_fewer_ranks_are_refused_by_every_rank(rank: int, pattern: Path) -> None:
    with pytest.raises((ConfigError, LocateError), match=r"files of ranks 0, 1, for tp_size 2.* 4"):
        loaded(pattern, rank, 4)


def test_life_06_no_rank_reads_the_file_of_another(pattern: Path) -> None:
    pattern.with_name("model-001.tensors").unlink()
    with pytest.raises(LocateError, match=r"none is of rank 1 of 2"):
        loaded(pattern, 1, 2)


def test_life_06_a_number_of_another_width_is_another_file(pattern: Path) -> None:
    pattern.with_name("model-001.tensors").rename(pattern.with_name("model-1.tensors"))
    with pytest.raises(LocateError, match="files of ranks 0, for tp_size 1; none is of rank 1 of 2"):
        loaded(pattern, 1, 2)


@pytest.mark.parametrize("number", ["%d", "%3d"])
def test_life_06_a_number_that_is_written_otherwise_is_said(number: str, pattern: Path) -> None:
    with pytest.raises(ConfigError, match=f"{number} is no number of the rank: write %03d"):
        loaded(pattern.with_name(f"model-{number}.tensors"), 0, 2)


def test_life_06_a_wrong_key_is_denied_and_never_garbage(tmp_path: Path) -> None:
    write_tensorizer(tmp_path / "model.tensors", {"weight": new_tensor(WHOLE)}, key=bytes(range(32)))
    wrong = key_file(tmp_path / "wrong", bytes(32))
    for verify_hash in (True, False):
        with pytest.raises(AccessDenied, match="does not open it"):
            loaded(tmp_path, 0, 1, encryption_keyfile=str(wrong), verify_hash=verify_hash)
