"""Addresses of object stores and HTTP servers, such as ``s3://bucket/models/llama``: what they mean. Pure."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field, replace
from typing import Literal
from urllib.parse import unquote, urlsplit

from tensorferry.errors import ConfigError, shown

__all__ = ["ObjectUri", "is_uri"]

Service = Literal["s3", "gs", "az", "http"]

_SERVICES: dict[str, Service] = {
    "s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "azure": "az", "abfs": "az", "abfss": "az", "http": "http",
    "https": "http",
}  # fmt: skip
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BUCKET = re.compile(r"[A-Za-z0-9_.$-]+")
_HOST = re.compile(r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")
_CONTAINER = re.compile(r"[A-Za-z0-9$-]+")
_ACCOUNT = re.compile(r"([a-z0-9]+)\.(?:dfs|blob)\.[a-z0-9.-]+")


def is_uri(path: object) -> bool:
    """Whether `path` is text that begins like an address, ``scheme://``, and so is no path of this machine.

    >>> is_uri("s3://bucket/model"), is_uri("owner/model"), is_uri("C:/model")
    (True, False, False)
    """
    return isinstance(path, str) and _ADDRESS.match(path) is not None


@dataclass(frozen=True, slots=True)
class ObjectUri:
    """An address, taken apart.

    scheme: as it was written. service: what answers there. bucket: or the container; of HTTP, the host with its port.
    key: what comes after, with neither slash at its ends; "" for all of a bucket; of HTTP, as it is written in the
    address, with ``%20`` for a blank. account: of Azure, where the address says it. query: of HTTP, what signs a
    request; it is in no text that is made of this.
    """

    scheme: str
    service: Service
    bucket: str
    key: str
    account: str = ""
    query: str = field(default="", repr=False)

    @classmethod
    def parse(cls, address: str) -> ObjectUri:
        """Return what `address` means. Raises ConfigError for what is not known here, and for passwords in it."""
        where = shown(address, 300)
        if not address.isprintable():  # urlsplit would take tabs and newlines out
            raise ConfigError(f"{where}: tabs, newlines and the like are in no address that is read")
        try:
            parts = urlsplit(address)
        except ValueError:
            raise ConfigError(f"{where}: is no address that can be understood") from None
        service = _SERVICES.get(parts.scheme.lower())
        if service is None:
            raise ConfigError(
                f"{where}: addresses of {shown(parts.scheme)} are not known here; there are"
                f" {', '.join(f'{scheme}://' for scheme in _SERVICES)}"
            )
        bucket, account = _authority(where, service, parts.netloc)
        if (parts.query and service != "http") or parts.fragment:
            raise ConfigError(f"{where}: a bucket and what it holds are expected, with no '?' or '#' in it")
        key = parts.path.strip("/")
        plain = _unquoted(where, key) if service == "http" else key
        if "//" in parts.path or {".", ".."} & set(plain.split("/")) or not plain.isprintable():
            raise ConfigError(f"{where}: names of objects with empty parts, '.' or '..' are not read")
        uri = cls(parts.scheme.lower(), service, bucket, key, account, parts.query)
        if "/" in uri.name:
            raise ConfigError(f"{where}: the name of a file has a slash in it (%2F), and is not read")
        return uri

    @property
    def text(self) -> str:
        """The address for people, without the query."""
        host = f"{self.account}/{self.bucket}" if self.account else self.bucket
        return f"{self.scheme}://{host}/{self.key}".rstrip("/")

    @property
    def name(self) -> str:
        """The last part of the key; of HTTP, what it stands for (``%20`` is a blank), but where the address is signed:
        that is asked for as it was written.
        """
        last = posixpath.basename(self.key)
        return unquote(last) if self.service == "http" and not self.query else last

    @property
    def parent(self) -> ObjectUri:
        """The address one level up, without a query."""
        return replace(self, key=posixpath.dirname(self.key), query="")

    def below(self, folder: str) -> ObjectUri:
        """Return the address of `folder`, a relative path, in this one. Raises ConfigError for any other path."""
        if folder.startswith("/") or ({".", "..", ""} & set(folder.strip("/").split("/")) and folder):
            raise ConfigError(f"subfolder {shown(folder)!r}: a relative path without '..' is expected")
        return replace(self, key=posixpath.join(self.key, folder.strip("/"))) if folder else self


def _unquoted(where: str, key: str) -> str:
    try:
        return unquote(key, errors="strict")
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: what is written with '%' in it is no UTF-8") from None


def _authority(where: str, service: Service, netloc: str) -> tuple[str, str]:
    """Return bucket and account. Raises ConfigError where there is no bucket, and where somebody put a key."""
    before, at, host = netloc.rpartition("@")
    account = _ACCOUNT.fullmatch(host) if at and service == "az" else None
    if account is not None and _CONTAINER.fullmatch(before):  # abfss://container@account.dfs.core.windows.net
        return before, account[1]
    if at:
        raise ConfigError(
            f"{where}: an address holds no keys or passwords: take them out, and give them in the environment"
        )
    if service == "http" and not _HOST.fullmatch(host):
        raise ConfigError(f"{where}: a host is expected after '://', with a port if need be")
    if service != "http" and not _BUCKET.fullmatch(host):
        raise ConfigError(f"{where}: the name of a bucket is expected after '://'")
    return host, ""
