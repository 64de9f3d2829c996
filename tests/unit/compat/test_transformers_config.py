"""What config.json may ask for: the class and dtype it says, and nothing that runs code or cannot be filled."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tensorferry
from helpers.tiny_transformers import saved, tiny

pytestmark = pytest.mark.transformers


def edited(folder: Path, **changes: Any) -> Path:
    """Write a tiny Llama and change its config.json; None takes a key out."""
    path = saved("Llama", folder) / "config.json"
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))
    return folder


def test_a_folder_without_a_config_is_told_what_is_missing(tmp_path: Path) -> None:
    (saved("Llama", tmp_path) / "config.json").unlink()
    with pytest.raises(tensorferry.LocateError, match=r"config\.json is missing"):
        tensorferry.load_model(tmp_path)


def test_a_config_object_stands_in_for_the_file(tmp_path: Path) -> None:
    (saved("Llama", tmp_path) / "config.json").unlink()
    model = tensorferry.load_model(tmp_path, config=tiny("Llama").config, auto_class="LlamaForCausalLM")
    assert type(model).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("text", ["[]", "{", "\udcff", "nonsense"])
def test_a_config_that_is_no_json_object_is_corrupt(text: str, tmp_path: Path) -> None:
    (saved("Llama", tmp_path) / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(tensorferry.CorruptFile, match=r"config\.json"):
        tensorferry.load_model(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("num_hidden_layers", 10**9), ("n_layer", 10**6), ("num_experts", 10**8), ("num_labels", 10**9)]
)
def test_counts_that_no_such_checkpoint_fills_are_refused_with_numbers(key: str, value: int, tmp_path: Path) -> None:
    edited(tmp_path, **{key: value})
    with pytest.raises(tensorferry.ConfigError, match=rf"{key} = {value:,}"):
        tensorferry.load_model(tmp_path)


def test_counts_in_a_part_of_the_configuration_are_looked_at_too(tmp_path: Path) -> None:
    edited(tmp_path, text_config={"num_hidden_layers": 10**9})
    with pytest.raises(tensorferry.ConfigError, match="num_hidden_layers"):
        tensorferry.load_model(tmp_path)


def test_sizes_that_do_not_fit_the_weights_take_no_memory_and_are_problems(tmp_path: Path) -> None:
    edited(tmp_path, vocab_size=10**12)
    with pytest.raises(tensorferry.PlanError, match="1000000000000"):
        tensorferry.load_model(tmp_path)


def test_quantized_weights_are_refused_with_the_method(tmp_path: Path) -> None:
    edited(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(tensorferry.ConfigError, match="'awq'"):
        tensorferry.load_model(tmp_path)


def test_code_of_a_checkpoint_is_not_run_where_transformers_has_the_class(tmp_path: Path) -> None:
    edited(tmp_path, auto_map={"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"})
    (tmp_path / "evil.py").write_text("raise SystemExit('this ran')")
    assert type(tensorferry.load_model(tmp_path)).__module__.startswith("transformers.")


@pytest.mark.parametrize("changes", [{"model_type": "evil"}, {"architectures": ["EvilModel"]}])
def test_code_of_a_checkpoint_is_refused_where_it_would_be_needed(changes: dict[str, Any], tmp_path: Path) -> None:
    edited(tmp_path, auto_map={"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}, **changes)
    (tmp_path / "evil.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(tensorferry.UnsafeFile, match=r"evil\.Model.*trust_remote_code"):
        tensorferry.load_model(tmp_path)


def test_a_class_that_transformers_lacks_is_named(tmp_path: Path) -> None:
    edited(tmp_path, architectures=["LlamaForTelepathy"])
    with pytest.raises(tensorferry.ConfigError, match="LlamaForTelepathy"):
        tensorferry.load_model(tmp_path)


def test_a_config_without_architectures_asks_for_auto_class(tmp_path: Path) -> None:
    edited(tmp_path, architectures=None)
    with pytest.raises(tensorferry.ConfigError, match="names no architectures: give auto_class"):
        tensorferry.load_model(tmp_path)
    assert type(tensorferry.load_model(tmp_path, auto_class="AutoModelForCausalLM")).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("asked", ["int8", "float99", 7, torch.int32])
def test_a_dtype_that_no_model_is_built_in_is_refused(asked: Any, tmp_path: Path) -> None:
    with pytest.raises(tensorferry.ConfigError, match=r"float32|a torch dtype"):
        tensorferry.load_model(saved("Llama", tmp_path), dtype=asked)


def test_values_that_transformers_refuses_are_told_in_its_words(tmp_path: Path) -> None:
    edited(tmp_path, hidden_act="telepathy")
    with pytest.raises(tensorferry.ConfigError, match="telepathy"):
        tensorferry.load_model(tmp_path)


def test_the_class_says_which_configuration_where_the_model_type_is_of_an_inner_kind(tmp_path: Path) -> None:
    edited(tmp_path, model_type="an_inner_kind")
    model = tensorferry.load_model(tmp_path)
    assert (type(model).__name__, type(model.config).__name__) == ("LlamaForCausalLM", "LlamaConfig")


CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel

class TinyConfig(PretrainedConfig):
    model_type = "tiny_of_our_own"

class TinyModel(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.linear = torch.nn.Linear(2, 2)
        self.post_init()
"""


def test_code_of_a_checkpoint_runs_where_it_is_trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", sys.path.copy())
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "code.py").write_text(CODE)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "tiny_of_our_own",
                "architectures": ["TinyModel"],
                "auto_map": {"AutoConfig": "code.TinyConfig", "AutoModel": "code.TinyModel"},
            }
        )
    )
    save_file({"linear.weight": torch.eye(2), "linear.bias": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(tensorferry.UnsafeFile):
        tensorferry.load_model(folder)
    model = tensorferry.load_model(folder, trust_remote_code=True)
    assert type(model).__name__ == "TinyModel"
    assert torch.equal(model.get_parameter("linear.weight"), torch.eye(2))


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_implementation": "kernels-community/flash-attn2"},
        {"_attn_implementation": "someone/kernel:forward"},
        {"attn_implementation": {"": "paged|someone/kernel"}},
        {"experts_implementation": "someone/kernel"},
        {"attribute_map": {"harmless": "_attn_implementation"}, "harmless": "someone/kernel"},
    ],
    ids=str,
)
def test_code_that_would_be_fetched_for_attention_or_experts_is_refused(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(tensorferry.UnsafeFile, match=r"asks to fetch and run the code '.*kern"):
        tensorferry.load_model(edited(tmp_path, **changes))


def test_ways_of_computing_that_transformers_brings_are_as_configured(tmp_path: Path) -> None:
    model = tensorferry.load_model(edited(tmp_path, attn_implementation="eager"))
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("value", [3, ["llama"], {}, True])
def test_a_model_type_that_is_no_text_is_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(tensorferry.TensorferryError):
        tensorferry.load_model(edited(tmp_path, model_type=value, architectures=None))


def test_a_config_that_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved("Llama", tmp_path)

    def refused(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(tensorferry.AccessDenied, match=r"config\.json: Permission denied"):
        tensorferry.load_model(folder)
