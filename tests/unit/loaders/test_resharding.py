"""A state that some ranks saved is put together and taken apart anew for others: every value, and few bytes more."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from helpers.sharded_models import (
    HIDDEN,
    Attention,
    Layer,
    Model,
    filled,
    load_rank,
    logical_values,
    on_meta,
    part,
    ranks,
)
from tensorferry import ParallelConfig, ReadOptions, convert, load, open_checkpoint
from tensorferry.core.rules import Place
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Layout, Slot
from tensorferry.errors import ConfigError
from tensorferry.loaders.saving import save_sharded_state
from tensorferry.modules.describe import describe
from tensorferry.parallel import VocabParallelEmbedding

SIZES = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("states")
    for size in SIZES:
        for parallel in ranks(size):
            save_sharded_state(filled(Model(parallel)), root / str(size), parallel=parallel, max_part_size=300)
    return root


@cache
def needed(parallel: ParallelConfig) -> int:
    """Return the bytes that slots take, padding not counted."""
    return 4 * sum(slot.local.size for t in describe(on_meta(parallel)).values() for slot in t.slots.values())


@pytest.mark.parametrize("saved", SIZES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("meta", [True, False])
def test_every_rank_gets_its_part_and_reads_nothing_else(states: Path, saved: int, size: int, meta: bool) -> None:
    for parallel in ranks(size):
        model = on_meta(parallel) if meta else Model(parallel)
        loaded, report = load_rank(states / str(saved), model, parallel, read=ReadOptions(max_gap=0))
        for (name, values), wanted in zip(
            loaded.state_dict().items(), filled(Model(parallel)).state_dict().values(), strict=True
        ):
            assert torch.equal(values, wanted), (parallel, name)
        told = any("resharded" in warning for warning in report.warnings)
        assert told == (saved != size)
        if told:
            assert report.bytes_read == report.bytes_needed == needed(parallel)


def test_experts_of_other_ranks_are_dropped_for_a_reason(states: Path) -> None:
    _, report = load_rank(states / "1", on_meta(ranks(4)[3]), ranks(4)[3])
    assert report.dropped["experts.weight[0.gate]"] == "not on this rank"
    assert "experts.weight[4.up]" not in report.dropped


def test_padding_is_not_read_and_filled_with_its_default(states: Path) -> None:
    loaded, _ = load_rank(states / "1", on_meta(ranks(4)[3]), ranks(4)[3])
    assert (loaded.get_parameter("embed.weight") == -1).all()


def test_the_whole_state_is_one_checkpoint_with_an_entry_for_each_slot(states: Path) -> None:
    with open_checkpoint(states / "3", load_format="sharded_state") as checkpoint:
        assert checkpoint.catalogue.format == "sharded_state"
        assert checkpoint.selection.reason.endswith("saved for tensor-parallel size 3, expert-parallel size 3")
        shapes = {name: entry.shape for name, entry in checkpoint.catalogue.items() if "experts" not in name}
        assert shapes == {
            "embed.weight": (8, HIDDEN),
            "attention.weight[q]": (12, HIDDEN),
            "attention.weight[k]": (1, HIDDEN),
            "attention.weight[v]": (1, HIDDEN),
            "rows.weight": (12, 12),
            "columns.weight": (12, 12),
            "norm.weight": (HIDDEN,),
            "norm.bias": (HIDDEN,),
        }
        assert torch.equal(checkpoint.read("columns.weight"), logical_values("columns.weight/", (12, 12)))
        assert torch.equal(checkpoint.read("experts.weight[3.up]"), logical_values("experts.weight/3.up", (2, HIDDEN)))
        names = {name for name, _ in checkpoint.tensors()}
        assert names == set(checkpoint.catalogue)


class Plain(nn.Module):
    """What is fused in the state is one parameter here, with nothing declared."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(HIDDEN, 14, bias=False)
        self.rows = nn.Linear(12, 12, bias=False)
        self.columns = nn.Linear(12, 12, bias=False)
        self.norm = nn.LayerNorm(HIDDEN)


class Some(nn.Module):
    """What `Plain` is, divided."""

    def __init__(self, parallel: ParallelConfig) -> None:
        super().__init__()
        whole = Model(parallel)
        self.attention, self.rows, self.columns, self.norm = whole.attention, whole.rows, whole.columns, whole.norm


def test_a_model_that_declares_nothing_gets_whole_tensors_and_slots_one_after_the_other(tmp_path: Path) -> None:
    for parallel in ranks(2, experts=False):
        save_sharded_state(filled(Some(parallel)), tmp_path, parallel=parallel)
    model, _ = load_rank(tmp_path, Plain())
    q, k, v = (logical_values(f"attention.weight/{s}", (n, HIDDEN)) for s, n in (("q", 12), ("k", 1), ("v", 1)))
    assert torch.equal(model.get_parameter("attention.weight"), torch.cat([q, k, v]))
    assert torch.equal(model.get_parameter("columns.weight"), logical_values("columns.weight/", (12, 12)))


