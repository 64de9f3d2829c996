"""DTensors: which part of an entry a rank reads, into which memory; and tensors that keep their values in others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

from helpers.checkpoints import ar
from helpers.gguf_bytes import F32, T, gguf
from helpers.meshes import One, checkpoint, local, mesh_seen_by, spread
from tensorferry import (
    ConfigError,
    PlanError,
    ReadOptions,
    Slot,
    load,
    plan,
    save_sharded_state,
)
from tensorferry.loaders.restoring import sub_views
from tensorferry.modules.describe import describe, identity_of
from tensorferry.modules.surroundings import device_for

S = Shard
PLACED: dict[str, tuple[tuple[int, ...], Sequence[Any], tuple[int, ...]]] = {
    "rows": ((2,), [S(0)], (8, 6)),
    "uneven rows": ((4,), [S(0)], (5, 3)),
    "rows that some ranks have none of": ((4,), [S(0)], (6, 3)),
    "columns": ((2,), [S(1)], (3, 8)),
    "uneven columns": ((4,), [S(1)], (3, 9)),
    "all of it": ((2,), [Replicate()], (3, 5)),
    "a vector": ((4,), [S(0)], (7,)),
    "a vector of one": ((2,), [S(0)], (1,)),
    "rows and columns": ((2, 2), [S(0), S(1)], (5, 6)),
    "rows of rows": ((2, 2), [S(0), S(0)], (10, 3)),
    "columns, in two copies": ((2, 2), [Replicate(), S(1)], (3, 6)),
    "FSDP of rows of TP": ((2, 2), [_StridedShard(0, split_factor=2), S(0)], (8, 3)),
    "FSDP of uneven rows of TP": ((2, 2), [_StridedShard(0, split_factor=2), S(0)], (10, 3)),
    "three dimensions": ((2, 2), [S(2), S(1)], (3, 4, 5)),
}
"""Shape of the mesh, placements and shape of the whole, by what a rank has."""


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("what", PLACED)
def test_each_rank_reads_what_distribute_tensor_would_give_it(what: str, device: str, tmp_path: Path) -> None:
    shape, placements, whole = PLACED[what]
    values = ar(*whole, start=1)
    checkpoint(tmp_path, weight=values)
    for rank in range(torch.Size(shape).numel()):
        with mesh_seen_by(rank, shape) as mesh:
            model = One(spread(torch.zeros(whole, device=device), mesh, placements))
            expected = local(spread(values, mesh, placements))
            report = load(model, tmp_path)
            assert torch.equal(local(model.weight), expected)
            assert model.weight.shape == values.shape
            assert (report.bytes_needed, report.missing, report.unexpected) == (expected.nbytes, (), ())
            assert describe(model)["weight"].shape == tuple(expected.shape)


def test_what_a_rank_needs_is_a_window_of_the_whole() -> None:
    with mesh_seen_by(3, (2, 2)) as mesh:
        model = One(spread(torch.zeros(10, 3), mesh, [S(0), S(0)]))
        found = describe(model)["weight"]
    slot = found.slots[""]
    assert (found.shape, slot.logical, slot.window.box.slices) == ((2, 3), (10, 3), (slice(8, 10), slice(0, 3)))
    assert slot.local.is_whole


def test_the_elements_of_a_strided_shard_are_where_fsdp_and_tp_put_them(tmp_path: Path) -> None:
    """Rows 0 to 5 are of TP rank 0; of them, FSDP rank 1 has 3 and 4."""
    with mesh_seen_by(2, (2, 2)) as mesh:
        model = One(spread(torch.zeros(10, 1), mesh, [_StridedShard(0, split_factor=2), S(0)]))
        load(model, checkpoint(tmp_path, weight=ar(10, 1)))
        assert local(model.weight).tolist() == [[3], [4]]


def test_a_parameter_with_memory_stays_the_object_that_it_is_in_that_memory(tmp_path: Path) -> None:
    with mesh_seen_by(1, (2,)) as mesh:
        model = One(spread(torch.zeros(4, 2), mesh, [S(0)]))
        kept, at = model.weight, model.weight._local_tensor.data_ptr()
        load(model, checkpoint(tmp_path, weight=ar(4, 2)))
        assert model.weight is kept
        assert model.weight._local_tensor.data_ptr() == at
        assert local(model.weight).tolist() == [[4, 5], [6, 7]]


@pytest.mark.parametrize("grad", [True, False])
def test_a_parameter_on_meta_is_replaced_by_one_like_it(grad: bool, tmp_path: Path) -> None:
    with mesh_seen_by(1, (2,)) as mesh:
        model = One(spread(torch.zeros(4, 2, device="meta"), mesh, [S(0)], grad=grad))
        model.weight.note = "kept"
        old: Any = model.weight
        with torch.inference_mode():
            load(model, checkpoint(tmp_path, weight=ar(4, 2)))
        new: Any = model.weight
        assert (type(new), isinstance(new, nn.Parameter)) == (DTensor, True)
        assert (new.requires_grad, new.is_leaf, new.note, new.placements) == (grad, True, "kept", old.placements)
        assert (new.device_mesh, new.stride(), new.dtype) == (mesh, (2, 1), torch.float32)
        assert not new.is_inference()
        if grad:
            (new * 2).sum().backward()
            assert new.grad is not None


def test_buffers_are_filled_too_if_they_persist(tmp_path: Path) -> None:
    with mesh_seen_by(0, (2,)) as mesh:
        model = One(spread(torch.zeros(2), mesh, [S(0)]))
        model.register_buffer("scale", spread(torch.zeros(4), mesh, [S(0)], grad=False).data)
        load(model, checkpoint(tmp_path, weight=ar(2), scale=ar(4)))
        assert local(model.scale).tolist() == [0, 1]
        assert isinstance(model.scale, DTensor)


def test_values_are_cast_to_the_type_of_the_parameter(tmp_path: Path) -> None:
    values = ar(6, 4, dtype=torch.bfloat16)
    with mesh_seen_by(1, (2,)) as mesh:
        model = One(spread(torch.zeros(6, 4, device="meta"), mesh, [S(1)]))
        report = load(model, checkpoint(tmp_path, weight=values))
        assert torch.equal(local(model.weight), values[:, 2:].float())
    assert (report.casts, report.bytes_needed) == ({"BF16 -> F32": 1}, 6 * 2 * 2)


@pytest.mark.parametrize("placement", [S(0), S(1)])
def test_a_rank_reads_its_part_of_a_torch_file(placement: Shard, tmp_path: Path) -> None:
    torch.save({"weight": ar(6, 4)}, tmp_path / "pytorch_model.bin")
    with mesh_seen_by(1, (2,)) as mesh:
        model = One(spread(torch.zeros(6, 4), mesh, [placement]))
        report = load(model, tmp_path)
        assert torch.equal(local(model.weight), local(spread(ar(6, 4), mesh, [placement])))
    assert (report.format, report.bytes_needed) == ("torch", 6 * 4 * 4 // 2)


def test_a_rank_reads_its_part_of_a_gguf_file(tmp_path: Path) -> None:
    values = ar(6, 4)
    tensor = T("weight", (4, 6), F32, values.numpy().tobytes())
    (tmp_path / "m.gguf").write_bytes(gguf([tensor]))
    with mesh_seen_by(1, (2,)) as mesh:
        model = One(spread(torch.zeros(6, 4, device="meta"), mesh, [S(0)]))
        report = load(model, tmp_path)
        assert torch.equal(local(model.weight), values[3:])
    assert (report.format, report.bytes_needed, report.bytes_read) == ("gguf", 48, 48)


def test_no_more_is_read_than_a_rank_needs_if_it_lies_in_one_piece(tmp_path: Path) -> None:
    checkpoint(tmp_path, weight=ar(1024, 64))
    with mesh_seen_by(1, (4,)) as mesh:
        model = One(spread(torch.zeros(1024, 64, device="meta"), mesh, [S(0)]))
        report = load(model, tmp_path, options=ReadOptions(direct="never"))
    assert report.bytes_read == report.bytes_needed == 1024 * 64 * 4 // 4


def test_rows_of_a_rank_may_be_views_of_mapped_files(tmp_path: Path) -> None:
    with mesh_seen_by(1, (2,)) as mesh:
        model = One(spread(torch.zeros(4, 2, device="meta"), mesh, [S(0)]))
        report = load(model, checkpoint(tmp_path, weight=ar(4, 2)), options=ReadOptions(mapped=True))
        assert local(model.weight).tolist() == [[4, 5], [6, 7]]
        assert isinstance(model.weight, DTensor)
    assert report.mapped_bytes == 16


def test_an_entry_of_another_shape_is_refused_by_the_shape_of_the_whole(tmp_path: Path) -> None:
    with mesh_seen_by(0, (2,)) as mesh:
        model = One(spread(torch.zeros(4, 2), mesh, [S(0)]))
        with pytest.raises(PlanError, match=r"the checkpoint has \(2, 2\), weight expects \(4, 2\)") as caught:
            load(model, checkpoint(tmp_path, weight=ar(2, 2)))
    assert not caught.value.touched


def test_an_entry_that_is_missing_is_missed_on_ranks_without_a_part_of_it(tmp_path: Path) -> None:
    with mesh_seen_by(3, (4,)) as mesh:
        model = One(spread(torch.zeros(3, 2), mesh, [S(0)]))
        with pytest.raises(PlanError, match="weight"):
            load(model, checkpoint(tmp_path, other=ar(3, 2)))


# ---- ties


def test_equal_parameters_that_have_memory_of_their_own_are_not_tied() -> None:
    with mesh_seen_by(0, (2,)) as mesh:
        for device in ("cpu", "meta"):
            one, other = (spread(torch.zeros(4, 2, device=device), mesh, [S(0)]) for _ in range(2))
            assert [t.alias_of for t in describe(One(one, other=other)).values()] == [None, None]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_parameter_that_hangs_twice_is_tied(device: str, tmp_path: Path) -> None:
    with mesh_seen_by(1, (2,)) as mesh:
        shared = spread(torch.zeros(4, 2, device=device), mesh, [S(0)])
        model = One(shared, other=shared)
        assert describe(model)["other"].alias_of == "weight"
        report = load(model, checkpoint(tmp_path, other=ar(4, 2)))
        assert model.other is model.weight
        assert local(model.weight).tolist() == [[4, 5], [6, 7]]
    assert report.ties == {"other": "weight"}


def test_parameters_around_one_local_tensor_are_tied() -> None:
    with mesh_seen_by(0, (2,)) as mesh:
        shared = spread(torch.zeros(4, 2), mesh, [S(0)])
        model = One(shared, other=nn.Parameter(shared.data))
        assert describe(model)["other"].alias_of == "weight"


def test_a_tie_that_the_checkpoint_does_not_keep_is_taken_apart(tmp_path: Path) -> None:
    with mesh_seen_by(1, (2,)) as mesh:
        shared = spread(torch.zeros(4, 2), mesh, [S(0)])
        model = One(shared, other=shared)
        load(model, checkpoint(tmp_path, weight=ar(4, 2), other=ar(4, 2, start=9)))
        assert local(model.weight).tolist() == [[4, 5], [6, 7]]
        assert local(model.other).tolist() == [[13, 14], [15, 16]]


# ---- what is refused


def refused(model: nn.Module, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        describe(model)


def test_a_partial_placement_is_refused() -> None:
    with mesh_seen_by(0, (2,)) as mesh:
        local_part = torch.zeros(4, 2)
        refused(One(nn.Parameter(DTensor.from_local(local_part, mesh, [Partial()]))), r"^weight is a DTensor .*summand")


def test_elements_that_do_not_lie_side_by_side_are_refused() -> None:
    with mesh_seen_by(0, (2,)) as mesh:
        scattered = spread(torch.zeros(8, 2), mesh, [_StridedShard(0, split_factor=2)])
        refused(One(scattered), r"^weight is a DTensor .*no box of \[8, 2\]")


def test_a_placement_that_deals_otherwise_is_refused() -> None:
    class Interleaved(Shard):
        pass

    with mesh_seen_by(0, (2,)) as mesh:
        dealt = DTensor.from_local(torch.zeros(4, 2), mesh, [Interleaved(0)])
        refused(One(nn.Parameter(dealt)), "not all known here")


def test_a_local_part_of_another_size_than_its_placements_say_is_refused() -> None:
    with mesh_seen_by(0, (2,)) as mesh:
        odd = DTensor.from_local(torch.zeros(3, 2), mesh, [S(0)], shape=torch.Size((4, 2)), stride=(2, 1))
        refused(One(nn.Parameter(odd)), r"give this rank \[\[2, 2\]\] of \[4, 2\], and it holds \[3, 2\]")


def test_a_layer_that_declares_slots_of_a_dtensor_is_refused() -> None:
    class Declares(One):
        def tensor_slots(self) -> dict[str, dict[str, Slot]]:
            return {"weight": {"": Slot.whole((4, 2))}}

    with mesh_seen_by(0, (2,)) as mesh:
        refused(Declares(spread(torch.zeros(4, 2), mesh, [S(0)])), "weight is a DTensor, and tensor_slots of Declares")


def test_a_rank_outside_of_the_mesh_needs_nothing(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    with mesh_seen_by(3, (4,)):
        mesh = DeviceMesh("cpu", [0, 1], _init_backend=False)
        model = One(nn.Parameter(DTensor.from_local(torch.zeros(2, 2), mesh, [S(0)])))
        report = load(model, checkpoint(tmp_path, weight=ar(4, 2)))
    assert (report.bytes_needed, report.dropped) == (0, {"weight": "not on this rank"})


# ---- tensors that keep their values in others


def two(device: str = "cpu") -> nn.Parameter:
    tensor = torch.zeros(4, 2, device=device)
    return nn.Parameter(TwoTensor(tensor, tensor.clone()))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tensor_that_keeps_its_values_in_others_is_refused(device: str) -> None:
    refused(One(two(device)), "^weight is a TwoTensor, which keeps its values in other tensors")


def test_tensors_that_keep_their_values_in_others_are_never_tied() -> None:
    assert identity_of(two()) != identity_of(two())


def test_a_dtensor_of_such_tensors_is_refused() -> None:
    with mesh_seen_by(0, (2,)) as mesh:
        inner: Any = two().data
        refused(One(nn.Parameter(DTensor.from_local(inner, mesh, [S(0)]))), "^the local part of weight is a TwoTensor")


def test_other_classes_of_tensors_are_filled_as_ever(tmp_path: Path) -> None:
    class Noted(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    model = One(Noted(torch.zeros(4, 2)))
    load(model, checkpoint(tmp_path, weight=ar(4, 2)))
    assert torch.equal(model.weight.data, ar(4, 2))


# ---- around it


def test_nobody_has_to_import_what_dtensors_are_for_a_model_without(tmp_path: Path) -> None:
    checkpoint(tmp_path, weight=ar(3, 2), bias=ar(3))
    code = (
        "import sys, torch, tensorferry\n"
        f"tensorferry.Reloader(torch.nn.Linear(2, 3)).load({str(tmp_path)!r})\n"
        "print([n for n in sys.modules if n.startswith(('torch.distributed.tensor', 'torch.distributed.fsdp'))])"
    )
    bare = "import sys, torch\nprint([n for n in sys.modules if n.startswith('torch.distributed.tensor')])"
    found, before = (
        subprocess.run([sys.executable, "-c", c], capture_output=True, text=True, check=True).stdout
        for c in (code, bare)
    )
    assert before == found == "[]\n"


def test_a_sharded_state_is_not_written_of_dtensors(tmp_path: Path) -> None:
    with mesh_seen_by(1, (2,)) as mesh, pytest.raises(ConfigError, match="weight is a DTensor"):
        save_sharded_state(One(spread(ar(4, 2), mesh, [S(0)])), tmp_path)


def test_a_dtensor_is_no_view_of_another_one() -> None:
    with mesh_seen_by(0, (2,)) as mesh:
        assert sub_views(One(spread(ar(4, 2), mesh, [S(0)]), other=spread(ar(6, 2), mesh, [S(0)]))) == set()


def test_memory_is_given_where_the_mesh_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorferry.modules import distributed

    with mesh_seen_by(0, (2,)) as mesh:
        model = One(spread(torch.zeros(4, 2, device="meta"), mesh, [S(0)]))
        assert device_for(model, None) == torch.device("cpu")

        class Elsewhere:
            mesh = type("Mesh", (), {"device_type": "cuda"})

        monkeypatch.setattr(distributed, "spec_of", lambda tensor: Elsewhere)
        monkeypatch.setattr(distributed, "_current", lambda kind: 3)
        assert distributed.device_of_mesh(model.parameters()) == torch.device("cuda", 3)


def test_a_plan_touches_nothing(tmp_path: Path) -> None:
    with mesh_seen_by(1, (2,)) as mesh:
        model = One(spread(torch.zeros(4, 2, device="meta"), mesh, [S(0)]))
        made = plan(model, checkpoint(tmp_path, weight=ar(4, 2)))
        assert model.weight.is_meta
    assert made.bytes_needed == 16
