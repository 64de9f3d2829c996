"""What of a vLLM model no checkpoint need hold, and what is missing in spite of that."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from helpers.checkpoints import write_safetensors
from helpers.fake_vllm import FakeVllm, KvCacheMethod
from helpers.vllm_loading import load
from tensorferry import PlanError


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


def test_what_is_streamed_may_leave_the_same(vllm: FakeVllm, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"weight": torch.ones(4)})
    report = load(vllm, tmp_path, Attention(KvCacheMethod()), own_loader="stream").report
    assert (report.computed, report.missing) == (("k_scale", "_k_scale"), ())
    with pytest.raises(PlanError, match="missing: k_scale"):
        load(vllm, tmp_path, Attention(object()), own_loader="stream")


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
    """Two experts of 6 rows, of which kernels want 8, as they say. doubled: whether their loader computes."""

    def __init__(self, unpadded: int, *, doubled: bool = False) -> None:
        super().__init__()
        self.doubled = doubled
        self.w = nn.Parameter(torch.zeros(2, 8, 4))
        self.moe_config = SimpleNamespace(
            hidden_dim=4,
            hidden_dim_unpadded=4,
            intermediate_size_per_partition=8,
            intermediate_size_per_partition_unpadded=unpadded,
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, value in weights:
            self.w.data[int(name), : value.shape[0]].copy_(value * 2 if self.doubled else value)


@pytest.mark.parametrize("own_loader", ["trace", "stream"])
@pytest.mark.parametrize("doubled", [False, True])
def test_the_padding_of_experts_need_not_be_filled(
    vllm: FakeVllm, tmp_path: Path, doubled: bool, own_loader: str
) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"0": torch.ones(6, 4), "1": torch.ones(6, 4)})
    model = PaddedExperts(6, doubled=doubled)
    report = load(vllm, tmp_path, model, own_loader=own_loader).report
    assert (report.computed, report.missing) == ((), ())
    assert model.state_dict()["w"].sum().item() == (96 if doubled else 48)


@pytest.mark.parametrize("unpadded", [6, 8])
def test_an_expert_that_is_missing_is_no_padding(vllm: FakeVllm, tmp_path: Path, unpadded: int) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"0": torch.ones(6, 4)})
    with pytest.raises(PlanError, match="fills 24 of its 64"):
        load(vllm, tmp_path, PaddedExperts(unpadded))


@pytest.mark.parametrize("rows", [4, 5, 7])
def test_streamed_experts_that_leave_more_or_less_than_their_padding_are_refused(
    vllm: FakeVllm, tmp_path: Path, rows: int
) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"0": torch.ones(6, 4), "1": torch.ones(rows, 4)})
    with pytest.raises(PlanError, match=f"wrote {24 + 4 * rows} of its 64") as caught:
        load(vllm, tmp_path, PaddedExperts(6), own_loader="stream")
    assert caught.value.touched


class BiasedExperts(nn.Module):
    """Has a bias, as some quantized layers do for any architecture. has_bias: what the architecture says."""

    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        self.w2_weight, self.w2_bias = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        self.moe_config = SimpleNamespace(has_bias=has_bias)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, value in weights:
            parameters[name].data.copy_(value)


@pytest.mark.parametrize("own_loader", ["trace", "stream"])
def test_a_bias_need_not_be_there_where_experts_have_none(vllm: FakeVllm, tmp_path: Path, own_loader: str) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"w2_weight": torch.ones(2)})
    report = load(vllm, tmp_path, BiasedExperts(False), own_loader=own_loader).report
    assert (report.computed, report.missing) == (("w2_bias",), ())
    with pytest.raises(PlanError, match="missing: w2_bias"):
        load(vllm, tmp_path, BiasedExperts(True), own_loader=own_loader)


def test_a_bias_that_is_there_is_loaded(vllm: FakeVllm, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"w2_weight": torch.ones(2), "w2_bias": torch.ones(2)})
    model = BiasedExperts(False)
    assert load(vllm, tmp_path, model).report.computed == ()
    assert model.w2_bias.tolist() == [1.0, 1.0]


def test_what_strictness_lets_be_missing_is_not_told_where_the_loader_fails(vllm: FakeVllm, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"w2_weigth": torch.ones(2), "w2_bias": torch.ones(2)})
    with pytest.raises(PlanError) as caught:
        load(vllm, tmp_path, BiasedExperts(True), strictness={"may_miss": ["w2_weight"]})
    assert [problem.subject for problem in caught.value.problems] == ["w2_weigth"]
