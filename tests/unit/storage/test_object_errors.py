"""What a store's error is about, is read from what the store says, and from no name of what was asked for."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from tensorferry.errors import AccessDenied, LocateError, ReadError
from tensorferry.storage.object_errors import explained, is_changed, said_by


class GenericError(Exception):
    """One of obstore's."""


def fault(text: str, where: str = "s3://bucket/m", key: str = "m/a.safetensors") -> Exception:
    error = GenericError(text)
    said = said_by(error, where, key)
    assert not is_changed(error, said)
    return explained(error, said, f"a ({where})", "looking for it", "asked with the key of the test")


@pytest.mark.parametrize(
    ("where", "key"),
    [
        ("s3://bucket/credentials", "credentials/a.safetensors"),
        ("s3://my-credential-models/m", "m/a.safetensors"),
        ("s3://bucket/oauth", "x/oauth/a.safetensors"),
        ("s3://PermanentRedirect/m", "m/a.safetensors"),
        ("s3://bucket/m", "m/status: 404"),
        ("s3://bucket/m", "m/status: 412/a b"),
        ("s3://bucket/m", "m/dns error"),
        ("abfss://account/oauth2/m", "m/a"),
    ],
)
@pytest.mark.parametrize("spelled", ["http://e:9/{bucket}/{key}", "https://{bucket}.e/?list-type=2&prefix={quoted}%2F"])
def test_names_do_not_change_what_a_fault_is(where: str, key: str, spelled: str) -> None:
    bucket = where.split("/")[3 if where.startswith("abfss") else 2]
    url = spelled.format(bucket=bucket, key=quote(key), quoted=quote(key, safe=""))
    for text, words in [
        ("HTTP error: error sending request, kind: Timeout", "sends nothing for too long"),
        ("HTTP error: error sending request", "the connection broke"),
    ]:
        found = fault(
            f"Generic S3 error: Error performing GET {url} in 5s, after 8 retries - {text}; {key}", where, key
        )
        assert type(found) is ReadError
        assert words in str(found)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "Error performing PUT http://169.254.169.254/latest/api/token in 1s - HTTP error: kind: Connect",
            AccessDenied,
        ),
        ("Error performing POST https://login.example/t/oauth2/v2.0/token - kind: Connect", AccessDenied),
        ("Error performing GET http://e/bucket/latest/a - Received redirect: BareRedirect", LocateError),
        ("Server returned non-2xx status code: 404 Not Found: http://e/bucket/latest/a", LocateError),
        ("Error performing GET http://e/bucket/latest/a - status: 503", ReadError),
    ],
)
def test_what_the_store_says_is_still_read(text: str, kind: type[Exception]) -> None:
    assert type(fault(text, "s3://bucket/latest", "latest")) is kind
    assert type(fault(text, "s3://bucket", "404")) is kind
