"""Options of `load_model`, and models that it fetches from the Hub by their name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("huggingface_hub")

import tensorferry
from helpers.hubserver import HubServer, hub_for_tests
from helpers.tiny_transformers import saved
from tensorferry.errors import ConfigError, FormatError, LocateError

pytestmark = pytest.mark.transformers

NAME = "owner/llama"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_for_tests(monkeypatch, tmp_path / "home") as server:
        saved("Llama", tmp_path / "repo")
        (tmp_path / "repo" / "pytorch_model.bin").write_bytes(b"not fetched")
        server.add(NAME, tmp_path / "repo")
        yield server


def test_a_name_on_the_hub_is_fetched_what_is_needed_of_it_only(hub: HubServer, tmp_path: Path) -> None:
    model = tensorferry.load_model(NAME)
    assert (model.config.name_or_path, model.name_or_path) == (NAME, NAME)
    again = tensorferry.load_model(tmp_path / "repo").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())
    assert "pytorch_model.bin" not in hub.resolved()
    assert {"config.json", "model.safetensors"} <= set(hub.resolved())


def test_a_revision_is_one_of_the_hub(hub: HubServer, tmp_path: Path) -> None:
    tensorferry.load_model(NAME, revision="main")
    with pytest.raises(LocateError, match="has no revision 'v9'"):
        tensorferry.load_model(NAME, revision="v9")
    with pytest.raises(ConfigError, match=r"revision 'main': of a name on the Hub, and .* is a path here"):
        tensorferry.load_model(tmp_path / "repo", revision="main")


def test_a_folder_comes_before_a_name_on_the_hub(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("Llama", tmp_path / "owner" / "llama")
    monkeypatch.chdir(tmp_path)
    tensorferry.load_model(NAME)
    assert hub.log == []


@pytest.mark.parametrize("path", ["./owner/none", "/owner/none", "a/b/none", "none", Path("owner/none")])
def test_what_can_be_no_name_is_never_asked_for(hub: HubServer, path: Any) -> None:
    with pytest.raises(LocateError, match="there is no such file or folder"):
        tensorferry.load_model(path)
    assert hub.log == []


def test_opening_says_who_takes_names_on_the_hub() -> None:
    with pytest.raises(LocateError, match="names on the Hub are for load_model and get_model_loader, and convert"):
        tensorferry.open_checkpoint(NAME)


def test_a_misspelt_option_names_load_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^load_model\(\) has no option 'auto_clas'; did you mean 'auto_class'"):
        tensorferry.load_model(tmp_path, auto_clas="AutoModel")  # type: ignore[call-overload]


@pytest.mark.parametrize("device", ["gpu", "meta", "cpu:9"])
def test_a_device_is_refused_before_anything_is_looked_for(device: str) -> None:
    with pytest.raises(ConfigError, match=f"device '{device}'"):
        tensorferry.load_model("there-is-no-such-folder", device=device)


def test_a_class_that_nobody_knows_is_the_fault_of_the_checkpoint(tmp_path: Path) -> None:
    saved("Llama", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "LlamaForTelepathy"))
    with pytest.raises(FormatError, match="LlamaForTelepathy"):
        tensorferry.load_model(tmp_path)
