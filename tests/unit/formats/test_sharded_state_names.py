"""Names of the files of a sharded state: whose they are, and patterns in which two ranks would have one."""

from __future__ import annotations

import pytest

from tensorferry.errors import ConfigError, LocateError
from tensorferry.formats.sharded_state_names import PartNames, RankNumbers, manifest_name, manifests_in
from tensorferry.storage.base import File


def files(*paths: str) -> list[File]:
    return [File(path, 1, ()) for path in paths]


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        (RankNumbers(), "model-rank-0-part-2.safetensors"),
        (RankNumbers(8, 5), "model-rank-5-part-2.safetensors"),
        (RankNumbers(8, 5, ep_size=8, ep_rank=5), "model-rank-5-part-2.safetensors"),
        (RankNumbers(2, 1, pp_size=2, pp_rank=1), "model-pp-1-tp-1-part-2.safetensors"),
        (RankNumbers(2, 1, ep_size=4, ep_rank=3), "model-ep-3-part-2.safetensors"),
        (RankNumbers(ep_size=4, ep_rank=3, pp_size=2), "model-pp-0-ep-3-part-2.safetensors"),
    ],
)
def test_names_are_those_of_vllm_and_tell_all_ranks_apart(ranks: RankNumbers, name: str) -> None:
    names = PartNames.of(None, ranks)
    assert names.name(2) == name
    assert names.number(name) == 2


@pytest.mark.parametrize(
    "other",
    [
        "model-rank-10-part-0.safetensors",
        "model-rank-11-part-1.safetensors",
        "model-rank-01-part-0.safetensors",
        "model-rank-1-part-00.safetensors",
        "model-rank-1-part--1.safetensors",
        "model-rank-1-part-0.safetensors.tmp",
        ".model-rank-1-part-0.safetensors",
        "xmodel-rank-1-part-0.safetensors",
        "model-rank-1-part-\u0661.safetensors",
    ],
)
def test_a_rank_takes_only_what_is_named_after_it(other: str) -> None:
    assert PartNames.of(None, RankNumbers(16, 1)).number(other) is None


@pytest.mark.parametrize(
    "pattern", ["w-{rank}.{part}.safetensors", "{tp_rank}_{part}.safetensors", "{{x}}-{rank}-{part}.safetensors"]
)
def test_other_patterns_will_do(pattern: str) -> None:
    names = PartNames.of(pattern, RankNumbers(16, 12))
    assert names.name(34) == pattern.format(rank=12, tp_rank=12, part=34)
    assert names.number(names.name(34)) == 34


@pytest.mark.parametrize(
    ("pattern", "ranks", "words"),
    [
        (
            "m-{part}.safetensors",
            RankNumbers(2),
            r"lacks \{rank\} or \{tp_rank\}, so that the 2 ranks would write the same file",
        ),
        ("m-{rank}-{part}.safetensors", RankNumbers(2, pp_size=3), r"lacks \{pp_rank\}, so that the 3 pipeline stages"),
        ("m-{pp_rank}-{part}.safetensors", RankNumbers(2, pp_size=3), r"lacks \{rank\} or \{tp_rank\}"),
        (
            "m-{pp_rank}-{rank}-{part}.safetensors",
            RankNumbers(2),
            r"has \{pp_rank\}, and the pipeline-parallel size is 1",
        ),
        ("m-{rank}-{part}.safetensors", RankNumbers(2, ep_size=4), r"lacks \{ep_rank\}"),
        ("m-{world}-{part}.safetensors", RankNumbers(2), "has the field 'world'"),
        ("m-{rank:02d}-{part}.safetensors", RankNumbers(2), "has the field 'rank'"),
        ("m-{rank!r}-{part}.safetensors", RankNumbers(2), "has the field 'rank'"),
        ("m-{rank-{part}.safetensors", RankNumbers(2), "unexpected|expected"),
        ("m-{}-{part}.safetensors", RankNumbers(2), "has the field ''"),
        ("m{rank}{part}.safetensors", RankNumbers(2), "numbers that run into each other"),
        ("m1{rank}-{part}.safetensors", RankNumbers(2), "numbers that run into each other"),
        ("m-{rank}-{part}0.safetensors", RankNumbers(2), "numbers that run into each other"),
        ("m-{rank}-{rank}-{part}.safetensors", RankNumbers(2), "has a field twice"),
        ("../m-{rank}-{part}.safetensors", RankNumbers(2), "no name of a file in the folder"),
        ("a/m-{rank}-{part}.safetensors", RankNumbers(2), "no name of a file in the folder"),
        (".m-{rank}-{part}.safetensors", RankNumbers(2), "no name of a file in the folder"),
        ("m-{rank}-{part}.bin", RankNumbers(2), "does not end in .safetensors"),
    ],
)
def test_a_pattern_in_which_names_would_meet_is_refused(pattern: str, ranks: RankNumbers, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PartNames.of(pattern, ranks)


def test_parts_come_in_the_order_of_their_numbers() -> None:
    there = files(*(f"model-rank-0-part-{n}.safetensors" for n in (10, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9)), "config.json")
    parts = PartNames.of(None, RankNumbers()).parts(there, "here")
    assert [f.path for f in parts] == [f"model-rank-0-part-{n}.safetensors" for n in range(11)]


def test_a_part_that_is_left_out_is_named() -> None:
    there = files("model-rank-0-part-0.safetensors", "model-rank-0-part-2.safetensors")
    with pytest.raises(
        LocateError, match=r"rank 0 has 2 parts, up to number 2, and lacks model-rank-0-part-1\.safetensors"
    ):
        PartNames.of(None, RankNumbers()).parts(there, "here")


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (
            ["model-rank-1-part-0.safetensors", "model-rank-10-part-0.safetensors"],
            "There is: model-rank-1-part-0.safetensors, model-rank-10",
        ),
        (["model.safetensors"], "There is: model.safetensors."),
        (["config.json"], "There is no safetensors file at all."),
    ],
)
def test_a_rank_without_files_is_told_what_is_there(there: list[str], words: str) -> None:
    with pytest.raises(LocateError, match=f"rank 3 has no files model-rank-3-part-.*{words}"):
        PartNames.of(None, RankNumbers(16, 3)).parts(files(*there), "here")


def test_manifests_are_found_by_their_names_alone() -> None:
    mine = manifest_name(RankNumbers(4, 3))
    there = files(
        "config.json",
        "tensorferry-sharded-state-pp-0-tp-10-ep-0.json",
        mine,
        mine + ".bak",
        "x" + mine,
        "tensorferry-sharded-state-pp-0-tp-03-ep-0.json",
    )
    assert [f.path for f in manifests_in(there)] == [mine, "tensorferry-sharded-state-pp-0-tp-10-ep-0.json"]
