"""A load_format names a loader: one that comes with tensorferry, one that was registered, or a plug-in's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from tensorferry.errors import ConfigError
from tensorferry.loaders import (
    BaseModelLoader,
    DefaultModelLoader,
    DummyModelLoader,
    LoadConfig,
    ModelConfig,
    get_model_loader,
    known_formats,
    register_model_loader,
    registry,
)
from tensorferry.report import Report


class Mine(BaseModelLoader):
    def download_model(self, model_config: ModelConfig) -> None: ...

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> Report:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _own_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages; a package there gives loaders of its module `plugin_of_tests`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "plugin_of_tests.py").write_text(
        "from tensorferry.loaders import BaseModelLoader, register_model_loader\n"
        "@register_model_loader('both')\n"
        "class Loader(BaseModelLoader):\n"
        "    def download_model(self, model_config): ...\n"
        "    def load_weights(self, model, model_config): ...\n"
        "class NoLoader: ...\n"
    )
    yield tmp_path
    sys.modules.pop("plugin_of_tests", None)


def install(site: Path, package: str, name: str, what: str = "plugin_of_tests:Loader") -> None:
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tensorferry.model_loaders]\n{name} = {what}\n")


@pytest.mark.parametrize("name", ["auto", "hf", "safetensors", "mistral", "pt", "HF"])
def test_formats_of_files_are_the_default_loaders(name: str) -> None:
    assert type(get_model_loader(LoadConfig(load_format=name))) is DefaultModelLoader


def test_dummy_is_the_loader_that_reads_nothing() -> None:
    assert type(get_model_loader(LoadConfig(load_format="dummy"))) is DummyModelLoader


def test_an_unknown_format_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'safetensor' is not known; did you mean 'safetensors'\? \(there are auto"):
        get_model_loader(LoadConfig(load_format="safetensor"))


def test_a_registered_class_is_found_by_its_name_in_any_case() -> None:
    register_model_loader("Mine")(Mine)
    config = LoadConfig(load_format="mine")
    assert type(get_model_loader(config)) is Mine
    assert get_model_loader(config).load_config is config
    assert "mine" in known_formats()


def test_a_name_is_given_once() -> None:
    register_model_loader("mine")(Mine)
    register_model_loader("mine")(Mine)  # again, as when a module is imported twice
    with pytest.raises(ConfigError, match="'mine' is already that of Mine"):
        register_model_loader("mine")(DefaultModelLoader)
    with pytest.raises(ConfigError, match="'pt' is already that of tensorferry"):
        register_model_loader("pt")(Mine)


def test_a_class_that_is_no_loader_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'Path' is no subclass of tensorferry\.loaders\.BaseModelLoader"):
        register_model_loader("mine")(Path)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="is no subclass"):
        register_model_loader("mine")(lambda config: None)  # type: ignore[type-var]


def test_an_installed_plug_in_is_found(site: Path) -> None:
    install(site, "ferry-plugin", "Fancy")
    assert "fancy" in known_formats()
    loader = get_model_loader(LoadConfig(load_format="fancy"))
    assert type(loader).__module__ == "plugin_of_tests"


def test_a_plug_in_may_register_itself_as_well(site: Path) -> None:
    install(site, "ferry-plugin", "both")
    for _ in range(2):
        assert type(get_model_loader(LoadConfig(load_format="both"))).__name__ == "Loader"


def test_two_who_offer_one_name_are_refused_and_both_are_named(site: Path) -> None:
    install(site, "ferry-plugin", "pt")
    with pytest.raises(ConfigError, match=r"'pt' is offered by tensorferry and by the plug-in .* of ferry-plugin"):
        get_model_loader(LoadConfig(load_format="pt"))


def test_a_plug_in_that_is_no_loader_is_refused(site: Path) -> None:
    install(site, "ferry-plugin", "odd", "plugin_of_tests:NoLoader")
    with pytest.raises(ConfigError, match="the plug-in plugin_of_tests:NoLoader of ferry-plugin is no subclass"):
        get_model_loader(LoadConfig(load_format="odd"))


def test_a_plug_in_is_not_imported_before_it_is_asked_for(site: Path) -> None:
    install(site, "ferry-plugin", "fancy")
    known_formats()
    get_model_loader(LoadConfig())
    assert "plugin_of_tests" not in sys.modules


def test_options_that_a_loader_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"load_format 'auto' has no option 'buffer' \(it takes nothing\)"):
        get_model_loader(LoadConfig(options={"buffer": 1}))
