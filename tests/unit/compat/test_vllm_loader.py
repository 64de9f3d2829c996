"""The loader that vLLM gets, with stand-ins for vLLM: what it fills, refuses and says."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from helpers.checkpoints import write_safetensors
from helpers.fake_vllm import FakeVllm, KvCacheMethod, LoadConfig, installed, model_config
from helpers.old_loaders import NanoModel, nano_checkpoint, poisoned, whole_entries
from helpers.ranks import Fault, Ranks
from tensorferry import ConfigError, LocateError, PlanError
from tensorferry.formats.opening import open_files


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    with installed() as fake:
        yield fake


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return nano_checkpoint(tmp_path)


def filled_by_itself(folder: Path, tp: int = 1, rank: int = 0) -> dict[str, torch.Tensor]:
    model = poisoned(NanoModel(tp, rank))
    with open_files(folder) as opened:
        model.load_weights(whole_entries(opened, opened.catalogue))  # type: ignore[operator]
    return model.state_dict()


def load(vllm: FakeVllm, folder: Path, model: nn.Module | None = None, **extra: Any) -> Any:
    """Fill a model (poisoned, so that what nothing wrote shows) and return the loader."""
    loader = vllm.loader(LoadConfig(model_loader_extra_config=extra))
    loader.load_weights(poisoned(NanoModel()) if model is None else model, model_config(folder))
    return loader


def rewrite(folder: Path, **renamed: str | None) -> None:
    """Write the checkpoint again, with tensors under other names, or without them; ``__`` stands for a dot."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for old, new in renamed.items():
        value = tensors.pop(old.replace("__", "."))
        if new is not None:
            tensors[new] = value
    save_file(tensors, file)


def is_untouched(model: nn.Module) -> bool:
    return all(bool((tensor == 77).all()) for tensor in model.state_dict().values())


def test_the_package_says_that_it_is_a_plug_in_of_vllm() -> None:
    (point,) = (p for p in entry_points(group="vllm.general_plugins") if p.name == "tensorferry")
    assert point.value == "tensorferry.compat.vllm:register"


def test_importing_the_plug_in_does_not_import_vllm() -> None:
    import tensorferry.compat.vllm

    assert tensorferry.compat.vllm.LOAD_FORMAT == "tensorferry"
    assert "tensorferry.compat.vllm.engine" not in sys.modules


def test_registering_twice_registers_once(vllm: FakeVllm) -> None:
    from tensorferry.compat.vllm import register

    register()
    assert len(vllm.loaders["tensorferry"]) == 1


def test_a_model_is_filled_as_by_its_own_loader(vllm: FakeVllm, folder: Path) -> None:
    model = poisoned(NanoModel())
    load(vllm, folder, model)
    for name, expected in filled_by_itself(folder).items():
        assert torch.equal(model.state_dict()[name], expected), name


def test_a_rank_of_two_needs_about_half_of_the_bytes(vllm: FakeVllm, folder: Path) -> None:
    whole, half = (load(vllm, folder, poisoned(NanoModel(size, 0))).report.bytes_needed for size in (1, 2))
    assert half < 0.52 * whole


def test_hooks_are_left_to_vllm(vllm: FakeVllm, folder: Path) -> None:
    model, ran = poisoned(NanoModel()), []
    model.norm.process_weights_after_loading = lambda: ran.append("hook")  # type: ignore[union-attr]
    assert load(vllm, folder, model).report.post_processed == ()
    assert ran == []


def test_vllm_processes_weights_that_are_there_already(vllm: FakeVllm, folder: Path) -> None:
    loader, seen = vllm.loader(), []
    loader.process = lambda model: seen.append(float(model.norm.weight.detach()[0]))
    model = loader.load_model(poisoned(NanoModel()), model_config(folder))
    assert seen == [float(model.norm.weight.detach()[0])] != [77.0]
    assert not model.training


