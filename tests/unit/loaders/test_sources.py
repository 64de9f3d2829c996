"""Weights from several places become one checkpoint, and only the files and tensors that are wanted are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from tensorferry.errors import ConfigError, FormatError, LocateError, PlanError
from tensorferry.loaders import DefaultModelLoader, LoadConfig, ModelConfig

Source = DefaultModelLoader.Source


class TwoTowers(nn.Module):
    """A model whose second tower comes from elsewhere."""

    def __init__(self, secondary: Path | None = None, prefix: str = "vision.") -> None:
        super().__init__()
        self.text = nn.Linear(3, 2, bias=False)
        self.vision = nn.Linear(2, 2, bias=False)
        self.secondary_weights = [Source(secondary, prefix=prefix)] if secondary is not None else []


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    write_safetensors(tmp_path / "main" / "model.safetensors", {"text.weight": ar(2, 3)})
    write_safetensors(tmp_path / "tower" / "model.safetensors", {"weight": ar(2, 2, start=50)})
    return tmp_path / "main", tmp_path / "tower"


def test_a_secondary_source_comes_under_its_prefix(places: tuple[Path, Path]) -> None:
    main, tower = places
    loader = DefaultModelLoader()
    model = loader.load_model(ModelConfig(str(main)), build=lambda c: TwoTowers(tower))
    assert model.get_parameter("text.weight").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert model.get_parameter("vision.weight").tolist() == [[50, 51], [52, 53]]
    assert loader.report is not None
    assert loader.report.files == ("primary/model.safetensors", "secondary-1/model.safetensors")
    assert loader.report.source == f"{main} + {tower}"
    assert "primary: " in loader.report.selection
    assert "secondary-1: " in loader.report.selection


def test_all_sources_come_in_one_stream_the_primary_one_first(places: tuple[Path, Path]) -> None:
    stream = DefaultModelLoader().get_all_weights(ModelConfig(str(places[0])), TwoTowers(places[1], "v."))
    assert [(name, t.flatten()[0].item()) for name, t in stream] == [("text.weight", 0), ("v.weight", 50)]


def test_a_models_own_loader_gets_that_stream(places: tuple[Path, Path]) -> None:
    class Own(TwoTowers):
        def load_weights(self, weights: Any) -> set[str]:
            names = dict(self.named_parameters())
            return {name for name, tensor in weights if names[name].data.copy_(tensor) is not None}

    for how in ("trace", "stream"):
        loader = DefaultModelLoader(LoadConfig.from_dict({"own_loader": how}))
        model = loader.load_model(ModelConfig(str(places[0])), build=lambda c: Own(places[1]))
        assert model.get_parameter("vision.weight").tolist() == [[50, 51], [52, 53]]


def test_one_name_from_two_sources_is_refused_with_both_files(places: tuple[Path, Path]) -> None:
    model = TwoTowers(places[0], prefix="")
    with pytest.raises(FormatError, match=r"'text.weight', in primary/model.* and secondary-1/model.*give one of them"):
        DefaultModelLoader().load_weights(model, ModelConfig(str(places[0])))


def test_what_is_no_source_is_refused(places: tuple[Path, Path]) -> None:
    model = TwoTowers()
    model.secondary_weights = ["owner/tower"]  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="secondary_weights of TwoTowers holds str, not a Source"):
        DefaultModelLoader().load_weights(model, ModelConfig(str(places[0])))
    with pytest.raises(ConfigError, match="a list of patterns is expected"):
        Source("m", allow_patterns_overrides="*.bin")


def test_an_absent_source_says_what_is_there_instead(places: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "llama.onnx").write_bytes(b"\x08")
    with pytest.raises(LocateError, match=r"llama\.onnx"):
        DefaultModelLoader().load_weights(TwoTowers(tmp_path / "empty"), ModelConfig(str(places[0])))


def test_a_place_that_is_not_here_and_no_name_on_the_hub_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocateError, match="is neither a folder here nor a name on the Hub"):
        DefaultModelLoader().load_weights(TwoTowers(), ModelConfig(str(tmp_path / "nowhere")))


def test_a_model_may_name_the_files_itself(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(1, 2)})
    write_safetensors(tmp_path / "ema.safetensors", {"weight": ar(1, 2, start=7)})
    model = nn.Linear(2, 1, bias=False)
    model.allow_patterns_overrides = ["ema*.safetensors"]  # type: ignore[assignment]
    DefaultModelLoader().load_weights(model, ModelConfig(str(tmp_path)))
    assert model.weight.tolist() == [[7, 8]]


def test_torch_files_stand_in_unless_the_model_forbids_it(tmp_path: Path) -> None:
    torch.save({"weight": ar(1, 2)}, tmp_path / "pytorch_model.bin")
    model = nn.Linear(2, 1, bias=False)
    DefaultModelLoader().load_weights(model, ModelConfig(str(tmp_path)))
    assert model.weight.tolist() == [[0, 1]]
    model.fall_back_to_pt_during_load = False  # type: ignore[assignment]
    with pytest.raises(LocateError, match=r"pytorch_model\.bin"):
        DefaultModelLoader().load_weights(model, ModelConfig(str(tmp_path)))


def test_subfolder_variant_and_ignored_files_choose_among_what_is_there(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "unet" / "model.fp16.safetensors", {"weight": ar(1, 2, start=3)})
    write_safetensors(tmp_path / "unet" / "other.safetensors", {"weight": ar(1, 2, start=9)})
    model = nn.Linear(2, 1, bias=False)
    config = LoadConfig(ignore_patterns=["other*"])
    DefaultModelLoader(config).load_weights(model, ModelConfig(str(tmp_path), subfolder="unet", variant="fp16"))
    assert model.weight.tolist() == [[3, 4]]


def test_a_single_file_is_a_source(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "some.safetensors", {"weight": ar(1, 2)})
    model = nn.Linear(2, 1, bias=False)
    DefaultModelLoader().load_weights(model, ModelConfig(str(file)))
    assert model.weight.tolist() == [[0, 1]]


class Experts(nn.Module):
    """Has expert 1 of two."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({"1": nn.Linear(256, 256, bias=False)})

    @staticmethod
    def weight_name_filter(name: str) -> bool:
        return ".0." not in name


