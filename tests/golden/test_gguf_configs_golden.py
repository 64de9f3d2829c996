"""Configurations of tiny models, out of what llama.cpp's converter wrote of them, beside those that they came from.

The files of ``gguf/`` were written by ``benchmarks/gguf_roundtrip.py --headers``: metadata, shapes, the values of small
tensors, and the configuration of the model that was converted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from helpers.core_values import catalogue_of
from tensorferry.compat.gguf import infer_config
from tensorferry.compat.gguf.architectures import ARCHITECTURES
from tensorferry.compat.translation import InferredConfig
from tensorferry.formats.gguf_metadata import GgufMetadata, Value, ValueType

HEADERS = {path.stem: path for path in sorted((Path(__file__).parent / "gguf").glob("*.json"))}


@cache
def header(name: str) -> Any:
    return json.loads(HEADERS[name].read_text())


@cache
def inferred(name: str) -> InferredConfig:
    found = header(name)
    metadata = {
        key: Value(ValueType[kind], value, None if element is None else ValueType[element])
        for key, (kind, element, value) in found["metadata"].items()
    }
    shapes = {tensor: tuple(shape) for tensor, shape in found["tensors"].items()}
    return infer_config(GgufMetadata(metadata, what=name), catalogue_of(shapes), found["values"])


def alike(one: Any, other: Any) -> bool:
    """Whether two values are the same but for the rounding of float32."""
    if isinstance(one, float | int) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-6)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def within(one: Any, other: Any) -> bool:
    """Whether two values are alike; of a mapping, what `other` has beside is what transformers adds by itself."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(key in other and within(value, other[key]) for key, value in one.items())
    return alike(one, other)


def test_every_architecture_is_among_them() -> None:
    assert {header(name)["metadata"]["general.architecture"][2] for name in HEADERS} == set(ARCHITECTURES)
    kinds = {inferred(name).config["model_type"] for name in HEADERS}
    assert {"llama", "mistral", "mixtral", "deepseek_v2", "deepseek_v3"} <= kinds


@pytest.mark.parametrize("name", HEADERS)
def test_a_field_that_is_not_assumed_is_that_of_the_original(name: str) -> None:
    found, original = inferred(name), header(name)["config"]
    known = {key: value for key, value in found.config.items() if found.origin[key] != "assumed" and key in original}
    assert {key: (value, original[key]) for key, value in known.items() if not within(value, original[key])} == {}
    assert {"num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "rms_norm_eps"} <= known.keys()


@pytest.mark.parametrize("name", HEADERS)
def test_every_field_has_an_origin_and_those_that_no_file_can_say_are_assumed(name: str) -> None:
    found = inferred(name)
    assert found.config.keys() == found.origin.keys()
    assert "assumed" in {found.origin.get("hidden_act"), found.origin.get("hidden_activation")}


@pytest.mark.transformers
@pytest.mark.parametrize("name", HEADERS)
def test_what_transformers_makes_of_it_is_the_configuration_of_the_original(name: str) -> None:
    from tensorferry.compat.transformers.gguf_files import config_from_file

    original, made = header(name)["config"], json.loads(config_from_file(inferred(name)).to_json_string(use_diff=False))
    assert {key: (made.get(key), v) for key, v in original.items() if not alike(made.get(key), v)} == {}


def test_the_base_of_the_rotary_embedding_and_its_scaling_are_those_of_the_original() -> None:
    """Llama 3's divisors become its parameters again, yarn and longrope are read."""
    kinds = {name: inferred(name).config["rope_parameters"].get("rope_type") for name in HEADERS}
    assert (kinds["llama"], kinds["llama-yarn"], kinds["phi3-long"]) == ("llama3", "yarn", "longrope")


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3", {"head_dim": 32}),
        ("qwen3moe", {"moe_intermediate_size": 32, "num_experts": 4, "head_dim": 32}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("gpt-oss", {"num_local_experts": 4, "sliding_window": 128}),
        ("deepseek3", {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}),
    ],
)
def test_sizes_that_other_readers_take_from_defaults_are_read(name: str, sizes: dict[str, int]) -> None:
    config = inferred(name).config
    assert {key: config[key] for key in sizes} == sizes


def test_mistrals_window_is_assumed_absent_rather_than_4096() -> None:
    found = inferred("mistral")
    assert (found.config["sliding_window"], found.origin["sliding_window"]) == (None, "assumed")
