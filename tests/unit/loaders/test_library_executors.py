"""Executors over other libraries: every type, every file, every part arrives, as by our own reader."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.checkpoints import ar, raw, write_raw_safetensors, write_safetensors
from helpers.third_party import (
    LIBRARIES,
    Borrowing,
    Recorded,
    empty,
    filled,
    need,
    planned,
    write_sharded,
)
from tensorferry.checkpoint import Checkpoint, open_checkpoint
from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import Catalogue, Chunk, Span, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.rules import Join
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Slot, TargetTensor
from tensorferry.core.transforms import Chain, Stack, Transpose
from tensorferry.execute import Counters, ThreadedExecutor
from tensorferry.loaders.third_party.executor import COMMON_TYPES, LibraryExecutor
from tensorferry.storage.local import LocalStorage

F32 = DTYPES["F32"]
CPU = torch.device("cpu")

SIX = {f"layers.{i}.weight": ar(5, 4, start=100 * i) for i in range(6)}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    need(request.param)
    name: str = request.param
    return name


@pytest.fixture
def executor(library: str) -> LibraryExecutor:
    return LIBRARIES[library]()


def test_a_sharded_checkpoint_is_filled_as_by_our_own_reader(executor: LibraryExecutor, tmp_path: Path) -> None:
    write_sharded(tmp_path, SIX, 3)
    found, ours = filled(executor, tmp_path), filled(ThreadedExecutor(1), tmp_path)
    assert {n: t.tolist() for n, t in found.items()} == {n: t.tolist() for n, t in ours.items()}


@pytest.mark.parametrize("dtype", sorted(COMMON_TYPES))
def test_every_type_arrives_bit_by_bit(executor: LibraryExecutor, dtype: str, tmp_path: Path) -> None:
    kind, ones = DTYPES[dtype], dtype == "BOOL"
    shapes = {"m": (3, 8), "v": (2,), **({} if kind.block > 1 else {"s": ()}), "e": (0, 2)}
    data = {n: bytes((7 * i) % (2 if ones else 256) for i in range(kind.nbytes(shape))) for n, shape in shapes.items()}
    write_raw_safetensors(tmp_path / "model.safetensors", [(n, dtype, shapes[n], data[n]) for n in shapes])
    found = filled(executor, tmp_path)
    assert {n: raw(t) for n, t in found.items()} == data


def test_only_files_and_names_that_the_plan_needs_are_asked_for(executor: LibraryExecutor, tmp_path: Path) -> None:
    write_sharded(tmp_path, SIX, 3)
    recorded = Recorded(executor)
    target = [TargetTensor.plain(f"layers.{i}.weight", F32, (5, 4)) for i in (0, 1)]
    found = filled(recorded, tmp_path, *target)
    (batch,) = recorded.asked
    assert [Path(p).name for p in batch.paths] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2)]
    assert sorted(batch.parts) == sorted(found) == ["layers.0.weight", "layers.1.weight"]
    assert all(torch.equal(found[name], SIX[name]) for name in found)


def test_a_rank_takes_its_part_of_each_tensor(executor: LibraryExecutor, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"w": ar(6, 4)})
    slot = Slot(Region.whole((6, 2)), (6, 4), Region((6, 4), Box((0, 2), (6, 4))))
    found = filled(executor, tmp_path, TargetTensor("w", F32, (6, 2), {"": slot}))
    assert torch.equal(found["w"], ar(6, 4)[:, 2:])


def test_tensors_that_wait_for_others_outlive_the_buffers_of_the_library(
    executor: LibraryExecutor, tmp_path: Path
) -> None:
    many = {f"e.{i}": ar(64, 64, start=5000 * i) for i in range(8)}
    write_sharded(tmp_path, many, 2)
    rule = Join(("e.{i}",), "t", Chain((Stack(0), Transpose((2, 1, 0)))))
    for one in (executor, Borrowing()):
        found = filled(one, tmp_path, TargetTensor.plain("t", F32, (64, 64, 8)), rules=RuleSet(rule))
        assert torch.equal(found["t"], torch.stack(list(many.values())).permute(2, 1, 0))


def test_names_that_stand_in_several_files_are_taken_from_the_right_one(
    executor: LibraryExecutor, tmp_path: Path
) -> None:
    a, b = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    write_safetensors(tmp_path / a, {"x": ar(4), "y": ar(4, start=100)})
    write_safetensors(tmp_path / b, {"x": ar(4, start=200), "y": ar(4, start=300)})
    with LocalStorage(tmp_path) as storage:
        recorded, at = Recorded(executor), (tmp_path / a).stat().st_size - 32
        entries = [TensorEntry.at("x", F32, (4,), a, at), TensorEntry.at("y", F32, (4,), b, at + 16)]
        checkpoint = _checkpoint(storage, entries)
        schedule = planned(checkpoint)
        found = empty(schedule)
        recorded.run(schedule, storage, found)
    assert [batch.labels for batch in recorded.asked] == [[a], [b]]
    assert found["x"].tolist() == [0, 1, 2, 3]
    assert found["y"].tolist() == [300, 301, 302, 303]


def test_an_entry_that_lies_in_several_files_is_put_together(executor: LibraryExecutor, tmp_path: Path) -> None:
    whole = ar(4, 6)
    for rank in (0, 1):
        write_safetensors(tmp_path / f"rank-{rank}.safetensors", {"w": whole[:, 3 * rank : 3 * rank + 3]})
    start = (tmp_path / "rank-0.safetensors").stat().st_size - 48
    boxes = [Box((0, 3 * rank), (4, 3 * rank + 3)) for rank in (0, 1)]
    chunks = tuple(Chunk(box, Span(f"rank-{rank}.safetensors", start, 48)) for rank, box in enumerate(boxes))
    entry = TensorEntry("w", F32, (4, 6), chunks)
    slot = Slot(Region.whole((2, 6)), (4, 6), Region((4, 6), Box((1, 0), (3, 6))))
    with LocalStorage(tmp_path) as storage:
        checkpoint = _checkpoint(storage, [entry])
        schedule = planned(checkpoint, TargetTensor("w", F32, (2, 6), {"": slot}))
        found = empty(schedule)
        executor.run(schedule, storage, found)
        assert torch.equal(found["w"], whole[1:3])
        assert [(n, t.tolist()) for n, t in executor.stream(storage, [entry], Counters())] == [("w", whole.tolist())]


def test_a_stream_yields_tensors_that_stay(executor: LibraryExecutor, tmp_path: Path) -> None:
    tensors = SIX | {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    write_sharded(tmp_path, tensors, 2)
    for one in (executor, Borrowing()):
        counters = Counters()
        with open_checkpoint(tmp_path) as checkpoint:
            found = dict(one.stream(checkpoint.storage, list(checkpoint.catalogue.values()), counters))
        assert {n: t.tolist() for n, t in found.items()} == {n: t.tolist() for n, t in tensors.items()}
        assert counters.bytes_read == 6 * 80 + 4


def _checkpoint(storage: LocalStorage, entries: list[TensorEntry]) -> Checkpoint:
    from tensorferry.formats.base import Selection

    catalogue = Catalogue(entries, format="safetensors", files=[f.path for f in storage.list()])
    return Checkpoint(storage, Selection("safetensors", tuple(storage.list()), ""), catalogue)
