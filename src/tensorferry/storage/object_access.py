"""Connections to object stores, by obstore: where they are, and with which credentials, is up to the environment.

obstore is an extra, imported when it is first needed. It reads the environment of each service, but no profile files of
AWS, which boto3 reads where that is installed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from tensorferry.errors import AccessDenied, ConfigError
from tensorferry.storage.object_uri import ObjectUri

__all__ = ["CLIENT", "RETRY", "Access", "connected"]

CLIENT: Mapping[str, Any] = {"timeout": "300s", "read_timeout": "10s", "connect_timeout": "5s"}
"""What is waited for: a connection, the next bytes of an answer, and all of one. An answer that is slow and moves is
let finish, where obstore's own 30 seconds for all of it would never have 8 MiB come at 200 KiB/s."""
RETRY: Mapping[str, Any] = {"retry_timeout": timedelta(seconds=600), "max_retries": 8}
"""How long and how often a request is tried again, what was read until then included; longer than one may take."""

_TRUE = ("1", "true", "yes", "on", "y", "t")
_AZURE = {
    "AZURE_STORAGE_USE_EMULATOR": "to the emulator",
    "AZURE_STORAGE_ACCOUNT_KEY": "with the account's key", "AZURE_STORAGE_ACCESS_KEY": "with the account's key",
    "AZURE_STORAGE_MASTER_KEY": "with the account's key", "AZURE_STORAGE_SAS_TOKEN": "with a shared access signature",
    "AZURE_STORAGE_SAS_KEY": "with a shared access signature", "AZURE_STORAGE_TOKEN": "with a token",
    "AZURE_STORAGE_CLIENT_SECRET": "as an application", "AZURE_CLIENT_SECRET": "as an application",
    "AZURE_FEDERATED_TOKEN_FILE": "with a federated token", "AZURE_USE_AZURE_CLI": "as `az login` says",
}  # fmt: skip
_GOOGLE = {
    "GOOGLE_SERVICE_ACCOUNT": "as a service account", "GOOGLE_SERVICE_ACCOUNT_PATH": "as a service account",
    "GOOGLE_SERVICE_ACCOUNT_KEY": "as a service account", "GOOGLE_APPLICATION_CREDENTIALS": "with its file",
}  # fmt: skip
_OF_THE_MACHINE = (
    "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip


class Access(NamedTuple):
    """A connection. store: obstore's. words: which credentials it has, in words that hold none."""

    store: Any  # obstore is an extra, whose types are not there for whoever checks without it
    words: str


def connected(uri: ObjectUri) -> Access:
    """Return a connection to the bucket of `uri`, or to all of it where that is of HTTP. Asks no server for objects.

    Raises ConfigError where obstore is not installed or what the environment says makes no sense, AccessDenied where
    there are no credentials.
    """
    stores = _library(uri)
    make = {"s3": _s3, "gs": _google, "az": _azure, "http": _http}[uri.service]
    try:
        return make(uri, stores)
    except (AccessDenied, ConfigError):
        raise
    except Exception as error:  # noqa: BLE001 - obstore's errors have no base that is known before it is imported
        kind = type(error).__name__
    told = f"{uri.text}: the environment says of it what makes no sense to obstore ({kind})"
    raise ConfigError(f"{told}: check {_VARIABLES[uri.service]}")  # outside: the error may quote the environment


_VARIABLES = {
    "s3": "AWS_ENDPOINT_URL, AWS_REGION and the other variables that begin with AWS_",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS and the other variables that begin with GOOGLE_",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and the other variables that begin with AZURE_",
    "http": "the address",
}


def _library(uri: ObjectUri) -> Any:
    try:
        return import_module("obstore.store")
    except ModuleNotFoundError as error:
        if error.name not in ("obstore", "obstore.store"):
            raise
        raise ConfigError(
            f"{uri.text}: object stores are read by obstore, which is not installed: "
            "pip install 'tensorferry[object-store]'"
        ) from error


def _options(endpoint: str | None) -> dict[str, Any]:
    """Return how to connect; without encryption only where somebody gave an endpoint that is so."""
    plain = {"allow_http": True} if endpoint is not None and endpoint.lower().startswith("http://") else {}
    return {"client_options": {**CLIENT, **plain}, "retry_config": dict(RETRY)}


def _is_true(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() in _TRUE


def _given(variables: Sequence[str]) -> str | None:
    return next((name for name in variables if os.environ.get(name)), None)


# -- Amazon S3, and all that speaks like it ---------------------------------------------------------------------------


class _Signing(NamedTuple):
    """Who signs requests to S3. config: what a profile says beside keys."""

    words: str
    provider: Any = None
    config: Mapping[str, str] | None = None


def _s3(uri: ObjectUri, stores: Any) -> Access:
    signing = _signing(uri)
    config = dict(signing.config or {})
    named = _given(("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"))
    if named is not None:
        config["endpoint"] = os.environ[named].rstrip("/")
    if _given(("AWS_REGION", "AWS_DEFAULT_REGION")):
        config.pop("region", None)
    store = stores.S3Store(
        uri.bucket, config=config, credential_provider=signing.provider, **_options(config.get("endpoint"))
    )
    return Access(store, signing.words)


def _signing(uri: ObjectUri) -> _Signing:
    if _is_true("AWS_SKIP_SIGNATURE"):
        return _Signing("asked without credentials, as AWS_SKIP_SIGNATURE says")
    if os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"):
        return _Signing("asked with the key of AWS_ACCESS_KEY_ID")
    try:
        session, provider = import_module("botocore.session"), import_module("obstore.auth.boto3")
    except ModuleNotFoundError:
        return _of_the_machine(uri)
    return _as_boto3_finds(uri, session.get_session(), provider.Boto3CredentialProvider)


def _as_boto3_finds(uri: ObjectUri, session: Any, make: Any) -> _Signing:
    """Return what boto3 finds: in profiles, web identities, containers, and of instances where that is not disabled."""
    try:
        credentials, provider = session.get_credentials(), None
        config = {"region": session.get_config_variable("region")}
        config["endpoint"] = session.get_scoped_config().get("endpoint_url")
        if credentials is not None:
            provider = make(session)
    except Exception as error:  # noqa: BLE001 - of many kinds, whose texts quote files
        kind = type(error).__name__
        raise AccessDenied(
            f"{uri.text}: boto3 cannot read the credentials ({kind}): check AWS_PROFILE and its files"
        ) from None
    if provider is None:
        raise AccessDenied(f"{uri.text}: no credentials were found, in the environment or by boto3: {_S3_HOW}")
    profile = f", profile {session.profile!r}" if getattr(session, "profile", None) else ""
    words = f"asked with credentials that boto3 found ({credentials.method}{profile})"
    return _Signing(words, provider, {key: value for key, value in config.items() if value})


_S3_HOW = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE with boto3 installed, or AWS_SKIP_SIGNATURE=true"
    " for a public bucket"
)


def _of_the_machine(uri: ObjectUri) -> _Signing:
    """Leave it to obstore, without boto3: web identities, containers, and instances, unless these are disabled."""
    profile = "AWS_PROFILE" in os.environ or Path("~/.aws/credentials").expanduser().is_file()
    hint = "; there is a profile, which boto3 would read: pip install boto3" if profile else ""
    named = _given(_OF_THE_MACHINE)
    if named is None and _is_true("AWS_EC2_METADATA_DISABLED"):
        raise AccessDenied(f"{uri.text}: no credentials were found: {_S3_HOW}{hint}")
    return _Signing(f"asked with those of {named or 'the instance that this machine is'}{hint}")


# -- the others -------------------------------------------------------------------------------------------------------


def _google(uri: ObjectUri, stores: Any) -> Access:
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        host = emulator if "://" in emulator else f"http://{emulator}"
        key = {"gcs_base_url": host, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        store = stores.GCSStore(uri.bucket, config={"service_account_key": json.dumps(key)}, **_options(host))
        return Access(store, "asked of the emulator, as STORAGE_EMULATOR_HOST says")
    named = _given(tuple(_GOOGLE))
    words = f"asked {_GOOGLE[named]}, as {named} says" if named else "asked with what this machine is given by default"
    if _is_true("GOOGLE_SKIP_SIGNATURE"):
        words = "asked without credentials, as GOOGLE_SKIP_SIGNATURE says"
    return Access(stores.GCSStore(uri.bucket, **_options(None)), words)


def _azure(uri: ObjectUri, stores: Any) -> Access:
    emulated = _is_true("AZURE_STORAGE_USE_EMULATOR")
    endpoint = os.environ.get("AZURITE_BLOB_STORAGE_URL", "http://") if emulated else None
    endpoint = endpoint or os.environ.get(_given(("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")) or "")
    config = {"account_name": uri.account} if uri.account else {}
    if not config and not emulated and not _given(("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")):
        raise ConfigError(f"{uri.text}: of which account it is, nothing says: set AZURE_STORAGE_ACCOUNT_NAME")
    named = _given(tuple(_AZURE))
    words = f"asked {_AZURE[named]}, as {named} says" if named else "asked with the identity of this machine"
    if _is_true("AZURE_SKIP_SIGNATURE"):
        words = "asked without credentials, as AZURE_SKIP_SIGNATURE says"
    return Access(stores.AzureStore(uri.bucket, config=config, **_options(endpoint)), words)


def _http(uri: ObjectUri, stores: Any) -> Access:
    query = f"?{uri.query}" if uri.query else ""
    url = f"{uri.scheme}://{uri.bucket}/{uri.key}{query}"
    words = "with what signs the address, which may have expired" if uri.query else "asked without credentials"
    return Access(stores.HTTPStore.from_url(url, **_options(url)), words)
