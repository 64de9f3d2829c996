"""Which credentials a store is asked with, where it is, and how long is waited: as the environment says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")

from helpers.object_stores import FaultyStore, no_credentials
from tensorferry import open_checkpoint
from tensorferry.errors import AccessDenied, ConfigError
from tensorferry.storage import object_access
from tensorferry.storage.object_access import CLIENT, RETRY, connected
from tensorferry.storage.object_store import ObjectStorage
from tensorferry.storage.object_uri import ObjectUri

S3 = ObjectUri.parse("s3://bucket/m")


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_credentials(monkeypatch, tmp_path)


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    with FaultyStore({"m/a": b"12345"}) as running:
        yield running


@pytest.fixture
def without_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)


def given(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def profiles(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, config: str = "") -> None:
    (folder / "credentials").write_text(text)
    (folder / "config").write_text(config)
    given(
        monkeypatch,
        AWS_SHARED_CREDENTIALS_FILE=str(folder / "credentials"),
        AWS_CONFIG_FILE=str(folder / "config"),
    )


def test_keys_of_the_environment_come_first_and_are_not_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    profiles(monkeypatch, tmp_path, "[default]\naws_access_key_id = P\naws_secret_access_key = SECRET\n")
    given(monkeypatch, AWS_ACCESS_KEY_ID="AKIASECRET", AWS_SECRET_ACCESS_KEY="SECRET")
    assert connected(S3).words == "asked with the key of AWS_ACCESS_KEY_ID"


def test_requests_are_signed_with_the_key_of_the_environment(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, AWS_ENDPOINT_URL=store.endpoint, AWS_ACCESS_KEY_ID="AKIA1", AWS_SECRET_ACCESS_KEY="x")
    with ObjectStorage.at(S3) as storage:
        assert [file.path for file in storage.list()] == ["a"]
    assert "Credential=AKIA1/" in store.log[0].authorization
    assert "/us-east-1/s3/" in store.log[0].authorization


def test_a_profile_is_read_by_boto3_with_its_region_and_endpoint(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("boto3")
    profiles(
        monkeypatch,
        tmp_path,
        "[weights]\naws_access_key_id = AKIAPROFILE\naws_secret_access_key = SECRET\n",
        f"[profile weights]\nregion = eu-west-3\nendpoint_url = {store.endpoint}\n",
    )
    given(monkeypatch, AWS_PROFILE="weights")
    with ObjectStorage.at(S3) as storage:
        storage.list()
    assert "Credential=AKIAPROFILE/" in store.log[0].authorization
    assert "/eu-west-3/s3/" in store.log[0].authorization
    words = connected(S3).words
    assert words == "asked with credentials that boto3 found (shared-credentials-file, profile 'weights')"


def test_a_profile_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("boto3")
    profiles(monkeypatch, tmp_path, "")
    given(monkeypatch, AWS_PROFILE="nope")
    with pytest.raises(AccessDenied, match=r"boto3 cannot read the credentials \(ProfileNotFound\): check AWS_PROFILE"):
        connected(S3)


def test_without_any_credentials_nobody_is_asked_and_what_to_set_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3")
    with pytest.raises(AccessDenied, match="no credentials were found, in the environment or by boto3: set AWS_ACC"):
        connected(S3)


@pytest.mark.usefixtures("without_boto3")
def test_without_boto3_the_instance_is_asked_unless_that_is_disabled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(AccessDenied, match="no credentials were found: set AWS_ACCESS_KEY_ID"):
        connected(S3)
    given(monkeypatch, AWS_PROFILE="weights")
    with pytest.raises(AccessDenied, match="there is a profile, which boto3 would read: pip install boto3"):
        connected(S3)
    given(monkeypatch, AWS_WEB_IDENTITY_TOKEN_FILE=str(tmp_path / "token"), AWS_ROLE_ARN="arn:aws:iam::1:role/r")
    assert connected(S3).words.startswith("asked with those of AWS_WEB_IDENTITY_TOKEN_FILE")
    monkeypatch.delenv("AWS_WEB_IDENTITY_TOKEN_FILE")
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    assert connected(S3).words.startswith("asked with those of the instance that this machine is")


def test_a_public_bucket_is_asked_without_a_signature(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, AWS_ENDPOINT_URL=store.endpoint, AWS_SKIP_SIGNATURE="true")
    with ObjectStorage.at(S3) as storage:
        storage.list()
    assert store.log[0].authorization == ""
    assert connected(S3).words == "asked without credentials, as AWS_SKIP_SIGNATURE says"


def test_an_endpoint_of_its_own_for_s3_comes_first(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    given(
        monkeypatch, AWS_ENDPOINT_URL="http://127.0.0.1:9", AWS_ENDPOINT_URL_S3=f"{store.endpoint}/",
        AWS_SKIP_SIGNATURE="true",
    )  # fmt: skip
    with ObjectStorage.at(S3) as storage:
        storage.list()
    assert store.log


@pytest.mark.parametrize(("endpoint", "plain"), [("http://host", True), ("https://host", False), (None, False)])
def test_connections_are_encrypted_but_to_an_endpoint_that_is_not(endpoint: str | None, plain: bool) -> None:
    options = object_access._options(endpoint)
    assert options["client_options"].get("allow_http", False) is plain
    assert {key: options["client_options"][key] for key in CLIENT} == dict(CLIENT)
    assert options["retry_config"] == dict(RETRY)
    assert RETRY["retry_timeout"].total_seconds() > 300


def test_the_path_of_a_bucket_is_its_host_where_that_is_asked_for(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, AWS_ENDPOINT_URL=store.endpoint, AWS_SKIP_SIGNATURE="1", AWS_VIRTUAL_HOSTED_STYLE_REQUEST="true")
    store.bucket = ""  # the host is the bucket's then, so that paths begin with keys
    with ObjectStorage.at(S3) as storage:
        assert [file.path for file in storage.list()] == ["a"]


@pytest.mark.parametrize(
    ("address", "variables", "words"),
    [
        ("az://c/m", {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_SAS_TOKEN": "sig=SECRET"}, "SAS_TOKEN says"),
        ("az://c/m", {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_SKIP_SIGNATURE": "true"}, "AZURE_SKIP_SIGNATURE says"),
        ("abfss://c@acc.dfs.core.windows.net/m", {}, "with the identity of this machine"),
        ("gs://b/m", {"GOOGLE_SKIP_SIGNATURE": "true"}, "as GOOGLE_SKIP_SIGNATURE says"),
        ("gs://b/m", {"STORAGE_EMULATOR_HOST": "127.0.0.1:9"}, "as STORAGE_EMULATOR_HOST says"),
        ("https://host/m.gguf?sig=SECRET", {}, "with what signs the address, which may have expired"),
        ("https://host/m.gguf", {}, "asked without credentials"),
    ],
)
def test_other_stores_say_which_credentials_they_have(
    address: str, variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, **variables)
    told = connected(ObjectUri.parse(address)).words
    assert words in told
    assert "SECRET" not in told


def test_azure_needs_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="set AZURE_STORAGE_ACCOUNT_NAME"):
        open_checkpoint("az://container/model")


def test_an_environment_that_makes_no_sense_is_told_without_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, GOOGLE_SERVICE_ACCOUNT_KEY='{"SECRET": 1}')
    with pytest.raises(ConfigError, match=r"makes no sense to obstore .*GOOGLE_APPLICATION_CREDENTIALS") as refusal:
        connected(ObjectUri.parse("gs://b/m"))
    error: Any = refusal.value
    assert "SECRET" not in str(error)
    assert error.__cause__ is None
    assert error.__context__ is None
