"""What is handed to loaders in place of a configuration is refused in words that say what is expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorferry.errors import ConfigError
from tensorferry.loaders import DefaultModelLoader, LoadConfig, ModelConfig, get_model_loader


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"load_format": "hf"}, r"load_config: a LoadConfig is expected, not dict: LoadConfig.from_dict\(...\)"),
        ("hf", "load_config: a LoadConfig is expected, not str"),
        (None, "not NoneType"),
        (ModelConfig("x"), "not ModelConfig"),
    ],
)
def test_a_loader_is_chosen_by_a_load_config(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        get_model_loader(config)


def test_a_loader_is_made_of_a_load_config() -> None:
    config: Any = {"load_format": "hf"}
    with pytest.raises(ConfigError, match="a LoadConfig is expected, not dict"):
        DefaultModelLoader(config)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("owner/model", r"model_config: a ModelConfig is expected, not str: ModelConfig\('owner/model'\)"),
        (Path("here"), r"ModelConfig\('here'\)"),
        ({"model": "x"}, r"not dict: ModelConfig.from_dict\(...\)"),
    ],
)
def test_a_model_is_said_by_a_model_config(model: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DefaultModelLoader().load_model(model)


@pytest.mark.parametrize(
    ("links_to", "expected"), [("store", ("store",)), (Path("store"), ("store",)), (["a", Path("b")], ("a", "b"))]
)
def test_folders_that_links_may_lead_into_are_one_or_several(links_to: Any, expected: tuple[str, ...]) -> None:
    assert LoadConfig(links_to=links_to).links_to == expected


@pytest.mark.parametrize("links_to", [3, [3], None, [""]])
def test_what_is_no_folder_is_refused(links_to: Any) -> None:
    with pytest.raises(ConfigError, match=r"links_to .*: a folder or a list of them is expected"):
        LoadConfig(links_to=links_to)
