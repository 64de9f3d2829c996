"""Reported failures of finding the files of a checkpoint, each as a case that must come out right."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import ar, write_index, write_safetensors
from helpers.reading import as_lists, read_all, tensors_of, watching_opens
from tensorferry.errors import CorruptFile, FormatError, LocateError, UnsafeFile
from tensorferry.formats.opening import open_files
from tensorferry.storage.local import LocalStorage

INDEX = "model.safetensors.index.json"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_disc_01_an_index_that_names_an_absent_shard_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    write_safetensors(tmp_path / A, {"a": ar(2)})
    write_index(tmp_path / INDEX, {"a": A, "b": B})
    with watching_opens() as opened, pytest.raises(LocateError, match=B):
        open_files(tmp_path)
    assert not [path for path in opened if path.endswith(".safetensors")]


def test_disc_02_a_stale_index_never_gives_a_partial_set(tmp_path: Path) -> None:
    write_safetensors(tmp_path / A, {"a": ar(2)})
    write_safetensors(tmp_path / B, {"b": ar(2, start=5)})
    write_index(tmp_path / INDEX, {"a": A, "b": "old-00001-of-00001.safetensors"})
    with pytest.raises(LocateError, match=rf"{INDEX}.*old-00001-of-00001\.safetensors"):
        open_files(tmp_path)
    assert read_all(tmp_path, allow_patterns=["model-*"]) == {"a": [0, 1], "b": [5, 6]}


def only_bin_shards(folder: Path) -> None:
    shard = "pytorch_model-00001-of-00001.bin"
    torch.save({"a": ar(2)}, folder / shard)
    write_index(folder / "pytorch_model.bin.index.json", {"a": shard})
    write_index(folder / INDEX, {"a": "model-00001-of-00001.safetensors"})


@pytest.mark.parametrize("load_format", ["auto", "hf"])
def test_disc_03_a_complete_bin_set_stands_in_with_a_warning(tmp_path: Path, load_format: str) -> None:
    only_bin_shards(tmp_path)
    with open_files(tmp_path, load_format=load_format) as opened:
        assert as_lists(tensors_of(opened)) == {"a": [0, 1]}
        assert f"{INDEX} names 1 file and none of them is there" in opened.warnings[0]
        assert "pytorch_model.bin.index.json is used instead" in opened.warnings[0]


def test_disc_03_where_pickles_are_not_allowed_the_bin_set_is_mentioned(tmp_path: Path) -> None:
    only_bin_shards(tmp_path)
    with pytest.raises(LocateError, match=r"pytorch_model\.bin\.index\.json"):
        open_files(tmp_path, load_format="safetensors")


def test_disc_04_consolidated_and_hf_files_are_never_both_read(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": ar(2)})
    write_safetensors(tmp_path / "consolidated.safetensors", {"tok_embeddings.weight": ar(2, start=9)})
    with LocalStorage(tmp_path) as storage, watching_opens() as seen, open_files(tmp_path) as opened:
        before = storage.counters.bytes_read
        assert as_lists(tensors_of(replace(opened, storage=storage))) == {"a": [0, 1]}
        assert storage.counters.bytes_read - before == 8
    assert not [path for path in seen if path.endswith("consolidated.safetensors")]
    assert read_all(tmp_path, load_format="mistral") == {"tok_embeddings.weight": [9, 10]}


def test_disc_06_of_two_splits_the_index_decides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x, y1, y2 = "x-00001-of-00001.safetensors", "y-00001-of-00002.safetensors", "y-00002-of-00002.safetensors"
    write_safetensors(tmp_path / x, {"a": ar(2, start=100), "b": ar(2, start=200)})
    write_safetensors(tmp_path / y1, {"a": ar(2)})
    write_safetensors(tmp_path / y2, {"b": ar(2, start=5)})
    index = write_index(tmp_path / INDEX, {"a": y1, "b": y2})
    with watching_opens() as opened, caplog.at_level(logging.INFO, "tensorferry"):
        assert read_all(tmp_path) == {"a": [0, 1], "b": [5, 6]}
    assert not [path for path in opened if path.endswith(x)]
    assert [r.levelname for r in caplog.records if x in r.message] == ["INFO"]
    index.unlink()
    with pytest.raises(FormatError, match=f"{x} or {y1}, {y2}"):
        open_files(tmp_path)


def test_disc_07_a_stray_quantized_file_beside_indexed_shards_is_not_read(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-00001-of-00001.safetensors", {"w": ar(2, 2, dtype=torch.bfloat16)})
    write_safetensors(tmp_path / "model.safetensors", {"w": torch.zeros(2, 1, dtype=torch.int32)})
    write_index(tmp_path / INDEX, {"w": "model-00001-of-00001.safetensors"})
    with watching_opens() as seen, open_files(tmp_path) as opened:
        w = tensors_of(opened)["w"]
    assert w.dtype == torch.bfloat16
    assert w.tolist() == [[0, 1], [2, 3]]
    assert not [path for path in seen if path.endswith("/model.safetensors")]


def test_disc_09_training_state_is_no_weights_and_is_never_opened(tmp_path: Path) -> None:
    torch.save({"w": ar(2)}, tmp_path / "pytorch_model.bin")
    torch.save({"lr": 1.0}, tmp_path / "training_args.bin")
    torch.save({"state": {0: ar(2)}}, tmp_path / "optimizer.bin")
    for name in ("scheduler.pt", "scaler.pt", "rng_state_0.pth", "trainer_state.pt"):
        torch.save({"x": ar(1)}, tmp_path / name)
    with watching_opens() as opened:
        assert read_all(tmp_path) == {"w": [0, 1]}
    assert {Path(p).name for p in opened if str(tmp_path) in p} == {"pytorch_model.bin"}


def test_disc_10_an_adapter_is_not_loaded_as_a_model(tmp_path: Path) -> None:
    names = ("base_model.model.lm_head.weight", "base_model.model.q.lora_A.weight", "base_model.model.q.lora_B.weight")
    write_safetensors(tmp_path / "adapter_model.safetensors", {name: ar(2, 2) for name in names})
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(LocateError, match=r"This is an adapter \(adapter_model\.safetensors\), not a model"):
        open_files(tmp_path)


def test_disc_12_the_same_weights_in_sub_folders_are_not_touched(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": ar(2)})
    write_safetensors(tmp_path / "metal" / "model.safetensors", {"a": ar(2)})
    (tmp_path / "original").mkdir()
    torch.save({"a": ar(2)}, tmp_path / "original" / "consolidated.00.pth")
    with watching_opens() as opened:
        assert read_all(tmp_path) == {"a": [0, 1]}
    assert [p for p in opened if str(tmp_path) in p] == [str(tmp_path / "model.safetensors")]


def test_disc_14_a_dangling_link_is_said_with_both_its_ends(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../../blobs/nope")
    with pytest.raises(LocateError, match=r"broken link.*model\.safetensors.*nope"):
        open_files(tmp_path)


def test_disc_14_a_weight_file_of_zero_bytes_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CorruptFile, match=r"model\.safetensors: 0 bytes"):
        open_files(tmp_path)


def test_disc_14_a_dangling_link_among_the_shards_is_said_with_both_its_ends(tmp_path: Path) -> None:
    write_safetensors(tmp_path / A, {"a": ar(2)})
    (tmp_path / B).symlink_to("../../blobs/nope")
    write_index(tmp_path / INDEX, {"a": A, "b": B})
    with pytest.raises(LocateError, match=f"broken link.*{B}.*nope"):
        open_files(tmp_path)


def test_disc_15_a_linked_folder_is_the_folder(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "real" / "model.safetensors", {"a": ar(2)})
    (tmp_path / "link").symlink_to("real")
    assert read_all(tmp_path / "link") == read_all(tmp_path / "real") == {"a": [0, 1]}


def test_disc_15_a_hub_cache_whose_files_are_links_is_read_also_through_a_linked_root(tmp_path: Path) -> None:
    repo = tmp_path / "cache" / "models--owner--model"
    snapshot = repo / "snapshots" / ("0" * 40)
    write_safetensors(repo / "blobs" / "blob", {"a": ar(2)})
    (snapshot / "unet").mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/blob")
    (snapshot / "unet" / "model.safetensors").symlink_to("../../../blobs/blob")
    (tmp_path / "linked").symlink_to("cache")
    through = tmp_path / "linked" / repo.name / "snapshots" / snapshot.name
    assert read_all(through) == read_all(through, subfolder="unet") == {"a": [0, 1]}
    assert read_all(through / "model.safetensors") == {"a": [0, 1]}


@pytest.mark.parametrize("shard", ["../x.safetensors", "sub/../../x.safetensors", "ABSOLUTE"])
def test_disc_18_an_index_never_leads_out_of_its_folder(tmp_path: Path, shard: str) -> None:
    outside = write_safetensors(tmp_path / "x.safetensors", {"w": ar(2, start=666)})
    (tmp_path / "m").mkdir()
    write_index(tmp_path / "m" / INDEX, {"w": str(outside) if shard == "ABSOLUTE" else shard})
    with watching_opens() as opened, pytest.raises(UnsafeFile, match=r"x\.safetensors"):
        open_files(tmp_path / "m")
    assert str(outside) not in opened


def test_disc_18_a_nested_relative_name_is_fine(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "shards" / "x.safetensors", {"w": ar(2)})
    write_index(tmp_path / INDEX, {"w": "shards/x.safetensors"})
    assert read_all(tmp_path) == {"w": [0, 1]}


def test_disc_19_safetensors_win_over_bin_and_the_report_says_so(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"w": ar(2)})
    torch.save({"w": ar(2, start=7)}, tmp_path / "pytorch_model.bin")
    with watching_opens() as seen, open_files(tmp_path) as opened:
        assert tensors_of(opened)["w"].tolist() == [0, 1]
        assert opened.selection.reason == "model.safetensors is the HF safetensors file"
        assert opened.selection.ignored == (("pytorch_model.bin", "not HF safetensors"),)
    assert not [path for path in seen if path.endswith(".bin")]


def test_disc_21_mistral_without_a_consolidated_file_lists_what_exists(tmp_path: Path) -> None:
    write_safetensors(tmp_path / A, {"a": ar(2)})
    write_safetensors(tmp_path / B, {"b": ar(2)})
    with pytest.raises(LocateError, match=r"consolidated.*HF safetensors shards: 2 files \(model-00001-of-00002"):
        open_files(tmp_path, load_format="mistral")
