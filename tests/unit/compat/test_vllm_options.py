"""What vLLM's options mean for a load, and which are refused."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from helpers.fake_vllm import FakeVllm, LoadConfig
from tensorferry import ConfigError


def config_of(vllm: FakeVllm, **given: Any) -> Any:
    return vllm.loader(LoadConfig(**given)).config


def test_without_options_the_defaults_hold(vllm: FakeVllm) -> None:
    config = config_of(vllm)
    assert (config.load_format, config.strategy, config.own_loader) == ("auto", "lazy", "trace")
    assert config.ignore_patterns == ("original/*",)
    assert config.strictness.missing == "error"


def test_an_unknown_key_is_refused_with_the_keys_that_there_are(vllm: FakeVllm) -> None:
    with pytest.raises(ConfigError, match=r"no option 'thread'; did you mean 'threads'\? \(it takes weights, format,"):
        config_of(vllm, model_loader_extra_config={"thread": 4})


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"format": "gguff"}, "format 'gguff': one of auto, "),
        ({"format": "sharded_state"}, "format 'sharded_state'"),
        ({"weights": 3}, "weights 3: the path"),
        ({"threads": "4"}, "model_loader_extra_config: threads '4'"),
        ({"strategy": "mmap"}, "model_loader_extra_config: strategy 'mmap'"),
        ({"read": {"max_stagin": 1}}, "read has no option 'max_stagin'"),
        ({"strictness": {"missing": "no"}}, "missing 'no'"),
        (["threads"], "a mapping is expected, not list"),
    ],
)
def test_values_that_make_no_sense_are_refused(vllm: FakeVllm, extra: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of(vllm, model_loader_extra_config=extra)


def test_options_reach_the_load(vllm: FakeVllm) -> None:
    extra = {
        "format": "gguf", "threads": 3, "read": {"max_read": 8192}, "links_to": ["/store"],
        "strictness": {"unexpected": "error", "may_miss": ["lm_head.weight"]},
    }  # fmt: skip
    config = config_of(vllm, model_loader_extra_config=extra, download_dir="/cache")
    assert (config.load_format, config.reading.threads, config.reading.max_read) == ("gguf", 3, 8192)
    assert (config.links_to, config.download_dir) == (("/store",), "/cache")
    assert (config.strictness.unexpected, config.strictness.may_miss) == ("error", ("lm_head.weight",))


@pytest.mark.parametrize(("theirs", "ours"), [(None, "lazy"), ("lazy", "lazy"), ("prefetch", "prefetch")])
def test_the_strategy_of_vllm_is_ours(vllm: FakeVllm, theirs: str | None, ours: str) -> None:
    assert config_of(vllm, safetensors_load_strategy=theirs).strategy == ours


def test_our_own_option_goes_before_the_strategy_of_vllm(vllm: FakeVllm) -> None:
    given = {"safetensors_load_strategy": "prefetch", "model_loader_extra_config": {"strategy": "eager"}}
    assert config_of(vllm, **given).strategy == "eager"


def test_the_strategy_for_torchao_is_refused(vllm: FakeVllm) -> None:
    with pytest.raises(ConfigError, match="torchao"):
        config_of(vllm, safetensors_load_strategy="torchao")


def test_patterns_of_files_to_ignore_are_vllm_s(vllm: FakeVllm) -> None:
    assert config_of(vllm, ignore_patterns="*.bin").ignore_patterns == ("*.bin",)


@pytest.mark.parametrize(("read", "expected"), [({}, (1, 2)), ({"turn": [3, 4]}, (3, 4)), ({"shared": False}, (0, 1))])
def test_each_rank_begins_its_reads_elsewhere(vllm: FakeVllm, tmp_path: Path, read: Any, expected: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, weight in weights:
                self.w.data.copy_(weight)

    write_safetensors(tmp_path / "model.safetensors", {"w": ar(2)})
    vllm.share(2, 1)
    loader = vllm.loader(LoadConfig(model_loader_extra_config={"read": read}))
    served, model = SimpleNamespace(model=str(tmp_path), revision=None), Model()
    with loader._opened(served, model) as checkpoint:
        assert loader._planned(model, checkpoint, served).own.reading.executor.turn == expected
