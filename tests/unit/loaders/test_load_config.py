"""Settings of a load and of a model are checked when they are made."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorferry.config import LoadConfig, ModelConfig, ReadOptions
from tensorferry.core import Strictness
from tensorferry.errors import ConfigError


def test_the_load_format_is_read_without_regard_to_case() -> None:
    assert LoadConfig(load_format="SafeTensors").load_format == "safetensors"


def test_one_pattern_and_a_list_of_patterns_are_the_same_thing() -> None:
    assert LoadConfig(ignore_patterns="*.bin").ignore_patterns == ("*.bin",)
    assert LoadConfig(ignore_patterns=["*.bin", "x*"]).ignore_patterns == ("*.bin", "x*")


def test_devices_and_dtypes_of_torch_are_taken_as_well_as_their_names(tmp_path: Path) -> None:
    device: Any = torch.device("cuda:1")
    dtype: Any = torch.bfloat16
    assert LoadConfig(device=device) == LoadConfig(device="cuda:1")
    assert ModelConfig("m", dtype=dtype) == ModelConfig("m", dtype="bfloat16")
    folder: Any = tmp_path
    assert ModelConfig(folder).model == str(tmp_path)


@pytest.mark.parametrize(("given", "meant"), [("half", "float16"), ("float", "float32"), ("auto", None), (None, None)])
def test_dtypes_have_their_usual_other_names(given: str | None, meant: str | None) -> None:
    assert ModelConfig("m", dtype=given).dtype == meant


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loadformat": "hf"}, "has no option 'loadformat'; did you mean 'load_format'?"),
        ({"colour": 1}, "it takes load_format, download_dir, device, ignore_patterns, links_to, strategy, threads"),
        ({"load_format": None}, "load_format None: text is expected"),
        ({"load_format": ""}, "load_format '': text is expected"),
        ({"download_dir": 3}, "download_dir 3: a path is expected, not int"),
        ({"device": "gpu number one"}, "a device such as 'cpu' or 'cuda:0' is expected"),
        ({"ignore_patterns": [1]}, "a file name pattern or a list of them is expected"),
        ({"ignore_patterns": None}, "a file name pattern or a list of them is expected"),
        ({"strategy": "fast"}, "strategy 'fast': one of lazy, eager, prefetch is expected"),
        ({"threads": "4"}, "threads '4': a number of threads is expected, not str"),
        ({"threads": True}, "threads True: a number of threads is expected, not bool"),
        ({"threads": -1}, "threads -1: 0 or more is expected"),
        ({"progress": 1}, "progress 1: true or false is expected, not int"),
        ({"own_loader": "guess"}, "own_loader 'guess': one of trace, stream is expected"),
        ({"options": [1]}, "a mapping from names to values is expected"),
        ({"strictness": "strict"}, "strictness 'strict': a Strictness is expected"),
        ({"strictness": {"missing": "shrug"}}, "Strictness: missing 'shrug': one of error, warn is expected"),
        ({"strictness": {"missing_": "warn"}}, "strictness has no option 'missing_'; did you mean 'missing'?"),
        ({"strictness": {"may_miss": "a.b"}}, "a tuple of names in rule notation is expected"),
        ({"read": {"max_read": "16M"}}, "max_read must be a number, not '16M'"),
        ({"read": {"buffer": 1}}, "it takes max_staging, max_read, max_gap, waste, threads"),
    ],
)
def test_nonsense_is_refused_at_once_and_the_message_says_what_is_expected(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        LoadConfig.from_dict(options)
    assert message in str(refused.value)


def test_plain_data_may_nest() -> None:
    config = LoadConfig.from_dict(
        {"strictness": {"missing": "warn", "may_miss": ["lm_head.{x:part}"]}, "read": {"max_gap": 0}}
    )
    assert config.strictness == Strictness(missing="warn", may_miss=("lm_head.{x:part}",))
    assert config.read == ReadOptions(max_gap=0)


@pytest.mark.parametrize("strategy", ["eager", "prefetch"])
def test_several_threads_are_for_the_strategy_lazy(strategy: Any) -> None:
    with pytest.raises(ConfigError, match=f"strategy '{strategy}' reads with one thread, and 4 were asked for"):
        LoadConfig(strategy=strategy, threads=4)
    with pytest.raises(ConfigError, match="reads with one thread"):
        LoadConfig(strategy=strategy, read=ReadOptions(threads=2))
    assert LoadConfig(strategy=strategy).reading.workers == 1
    assert LoadConfig(strategy=strategy, threads=1).reading.workers == 1
    assert LoadConfig(threads=4).reading.workers == 4


def test_two_numbers_of_threads_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match=r"threads 2 contradicts read\.threads 3"):
        LoadConfig(threads=2, read=ReadOptions(threads=3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "model"),
        ({"model": ""}, "model '': text is expected"),
        ({"model": 5}, "model 5: a path is expected, not int"),
        ({"model": "m", "dtype": "int8"}, "dtype 'int8': one of auto, float16"),
        ({"model": "m", "revision": 1}, "revision 1: text is expected, not int"),
        ({"model": "m", "trust_remote_code": "yes"}, "trust_remote_code 'yes': true or false is expected"),
        ({"model": "m", "revisions": "main"}, "did you mean 'revision'?"),
    ],
)
def test_a_model_is_described_without_nonsense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ModelConfig.from_dict(options)
    assert message in str(refused.value)


def test_settings_travel_between_processes_and_serve_as_keys() -> None:
    config = LoadConfig(options={"seed": 1}, ignore_patterns=["*.bin"])
    assert pickle.loads(pickle.dumps(config)) == config
    assert {config: 1}[LoadConfig(options={"seed": 1}, ignore_patterns=["*.bin"])] == 1


def test_settings_need_no_torch() -> None:
    program = "import sys, tensorferry.config as c; c.LoadConfig(device='cpu'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
