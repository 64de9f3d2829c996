"""Reported failures with the Hugging Face Hub, against a look-alike and with the real huggingface_hub."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")

import huggingface_hub

from helpers.checkpoints import ar, write_index, write_safetensors
from helpers.hubserver import TOKEN, HubServer, download_without_locks, hub_for_tests
from helpers.reading import read_all
from tensorferry.errors import AccessDenied, ConfigError, LocateError, ReadError, WriteError
from tensorferry.formats.download import download, local_path
from tensorferry.loaders import LoadConfig
from tensorferry.loaders.sources import Source, locate

NAME = "owner/model"
INDEX = "model.safetensors.index.json"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_for_tests(monkeypatch, tmp_path / "home") as server:
        yield server


def sharded(folder: Path, start: float = 0.0) -> Path:
    write_safetensors(folder / A, {"a": ar(2, start=start)})
    write_safetensors(folder / B, {"b": ar(2, start=start + 5)})
    write_index(folder / INDEX, {"a": A, "b": B})
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return sharded(tmp_path / "repo")


def files_of(path: Path) -> list[str]:
    return sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())


def test_disc_22_only_what_will_be_loaded_is_asked_for(hub: HubServer, repo: Path) -> None:
    write_safetensors(repo / "consolidated.safetensors", {"tok_embeddings.weight": ar(2, start=9)})
    write_safetensors(repo / "original" / "model.safetensors", {"a": ar(2)})
    (repo / "pytorch_model.bin").write_bytes(b"never fetched")
    hub.add(NAME, repo)
    snapshot = download(NAME)
    assert hub.resolved() == ["config.json", A, B, INDEX]
    assert read_all(snapshot.path) == {"a": [0, 1], "b": [5, 6]}


def test_disc_22_the_other_set_is_fetched_when_its_format_is_asked_for(hub: HubServer, repo: Path) -> None:
    write_safetensors(repo / "consolidated.safetensors", {"tok_embeddings.weight": ar(2, start=9)})
    hub.add(NAME, repo)
    snapshot = download(NAME, load_format="mistral")
    assert hub.resolved() == ["config.json", "consolidated.safetensors"]
    assert read_all(snapshot.path, load_format="mistral") == {"tok_embeddings.weight": [9, 10]}


def test_disc_22_a_shard_that_the_listing_lacks_is_refused_before_any_download(hub: HubServer, repo: Path) -> None:
    (repo / B).unlink()
    hub.add(NAME, repo)
    with pytest.raises(LocateError, match=f"{INDEX} names 2 files and 1 of them is not there: {B}"):
        download(NAME)
    assert hub.resolved() == [INDEX]


def test_disc_22_variants_sub_folders_and_patterns_are_chosen_before_the_download(hub: HubServer, repo: Path) -> None:
    write_safetensors(repo / "unet" / "diffusion_pytorch_model.safetensors", {"u": ar(1)})
    write_safetensors(repo / "unet" / "diffusion_pytorch_model.fp16.safetensors", {"u": ar(1, start=3)})
    (repo / "unet" / "config.json").write_text("{}")
    hub.add(NAME, repo)
    snapshot = download(NAME, subfolder="unet", variant="fp16")
    weights = "unet/diffusion_pytorch_model.fp16.safetensors"
    assert hub.resolved() == ["config.json", "unet/config.json", weights]
    assert read_all(snapshot.path, subfolder="unet", variant="fp16") == {"u": [3]}
    hub.log.clear()
    download(NAME, allow_patterns=["model-00002*"], ignore_patterns=["*.json"])
    assert hub.resolved() == [B]


def test_disc_22_patterns_are_of_paths_as_the_sub_folder_that_is_asked_for_has_them(hub: HubServer, repo: Path) -> None:
    (repo / "original").mkdir()
    sharded(repo / "original", start=7)
    hub.add(NAME, repo)
    ignored = ("original/*",)
    assert not [path for path in files_of(download(NAME, ignore_patterns=ignored).path) if "original" in path]
    found = download(NAME, subfolder="original", ignore_patterns=ignored).path
    assert read_all(found, subfolder="original", ignore_patterns=ignored) == {"a": [7, 8], "b": [12, 13]}
    assert (found / "original" / "config.json").is_file()
    config = LoadConfig()
    assert config.ignore_patterns == ignored
    assert locate(Source(NAME, subfolder="original"), config, "auto") == found


def test_rem_01_several_processes_share_one_cache_where_locks_do_nothing(hub: HubServer, repo: Path) -> None:
    hub.add(NAME, repo)
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        results = pool.map(download_without_locks, [NAME] * 3, chunksize=1)
    assert results == [{name: (repo / name).read_bytes() for name in ("config.json", INDEX, A, B)}] * 3
    cache = download(NAME).path.parents[1]
    assert [path for path in cache.rglob("*") if path.suffix in (".incomplete", ".tmp")] == []


@pytest.mark.parametrize("token", [None, "hf_wrong"])
def test_rem_05_a_private_repository_needs_a_valid_token(hub: HubServer, repo: Path, token: str | None) -> None:
    hub.add(NAME, repo, private=True)
    expected = "no token was sent (401): set HF_TOKEN" if token is None else "the token is not valid"
    with pytest.raises(AccessDenied, match=re.escape(expected)):
        download(NAME, token=token)
    assert read_all(download(NAME, token=TOKEN).path) == {"a": [0, 1], "b": [5, 6]}


def test_rem_05_a_gated_repository_without_a_token_says_both_steps(hub: HubServer, repo: Path) -> None:
    hub.add(NAME, repo, gated=True)
    with pytest.raises(AccessDenied, match=rf"is gated \(401\), and no token was sent: .* {hub.url}/{NAME}"):
        download(NAME)


def test_rem_05_a_token_without_accepted_terms_is_told_so(hub: HubServer, repo: Path) -> None:
    hub.add(NAME, repo, gated=True)
    hub.accepted.clear()
    with pytest.raises(AccessDenied, match=r"is gated \(403\), and this token may not read it: accept its terms"):
        download(NAME, token=TOKEN)


def test_rem_05_a_repository_that_a_token_does_not_find_is_absent_or_private(hub: HubServer) -> None:
    with pytest.raises(LocateError, match=r"no such repository, or a private one .* \(404\)"):
        download("owner/nothing", token=TOKEN)


def test_rem_05_a_forbidden_repository_is_no_right(hub: HubServer, repo: Path) -> None:
    hub.add(NAME, repo)
    hub.fault = lambda request: 403
    with pytest.raises(AccessDenied, match="no right to read it"):
        download(NAME, token=TOKEN)


def test_rem_04_a_forbidden_file_may_be_one_whose_address_has_expired(hub: HubServer, repo: Path) -> None:
    hub.add(NAME, repo)
    hub.fault = lambda request: 403 if request.host == "cdn" else None
    with pytest.raises(AccessDenied, match=r"or the address of a file, .* has expired \(403\): in that case try again"):
        download(NAME, token=TOKEN)
    with pytest.raises(AccessDenied, match=r"forbidden \(403\), and no token was sent"):
        download(NAME)


def test_rem_05_a_disabled_repository_is_called_so(hub: HubServer, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, repo)
    response: Any = SimpleNamespace(status_code=403, headers={}, request=None)
    disabled = huggingface_hub.errors.DisabledRepoError("off", response=response)
    fails(monkeypatch, "model_info", disabled)
    with pytest.raises(AccessDenied, match=r"the Hub has disabled this repository \(403\)"):
        download(NAME)


def test_rem_05_a_revision_that_is_not_there_is_named(hub: HubServer, repo: Path) -> None:
    hub.add(NAME, repo)
    with pytest.raises(LocateError, match="has no revision 'v9'"):
        download(NAME, revision="v9")


@pytest.mark.parametrize("how", ["private", "gated", "absent"])
def test_rem_05_a_token_is_in_no_message(hub: HubServer, repo: Path, how: str) -> None:
    secret = "hf_averysecrettoken"
    if how != "absent":
        hub.add(NAME, repo, private=how == "private", gated=how == "gated")
    with pytest.raises(LocateError) as caught:
        download(NAME, token=secret)
    chain: BaseException | None = caught.value
    while chain is not None:
        assert secret not in str(chain)
        chain = chain.__cause__ or chain.__context__


def test_rem_05_a_token_is_sent_to_no_other_host(hub: HubServer, repo: Path) -> None:
    hub.add(NAME, repo, gated=True)
    download(NAME, token=TOKEN)
    assert {request.authorization for request in hub.log if request.host == "cdn"} == {None}


def test_rem_06_the_endpoint_is_read_at_call_time_and_sees_every_request(
    hub: HubServer, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, repo)
    download(NAME)  # any request to another host than loopback fails, see hub_for_tests
    with HubServer() as mirror:
        mirror.add(NAME, sharded(tmp_path / "mirrored", start=50))
        monkeypatch.setenv("HF_ENDPOINT", mirror.url)
        hub.log.clear()
        snapshot = download(NAME, cache_dir=tmp_path / "other")
        assert read_all(snapshot.path) == {"a": [50, 51], "b": [55, 56]}
        assert mirror.resolved() == ["config.json", A, B, INDEX]
    assert hub.log == []


def test_rem_08_one_commit_is_used_for_everything(hub: HubServer, repo: Path, tmp_path: Path) -> None:
    hub.add(NAME, sharded(tmp_path / "main", start=100))
    commit = hub.add(NAME, repo, revision="v1")
    snapshot = download(NAME, revision="v1")
    assert snapshot.commit == commit
    assert snapshot.path.name == commit
    asked = [re.search(r"/(?:resolve|tree)/([^/]+)", request.path) for request in hub.log]
    assert {match[1] for match in asked if match} == {commit}
    assert read_all(snapshot.path) == {"a": [0, 1], "b": [5, 6]}


def test_rem_08_a_branch_that_moves_during_the_download_changes_nothing(
    hub: HubServer, repo: Path, tmp_path: Path
) -> None:
    hub.add(NAME, repo)
    newer = sharded(tmp_path / "newer", start=100)

    def push_once_listed(request: object) -> None:
        if hub.resolved() and hub.repos[NAME].revisions["main"] is repo:
            hub.repos[NAME].revisions = {"main": newer, "before": repo}

    hub.fault = push_once_listed
    assert read_all(download(NAME).path) == {"a": [0, 1], "b": [5, 6]}


def test_rem_10_a_complete_cache_is_loaded_without_writing_to_it(hub: HubServer, repo: Path, tmp_path: Path) -> None:
    hub.add(NAME, repo)
    before = download(NAME)
    existing = {path: path.lstat().st_mtime_ns for path in (tmp_path / "home").rglob("*")}
    assert download(NAME) == before
    assert download(NAME, local_files_only=True) == before
    assert {path: path.lstat().st_mtime_ns for path in (tmp_path / "home").rglob("*")} == existing


def test_rem_13_every_small_file_that_a_model_needs_comes_along(hub: HubServer, repo: Path) -> None:
    needed = [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "modeling_custom.py",
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
        "code/layers.py",
    ]
    others = ["README.md", ".gitattributes", "picture.png", "model.onnx", "runs/events.json", "onnx/config.json"]
    for name in needed + others:
        (repo / name).parent.mkdir(exist_ok=True)
        (repo / name).write_text("x")
    hub.add(NAME, repo)
    assert files_of(download(NAME).path) == sorted([*needed, "config.json", A, B, INDEX])


def test_offline_a_model_is_chosen_from_the_cache(hub: HubServer, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, repo)
    online = download(NAME)
    hub.log.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert download(NAME) == online
    assert hub.log == []


def test_offline_an_incomplete_cache_is_refused_with_the_missing_shard(hub: HubServer, repo: Path) -> None:
    hub.add(NAME, repo)
    (download(NAME).path / B).unlink()
    with pytest.raises(LocateError, match=rf"in the cache .* \(offline\): {INDEX} names 2 files .* not there: {B}"):
        download(NAME, local_files_only=True)


def test_corr_16_a_download_that_was_killed_is_never_taken_for_the_file(hub: HubServer, repo: Path) -> None:
    hub.add(NAME, repo)
    hub.go_on = threading.Event()
    fetching = "from tensorferry.formats.download import download; download('owner/model')"
    child = subprocess.Popen([sys.executable, "-c", fetching], env={**os.environ, "HF_HUB_DISABLE_XET": "1"})
    try:
        assert hub.half_way.wait(60)
    finally:
        child.kill()
        child.wait()
        hub.go_on.set()
    hub.go_on = None
    with pytest.raises(LocateError, match=r"not in the cache .* load it once online"):
        download(NAME, local_files_only=True)
    assert read_all(download(NAME).path) == {"a": [0, 1], "b": [5, 6]}


def test_corr_16_an_update_that_was_interrupted_leaves_the_whole_snapshot_in_use(
    hub: HubServer, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, repo)
    download(NAME)
    (tmp_path / "newer").mkdir()
    hub.add(NAME, sharded(tmp_path / "newer", start=20))
    with monkeypatch.context() as during:
        fails(during, "snapshot_download", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            download(NAME)
    assert read_all(download(NAME, local_files_only=True).path) == {"a": [0, 1], "b": [5, 6]}
    assert read_all(download(NAME).path) == {"a": [20, 21], "b": [25, 26]}
    assert read_all(download(NAME, local_files_only=True).path) == {"a": [20, 21], "b": [25, 26]}


def test_rem_09_a_full_disk_says_where_and_what_it_lacks(
    hub: HubServer, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, repo)
    fails(monkeypatch, "snapshot_download", OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(
        WriteError, match=rf"{NAME}: the cache .*: No space left on device \(\d+ B are needed, .* are free\)"
    ):
        download(NAME)


class XetFailed(Exception):
    """As errors of code that is no Python's come."""