def test_rules_of_the_caller_lead_from_slots_to_parameters_of_any_name(tmp_path: Path) -> None:
    for parallel in ranks(2, experts=False):
        save_sharded_state(filled(Attention(parallel)), tmp_path, parallel=parallel)
    model = nn.ModuleDict({"q": nn.Linear(HIDDEN, 12, bias=False), "k": nn.Linear(HIDDEN, 1, bias=False)})
    rules = RuleSet(Place("weight[q]", "q.weight"), Place("weight[k]", "k.weight"))
    load(model, tmp_path, load_format="sharded_state", rules=rules)
    assert torch.equal(model.get_parameter("q.weight"), logical_values("weight/q", (12, HIDDEN)))


def test_pipeline_stages_are_put_together_and_each_stage_takes_its_own_layers(tmp_path: Path) -> None:
    def stage(config: ParallelConfig) -> nn.Module:
        layers = range(4)[config.pp_rank * 4 // config.pp_size : (config.pp_rank + 1) * 4 // config.pp_size]
        alone = replace(config, pp_size=1, pp_rank=0)
        return nn.ModuleDict({f"layer{n}": Attention(alone) for n in layers})

    two = [ParallelConfig(pp_size=2, pp_rank=p, tp_size=2, tp_rank=t) for p in range(2) for t in range(2)]
    for config in two:
        written = save_sharded_state(filled(stage(config)), tmp_path, parallel=config)
        assert written[0] == f"model-pp-{config.pp_rank}-tp-{config.tp_rank}-part-0.safetensors"
    for config in (*two, ParallelConfig(), ParallelConfig(pp_size=4, pp_rank=3), ParallelConfig(tp_size=3, tp_rank=2)):
        loaded, report = load_rank(tmp_path, stage(config), config)
        wanted = filled(stage(config)).state_dict()
        assert all(torch.equal(values, wanted[name]) for name, values in loaded.state_dict().items())
    assert report.dropped == {}


def test_experts_of_more_ranks_than_tensor_parallelism_has_come_in_files_of_their_own(tmp_path: Path) -> None:
    def model(config: ParallelConfig) -> Model:
        return Model(config)

    four = [ParallelConfig(ep_size=4, ep_rank=rank) for rank in range(4)]
    for config in four:
        written = save_sharded_state(filled(model(config)), tmp_path, parallel=config)
        assert written[0] == f"model-ep-{config.ep_rank}-part-0.safetensors"
    for config in (*four, ParallelConfig(), *ranks(3)):
        loaded, _ = load_rank(tmp_path, model(config), config)
        wanted = filled(model(config)).state_dict()
        assert all(torch.equal(values, wanted[name]) for name, values in loaded.state_dict().items())


class Tied(nn.Module):
    """A head that is tied to the embedding, unless it is told otherwise. Its name comes first in the alphabet."""

    def __init__(self, parallel: ParallelConfig, *, tie: bool = True) -> None:
        super().__init__()
        self.embed, self.a_head = Attention(parallel), Attention(parallel)
        if tie:
            self.a_head.weight = self.embed.weight


def test_ties_are_kept_and_a_model_that_does_not_tie_gets_both(tmp_path: Path) -> None:
    for parallel in ranks(2, experts=False):
        save_sharded_state(filled(Tied(parallel)), tmp_path, parallel=parallel)
    with safe_open(tmp_path / "model-rank-1-part-0.safetensors", framework="pt") as file:
        assert list(file.keys()) == ["a_head.weight"], "the least of the names, as vLLM has it"
    for parallel in (ParallelConfig(), *ranks(2, experts=False)):
        tied, _ = load_rank(tmp_path, Tied(parallel), parallel)
        assert tied.get_submodule("a_head").weight is tied.get_submodule("embed").weight
        both, _ = load_rank(tmp_path, Tied(parallel, tie=False), parallel)
        assert torch.equal(both.get_parameter("a_head.weight"), both.get_parameter("embed.weight"))
        assert both.get_parameter("a_head.weight") is not both.get_parameter("embed.weight")
        assert torch.equal(both.get_parameter("a_head.weight"), tied.get_parameter("embed.weight"))


def test_as_a_checkpoint_a_state_has_what_is_tied_under_every_name(tmp_path: Path) -> None:
    for parallel in ranks(2, experts=False):
        save_sharded_state(filled(Tied(parallel)), tmp_path, parallel=parallel)
    with open_checkpoint(tmp_path, load_format="sharded_state") as checkpoint:
        found = dict(checkpoint.tensors())
    assert found.keys() == {f"{name}.weight[{slot}]" for name in ("a_head", "embed") for slot in "qkv"}
    assert all(torch.equal(found[f"embed.weight[{slot}]"], found[f"a_head.weight[{slot}]"]) for slot in "qkv")


def test_a_converted_state_fills_a_layer_that_is_padded_for_one_rank_too(tmp_path: Path) -> None:
    words = ar(7, 4, start=1)
    write_safetensors(tmp_path / "src" / "model.safetensors", {"weight": words})
    convert(tmp_path / "src", tmp_path / "state", to="sharded_state")
    for parallel in (ParallelConfig(), *ranks(2, experts=False)):
        layer = VocabParallelEmbedding(7, 4, parallel=parallel)
        load_rank(tmp_path / "state", layer, parallel)
        start = parallel.tp_rank * len(layer.weight)
        held = words[start : start + len(layer.weight)]
        assert torch.equal(layer.weight[: len(held)], held)
        assert not layer.weight[len(held) :].any()


class Undeclared(nn.Module):
    """A part of a whole that no layer declares."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.proj = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.proj.weight.copy_(ar(2, 2, start=start))


def test_parts_that_no_layer_declares_are_not_taken_for_copies(tmp_path: Path) -> None:
    for parallel in ranks(2, experts=False):
        save_sharded_state(Undeclared(parallel.tp_rank * 10.0), tmp_path, parallel=parallel)
    with pytest.raises(ConfigError, match=r"proj\.weight differs between rank 0 and rank 1.* declares no slots"):
        load_rank(tmp_path, Undeclared(0))
    same, _ = load_rank(tmp_path, Undeclared(0), ranks(2, experts=False)[1])
    assert same.get_parameter("proj.weight").tolist() == [[10, 11], [12, 13]]


class Windows(Layer):
    """A vector of six of which each rank takes what it is told."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        shape = (stop - start,)
        self.declare("w", shape, Layout({"": part(shape, 0, (6,), start, stop)}))


@pytest.mark.parametrize(
    ("windows", "words"),
    [
        ([(0, 3), (2, 6)], r"rank 0 and rank 1 both hold the elements from \[2\] to \[3\]"),
        ([(0, 3), (4, 6)], r"hold 5 of its 6 elements"),
    ],
)
def test_windows_that_do_not_tile_are_refused(tmp_path: Path, windows: list[tuple[int, int]], words: str) -> None:
    for parallel, (start, stop) in zip(ranks(2, experts=False), windows, strict=True):
        save_sharded_state(Windows(start, stop), tmp_path, parallel=parallel)
    with pytest.raises(ConfigError, match=f"saved for tensor-parallel size 2, load asks for 1.*{words}"):
        load_rank(tmp_path, Windows(0, 6))


class Comb(Layer):
    """Every second element of a vector of eight, which is no box of it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        window = Slot.whole((8,)).window.seen_as((4, 2))
        assert window is not None
        comb = replace(window, box=replace(window.box, start=(0, rank), stop=(4, rank + 1)))
        self.declare("w", (4,), Layout({"": Slot(Slot.whole((4,)).local, (8,), comb)}))


def test_a_window_that_is_no_box_is_refused_by_name(tmp_path: Path) -> None:
    for parallel in ranks(2, experts=False):
        save_sharded_state(Comb(parallel.tp_rank), tmp_path, parallel=parallel)
    with pytest.raises(ConfigError, match="w: what rank 0 holds of it is no box of the tensor"):
        load_rank(tmp_path, Windows(0, 6))


def test_a_layer_that_lays_out_the_same_ranks_otherwise_gets_its_own_part(tmp_path: Path) -> None:
    for parallel, (start, stop) in zip(ranks(2, experts=False), [(0, 3), (3, 6)], strict=True):
        save_sharded_state(filled(Windows(start, stop)), tmp_path, parallel=parallel)
    swapped, report = load_rank(tmp_path, Windows(3, 6), ranks(2, experts=False)[0])
    assert swapped.get_parameter("w").tolist() == logical_values("w/", (6,))[3:].tolist()
    assert "w was saved as [0] to [3] of [6] at [0], and is [3] to [6] of [6] at [0] here" in report.warnings[0]


def test_resharding_can_be_ruled_out(states: Path) -> None:
    with pytest.raises(ConfigError, match="saved for tensor-parallel size 2, load asks for 3"):
        load_rank(states / "2", on_meta(ranks(3)[0]), ranks(3)[0], options={"reshard": False})


def test_a_type_that_differs_is_refused_in_resharding_too(states: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows\.weight: saved as F32, the model has BF16"):
        load_rank(states / "2", Model(ranks(1)[0]).to(torch.bfloat16), ranks(1)[0])
