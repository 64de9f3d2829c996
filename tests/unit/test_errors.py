"""How errors are put into words: what is shown of names and addresses that come from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

import tensorferry
from tensorferry import LoadConfig, ModelConfig, get_model_loader
from tensorferry.errors import TensorferryError, shown
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


@pytest.mark.parametrize("address", ADDRESSES)
def test_converting_tells_no_secrets_of_either_address(address: str, tmp_path: Path) -> None:
    for source, destination in ((address, tmp_path / "new"), (tmp_path, address)):
        with pytest.raises(TensorferryError) as refused:
            tensorferry.convert(source, destination)
        assert "hunter2" not in str(refused.value)
