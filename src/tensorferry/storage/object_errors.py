"""What went wrong with an object store, as one of our errors: which object, what was asked, with which credentials.

Nothing of what a server or a library says gets into a message but status and error code: the rest may hold keys,
signatures and addresses that are signed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import quote

from tensorferry.errors import AccessDenied, LocateError, ReadError

__all__ = ["LISTING", "Fault", "explained", "is_absent", "is_changed", "said_by"]

Fault = LocateError | ReadError

LISTING = "listing it"
"""What is being done where nothing but a bucket can be absent."""

_STATUS = re.compile(r"\bstatus: (\d{3})\b|\bstatus code:? (\d{3})\b")
_CODE = re.compile(r"<Code>([A-Za-z][A-Za-z0-9]{1,60})</Code>")
_CREDENTIALS = re.compile(r"(?i)credential|169\.254\.|metadata\.google\.internal|/oauth2?/|TokenRequest|AssumeRole")
_REGION = ("BareRedirect", "AuthorizationHeaderMalformed", "PermanentRedirect")
_WHOLE = ("NotPartial", "non-partial")
_OTHER_PART = ("UnexpectedRange", "Content-Range", "ContentRange")
_SLOW = ("kind: Timeout", "TimedOut", "timed out")
_UNREACHED = ("kind: Connect", "ConnectError", "dns error")
_SIGNS = (*_WHOLE, *_OTHER_PART, *_SLOW, *_UNREACHED)
_MISLEADING = re.compile("|".join((_CREDENTIALS.pattern, _STATUS.pattern, *_REGION, *_SIGNS)))
_WRONG_KEY = {
    "InvalidAccessKeyId": "the access key is not known there",
    "SignatureDoesNotMatch": "the secret key is not that of the access key",
    "ExpiredToken": "the session token has expired: get a new one",
    "TokenRefreshRequired": "the session token has expired: get a new one",
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
}
_RIGHTS = "check the credentials, and whether they may read and list there"


def said_by(error: Exception, where: str, key: str) -> str:
    """Return the text of `error` without what was asked for, of which any word may be a part: the URL, and names.

    where: the address of the bucket, or below it. key: of the object, or of what was listed.
    """
    text = str(error)
    count = 2 if where.startswith(("az", "abfs")) else 1  # account and bucket
    names = {key, *where.partition("://")[2].split("/")[:count]} - {""}
    spelled = {form for name in names for form in (name, quote(name), quote(name, safe=""))}
    if not spelled:
        return text
    text = re.sub(rf"""\w+://(?!169\.254\.|metadata\.)[^\s"'<>]*?{_any_of(spelled)}[^\s"'<>]*""", "…", text)
    misleading = {form for form in spelled if _MISLEADING.search(form)}
    return re.sub(_any_of(misleading), "…", text) if misleading else text


def _any_of(names: set[str]) -> str:
    longest_first = sorted(names, key=len, reverse=True)
    return rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)"


def explained(error: Exception, said: str, label: str, doing: str, access: str) -> Fault:
    """Return `error`, which a client has raised, as one of ours.

    said: its text, without what was asked for. label: the object, or the place. doing: what was asked, in words such as
    "reading 8 bytes at offset 0". access: with which credentials, in words that hold none.
    """
    kind = type(error).__name__
    status, code = _status(said), next(iter(_CODE.findall(said)), "")
    told = ", ".join(filter(None, (str(status or ""), code)))
    if status in (401, 403) or kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return AccessDenied(
            f"{label}: refused ({told or kind}) while {doing}, {access}: {_WRONG_KEY.get(code, _RIGHTS)}"
        )
    if kind == "InvalidPathError":
        return AccessDenied(
            f"{label}: a key there has empty parts, '.', '..' or control characters, so that obstore does not list it: "
            "name the weight file or its index, or take that key away"
        )
    if _any_in(said, _REGION):
        return LocateError(f"{label}: the bucket is in another region than was asked, while {doing}: set AWS_REGION")
    if is_absent(error, said):
        return LocateError(f"{label}: {_absence(code, doing)}")
    if not status and _CREDENTIALS.search(said):
        return AccessDenied(f"{label}: no credentials were to be had while {doing}, {access}: {_HOW}")
    return ReadError(f"{label}: {_failure(said, status, told, kind)}, while {doing}")


_HOW = "give some in the environment, or say that the bucket is public (AWS_SKIP_SIGNATURE=true and its like)"


def is_absent(error: Exception, said: str) -> bool:
    """Whether the server says that there is no such thing."""
    return isinstance(error, FileNotFoundError) or type(error).__name__ == "NotFoundError" or _status(said) == 404


def is_changed(error: Exception, said: str) -> bool:
    """Whether the server says that the object is no longer the one that was asked for."""
    return type(error).__name__ == "PreconditionError" or _status(said) == 412


def _any_in(said: str, signs: Sequence[str]) -> bool:
    return any(sign in said for sign in signs)


def _status(said: str) -> int | None:
    found = _STATUS.search(said)
    return int(found[1] or found[2]) if found else None


def _absence(code: str, doing: str) -> str:
    if doing == LISTING or code in ("NoSuchBucket", "ContainerNotFound", "AccountNotFound"):
        return "there is no such bucket: check its name, and the endpoint"
    return "there is no such object"


def _failure(said: str, status: int | None, told: str, kind: str) -> str:
    """Return in words what became of a request that found something, or nobody."""
    if _any_in(said, _WHOLE):
        return (
            "the server answers with the whole where a part is asked for, so that it cannot be read in parts: fetch it"
        )
    if _any_in(said, _OTHER_PART):
        return "the server answers with another part than was asked for"
    if status == 416 or "InvalidRange" in told:
        return "it ends before what was asked for: it is shorter than was told, or was replaced"
    if status is not None and status >= 500:
        return f"the server cannot answer at present ({told}), after several tries: try again later"
    if status is not None:
        return f"the server answers {told}"
    if _any_in(said, _SLOW):
        return "the server sends nothing for too long, after several tries: check the network, or try again"
    if _any_in(said, _UNREACHED):
        return "the server cannot be reached: check the endpoint and the network"
    return f"the connection broke, after several tries ({kind}): try again"
