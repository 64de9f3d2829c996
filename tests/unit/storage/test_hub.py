"""Files come from the Hub into its cache: what a chooser wants, of one commit, and with errors in clear words."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")

import huggingface_hub

from helpers.hubserver import TOKEN, HubServer, Request, hub_for_tests
from tensorferry.errors import ConfigError, CorruptFile, LocateError
from tensorferry.storage import hub as hub_module
from tensorferry.storage.hub import Listing, Snapshot, fetch_snapshot, is_offline

NAME = "owner/model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_for_tests(monkeypatch, tmp_path / "home") as server:
        yield server


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights!")
    (folder / "sub" / "other.bin").write_bytes(b"not wanted")
    return folder


def everything(listing: Listing) -> list[str]:
    return [file.path for file in listing.files]


def model_only(listing: Listing) -> list[str]:
    return ["model.safetensors"]


def contents(snapshot: Snapshot) -> dict[str, bytes]:
    files = (p for p in snapshot.path.rglob("*") if p.is_file())
    return {p.relative_to(snapshot.path).as_posix(): p.read_bytes() for p in files}


def test_what_the_chooser_wants_is_fetched_and_nothing_else(hub: HubServer, repo: Path) -> None:
    commit = hub.add(NAME, repo)
    snapshot = fetch_snapshot(NAME, model_only)
    assert contents(snapshot) == {"model.safetensors": b"weights!"}
    assert (snapshot.name, snapshot.commit) == (NAME, commit)
    assert hub.resolved() == ["model.safetensors"]


def test_the_chooser_sees_all_files_with_their_sizes_and_may_read_one(hub: HubServer, repo: Path) -> None:
    hub.add(NAME, repo)
    seen: list[Any] = []

    def choose(listing: Listing) -> list[str]:
        seen.append({file.path: file.size for file in listing.files})
        seen.append(listing.read("config.json"))
        return ["config.json"]

    fetch_snapshot(NAME, choose)
    assert seen == [{"config.json": 2, "model.safetensors": 8, "sub/other.bin": 10}, b"{}"]


def test_a_chooser_that_refuses_costs_no_download(hub: HubServer, repo: Path) -> None:
    hub.add(NAME, repo)

    def refuse(listing: Listing) -> list[str]:
        raise LocateError(f"{listing.where}: nothing to load")

    with pytest.raises(LocateError, match=f"{NAME} at [0-9a-f]{{12}}"):
        fetch_snapshot(NAME, refuse)
    assert hub.resolved() == []


def test_a_second_call_is_one_request(hub: HubServer, repo: Path) -> None:
    hub.add(NAME, repo)
    first = fetch_snapshot(NAME, everything)
    hub.log.clear()
    assert fetch_snapshot(NAME, everything) == first
    assert [request.path for request in hub.log] == [f"/api/models/{NAME}"]


def test_a_cache_that_cannot_be_written_is_read(hub: HubServer, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, repo)
    first = fetch_snapshot(NAME, everything)
    refs = list((first.path.parents[1] / "refs").iterdir())
    refs[0].write_text("0" * 40)

    def read_only(*args: object, **kwargs: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_text", read_only)
    assert fetch_snapshot(NAME, everything) == first


def test_a_changed_branch_is_followed_and_a_commit_is_kept(hub: HubServer, repo: Path, tmp_path: Path) -> None:
    old = hub.add(NAME, repo)
    fetch_snapshot(NAME, model_only)
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "model.safetensors").write_bytes(b"changed!")
    hub.repos[NAME].revisions["old"] = repo
    hub.add(NAME, newer)
    assert contents(fetch_snapshot(NAME, model_only))["model.safetensors"] == b"changed!"
    assert contents(fetch_snapshot(NAME, model_only, revision=old))["model.safetensors"] == b"weights!"


def test_the_cache_can_be_given(hub: HubServer, repo: Path, tmp_path: Path) -> None:
    hub.add(NAME, repo)
    assert fetch_snapshot(NAME, model_only, cache_dir=tmp_path / "mine").path.is_relative_to(tmp_path / "mine")


def test_the_caches_environment_is_read_at_each_call(
    hub: HubServer, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, repo)
    assert fetch_snapshot(NAME, model_only).path.is_relative_to(tmp_path / "home" / "hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert fetch_snapshot(NAME, model_only).path.is_relative_to(tmp_path / "cache")


def test_a_cached_file_of_the_wrong_size_is_corrupt(hub: HubServer, repo: Path) -> None:
    hub.add(NAME, repo)
    snapshot = fetch_snapshot(NAME, model_only)
    (snapshot.path / "model.safetensors").resolve().write_bytes(b"half")
    with pytest.raises(CorruptFile, match="4 bytes in the cache, 8 on the Hub"):
        fetch_snapshot(NAME, model_only)


# -- offline ---------------


def test_offline_the_choice_is_made_in_the_cache_without_a_request(
    hub: HubServer, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, repo)
    online = fetch_snapshot(NAME, model_only)
    hub.log.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    seen: list[list[str]] = []
    offline = fetch_snapshot(NAME, lambda listing: seen.append(everything(listing)) or [])  # type: ignore[func-returns-value]
    assert offline == online
    assert seen == [["model.safetensors"]]
    assert hub.log == []


def test_local_files_only_is_offline_for_one_call(hub: HubServer, repo: Path) -> None:
    commit = hub.add(NAME, repo)
    fetch_snapshot(NAME, everything)
    hub.log.clear()
    assert fetch_snapshot(NAME, everything, local_files_only=True).commit == commit
    assert fetch_snapshot(NAME, everything, local_files_only=True, revision=commit).commit == commit
    assert hub.log == []


def test_offline_an_unknown_model_is_refused_with_the_cache_and_the_variable(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(LocateError, match=r"'main' is not in the cache .*home.*\(offline\).*HF_HOME"):
        fetch_snapshot(NAME, everything, local_files_only=True)


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_offline_variable_is_read_as_the_hub_reads_it(
    value: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert is_offline() is expected


def test_an_unreachable_hub_leaves_the_cache(
    hub: HubServer, repo: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, repo)
    online = fetch_snapshot(NAME, everything)
    hub.fault = lambda request: 503
    with caplog.at_level(logging.WARNING, "tensorferry"):
        assert fetch_snapshot(NAME, everything) == online
    assert "using what the cache holds" in caplog.text
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetch_snapshot(NAME, everything) == online


def test_an_unreachable_hub_and_no_cache_is_said_with_the_endpoint(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(LocateError, match=r"cannot reach the Hub at http://127\.0\.0\.1:9"):
        fetch_snapshot(NAME, everything)


# -- refusals ---------------


@pytest.mark.parametrize("name", ["a/b/c", "../etc", "/abs/path", "a--b/c", "owner/mo del", ""])
def test_what_cannot_be_a_name_is_refused_without_a_request(hub: HubServer, name: str) -> None:
    with pytest.raises(LocateError, match="neither a folder here nor a name on the Hub"):
        fetch_snapshot(name, everything)
    assert hub.log == []


@pytest.mark.parametrize("revision", ["../x", "a b", ""])
def test_what_cannot_be_a_revision_is_refused(hub: HubServer, revision: str) -> None:
    with pytest.raises(ConfigError, match="a branch, a tag or a commit is expected"):
        fetch_snapshot(NAME, everything, revision=revision)


def test_a_listed_path_that_leads_out_is_not_shown_to_the_chooser() -> None:
    assert [p for p in ("a/b.json", "../x", "/x", "a/../../x", "a\\b") if hub_module._is_plain(p)] == ["a/b.json"]


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str, *args: object) -> object:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(hub_module, "import_module", absent)
    with pytest.raises(ConfigError, match=r"pip install 'tensorferry\[hub\]'"):
        fetch_snapshot(NAME, everything)


def test_the_token_goes_to_the_hub_and_never_to_the_cdn(hub: HubServer, repo: Path) -> None:
    hub.add(NAME, repo, private=True)
    fetch_snapshot(NAME, everything, token=TOKEN)
    sent = {(request.host, request.authorization) for request in hub.log}
    assert sent == {("hub", f"Bearer {TOKEN}"), ("cdn", None)}


def test_a_file_that_vanishes_is_no_silent_gap(hub: HubServer, repo: Path) -> None:
    hub.add(NAME, repo)

    def fault(request: Request) -> int | None:
        return 404 if "/resolve/" in request.path else None

    hub.fault = fault
    with pytest.raises(LocateError, match=NAME):
        fetch_snapshot(NAME, everything)


def test_a_password_in_the_endpoint_is_in_no_message(
    hub: HubServer, repo: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add(NAME, repo)
    fetch_snapshot(NAME, model_only)
    monkeypatch.setenv("HF_ENDPOINT", "http://me:secr@t@127.0.0.1:9")
    with caplog.at_level(logging.WARNING, "tensorferry"):
        fetch_snapshot(NAME, model_only)
    with pytest.raises(LocateError, match=r"cannot reach the Hub at http://127\.0\.0\.1:9") as caught:
        fetch_snapshot("owner/other", model_only)
    assert "cannot reach the Hub" in caplog.text
    assert not [said for said in (caplog.text, str(caught.value)) if "secr" in said or "me:" in said]


# -- answers that are none ---------------


def answers(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """Have the Hub's library be told of a model what `answer` is, or raise it."""

    def told(*args: object, **kwargs: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", told)


@pytest.mark.parametrize("sha", [None, "", "../../outside", "/etc", ".."])
def test_a_commit_that_is_none_becomes_no_path(
    hub: HubServer, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sha: str | None
) -> None:
    hub.add(NAME, repo)
    there = fetch_snapshot(NAME, model_only)
    (there.path.parents[1] / "outside").mkdir()
    (there.path.parents[1] / "outside" / "model.safetensors").write_bytes(b"weights?")
    listed = SimpleNamespace(rfilename="model.safetensors", size=8, blob_id=None)
    answers(monkeypatch, SimpleNamespace(sha=sha, siblings=[listed]))
    with pytest.raises(LocateError, match="is no commit"):
        fetch_snapshot(NAME, model_only)


def test_a_page_in_place_of_an_answer_is_no_hub_and_leaves_the_cache(
    hub: HubServer, repo: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add(NAME, repo)
    online = fetch_snapshot(NAME, model_only)
    answers(monkeypatch, json.JSONDecodeError("Expecting value", "<html>", 0))
    with caplog.at_level(logging.WARNING, "tensorferry"):
        assert fetch_snapshot(NAME, model_only) == online
    assert "what answered there is not the Hub (JSONDecodeError); using what the cache holds" in caplog.text
    with pytest.raises(LocateError, match=r"owner/other at .*: what answered there is not the Hub"):
        fetch_snapshot("owner/other", model_only)


def test_a_set_whose_names_do_not_tell_how_many_there_are_is_not_taken_in_part(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parts").mkdir()
    for name in ("language.safetensors", "vision.safetensors"):
        (tmp_path / "parts" / name).write_bytes(b"weights!")
    commit = hub.add(NAME, tmp_path / "parts")
    fetch = huggingface_hub.HfApi.snapshot_download

    def breaks_off(api: Any, *args: Any, allow_patterns: list[str], **options: Any) -> None:
        fetch(api, *args, allow_patterns=allow_patterns[:1], **options)
        raise ConnectionError("the network is gone")

    with monkeypatch.context() as during:
        during.setattr(huggingface_hub.HfApi, "snapshot_download", breaks_off)
        with pytest.raises(LocateError, match="cannot reach the Hub"):
            fetch_snapshot(NAME, everything)
    with pytest.raises(LocateError, match="not in the cache"):
        fetch_snapshot(NAME, everything, local_files_only=True)
    assert contents(fetch_snapshot(NAME, everything)).keys() == {"language.safetensors", "vision.safetensors"}
    assert fetch_snapshot(NAME, everything).commit == commit


def as_others_do() -> huggingface_hub.HfApi:
    return huggingface_hub.HfApi(endpoint=os.environ["HF_ENDPOINT"])


@pytest.mark.parametrize("by", ["branch that another program fetched", "commit"])
def test_a_fetch_that_was_killed_is_not_taken_for_all(
    hub: HubServer, repo: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    commit = hub.add(NAME, repo)
    fetch = huggingface_hub.HfApi.snapshot_download

    def killed(api: Any, *args: Any, allow_patterns: list[str], **options: Any) -> None:
        fetch(api, *args, allow_patterns=allow_patterns[:1], **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(huggingface_hub.HfApi, "snapshot_download", killed)
        with pytest.raises(KeyboardInterrupt):
            fetch_snapshot(NAME, everything)
    revision = None
    if by == "commit":
        revision = commit
    else:
        as_others_do().hf_hub_download(NAME, "config.json", cache_dir=hub_module._default_cache())
    with pytest.raises(LocateError, match=r"fetching it was broken off, and model\.safetensors, .* did not come"):
        fetch_snapshot(NAME, everything, revision=revision, local_files_only=True)
    there = fetch_snapshot(NAME, lambda listing: ["config.json"], revision=revision, local_files_only=True)
    assert (there.path / "config.json").is_file()
    fetch_snapshot(NAME, lambda listing: ["sub/other.bin"], revision=revision)
    with pytest.raises(LocateError, match=r"and model\.safetensors did not come"):
        fetch_snapshot(NAME, everything, revision=revision, local_files_only=True)
    whole = fetch_snapshot(NAME, everything, revision=revision)
    assert fetch_snapshot(NAME, everything, revision=revision, local_files_only=True) == whole
    assert not list((whole.path.parents[1] / ".tensorferry").iterdir())
    assert [repo.repo_id for repo in huggingface_hub.scan_cache_dir(whole.path.parents[2]).repos] == [NAME]


def test_what_a_broken_off_fetch_lacks_may_come_by_another_program(
    hub: HubServer, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add(NAME, repo)

    def killed(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(huggingface_hub.HfApi, "snapshot_download", killed)
        with pytest.raises(KeyboardInterrupt):
            fetch_snapshot(NAME, everything)
    as_others_do().snapshot_download(NAME, cache_dir=hub_module._default_cache())
    assert fetch_snapshot(NAME, everything, local_files_only=True).commit == commit


@pytest.mark.parametrize("note", ["", "[]", "{}", '{"a": null}', '{"../../x": 1}', "[" * 100_000])
def test_a_note_of_what_is_to_come_that_says_nothing_is_passed_over(hub: HubServer, repo: Path, note: str) -> None:
    hub.add(NAME, repo)
    there = fetch_snapshot(NAME, everything)
    (there.path.parents[1] / ".tensorferry").mkdir(exist_ok=True)
    (there.path.parents[1] / ".tensorferry" / f"{there.commit}.json").write_text(note)
    assert fetch_snapshot(NAME, everything, local_files_only=True) == there


def test_a_listing_that_tells_no_sizes_is_enough(hub: HubServer, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.add(NAME, repo)
    listed = [SimpleNamespace(rfilename=path, size=None, blob_id=None) for path in ("config.json", "model.safetensors")]
    answers(monkeypatch, SimpleNamespace(sha=commit, siblings=listed))
    assert contents(fetch_snapshot(NAME, everything)) == {"config.json": b"{}", "model.safetensors": b"weights!"}