class OwnExperts(Experts):
    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


@pytest.mark.parametrize("kind", [Experts, OwnExperts])
@pytest.mark.parametrize("how", ["trace", "stream"])
def test_entries_that_a_filter_leaves_out_are_not_read_and_are_told(
    kind: type[Experts], how: str, tmp_path: Path
) -> None:
    write_safetensors(
        tmp_path / "model.safetensors", {"experts.0.weight": ar(256, 256), "experts.1.weight": ar(256, 256, start=1)}
    )
    loader = DefaultModelLoader(LoadConfig.from_dict({"own_loader": how}))
    model = loader.load_model(ModelConfig(str(tmp_path)), build=lambda c: kind())
    assert model.get_parameter("experts.1.weight")[0, 0] == 1
    assert loader.report is not None
    assert loader.report.bytes_read == 256 * 256 * 4
    assert loader.report.dropped == {"experts.0.weight": "left out by weight_name_filter"}
    names = [name for name, _ in loader.get_all_weights(ModelConfig(str(tmp_path)), model)]
    assert names == ["experts.1.weight"]


def test_the_filters_of_model_and_loader_both_count(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"experts.0.weight": ar(2), "experts.1.weight": ar(256, 256)})
    loader = DefaultModelLoader(weight_name_filter=lambda name: ".1." not in name)
    with pytest.raises(PlanError, match=r"missing: experts\.1\.weight"):
        loader.load_weights(Experts(), ModelConfig(str(tmp_path)))


def test_files_are_closed_when_a_stream_is_left_early(places: tuple[Path, Path]) -> None:
    stream = DefaultModelLoader().get_all_weights(ModelConfig(str(places[0])), TwoTowers(places[1]))
    assert next(stream)[0] == "text.weight"
    stream.close()  # type: ignore[attr-defined]
    open_files = [p.readlink() for p in Path("/proc/self/fd").iterdir() if p.is_symlink()]
    assert not any(p.is_relative_to(places[0]) for p in open_files)