def test_the_log_of_vllm_says_what_was_done_in_one_line(
    vllm: FakeVllm, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm")
    load(vllm, folder)
    told = [r.getMessage() for r in caplog.records if r.name == "vllm.tensorferry"]
    (line,) = (text for text in told if "parameters from" in text)
    assert str(folder) in line
    assert "read" in line


def test_what_we_warn_of_is_in_the_log_of_vllm_and_only_there(
    vllm: FakeVllm, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite(folder, norm__weight=None)
    load(vllm, folder, strictness={"missing": "warn"})
    warned = [(r.name, r.getMessage()) for r in caplog.records if "missing: norm.weight" in r.getMessage()]
    assert [name for name, _ in warned] == ["vllm.tensorferry"]


def test_a_missing_tensor_stops_the_load_before_anything_is_touched(vllm: FakeVllm, folder: Path) -> None:
    rewrite(folder, layers__1__q_proj__weight=None)
    model = poisoned(NanoModel())
    with pytest.raises(PlanError, match=r"layers\.1\.qkv_proj\.weight.*fills 256 of its 768") as caught:
        load(vllm, folder, model)
    assert not caught.value.touched
    assert is_untouched(model)


def test_a_renamed_tensor_at_which_the_loader_fails_stops_the_load_before_anything_is_touched(
    vllm: FakeVllm, folder: Path
) -> None:
    rewrite(folder, layers__1__norm__weight="layers.1.nrom.weight")
    model = poisoned(NanoModel())
    with pytest.raises(PlanError, match="the model was not touched") as caught:
        load(vllm, folder, model)
    assert is_untouched(model)
    found = {(p.kind.value, p.subject): p for p in caught.value.problems}
    assert set(found) == {("unexpected", "layers.1.nrom.weight"), ("missing", "layers.1.norm.weight")}
    assert "KeyError" in found["unexpected", "layers.1.nrom.weight"].detail
    assert found["missing", "layers.1.norm.weight"].near == ("layers.1.nrom.weight",)
    assert "own_loader" in str(caught.value)


def test_a_tensor_of_another_shape_stops_the_load_before_anything_is_touched(vllm: FakeVllm, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "norm.weight": torch.zeros(17)}, folder / "model.safetensors")
    model = poisoned(NanoModel())
    with pytest.raises(PlanError, match=r"norm\.weight.*AssertionError"):
        load(vllm, folder, model)
    assert is_untouched(model)


def test_a_folder_without_weights_is_said_to_be_that(vllm: FakeVllm, tmp_path: Path) -> None:
    with pytest.raises(LocateError):
        load(vllm, tmp_path)


class Attention(nn.Module):
    """As vLLM's: buffers that the constructor fills, and scales that have a default."""

    def __init__(self, method: object) -> None:
        super().__init__()
        self.quant_method = method
        self.k_scale = nn.Parameter(torch.tensor(-1.0))
        self.register_buffer("_k_scale", torch.tensor(1.0))
        self.weight = nn.Parameter(torch.empty(4))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, value in weights:
            getattr(self, name).data.copy_(value)


def test_buffers_and_scales_of_the_cache_may_be_left_as_they_were_built(vllm: FakeVllm, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"weight": torch.ones(4)})
    model = Attention(KvCacheMethod())
    report = load(vllm, tmp_path, model).report
    assert report.computed == ("k_scale", "_k_scale")
    assert report.missing == ()
    assert [model.state_dict()[n].item() for n in ("k_scale", "_k_scale")] == [-1, 1]


def test_any_other_scale_has_to_be_there(vllm: FakeVllm, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"weight": torch.ones(4)})
    model = Attention(object())
    model.weight.data.fill_(77)
    with pytest.raises(PlanError, match="missing: k_scale"):
        load(vllm, tmp_path, model)
    assert bool((model.weight == 77).all())


def test_an_entry_at_which_the_loader_fails_does_not_bring_up_what_may_be_missing(
    vllm: FakeVllm, tmp_path: Path
) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"wieght": torch.ones(4)})
    with pytest.raises(PlanError) as caught:
        load(vllm, tmp_path, Attention(KvCacheMethod()))
    assert [p.subject for p in caught.value.problems] == ["wieght", "weight"]


