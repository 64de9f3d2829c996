"""Which files are the checkpoint: decided from names and the index alone, said with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tensorferry.errors import ConfigError, CorruptFile, FormatError, LocateError
from tensorferry.formats.base import Selection
from tensorferry.formats.selection import Wanted, choose
from tensorferry.storage.base import File

INDEX = "model.safetensors.index.json"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def pick(*names: str, index: Mapping[str, Mapping[str, str]] = {}, **wanted: Any) -> Selection:
    """Choose among files of 8 bytes called `names`, with the weight maps of the indexes among them."""
    return choose([File(name, 8, ()) for name in names], lambda file: dict(index[file.path]), Wanted(**wanted))


def chosen(*names: str, **how: Any) -> list[str]:
    return [file.path for file in pick(*names, **how).files]


def refusal(*names: str, **how: Any) -> str:
    with pytest.raises((LocateError, FormatError)) as caught:
        pick(*names, **how)
    return str(caught.value)


# -- one set ---------------


def test_a_single_file_is_the_checkpoint() -> None:
    selection = pick("config.json", "model.safetensors")
    assert [f.path for f in selection.files] == ["model.safetensors"]
    assert selection.format == "safetensors"
    assert selection.reason == "model.safetensors is the HF safetensors file"
    assert selection.index is None


def test_shards_named_by_an_index_come_in_natural_order() -> None:
    names = [f"model-{i}-of-12.safetensors" for i in range(1, 13)]
    weight_map = {f"t{i}": name for i, name in enumerate(reversed(names))}
    selection = pick(*names, INDEX, index={INDEX: weight_map})
    assert [f.path for f in selection.files] == names
    assert selection.index == weight_map
    assert selection.index_file == INDEX
    assert selection.reason == f"{INDEX} names 12 files"


def test_an_index_beats_whatever_lies_beside() -> None:
    selection = pick(A, "model.safetensors", "extra.safetensors", INDEX, index={INDEX: {"w": A}})
    assert [f.path for f in selection.files] == [A]
    assert dict(selection.ignored) == dict.fromkeys(("model.safetensors", "extra.safetensors"), f"not named by {INDEX}")


def test_a_complete_set_needs_no_index() -> None:
    assert chosen(A, B) == [A, B]
    assert pick(A, B).reason == "a complete set of 2 files without an index"


def test_a_set_numbered_from_zero_is_complete_too() -> None:
    names = ["m-00000-of-00002.safetensors", "m-00001-of-00002.safetensors"]
    assert chosen(*names) == names


def test_plain_files_of_one_kind_belong_together_where_none_has_a_canonical_name() -> None:
    assert chosen("b.safetensors", "a.safetensors") == ["a.safetensors", "b.safetensors"]


def test_a_canonical_name_is_the_whole_model() -> None:
    assert chosen("model.safetensors", "vision.safetensors") == ["model.safetensors"]


def test_dot_files_are_never_weights() -> None:
    assert chosen(".model.safetensors", "model.safetensors") == ["model.safetensors"]


# -- sets that are absent, partly or wholly ---------------


def test_a_shard_of_the_index_that_is_absent_is_named() -> None:
    message = refusal(A, INDEX, index={INDEX: {"a": A, "b": B}})
    assert f"{INDEX} names 2 files and 1 of them is not there: {B}" in message


def test_a_missing_number_is_named_without_an_index() -> None:
    assert f"the set that {A} belongs to is incomplete: 1 of 2 files are there, without {B}" in refusal(A)


def test_a_huge_count_in_a_name_costs_nothing() -> None:
    assert "1 of 999999999 files" in refusal("m-1-of-999999999.safetensors")


def test_numbers_beyond_the_count_are_refused() -> None:
    assert "3 files for 2 numbers" in refusal(A, B, "model-00003-of-00002.safetensors")


def test_shards_that_disagree_on_their_number_are_corrupt() -> None:
    other = "model-00002-of-00003.safetensors"
    with pytest.raises(CorruptFile, match=f"{INDEX}.*parts of sets of 2 and of 3"):
        pick(A, other, INDEX, index={INDEX: {"a": A, "b": other}})


def test_an_empty_weight_file_is_corrupt() -> None:
    with pytest.raises(CorruptFile, match=r"model\.safetensors: 0 bytes"):
        choose([File("model.safetensors", 0, ())], lambda _: {})


def test_a_broken_link_is_said_with_both_ends() -> None:
    with pytest.raises(LocateError, match=r"model\.safetensors -> \.\./blobs/nope"):
        choose([File("model.safetensors", 0, (), broken="../blobs/nope")], lambda _: {})


def test_a_broken_link_among_the_shards_counts_as_absent() -> None:
    files = [File(A, 8, ()), File(B, 0, (), broken="gone"), File(INDEX, 8, ())]
    with pytest.raises(LocateError, match=f"{B} -> gone"):
        choose(files, lambda _: {"a": A, "b": B})


def test_a_nested_shard_is_looked_up_where_the_listing_is_flat() -> None:
    nested = "shards/x.safetensors"
    selection = choose([File(INDEX, 8, ())], lambda _: {"a": nested}, stat=lambda path: File(path, 8, ()))
    assert [f.path for f in selection.files] == [nested]


# -- two sets ---------------


def test_two_complete_splits_without_an_index_are_refused_with_both() -> None:
    message = refusal("x-00001-of-00001.safetensors", "y-00001-of-00002.safetensors", "y-00002-of-00002.safetensors")
    assert "x-00001-of-00001.safetensors or y-00001-of-00002.safetensors" in message


def test_a_whole_file_beside_a_split_without_an_index_is_refused() -> None:
    assert "no index says which of 2 sets" in refusal("model.safetensors", A, B)


def test_two_foreign_indexes_are_refused_and_a_canonical_one_wins() -> None:
    maps = {f"{n}.safetensors.index.json": {"w": f"{n}.safetensors"} for n in ("x", "y", "model")}
    files = [*maps, *(f"{n}.safetensors" for n in ("x", "y", "model"))]
    assert chosen(*files, index=maps) == ["model.safetensors"]
    without = [f for f in files if not f.startswith("model")]
    assert "each name a set" in refusal(*without, index=maps)


# -- formats ---------------


@pytest.mark.parametrize("load_format", ["auto", "hf"])
def test_safetensors_come_before_bin_and_bin_before_pt(load_format: str) -> None:
    files = ["model.safetensors", "pytorch_model.bin", "model.pt"]
    assert chosen(*files, load_format=load_format) == ["model.safetensors"]
    assert chosen(*files[1:], load_format=load_format) == ["pytorch_model.bin"]
    assert chosen(*files[2:], load_format=load_format) == ["model.pt"]


def test_safetensors_never_means_a_pickle() -> None:
    assert "PyTorch .bin: 1 file (pytorch_model.bin)" in refusal("pytorch_model.bin", load_format="safetensors")


def test_pickles_can_be_ruled_out() -> None:
    assert "PyTorch .bin" in refusal("pytorch_model.bin", allow_pickle=False)


def test_pt_takes_torch_files_only() -> None:
    assert chosen("model.safetensors", "model.pt", load_format="pt") == ["model.pt"]
    assert chosen("model.safetensors", "pytorch_model.bin", load_format="pt") == ["pytorch_model.bin"]


def test_the_hf_set_comes_before_mistrals_where_both_are_there() -> None:
    files = ["consolidated.safetensors", "model.safetensors", "params.json"]
    selection = pick(*files)
    assert [f.path for f in selection.files] == ["model.safetensors"]
    assert dict(selection.ignored) == {"consolidated.safetensors": "not HF safetensors"}
    assert chosen(*files, load_format="mistral") == ["consolidated.safetensors"]


def test_mistrals_own_folder_is_taken_by_auto_and_not_by_hf() -> None:
    files = ["consolidated.safetensors", "params.json"]
    assert chosen(*files) == ["consolidated.safetensors"]
    assert chosen(*files, "pytorch_model.bin") == ["consolidated.safetensors"]
    assert chosen("consolidated.safetensors", "pytorch_model.bin") == ["pytorch_model.bin"]
    assert "load_format takes the Mistral consolidated" in refusal(*files, load_format="hf")


def test_mistrals_shards_have_an_index_of_their_own() -> None:
    index = "consolidated.safetensors.index.json"
    shards = [f"consolidated-0000{i}-of-00002.safetensors" for i in (1, 2)]
    maps = {index: dict(zip("ab", shards, strict=True)), INDEX: {"a": A}}
    files = [*shards, index, A, INDEX]
    assert chosen(*files, index=maps, load_format="mistral") == shards
    assert chosen(*files, index=maps) == [A]


def test_a_stale_safetensors_index_gives_way_to_a_complete_pickled_set_with_a_warning() -> None:
    bins = "pytorch_model.bin.index.json"
    maps = {INDEX: {"a": A}, bins: {"a": "pytorch_model-00001-of-00001.bin"}}
    selection = pick(INDEX, bins, "pytorch_model-00001-of-00001.bin", index=maps)
    assert [f.path for f in selection.files] == ["pytorch_model-00001-of-00001.bin"]
    (warning,) = selection.warnings
    assert f"{INDEX} names 1 file and none of them is there: {A}" in warning
    assert f"{bins} is used instead" in warning


def test_a_partly_absent_set_never_gives_way() -> None:
    maps = {INDEX: {"a": A, "b": B}}
    assert "1 of them is not there" in refusal(A, INDEX, "pytorch_model.bin", index=maps)


def test_an_unknown_load_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'safetensor'.*auto, hf, safetensors, mistral, pt"):
        Wanted(load_format="safetensor")


# -- variants ---------------


def test_a_variant_is_taken_only_when_asked_for() -> None:
    files = ["model.safetensors", "model.fp16.safetensors"]
    assert chosen(*files) == ["model.safetensors"]
    assert chosen(*files, variant="fp16") == ["model.fp16.safetensors"]
    assert dict(pick(*files).ignored) == {"model.fp16.safetensors": "variant fp16"}


@pytest.mark.parametrize(
    ("index", "shard"),
    [
        ("model.safetensors.index.fp16.json", "model.fp16-00001-of-00001.safetensors"),
        (
            "diffusion_pytorch_model.fp16.safetensors.index.json",
            "diffusion_pytorch_model-00001-of-00001.fp16.safetensors",
        ),
    ],
)
def test_both_spellings_of_a_sharded_variant(index: str, shard: str) -> None:
    files = [index, shard, A, B, INDEX]
    maps = {index: {"w": shard}, INDEX: {"w": A}}
    assert chosen(*files, index=maps, variant="fp16") == [shard]
    assert chosen(*files, index=maps) == [A]


def test_an_absent_variant_is_refused_with_those_that_exist() -> None:
    assert "variant='fp16'" in refusal("model.fp16.safetensors")
    assert "no weights of variant 'bf16'" in refusal("model.safetensors", variant="bf16")


@pytest.mark.parametrize("variant", ["", "../x", "a.b"])
def test_a_variant_is_one_word(variant: str) -> None:
    with pytest.raises(ConfigError, match="one word"):
        Wanted(variant=variant)


# -- what is not base weights ---------------


def test_training_state_is_left_out_with_the_reason() -> None:
    files = [
        "pytorch_model.bin",
        "training_args.bin",
        "optimizer.bin",
        "scheduler.bin",
        "rng_state_0.bin",
        "scaler.bin",
    ]
    selection = pick(*files)
    assert [f.path for f in selection.files] == ["pytorch_model.bin"]
    assert {why for _, why in selection.ignored} == {"training state"}
    assert len(selection.ignored) == 5


def test_an_adapter_is_no_model() -> None:
    message = refusal("adapter_model.safetensors", "adapter_config.json")
    assert "This is an adapter (adapter_model.safetensors), not a model" in message


def test_rank_shards_are_no_checkpoint_of_this_kind() -> None:
    assert "sharded state of single ranks: 2 files" in refusal(
        "model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"
    )


# -- nothing fits ---------------


def test_what_is_there_is_listed_by_kind() -> None:
    message = refusal(A, B, INDEX, "llama.Q4_K_M.gguf", "original/consolidated.00.pth", load_format="mistral")
    assert "no weights for load_format 'mistral' (Mistral consolidated safetensors, consolidated .pth)" in message
    assert f"HF safetensors shards: 2 files ({A}, {B})" in message
    assert "GGUF: 1 file (llama.Q4_K_M.gguf)" in message
    assert "sub-folder original/: 1 file (original/consolidated.00.pth)" in message


def test_a_folder_without_weights_says_what_else_it_has() -> None:
    assert "no weight file of any known kind: only 1 file (config.json)" in refusal("config.json")
    assert "nothing at all" in refusal()


def test_weights_in_a_sub_folder_are_a_hint_and_no_choice() -> None:
    assert "Pass subfolder='unet'" in refusal("unet/model.safetensors")


# -- sub-folders of a recursive listing ---------------


def test_only_the_top_of_a_recursive_listing_counts() -> None:
    assert chosen("model.safetensors", "original/model.safetensors") == ["model.safetensors"]


def test_a_sub_folder_is_chosen_from_with_its_own_index() -> None:
    index = f"unet/{INDEX}"
    selection = pick("model.safetensors", f"unet/{A}", index, index={index: {"w": A}}, subfolder="unet")
    assert [f.path for f in selection.files] == [f"unet/{A}"]
    assert selection.index == {"w": f"unet/{A}"}


@pytest.mark.parametrize("subfolder", ["..", "a/../b", "/a", ".", "a/", "a\0b"])
def test_a_sub_folder_is_a_plain_relative_path(subfolder: str) -> None:
    with pytest.raises(ConfigError, match="without '\\.\\.'"):
        Wanted(subfolder=subfolder)


# -- patterns ---------------


def test_allow_patterns_override_everything() -> None:
    files = [A, B, INDEX, "consolidated.safetensors", "optimizer.bin"]
    maps = {INDEX: {"a": A, "b": B}}
    assert chosen(*files, index=maps, allow_patterns=["consolidated*"]) == ["consolidated.safetensors"]
    assert chosen(*files, index=maps, allow_patterns=["model-00002*"]) == [B]
    assert chosen(*files, index=maps, allow_patterns=["optimizer.bin"]) == ["optimizer.bin"]


def test_patterns_that_hit_two_formats_take_the_better_one() -> None:
    assert chosen("a.safetensors", "a.bin", allow_patterns=["a.*"]) == ["a.safetensors"]


def test_patterns_that_hit_nothing_are_refused_with_what_is_there() -> None:
    assert "no weight file matches allow_patterns ['x*']" in refusal("model.safetensors", allow_patterns=["x*"])


def test_ignored_files_are_out_of_every_choice() -> None:
    selection = pick("model.safetensors", "pytorch_model.bin", ignore_patterns=["*.safetensors"])
    assert [f.path for f in selection.files] == ["pytorch_model.bin"]
    assert selection.ignored == (("model.safetensors", "left out by ignore_patterns"),)


def test_an_index_is_ignored_with_its_weights() -> None:
    files = [A, B, INDEX, "pytorch_model.bin"]
    assert chosen(*files, ignore_patterns=["*.safetensors"]) == ["pytorch_model.bin"]


def test_ignoring_one_shard_of_an_index_is_no_way_to_load_a_part() -> None:
    message = refusal(A, B, INDEX, index={INDEX: {"a": A, "b": B}}, ignore_patterns=["model-00002*"])
    assert "left out by ignore_patterns" in message


@pytest.mark.parametrize("option", ["allow_patterns", "ignore_patterns"])
def test_one_string_is_no_list_of_patterns(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} '\\*'"):
        Wanted(**{option: "*"})  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["load_format", "subfolder", "variant", "allow_patterns", "ignore_patterns"])
@pytest.mark.parametrize("value", [3, [None], [3], {"a": 1}.values()])
def test_options_of_another_type_are_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{option} .* is expected"):
        Wanted(**{option: value})  # type: ignore[arg-type]
