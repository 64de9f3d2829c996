"""Stand-in values: seeded by name, in range, of every dtype, and the same wherever they are made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tensorferry.errors import ConfigError, FinalizeError
from tensorferry.loaders import DummyModelLoader, LoadConfig, ModelConfig, get_model_loader
from tensorferry.loaders.dummy_values import fill

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]
INTEGERS = [torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
CODES = [torch.int8, torch.uint8, torch.float4_e2m1fn_x2]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
ALL = [*FLOATS, *FLOAT8, torch.float8_e8m0fnu, *INTEGERS, *CODES, *COMPLEX, torch.bool]


def made(name: str, dtype: torch.dtype, shape: tuple[int, ...] = (16, 32), seed: int = 0) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    fill(name, tensor, seed)
    return tensor


def raw(tensor: torch.Tensor) -> list[int]:
    values: list[int] = tensor.contiguous().view(torch.uint8).flatten().tolist()
    return values


def load(model: nn.Module, **options: int) -> nn.Module:
    loader = get_model_loader(LoadConfig(load_format="dummy", options=options))
    return loader.load_model(ModelConfig("none"), build=lambda c: model)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_equal_shapes_differ_and_equal_names_do_not(dtype: torch.dtype) -> None:
    assert raw(made("a", dtype)) == raw(made("a", dtype))
    assert raw(made("a", dtype)) != raw(made("b", dtype))
    assert raw(made("a", dtype)) != raw(made("a", dtype, seed=1))


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8], ids=str)
def test_floats_are_small_and_of_both_signs(dtype: torch.dtype) -> None:
    values = made("a", dtype).float()
    bound = 1.0 if dtype.itemsize == 1 else 1.001e-3
    assert values.isfinite().all()
    assert values.abs().max() <= bound
    assert (values > bound / 2).any()
    assert (values < -bound / 2).any()


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_both_parts_of_complex_numbers_are_small(dtype: torch.dtype) -> None:
    largest = torch.view_as_real(made("a", dtype)).double().abs().flatten(0, -2).amax(0)
    assert (largest <= 1.001e-3).all()
    assert (largest > 0.9e-3).all()


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool], ids=str)
def test_integers_are_valid_as_codes_indices_and_flags(dtype: torch.dtype) -> None:
    assert set(made("a", dtype).to(torch.int64).flatten().tolist()) == {0, 1}


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_codes_are_any_bytes(dtype: torch.dtype) -> None:
    assert len(set(raw(made("a", dtype, (64, 64))))) == 256


def test_scales_are_moderate_powers_of_two() -> None:
    assert set(made("scale", torch.float8_e8m0fnu).float().flatten().tolist()) == {2**-8, 2**-7, 2**-6}
    assert set(raw(made("down_proj.weight_scale", torch.uint8))) == {119, 120, 121}


def test_half_precision_is_the_rounded_single_precision() -> None:
    assert torch.equal(made("a", torch.bfloat16), made("a", torch.float32).bfloat16())


def test_layout_and_size_of_chunks_do_not_matter() -> None:
    transposed = torch.empty(32, 16).t()
    fill("a", transposed, 0)
    assert torch.equal(transposed, made("a", torch.float32))
    large = made("a", torch.uint8, ((1 << 22) + 5,))
    assert raw(large[: 1 << 22]) == raw(made("a", torch.uint8, (1 << 22,)))


def test_a_declared_value_is_taken_and_empty_tensors_stay_empty() -> None:
    declared = torch.zeros(3)
    declared.dummy_value = 2.5  # type: ignore[attr-defined]
    fill("a", declared, 0)
    assert declared.tolist() == [2.5, 2.5, 2.5]
    fill("a", torch.empty(0, 3), 0)
    fill("a", torch.empty(3, 0).t(), 0)


class Tied(nn.Module):
    def __init__(self, extra: bool = False) -> None:
        super().__init__()
        if extra:
            self.first = nn.Linear(5, 5)
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.zeros(2), persistent=False)

    def derive_buffers(self, device: torch.device) -> None:
        self.table = torch.full((2,), 7.0, device=device)


def test_a_model_on_meta_is_filled_its_ties_are_kept_and_its_buffers_computed() -> None:
    with torch.device("meta"):
        model = Tied()
    loaded = load(model)
    assert loaded.get_parameter("head.weight") is loaded.get_parameter("embed.weight")
    assert loaded.get_buffer("table").tolist() == [7, 7]
    assert not any(t.is_meta for t in (*loaded.parameters(), *loaded.buffers()))
    assert not loaded.training


def test_a_model_with_stand_in_values_runs() -> None:
    out = load(Tied()).norm(torch.ones(2, 3))  # type: ignore[operator]
    assert out.isfinite().all()


def test_values_do_not_depend_on_what_else_is_in_the_model_or_where_it_was_built() -> None:
    with torch.device("meta"):
        on_meta = Tied(extra=True)
    one, other = load(Tied()), load(on_meta)
    assert torch.equal(one.get_parameter("embed.weight"), other.get_parameter("embed.weight"))
    assert not torch.equal(one.get_parameter("embed.weight"), load(Tied(), seed=1).get_parameter("embed.weight"))


@pytest.mark.gpu
def test_values_do_not_depend_on_the_device() -> None:
    loader = get_model_loader(LoadConfig(load_format="dummy", device="cuda"))
    there = loader.load_model(ModelConfig("none"), build=lambda c: Tied()).get_parameter("embed.weight")
    assert there.is_cuda
    assert torch.equal(there.cpu(), load(Tied()).get_parameter("embed.weight"))


def test_post_processing_runs_when_a_module_is_whole() -> None:
    class Processed(nn.Linear):
        seen: float | None = None

        def process_weights_after_loading(self) -> None:
            self.seen = self.weight.abs().max().item()

    loader = DummyModelLoader(LoadConfig(load_format="dummy"))
    model = loader.load_model(ModelConfig("none"), build=lambda c: Processed(3, 3))
    assert 0 < model.seen <= 1e-3  # type: ignore[operator]
    assert loader.report is not None
    assert loader.report.post_processed == ("",)
    assert json.loads(loader.report.to_json())["format"] == "dummy"


def test_a_buffer_that_nobody_computes_is_refused() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(2), persistent=False)

    with torch.device("meta"):
        model = Table()
    with pytest.raises(FinalizeError, match="table"):
        load(model)


def test_its_only_option_is_the_seed() -> None:
    with pytest.raises(ConfigError, match=r"load_format 'dummy' has no option 'sed'; did you mean 'seed'\?"):
        get_model_loader(LoadConfig(load_format="dummy", options={"sed": 1}))
    with pytest.raises(ConfigError, match="seed '1': a whole number is expected"):
        get_model_loader(LoadConfig(load_format="dummy", options={"seed": "1"}))


@pytest.mark.transformers
def test_a_folder_with_a_configuration_and_no_weights_is_enough(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    loader = get_model_loader(LoadConfig(load_format="dummy"))
    model = loader.load_model(ModelConfig(str(tmp_path), dtype="bfloat16"))
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    assert model(torch.tensor([[1, 2]])).logits.isfinite().all()


def test_the_report_does_not_tell_what_signs_an_address() -> None:
    loader = get_model_loader(LoadConfig(load_format="dummy"))
    report = loader.load_weights(nn.Linear(2, 3), ModelConfig("https://h/my models/m.safetensors?sig=SECRET"))
    assert report.source == "https://h/my models/m.safetensors"
    assert "SECRET" not in repr(report)
