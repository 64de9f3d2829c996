"""Addresses: what they mean, and which are refused, without telling what is secret in them."""

from __future__ import annotations

import pytest

from tensorferry.errors import ConfigError
from tensorferry.storage.object_uri import ObjectUri, is_uri


@pytest.mark.parametrize(
    ("address", "service", "bucket", "key", "text"),
    [
        ("s3://bucket/models/llama", "s3", "bucket", "models/llama", "s3://bucket/models/llama"),
        ("s3://bucket/models/llama/", "s3", "bucket", "models/llama", "s3://bucket/models/llama"),
        ("S3A://bucket", "s3", "bucket", "", "s3a://bucket"),
        ("gs://b/x y/ü", "gs", "b", "x y/ü", "gs://b/x y/ü"),
        ("az://container/m", "az", "container", "m", "az://container/m"),
        ("https://host:8443/a/m.gguf?sig=SECRET", "http", "host:8443", "a/m.gguf", "https://host:8443/a/m.gguf"),
    ],
)
def test_an_address_is_a_bucket_and_a_key(address: str, service: str, bucket: str, key: str, text: str) -> None:
    uri = ObjectUri.parse(address)
    assert (uri.service, uri.bucket, uri.key, uri.text) == (service, bucket, key, text)
    assert "SECRET" not in repr(uri)


def test_azure_may_name_its_account() -> None:
    uri = ObjectUri.parse("abfss://weights@account.dfs.core.windows.net/m/x")
    assert (uri.bucket, uri.account, uri.key) == ("weights", "account", "m/x")
    assert uri.text == "abfss://account/weights/m/x"


def test_the_address_of_what_is_above_and_below() -> None:
    uri = ObjectUri.parse("https://host/a/m.gguf?sig=SECRET")
    assert (uri.name, uri.parent.text, uri.parent.query) == ("m.gguf", "https://host/a", "")
    assert ObjectUri.parse("s3://b/m").below("text/encoder").key == "m/text/encoder"
    assert ObjectUri.parse("s3://b").below("m").text == "s3://b/m"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ftp://host/m", "addresses of ftp are not known here; there are s3://"),
        ("s3:///m", "the name of a bucket is expected after"),
        ("https:///m", "a host is expected"),
        ("s3://key:SECRET@bucket/m", "an address holds no keys or passwords"),
        ("https://user:SECRET@host/m", "an address holds no keys or passwords"),
        ("abfss://c:SECRET@account.dfs.core.windows.net/m", "an address holds no keys or passwords"),
        ("s3://key:SEC/SECRET@bucket/m", "the name of a bucket is expected"),
        ("https://user:SEC/SECRET@host/m", "a host is expected"),
        ("s3://bucket/m?versionId=SECRET", "with no '\\?' or '#' in it"),
        ("s3://bucket/a/../b", "are not read"),
        ("s3://bucket/a//b", "are not read"),
        ("s3://bucket//a", "are not read"),
        ("s3://bucket/a//", "are not read"),
        ("s3://bucket/mo\ndel", "tabs, newlines and the like"),
        ("s3://bucket/mo\tdel", "tabs, newlines and the like"),
        ("http://host/a/%2e%2E/b", "are not read"),
        ("http://host/a/%2e%2e/b?sig=SECRET", "are not read"),
        ("http://host/a/%2e", "are not read"),
        ("http://host/..%2Fb", "are not read"),
        ("http://host/a/b%2Fc", "has a slash in it"),
        ("http://host/a/b%0Ac", "are not read"),
        ("http://host/a/b%FFc", "is no UTF-8"),
        ("http://[::1/m", "is no address that can be understood"),
    ],
)
def test_other_addresses_are_refused_without_what_is_secret_in_them(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        ObjectUri.parse(address)
    assert "SECRET" not in str(refusal.value)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("http://host/a%20b/my%20model.gguf", "my model.gguf"),
        ("http://host/a%20b/my model.gguf", "my model.gguf"),
        ("http://host/50%2525.gguf", "50%25.gguf"),
        ("http://host/my%20model.gguf?sig=SECRET", "my%20model.gguf"),  # is asked for as it is written
        ("s3://bucket/a/my%20model.gguf", "my%20model.gguf"),
        ("s3://bucket/%2e%2e", "%2e%2e"),
    ],
)
def test_percent_signs_stand_for_something_over_http_only(address: str, name: str) -> None:
    uri = ObjectUri.parse(address)
    assert uri.name == name
    assert uri.text == address.partition("?")[0]


@pytest.mark.parametrize("folder", ["../x", "/x", "a/../b", "."])
def test_a_subfolder_lies_below(folder: str) -> None:
    with pytest.raises(ConfigError, match="a relative path without"):
        ObjectUri.parse("s3://b/m").below(folder)


@pytest.mark.parametrize("path", ["owner/model", "/tmp/x", "s3:/bucket", "C:\\x", "", None, 3])
def test_paths_and_names_are_no_addresses(path: object) -> None:
    assert not is_uri(path)
