"""The loader of Tensorizer files: where the file is, that it is verified first, and what of it a model gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar
from helpers.tensorizer_library import key_file, new_tensor, write_by_library
from helpers.tiny_transformers import equal_bits, logits, tiny
from tensorferry.errors import AccessDenied, ConfigError, CorruptFile
from tensorferry.formats.tensorizer_write import write_tensorizer
from tensorferry.loaders import LoadConfig, ModelConfig, get_model_loader
from tensorferry.loaders.tensorizer import TensorizerLoader

KEY = bytes(range(32))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2, 3))
        self.b = nn.Parameter(torch.zeros(4))
        self.register_buffer("computed", torch.ones(2), persistent=False)


VALUES = {"a": ar(2, 3, start=1), "b": ar(4, start=10)}


def written(path: Path, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensorizer(path, {name: new_tensor(tensor) for name, tensor in VALUES.items()}, **options)
    return path


def loaded(model: str | Path, *, into: nn.Module | None = None, **options: Any) -> tuple[Small, Any]:
    loader = get_model_loader(LoadConfig(load_format="tensorizer", options=options))
    made = loader.load_model(ModelConfig(str(model)), build=lambda _: into or Small())
    assert isinstance(made, Small)
    return made, loader.report


def filled(model: nn.Module) -> bool:
    return all(torch.equal(model.get_parameter(name), tensor) for name, tensor in VALUES.items())


def test_load_format_tensorizer_has_a_loader_of_its_own() -> None:
    assert isinstance(get_model_loader(LoadConfig(load_format="tensorizer")), TensorizerLoader)


@pytest.mark.parametrize("where", ["file", "folder", "uri", "dir"])
def test_the_file_is_where_model_or_options_say(where: str, tmp_path: Path) -> None:
    file = written(tmp_path / "weights" / "model.tensors")
    options: dict[str, Any] = {"uri": {"tensorizer_uri": str(file)}, "dir": {"tensorizer_dir": str(file.parent)}}.get(
        where, {}
    )
    model, report = loaded({"file": file, "folder": file.parent}.get(where, tmp_path), **options)
    assert filled(model)
    assert report.verified == "hashes in model.tensors verified, of 40 B"


def test_auto_reads_it_too_where_there_is_nothing_else(tmp_path: Path) -> None:
    written(tmp_path / "model.tensors")
    loader = get_model_loader(LoadConfig())
    assert filled(loader.load_model(ModelConfig(str(tmp_path)), build=lambda _: Small()))


def damaged(file: Path) -> Path:
    data = bytearray(file.read_bytes())
    data[-9] ^= 1  # the last byte before the end's zeros
    file.write_bytes(data)
    return file


def test_a_wrong_byte_is_found_before_the_model_is_touched(tmp_path: Path) -> None:
    model = Small()
    with pytest.raises(CorruptFile, match=r"model\.tensors.*of tensor 'b' is"):
        loaded(damaged(written(tmp_path / "model.tensors")), into=model)
    assert not any(parameter.any() for parameter in model.parameters())


def test_hashes_are_not_looked_at_where_that_was_asked_for(tmp_path: Path) -> None:
    _, report = loaded(damaged(written(tmp_path / "model.tensors")), verify_hash=False)
    assert report.verified == "contents not verified"


@pytest.mark.parametrize("verify_hash", [True, False])
def test_an_encrypted_file_needs_its_key_before_the_model_is_touched(verify_hash: bool, tmp_path: Path) -> None:
    file, model = written(tmp_path / "model.tensors", key=KEY), Small()
    with pytest.raises(AccessDenied, match=r"model\.tensors.*option encryption_keyfile"):
        loaded(file, into=model, verify_hash=verify_hash)
    wrong = key_file(tmp_path / "wrong", bytes(32))
    with pytest.raises(AccessDenied, match="does not open it"):
        loaded(file, into=model, verify_hash=verify_hash, encryption_keyfile=str(wrong))
    assert not any(parameter.any() for parameter in model.parameters())
    key = key_file(tmp_path / "key", KEY)
    assert filled(loaded(file, verify_hash=verify_hash, encryption_keyfile=key)[0])


@pytest.mark.parametrize("strategy", ["eager", "prefetch"])
def test_every_strategy_reads_encrypted_files(strategy: Any, tmp_path: Path) -> None:
    file, key = written(tmp_path / "model.tensors", key=KEY), key_file(tmp_path / "key", KEY)
    config = LoadConfig(load_format="tensorizer", strategy=strategy, options={"encryption_keyfile": str(key)})
    assert filled(get_model_loader(config).load_model(ModelConfig(str(file)), build=lambda _: Small()))


class Streams(Small):
    def load_weights(self, weights: Any) -> set[str]:
        seen = set()
        for name, tensor in weights:
            with torch.no_grad():
                self.get_parameter(name).copy_(tensor)
            seen.add(name)
        return seen


def test_a_model_s_own_loader_gets_the_tensors_of_the_file(tmp_path: Path) -> None:
    assert filled(loaded(written(tmp_path / "model.tensors"), into=Streams())[0])


def test_num_readers_are_threads(tmp_path: Path) -> None:
    loader = get_model_loader(LoadConfig(load_format="tensorizer", options={"num_readers": 3}))
    assert loader.load_config.reading.workers == 3


def test_buffers_that_the_model_computes_are_left_where_they_are(tmp_path: Path) -> None:
    source = Small()
    with torch.no_grad():
        for name, tensor in VALUES.items():
            source.get_parameter(name).copy_(tensor)
        source.get_buffer("computed").fill_(5)
    model, report = loaded(write_by_library(tmp_path / "m.tensors", source))
    assert filled(model)
    assert model.get_buffer("computed").tolist() == [1, 1]
    assert report.dropped == {"computed": "a buffer that the model computes itself"}


class Processes(Small):
    def process_weights_after_loading(self) -> None:
        raise AssertionError("a second time")


def test_what_vllm_has_post_processed_is_not_post_processed_again(tmp_path: Path) -> None:
    tensors = {name: new_tensor(tensor) for name, tensor in VALUES.items()}
    file = tmp_path / "m.tensors"
    write_tensorizer(file, {**tensors, "vllm_tensorized_marker": new_tensor(ar(1))}, buffers=())
    model, report = loaded(file)
    assert filled(model)
    assert report.dropped == {"vllm_tensorized_marker": "a marker of vLLM, not a weight"}
    with pytest.raises(ConfigError, match="after post-processing, which the model would repeat"):
        loaded(file, into=Processes())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensorizer_uri": "a", "tensorizer_dir": "b"}, "give one of them"),
        ({"tensorizer_uri": 3}, "tensorizer_uri 3: a path is expected"),
        ({"verify_hash": "yes"}, "verify_hash"),
        ({"num_readers": 0}, "num_readers 0: at least 1"),
        ({"s3_endpoint": "x"}, "has no option 's3_endpoint'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        get_model_loader(LoadConfig(load_format="tensorizer", options=options))


@pytest.mark.parametrize("uri", ["s3://bucket/model.tensors?key=SECRET", "ftp://host/model.tensors?key=SECRET"])
def test_addresses_that_are_not_understood_are_refused_and_their_queries_are_not_told(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"with no .\?. or|are not known here") as refusal:
        loaded("m", tensorizer_uri=uri)
    assert "SECRET" not in str(refusal.value)


@pytest.mark.transformers
@pytest.mark.parametrize("name", ["tied Llama", "Qwen3-MoE"])
def test_a_module_that_the_library_wrote_loads_into_the_same_model(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    write_by_library(tmp_path / "model.tensors", model)
    loader = get_model_loader(LoadConfig(load_format="tensorizer"))
    made = loader.load_model(ModelConfig(str(tmp_path)))
    state, expected = made.state_dict(), model.state_dict()
    assert [n for n, t in expected.items() if not equal_bits(state[n], t)] == []
    assert torch.equal(logits(made), logits(model))