@pytest.mark.parametrize("error", [OSError("Consistency check failed"), ValueError("no hash"), XetFailed("cut off")])
def test_rem_15_a_transfer_that_fails_below_the_library_is_a_read_that_failed(
    hub: HubServer, repo: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    hub.add(NAME, repo)
    fails(monkeypatch, "snapshot_download", error)
    said = rf"{NAME} at {hub.url}: fetching it did not succeed \({type(error).__name__}: {error}\): try again"
    with pytest.raises(ReadError, match=said):
        download(NAME)


def test_a_path_that_was_mistyped_is_said_to_be_taken_for_a_name(
    hub: HubServer, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, repo)
    with pytest.raises(
        LocateError, match=r"nothing lies at 'owner/mistyped' here, so that it was taken for a name on the Hub"
    ):
        local_path("owner/mistyped")
    with pytest.raises(AccessDenied, match="nothing lies at 'owner/mistyped' here"):
        locate(Source("owner/mistyped"), LoadConfig(), "auto")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ConfigError, match=r"'owner/mistyped' is nothing that lies here, .* pip install 'tensorferry\[hub\]'"
    ):
        local_path("owner/mistyped")


def fails(monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException) -> None:
    """Have a method of the Hub's library raise `error`."""

    def raises(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, method, raises)


def test_a_process_that_imported_nothing_of_the_hub_before_can_fetch(hub: HubServer, repo: Path) -> None:
    hub.add(NAME, repo)
    fetching = "from tensorferry.formats.download import download; print(download('owner/model').path)"
    done = subprocess.run([sys.executable, "-c", fetching], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert read_all(Path(done.stdout.strip())) == {"a": [0, 1], "b": [5, 6]}
