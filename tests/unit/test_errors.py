"""How errors are put into words: what is shown of names and addresses that come from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from torch import nn

import tensorferry
from tensorferry import LoadConfig, ModelConfig, get_model_loader
from tensorferry.errors import ConfigError, TensorferryError, shown
from tensorferry.storage import object_access

ADDRESSES = [
    "https://user:hunter2@host/model",
    "s3://AKIA:hun/hunter2@bucket/model",
    "https:/user:hunter2@host/model",  # as a Path writes it
    "http://127.0.0.1:9/model?token=hunter2&x=1",
    "s3://AKIA:p@hunter2@bucket/k?X-Amz-Signature=hunter2",
]


@pytest.fixture(autouse=True)
def nobody_is_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_access, "RETRY", {**object_access.RETRY, "max_retries": 0})


@pytest.mark.parametrize("address", ADDRESSES)
def test_credentials_and_queries_of_addresses_are_not_shown(address: str) -> None:
    text = shown(f"while reading {address}: nothing is there")
    assert "hunter2" not in text
    assert text.endswith(": nothing is there") or "?" in address


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("https://host/my models//m.safetensors?Sig=hunter2", "https://host/my models//m.safetensors?…"),
        ("https://host/my models/m?Sig=hunter2 hunter2#t?hunter2", "https://host/my models/m?…"),
        ("https://host/m#t?Sig=hunter2", "https://host/m#t?…"),
        ("https://ho st/m?Sig=hunter2", "https://ho st/m?…"),
        ("https:/host/my m?Sig=hunter2", "https:/host/my m?…"),
        ("https://host:80/m?Sig=a@hunter2", "https://host:80/m?…"),
        ("https://user:hunter2?hunter2@host/m", "https://…"),
        ("https://user:hunter2 hunter2@host/m", "https://…@host/m"),
        ("https://user:a/hunter2 hunter2@host/m?x", "https://…@host/m?…"),
        ("abfss://weights@account/my m", "abfss://…@account/my m"),
        ("hf://owner/my model@main", "hf://owner/my model@main"),
    ],
)
def test_an_address_is_shown_without_its_secrets_whatever_is_in_them(address: str, text: str) -> None:
    assert shown(address, 300) == text


@pytest.mark.parametrize(
    "plain", ["layers.0.weight", "user:word@host", "hf://owner/model@main", "/a folder/x?y", "a@b"]
)
def test_what_is_no_address_with_a_secret_is_shown_as_it_is(plain: str) -> None:
    assert shown(plain) == plain


def test_a_secret_that_the_limit_cuts_is_not_shown() -> None:
    assert "hunter" not in shown("x " * 45 + "https://user:hunter2@host/model", limit=108)


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("load_format", ["auto", "sharded_state", "tensorizer", "npcache", "gguf", "mistral"])
def test_no_loader_tells_the_secrets_of_a_model_s_address(address: str, load_format: str) -> None:
    loader = get_model_loader(LoadConfig(load_format=load_format))
    with pytest.raises(TensorferryError) as refused:
        loader.load_model(ModelConfig(address))
    assert "hunter2" not in str(refused.value)


SIGNED = "http://h/my models/m.safetensors?X-Amz-Signature=hunter2"


@pytest.mark.parametrize("path", [SIGNED, SIGNED.replace("my ", "")])
def test_a_revision_of_an_address_is_refused_without_telling_what_signs_it(path: str, tmp_path: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: tensorferry.load_model(path, revision="main"),
        lambda: tensorferry.convert(path, tmp_path / "new", revision="main"),
    ]
    for load_format in ("auto", "dummy", "gguf", "npcache", "sharded_state", "tensorizer"):
        loader, config = get_model_loader(LoadConfig(load_format=load_format)), ModelConfig(path, revision="main")
        calls.append(partial(loader.load_weights, nn.Linear(2, 3), config))
        calls.append(partial(loader.download_model, config))
    for call in calls:
        with pytest.raises(ConfigError, match=r"^revision 'main': .* and http://h/.*m\.safetensors\?… is an address"):
            call()


@pytest.mark.parametrize("address", ADDRESSES)
def test_converting_tells_no_secrets_of_either_address(address: str, tmp_path: Path) -> None:
    for source, destination in ((address, tmp_path / "new"), (tmp_path, address)):
        with pytest.raises(TensorferryError) as refused:
            tensorferry.convert(source, destination)
        assert "hunter2" not in str(refused.value)