def test_scales_of_the_cache_that_the_checkpoint_has_are_loaded(vllm: FakeVllm, tmp_path: Path) -> None:
    tensors = {"weight": torch.ones(4), "k_scale": torch.tensor(0.5)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    model = Attention(KvCacheMethod())
    assert load(vllm, tmp_path, model).report.computed == ("_k_scale",)
    assert model.state_dict()["k_scale"].item() == 0.5


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = self.state_dict()
        for name, value in weights:
            own[name].copy_(value)


def test_the_statistics_of_a_batch_norm_are_no_buffers_that_may_be_missing(vllm: FakeVllm, tmp_path: Path) -> None:
    tensors = {"norm.weight": torch.ones(2), "norm.bias": torch.ones(2), "norm.running_mean": torch.ones(2)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(PlanError, match=r"norm\.running_var"):
        load(vllm, tmp_path, Statistics())


class PaddedExperts(nn.Module):
    """Two experts of 6 rows, of which kernels want 8, as they say."""

    def __init__(self, unpadded: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, 8, 4))
        self.moe_config = SimpleNamespace(
            hidden_dim=4,
            hidden_dim_unpadded=4,
            intermediate_size_per_partition=8,
            intermediate_size_per_partition_unpadded=unpadded,
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, value in weights:
            self.w.data[int(name), : value.shape[0]].copy_(value)


def test_the_padding_of_experts_need_not_be_filled(vllm: FakeVllm, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"0": torch.ones(6, 4), "1": torch.ones(6, 4)})
    model = PaddedExperts(6)
    assert load(vllm, tmp_path, model).report.missing == ()
    assert model.state_dict()["w"].sum().item() == 48


@pytest.mark.parametrize("unpadded", [6, 8])
def test_an_expert_that_is_missing_is_no_padding(vllm: FakeVllm, tmp_path: Path, unpadded: int) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"0": torch.ones(6, 4)})
    with pytest.raises(PlanError, match="fills 24 of its 64"):
        load(vllm, tmp_path, PaddedExperts(unpadded))


