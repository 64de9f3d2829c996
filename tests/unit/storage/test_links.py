"""Links that lead out of a checkpoint's folder are refused, but where the caller says that they may lead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tensorferry
from helpers.checkpoints import ar, write_safetensors
from tensorferry.errors import ConfigError, LocateError, UnsafeFile
from tensorferry.loaders import DefaultModelLoader, LoadConfig, ModelConfig


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A folder of blobs, as a store has them that several checkpoints share."""
    write_safetensors(tmp_path / "store" / "7f" / "blob", {"weight": ar(1, 2)})
    write_safetensors(tmp_path / "elsewhere" / "blob", {"weight": ar(1, 2)})
    return tmp_path / "store"


@pytest.fixture
def linked(store: Path, tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to(store / "7f" / "blob")
    return tmp_path / "model"


def test_a_link_that_leads_out_is_refused_and_the_error_names_the_option(linked: Path) -> None:
    with pytest.raises(UnsafeFile, match=r"leads out of its folder, to .*store/7f/blob; .*with links_to"):
        tensorferry.open_checkpoint(linked)


@pytest.mark.parametrize("how", [lambda store: store, lambda store: [store], lambda store: (str(store / "7f"),)])
def test_a_link_may_lead_into_a_folder_that_is_named(linked: Path, store: Path, how: Any) -> None:
    with tensorferry.open_checkpoint(linked, links_to=how(store)) as checkpoint:
        assert checkpoint.read("weight").tolist() == [[0, 1]]


def test_a_link_that_leads_elsewhere_is_refused_still(linked: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsafeFile, match="leads out of its folder"):
        tensorferry.open_checkpoint(linked, links_to=tmp_path / "elsewhere")


def test_a_folder_of_which_the_name_only_begins_alike_is_another(linked: Path, tmp_path: Path) -> None:
    (tmp_path / "stor").mkdir()
    with pytest.raises(UnsafeFile, match="leads out of its folder"):
        tensorferry.open_checkpoint(linked, links_to=tmp_path / "stor")


def test_the_folder_that_links_may_lead_into_may_be_a_link_itself(linked: Path, store: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(store)
    tensorferry.open_checkpoint(linked, links_to=tmp_path / "alias").close()


def test_names_in_an_index_lead_out_no_more_than_before(linked: Path, store: Path) -> None:
    (linked / "model.safetensors").unlink()
    (linked / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "../store/7f/blob"}}')
    with pytest.raises(UnsafeFile):
        tensorferry.open_checkpoint(linked, links_to=store)


def test_a_subfolder_may_be_a_link_into_it(store: Path, tmp_path: Path) -> None:
    write_safetensors(store / "whole" / "model.safetensors", {"weight": ar(1, 2)})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "part").symlink_to(store / "whole")
    with pytest.raises(UnsafeFile, match="leads out of its folder"):
        tensorferry.open_checkpoint(tmp_path / "model", subfolder="part")
    tensorferry.open_checkpoint(tmp_path / "model", subfolder="part", links_to=store).close()


@pytest.mark.parametrize(("links_to", "error"), [("nowhere", LocateError), (3, ConfigError), ([""], ConfigError)])
def test_what_is_no_folder_is_refused(linked: Path, links_to: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"nowhere|a folder or a list of them"):
        tensorferry.open_checkpoint(linked, links_to=links_to)


def test_load_verify_and_model_loaders_take_it_too(linked: Path, store: Path) -> None:
    from torch import nn

    model = nn.Linear(2, 1, bias=False)
    assert tensorferry.load(model, linked, links_to=[store]).bytes_needed == 8
    assert tensorferry.verify(linked, links_to=[store]).tensors == 1
    loader = DefaultModelLoader(LoadConfig(links_to=str(store)))
    loader.load_model(ModelConfig(str(linked)), build=lambda config: nn.Linear(2, 1, bias=False))
