"""Reported failures of ties and completeness, on plain modules: heads, buffers, prefixes, adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from tensorferry import LocateError, PlanError, load

EMBED, HEAD = ar(3, 2), ar(3, 2, start=50)


class Model(nn.Module):
    """An embedding and a head, tied or not, as a language model has them."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(3, 2)})
        self.lm_head = nn.Linear(2, 3, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight  # type: ignore[assignment]

    @property
    def embed(self) -> nn.Module:
        return self.model["embed_tokens"]


def _model(*, tied: bool, device: str) -> Model:
    with torch.device(device):
        return Model(tied=tied)


def _checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


both = pytest.mark.parametrize("device", ["cpu", "meta"])


@both
def test_keys_04_a_head_with_values_of_its_own_is_kept_with_a_warning(tmp_path: Path, device: str) -> None:
    _checkpoint(tmp_path, {"model.embed_tokens.weight": EMBED, "lm_head.weight": HEAD})
    model = _model(tied=True, device=device)
    report = load(model, tmp_path)
    assert model.lm_head.weight.tolist() == [[50, 51], [52, 53], [54, 55]]
    assert torch.equal(model.embed.weight, EMBED)  # type: ignore[arg-type]
    assert model.lm_head.weight.data_ptr() != model.embed.weight.data_ptr()  # type: ignore[operator]
    assert any("ties lm_head.weight to model.embed_tokens.weight" in w for w in report.warnings)
    assert report.ties == {}


@both
def test_keys_07_an_untied_model_without_a_head_in_the_file_is_refused(tmp_path: Path, device: str) -> None:
    _checkpoint(tmp_path, {"model.embed_tokens.weight": EMBED})
    model = _model(tied=False, device=device)
    with pytest.raises(PlanError, match=r"missing: lm_head\.weight") as caught:
        load(model, tmp_path)
    assert not caught.value.touched


@both
def test_keys_08_a_tied_head_is_counted_as_loaded_and_shares_its_memory(tmp_path: Path, device: str) -> None:
    _checkpoint(tmp_path, {"model.embed_tokens.weight": EMBED})
    model = _model(tied=True, device=device)
    report = load(model, tmp_path)
    assert model.lm_head.weight is model.embed.weight
    assert torch.equal(model.lm_head.weight, EMBED)
    assert report.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert report.missing == ()


@both
def test_keys_08_a_checkpoint_may_hold_the_tied_tensor_under_the_name_of_the_head(tmp_path: Path, device: str) -> None:
    _checkpoint(tmp_path, {"lm_head.weight": HEAD})
    model = _model(tied=True, device=device)
    load(model, tmp_path)
    assert torch.equal(model.lm_head.weight, HEAD)
    assert model.lm_head.weight is model.embed.weight


@both
def test_keys_09_a_redundant_equal_head_is_skipped_and_reported(tmp_path: Path, device: str) -> None:
    _checkpoint(tmp_path, {"model.embed_tokens.weight": EMBED, "lm_head.weight": EMBED.clone()})
    model = _model(tied=True, device=device)
    report = load(model, tmp_path)
    assert model.lm_head.weight is model.embed.weight
    assert report.dropped == {"lm_head.weight": "tied to model.embed_tokens.weight"}
    assert (report.warnings, report.bytes_read) == ((), 24)


class Rotary(nn.Module):
    """Computes its table when it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.01]), persistent=False)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(2, 2, bias=False)
        self.rotary_emb = Rotary()


@pytest.mark.parametrize("name", ["rotary_emb.inv_freq", "rope.freqs", "masked_bias", "position_ids"])
def test_keys_03_buffers_that_models_compute_are_reported_and_never_copied(tmp_path: Path, name: str) -> None:
    _checkpoint(tmp_path, {"0.q.weight": ar(2, 2), f"0.{name}": torch.tensor([9.0, 9.0])})
    attention = Attention()
    report = load(nn.Sequential(attention), tmp_path)
    assert attention.rotary_emb.inv_freq.tolist() == [1, torch.tensor(0.01).item()]  # type: ignore[operator]
    assert report.dropped == {f"0.{name}": "the model computes it"}
    assert report.unexpected == ()


@both
def test_pkl_05_a_prefix_of_a_parallel_wrapper_is_stripped_and_told(tmp_path: Path, device: str) -> None:
    torch.save({"module.lin.weight": ar(2, 2), "module.lin.bias": ar(2)}, tmp_path / "pytorch_model.bin")
    with torch.device(device):
        model = nn.ModuleDict({"lin": nn.Linear(2, 2)})
    report = load(model, tmp_path)
    assert torch.equal(model["lin"].weight, ar(2, 2))  # type: ignore[arg-type]
    assert torch.equal(model["lin"].bias, ar(2))  # type: ignore[arg-type]
    assert any("the prefix module. " in w for w in report.warnings)


def test_pkl_05_a_module_that_is_called_module_is_left_alone(tmp_path: Path) -> None:
    torch.save({"module.lin.weight": ar(2, 2), "module.lin.bias": ar(2)}, tmp_path / "pytorch_model.bin")
    model = nn.ModuleDict({"module": nn.ModuleDict({"lin": nn.Linear(2, 2)})})
    report = load(model, tmp_path)
    assert torch.equal(model.get_parameter("module.lin.weight"), ar(2, 2))
    assert report.warnings == ()


def test_pkl_05_a_prefix_on_some_names_only_stays(tmp_path: Path) -> None:
    torch.save({"module.lin.weight": ar(2, 2), "lin.bias": ar(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(PlanError, match=r"missing: lin\.weight.*did you mean module\.lin\.weight\?"):
        load(nn.ModuleDict({"lin": nn.Linear(2, 2)}), tmp_path)


def test_pkl_06_a_state_under_a_key_with_traces_of_the_compiler_is_loaded(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "state_dict": {"module._orig_mod.lin.weight": ar(2, 2)}}, tmp_path / "m.pt")
    model = nn.ModuleDict({"lin": nn.Linear(2, 2, bias=False)})
    report = load(model, tmp_path / "m.pt")
    assert model.get_parameter("lin.weight").tolist() == [[0, 1], [2, 3]]
    assert any("the prefix module._orig_mod. " in w for w in report.warnings)
    assert any("found under 'state_dict'" in w for w in report.warnings)


def test_disc_10_an_adapter_is_not_loaded_as_a_model(tmp_path: Path) -> None:
    tensors = {"base_model.model.lm_head.weight": ar(2, 2)}
    tensors |= {f"base_model.model.q.lora_{x}.weight": ar(2, 2) for x in "AB"}
    write_safetensors(tmp_path / "adapter_model.safetensors", tensors)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(LocateError, match=r"This is an adapter \(adapter_model\.safetensors\), not a model"):
        load(nn.Linear(2, 2), tmp_path)