class Doubling(nn.Module):
    """Computes one of its parameters, which no plan can do."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.empty(4))
        self.doubled = nn.Parameter(torch.empty(4))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, value in weights:
            getattr(self, name).data.copy_(value * 2 if name == "doubled" else value)


def test_what_is_no_copy_is_streamed_and_told(vllm: FakeVllm, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"plain": torch.ones(4), "doubled": torch.ones(4)})
    model = Doubling()
    report = load(vllm, tmp_path, model).report
    assert list(report.streamed) == ["doubled"]
    assert model.doubled.tolist() == [2.0] * 4
    assert "streamed through the model's own loader" in caplog.text


def test_streaming_everything_can_be_asked_for(vllm: FakeVllm, folder: Path) -> None:
    model = poisoned(NanoModel())
    report = load(vllm, folder, model, own_loader="stream").report
    assert len(report.streamed) == report.parameters
    for name, expected in filled_by_itself(folder).items():
        assert torch.equal(model.state_dict()[name], expected), name


def test_secondary_sources_of_vllm_are_read_under_their_prefixes(vllm: FakeVllm, tmp_path: Path) -> None:
    for name, tensors in (("a", {"plain": torch.ones(4)}), ("b", {"bled": torch.ones(4)})):
        (tmp_path / name).mkdir()
        write_safetensors(tmp_path / name / "model.safetensors", tensors)
    model = Doubling()
    theirs = SimpleNamespace(model_or_path=str(tmp_path / "b"), revision=None, subfolder=None, prefix="dou")
    model.secondary_weights = [theirs]  # type: ignore[assignment]
    load(vllm, tmp_path / "a", model)
    assert (model.plain.tolist(), model.doubled.tolist()) == ([1.0] * 4, [2.0] * 4)


def test_the_weights_may_lie_elsewhere_than_the_configuration(vllm: FakeVllm, folder: Path, tmp_path: Path) -> None:
    load(vllm, tmp_path / "only-a-configuration", weights=str(folder))


def test_a_draft_model_is_never_loaded_from_the_weights_of_the_served_one(
    vllm: FakeVllm, folder: Path, tmp_path: Path
) -> None:
    vllm.config = SimpleNamespace(model_config=object(), parallel_config=SimpleNamespace(data_parallel_size=1))
    with pytest.raises(LocateError):
        load(vllm, tmp_path / "draft", weights=str(folder))


def test_an_object_store_is_refused_in_words(vllm: FakeVllm, folder: Path) -> None:
    config = model_config(folder)
    config.model_weights = "s3://bucket/model"
    with pytest.raises(ConfigError, match="s3://bucket/model"):
        vllm.loader().load_weights(NanoModel(), config)


class Online(nn.Module):
    """A layer that has no memory until its own loader has made it."""

    def __init__(self, *, says: set[str]) -> None:
        super().__init__()
        self.says = says
        self.quant_method = SimpleNamespace(uses_meta_device=True)
        self.weight = nn.Parameter(torch.empty(4, device="meta"))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for _, value in weights:
            self.weight = nn.Parameter(value.clone())
        return self.says


def test_a_model_that_is_quantized_while_it_loads_is_streamed(vllm: FakeVllm, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"weight": torch.ones(4)})
    model = Online(says={"weight"})
    report = load(vllm, tmp_path, model).report
    assert list(report.streamed) == ["weight"]
    assert model.weight.tolist() == [1.0] * 4


def test_what_such_a_model_does_not_say_that_it_loaded_is_missing(vllm: FakeVllm, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"other": torch.ones(4)})
    with pytest.raises(PlanError, match="missing: weight") as caught:
        load(vllm, tmp_path, Online(says=set()))
    assert caught.value.touched


def reloaded(vllm: FakeVllm, folder: Path, model: nn.Module, at: Path) -> dict[str, torch.Tensor]:
    loader = load(vllm, folder, model)
    return dict(loader.get_all_weights(model_config(at), model))


def test_a_reload_offers_every_entry_and_reads_what_the_plan_took(vllm: FakeVllm, folder: Path) -> None:
    offered = reloaded(vllm, folder, poisoned(NanoModel(2, 1)), folder)
    stored = load_file(folder / "model.safetensors")
    assert offered.keys() == stored.keys()
    q = "layers.0.q_proj.weight"
    assert torch.equal(offered[q][16:], stored[q][16:])
    assert not offered[q][:16].any()


def test_a_model_that_is_loaded_again_has_the_new_values(vllm: FakeVllm, folder: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    new.mkdir()
    tensors = {name: value + 1 for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, new / "model.safetensors")
    model = poisoned(NanoModel(2, 1))
    model.load_weights(reloaded(vllm, folder, model, new).items())  # type: ignore[operator]
    for name, expected in filled_by_itself(new, 2, 1).items():
        assert torch.equal(model.state_dict()[name], expected), name


def test_a_checkpoint_that_lacks_what_the_plan_took_is_refused_before_a_reload_begins(
    vllm: FakeVllm, folder: Path
) -> None:
    model = poisoned(NanoModel())
    loader = load(vllm, folder, model)
    rewrite(folder, norm__weight=None)
    with pytest.raises(PlanError, match=r"missing: norm\.weight"):
        loader.get_all_weights(model_config(folder), model)


def test_a_model_that_was_filled_otherwise_gets_everything_in_a_reload(vllm: FakeVllm, folder: Path) -> None:
    offered = dict(vllm.loader().get_all_weights(model_config(folder), NanoModel(2, 1)))
    for name, value in load_file(folder / "model.safetensors").items():
        assert torch.equal(offered[name], value), name


def test_downloading_a_folder_that_is_here_does_nothing(vllm: FakeVllm, folder: Path) -> None:
    vllm.loader().download_model(model_config(folder))


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


@pytest.mark.parametrize("drafted", [False, True])
def test_ranks_of_the_last_stage_agree_on_a_draft_model_alone(vllm: FakeVllm, folder: Path, drafted: bool) -> None:
    from tensorferry.compat.vllm import engine

    served = model_config(folder)
    vllm.config = SimpleNamespace(model_config=served, parallel_config=SimpleNamespace(data_parallel_size=1))
    vllm.share(4, 3)
    vllm.groups["tp"] = SimpleNamespace(world_size=2, rank_in_group=1, cpu_group=None)
    asked = engine.agreement(model_config(folder) if drafted else served)
    assert repr(asked._ranks) == ("Ranks(size=2, rank=1)" if drafted else "Ranks(size=4, rank=3)")


def test_replicas_of_data_parallelism_do_not_wait_for_each_other(vllm: FakeVllm, folder: Path) -> None:
    from tensorferry.compat.vllm import engine

    served = model_config(folder)
    vllm.config = SimpleNamespace(model_config=served, parallel_config=SimpleNamespace(data_parallel_size=2))
    vllm.share(4, 3)
    vllm.groups["inner_dp_world"] = SimpleNamespace(world_size=2, rank_in_group=1, cpu_group=None)
    assert repr(engine.agreement(served)._ranks) == "Ranks(size=2, rank=1)"
