"""What `convert` writes: the tensors as they are or in another type, in one file or shards, with what lies beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import tensorferry
from helpers.checkpoints import ar, raw, write_index, write_raw_safetensors, write_safetensors
from helpers.safetensors_bytes import header_and_values
from helpers.tiny_transformers import equal_bits
from tensorferry import ConfigError, FinalizeError, LocateError, ReadOptions, Strictness, convert

Tensors = dict[str, torch.Tensor]

MIXED: Tensors = {
    "layers.0.wéight ☃": ar(6, 4, dtype=torch.bfloat16),
    "layers.10.b": ar(3, start=0.5),
    "layers.2.b": ar(3, start=7),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 5),
    "flag": torch.tensor([True, False, True]),
    "count": ar(2, 2, dtype=torch.int64),
    "eight": ar(4, 4, dtype=torch.float8_e4m3fn),
    "double": ar(2, dtype=torch.float64),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_safetensors(tmp_path / "src" / "model.safetensors", MIXED).parent


def tensors_of(path: Path, **opening: Any) -> Tensors:
    with tensorferry.open_checkpoint(path, **opening) as checkpoint:
        return dict(checkpoint.tensors())


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not equal_bits(found[name], tensor)] == []


def test_tensors_of_every_kind_and_name_come_out_as_they_went_in(source: Path, tmp_path: Path) -> None:
    account = convert(source, tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), MIXED)
    assert (account.tensors, account.nbytes) == (9, sum(t.nbytes for t in MIXED.values()))
    assert account.files == {"model.safetensors": (tmp_path / "out" / "model.safetensors").stat().st_size}
    assert account.verified == f"9 tensors, {account.nbytes} B, read back and equal"


def test_the_file_is_what_the_reference_library_writes_but_for_spaces(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")
    made, there = ((folder / "model.safetensors").read_bytes() for folder in (tmp_path / "out", source))
    assert header_and_values(made) == header_and_values(there)


def test_shards_and_their_index_are_those_of_transformers(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    account = convert(source, out, max_shard_size=60)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == account.nbytes
    assert set(index["weight_map"]) == set(MIXED)
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    found: Tensors = {}
    for shard in shards:
        found |= load_file(out / shard)
    assert_same(found, MIXED)
    with safe_open(out / shards[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert account.files == {path.name: path.stat().st_size for path in out.iterdir()}


def test_shards_become_one_file_again(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "shards", max_shard_size=60)
    convert(tmp_path / "shards", tmp_path / "one")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    assert_same(load_file(tmp_path / "one" / "model.safetensors"), MIXED)


def test_a_torch_checkpoint_becomes_safetensors(tmp_path: Path) -> None:
    shared = ar(4, 4)
    saved = {"a.weight": shared, "tied.weight": shared, "turned": ar(3, 5).t(), "part": ar(10)[2:6], "x": MIXED["flag"]}
    (tmp_path / "src").mkdir()
    torch.save(saved, tmp_path / "src" / "pytorch_model.bin")
    account = convert(tmp_path / "src", tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), saved)
    assert any("a.weight, tied.weight" in w and "each has its own now" in w for w in account.warnings)


def test_a_portion_at_a_time_gives_the_same(source: Path, tmp_path: Path) -> None:
    big = {"a": ar(300, 70), "b": ar(5, 9000, dtype=torch.bfloat16), "c": ar(40000, dtype=torch.float64), **MIXED}
    write_safetensors(source / "model.safetensors", big)
    options = ReadOptions(max_staging=16384, max_read=4096)
    account = convert(source, tmp_path / "out", dtype="float32", options=options)
    expected = {n: t.float() if n not in ("flag", "count", "eight") else t for n, t in big.items()}
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), expected)
    assert account.staging_peak <= 16384


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", torch.float64])
def test_floating_tensors_are_cast_as_torch_casts_them_and_no_others(
    source: Path, tmp_path: Path, dtype: torch.dtype | str
) -> None:
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    account = convert(source, tmp_path / "out", dtype=dtype)
    kept = {"flag", "count", "eight"}
    expected = {name: t if name in kept else t.to(wanted) for name, t in MIXED.items()}
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), expected)
    assert set(account.kept) == kept
    assert account.kept["count"] == "integers"


def test_scales_beside_quantized_weights_keep_their_type(tmp_path: Path) -> None:
    tensors = {
        "l.weight": ar(2, 2, dtype=torch.float8_e4m3fn), "l.weight_scale_inv": ar(1, 1), "l.bias": ar(2),
        "g.qweight": ar(2, 2, dtype=torch.int32), "g.scales": ar(1, 2, dtype=torch.float16),
        "b.weight": ar(4, dtype=torch.uint8), "b.weight.absmax": ar(1), "logit_scale": ar(1),
    }  # fmt: skip
    write_safetensors(tmp_path / "src" / "model.safetensors", tensors)
    account = convert(tmp_path / "src", tmp_path / "out", dtype="bfloat16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    cast = {name for name, tensor in found.items() if tensor.dtype == torch.bfloat16}
    assert cast == {"l.bias", "logit_scale"}
    scales = {name for name, why in account.kept.items() if why == "scales of quantized weights"}
    assert scales == {"l.weight_scale_inv", "g.scales", "b.weight.absmax"}


LOSSY = {"w": torch.tensor([1.0, 1e6, -1e6, 1e-30, float("inf")]), "fine": ar(2)}


def test_values_that_the_type_cannot_hold_stop_it_and_leave_nothing(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "src" / "model.safetensors", LOSSY)
    with pytest.raises(FinalizeError, match=r"w: 2 overflow, 1 underflow.*nothing was written"):
        convert(tmp_path / "src", tmp_path / "out", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_where_they_may_overflow_they_are_counted(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "src" / "model.safetensors", LOSSY)
    account = convert(tmp_path / "src", tmp_path / "out", dtype="float16", strict=Strictness(lossy="warn"))
    assert account.losses == {"w": (2, 1)}
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), {n: t.half() for n, t in LOSSY.items()})


def test_types_that_torch_lacks_are_copied_byte_by_byte(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    entries = [("f6", "F6_E2M3", (8,), bytes(range(6))), ("f4", "F4", (2, 4), b"\x12\x34\x56\x78"),
               ("e8", "F8_E8M0", (3,), b"\x01\x7f\xff")]  # fmt: skip
    write_raw_safetensors(tmp_path / "src" / "model.safetensors", entries)
    convert(tmp_path / "src", tmp_path / "out", dtype="bfloat16")
    with tensorferry.open_checkpoint(tmp_path / "out") as checkpoint:
        found = {n: (e.dtype.name, e.shape, raw(checkpoint.read(n))) for n, e in checkpoint.catalogue.items()}
    assert found == {name: (dtype, shape, data) for name, dtype, shape, data in entries}


def test_one_file_is_written_where_the_name_ends_like_one(source: Path, tmp_path: Path) -> None:
    account = convert(source, tmp_path / "weights.safetensors")
    assert_same(load_file(tmp_path / "weights.safetensors"), MIXED)
    assert list(account.files) == ["weights.safetensors"]
    assert account.side_files == {}
    assert any("single file" in warning for warning in account.warnings)


def test_a_dry_run_says_what_would_be_and_writes_nothing(source: Path, tmp_path: Path) -> None:
    told = convert(source, tmp_path / "out", dtype="float32", max_shard_size=60, dry_run=True)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
    account = convert(source, tmp_path / "out", dtype="float32", max_shard_size=60)
    assert told.dry_run
    assert (told.files, told.kept, told.casts) == (account.files, account.kept, account.casts)
    assert str(told).startswith("would write 9 tensors")


def test_entries_of_the_index_that_are_not_chosen_stay_behind(tmp_path: Path) -> None:
    src = tmp_path / "src"
    write_safetensors(src / "model-00001-of-00001.safetensors", {"w": ar(2)})
    write_index(src / "model.safetensors.index.json", {"w": "model-00001-of-00001.safetensors"})
    torch.save({"w": ar(2)}, src / "pytorch_model.bin")
    account = convert(src, tmp_path / "out")
    assert "pytorch_model.bin" in account.left_behind
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors"]


def test_the_account_is_plain_data_for_programs(source: Path, tmp_path: Path) -> None:
    account = convert(source, tmp_path / "out", verify=False)
    told = json.loads(account.to_json())
    assert told["files"] == dict(account.files)
    assert told["verified"] == "not read back"
    assert list(told["seconds"]) == ["plan", "write"]


def test_digests_of_all_files_are_written_where_they_are_wanted(source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text("{}")
    convert(source, tmp_path / "out", sha256sums=True)
    verified = tensorferry.verify(tmp_path / "out", manifest=tmp_path / "out" / "SHA256SUMS")
    assert [file.against for file in verified.files] == ["the manifest"]
    names = [line.split("  ")[1] for line in (tmp_path / "out" / "SHA256SUMS").read_text().splitlines()]
    assert names == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "gguf"}, "nothing here writes 'gguf'; there are writers of "),
        ({"to": 3}, "to 3: the name of a format"),
        ({"dtype": "int8"}, "dtype 'int8': one of float16, "),
        ({"names": "theirs"}, "names 'theirs': one of auto, hf, keep"),
        ({"max_shard_size": "5 apples"}, "max_shard_size '5 apples': a number of bytes"),
        ({"max_shard_size": 0}, "max_shard_size 0: a number of bytes"),
        ({"verify": 1}, "verify 1: true or false"),
        ({"strict": "no"}, "strict 'no': a Strictness"),
        ({"shard_size": 5}, "has no option 'shard_size'"),
    ],
)
def test_nonsense_is_refused_before_anything_is_opened(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        convert(tmp_path / "nowhere", tmp_path / "out", **options)


def test_a_source_or_a_place_that_is_not_there_is_said(source: Path, tmp_path: Path) -> None:
    with pytest.raises(LocateError, match="nowhere: there is no such file or folder"):
        convert(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(LocateError, match=r"there is no folder .*/absent"):
        convert(source, tmp_path / "absent" / "out")


def test_the_source_is_no_destination(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    for place in (source, tmp_path, tmp_path / "link"):
        with pytest.raises(ConfigError, match="is, or holds, what is to be converted: give another place"):
            convert(source, place, overwrite=True)
    for given, place in ((source / "model.safetensors", source), (source, source / "model.safetensors")):
        with pytest.raises(ConfigError, match="is, or holds"):
            convert(given, place, overwrite=True)
    assert_same(tensors_of(source), MIXED)


@pytest.mark.parametrize(
    ("place", "options", "said"),
    [
        ("out.safetensors", {"to": "tensorizer"}, "ends like a file, and tensorizer would make a folder of it"),
        ("OUT.SAFETENSORS", {}, "ends like a file, and safetensors would make a folder of it"),
        ("out.bin", {}, "ends like a file"),
        ("out.safetensors", {"sha256sums": True}, "sha256sums: digests go into the folder"),
        ("out.safetensors", {"max_shard_size": 60}, "max_shard_size: .*is one file, and holds all of it"),
        ("out", {"max_shard_size": 60, "to": "tensorizer"}, "max_shard_size: tensorizer has no shards: leave it out"),
        ("out", {"max_shard_size": 60, "to": "npcache"}, "max_shard_size: npcache has no shards: leave it out"),
    ],
)
def test_what_would_have_no_effect_or_another_one_is_refused(
    source: Path, tmp_path: Path, place: str, options: dict[str, Any], said: str
) -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=said):
        convert(source, tmp_path / place, **options)
    assert sorted(tmp_path.iterdir()) == before


def test_a_link_into_a_folder_that_is_not_there_is_said(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "absent" / "out")
    with pytest.raises(LocateError, match=r"link: is a link to .*/absent/out, and there is no folder for that"):
        convert(source, tmp_path / "link")


def test_a_tensor_without_a_name_is_converted_like_any_other(tmp_path: Path) -> None:
    torch.save({"a": ar(3), "": ar(2, start=5), "b": ar(1)}, tmp_path / "pytorch_model.bin")
    convert(tmp_path / "pytorch_model.bin", tmp_path / "out")
    assert_same(tensors_of(tmp_path / "out"), {"a": ar(3), "": ar(2, start=5), "b": ar(1)})


def test_a_folder_that_holds_shards_of_the_source_is_not_replaced(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "src" / "parts" / "one.safetensors", {"w": ar(2)})
    index = {"weight_map": {"w": "parts/one.safetensors"}}
    (tmp_path / "src" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="is, or holds, what is to be converted"):
        convert(tmp_path / "src", tmp_path / "src" / "parts", overwrite=True)
    assert_same(tensors_of(tmp_path / "src"), {"w": ar(2)})
