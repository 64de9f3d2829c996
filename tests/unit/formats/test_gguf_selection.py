"""Which GGUF files make up a model: one, one of several, or all parts of a split, from whichever part."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from helpers.checkpoints import ar, write_safetensors
from helpers.gguf_bytes import F32, T, gguf, split_pairs, write_split
from tensorferry.errors import ConfigError, CorruptFile, FormatError, LocateError
from tensorferry.formats.opening import open_files


def tensor(name: str, value: float) -> T:
    return T(name, (2,), F32, struct.pack("<2f", value, value))


def entries(path: Path, **options: str) -> dict[str, str]:
    with open_files(path, **options) as opened:  # type: ignore[arg-type]
        return {name: entry.files[0] for name, entry in opened.catalogue.items()}


def put(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).write_bytes(gguf([tensor(name, 1)]))
    return folder


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    put(tmp_path, "model.Q4_K_M.gguf")
    for load_format in ("auto", "gguf"):
        assert list(entries(tmp_path, load_format=load_format)) == ["model.Q4_K_M.gguf"]


def test_projectors_and_importance_matrices_are_no_models(tmp_path: Path) -> None:
    put(tmp_path, "gemma-Q4_0.gguf", "mmproj-F16.gguf", "gemma-mmproj-F16.gguf", "imatrix_unsloth.gguf")
    with open_files(tmp_path) as opened:
        assert list(opened.catalogue) == ["gemma-Q4_0.gguf"]
        assert {why for _, why in opened.selection.ignored} == {"multimodal projector", "importance matrix"}


def test_a_file_may_be_named_whatever_it_is_called(tmp_path: Path) -> None:
    put(tmp_path, "a.gguf", "b.gguf", "mmproj-F16.gguf", "blob")
    for name in ("a.gguf", "mmproj-F16.gguf", "blob"):
        assert list(entries(tmp_path / name)) == [name]


def test_another_load_format_does_not_take_it(tmp_path: Path) -> None:
    put(tmp_path, "a.gguf")
    with pytest.raises(ConfigError, match="is a gguf file"):
        open_files(tmp_path / "a.gguf", load_format="safetensors")
    with pytest.raises(LocateError, match="Another load_format takes the GGUF files"):
        open_files(tmp_path, load_format="hf")


def test_a_set_of_safetensors_comes_first_unless_gguf_is_asked_for(tmp_path: Path) -> None:
    put(tmp_path, "a.gguf")
    write_safetensors(tmp_path / "model.safetensors", {"w": ar(2)})
    assert entries(tmp_path) == {"w": "model.safetensors"}
    assert list(entries(tmp_path, load_format="gguf")) == ["a.gguf"]


def test_of_several_quantizations_one_must_be_chosen(tmp_path: Path) -> None:
    put(tmp_path, "llama-Q4_K_M.gguf", "llama-Q8_0.gguf")
    with pytest.raises(FormatError, match=r"llama-Q4_K_M\.gguf or llama-Q8_0\.gguf"):
        open_files(tmp_path)
    assert list(entries(tmp_path, variant="Q8_0")) == ["llama-Q8_0.gguf"]
    with open_files(tmp_path, allow_patterns=["*Q4*"]) as opened:
        assert list(opened.catalogue) == ["llama-Q4_K_M.gguf"]


def test_dots_in_a_name_are_no_variant(tmp_path: Path) -> None:
    put(tmp_path, "Qwen2.5-0.5B.Q4_0.gguf")
    assert list(entries(tmp_path)) == list(entries(tmp_path, variant="Q4_0")) == ["Qwen2.5-0.5B.Q4_0.gguf"]


# -- splits


PARTS = [[tensor("a", 1)], [tensor("b", 2), tensor("c", 3)], [tensor("d", 4)]]


@pytest.mark.parametrize("part", [None, 0, 1, 2])
def test_a_split_model_is_opened_from_its_folder_or_any_part(tmp_path: Path, part: int | None) -> None:
    paths = write_split(tmp_path, PARTS)
    put(tmp_path, "mmproj.gguf")
    with open_files(tmp_path if part is None else paths[part]) as opened:
        assert {n: e.files for n, e in opened.catalogue.items()} == {
            "a": (paths[0].name,),
            "b": (paths[1].name,),
            "c": (paths[1].name,),
            "d": (paths[2].name,),
        }
        assert opened.catalogue.metadata["general.architecture"] == "llama"
        assert not opened.warnings


def test_the_first_part_may_hold_no_tensors(tmp_path: Path) -> None:
    write_split(tmp_path, [[], [tensor("a", 1)]])
    assert list(entries(tmp_path)) == ["a"]


def test_of_two_splits_the_named_one_is_opened(tmp_path: Path) -> None:
    write_split(tmp_path, PARTS, "x-Q4_0")
    (one, _) = write_split(tmp_path, [[tensor("e", 1)], []], "x-Q8_0")
    assert list(entries(one)) == ["e"]
    with pytest.raises(FormatError, match=r"x-Q4_0-00001-of-00003\.gguf"):
        open_files(tmp_path)


@pytest.mark.parametrize("part", [0, 1])
def test_an_absent_part_is_named_before_anything_is_read(tmp_path: Path, part: int) -> None:
    paths = write_split(tmp_path, PARTS)
    paths[2].unlink()
    for path in (tmp_path, paths[part]):
        with pytest.raises(LocateError, match=r"m-00003-of-00003\.gguf"):
            open_files(path)


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    write_split(tmp_path, PARTS)[1].rename(tmp_path / "part.gguf")
    with pytest.raises(LocateError, match=r"part\.gguf: it is part 2 of 3"):
        open_files(tmp_path / "part.gguf")


def test_parts_that_are_chosen_alone_are_refused(tmp_path: Path) -> None:
    write_split(tmp_path, PARTS)
    with pytest.raises(CorruptFile, match=r"m-00001-of-00003\.gguf: split\.count is 3, 2 is expected"):
        open_files(tmp_path, allow_patterns=["m-00001*", "m-00002*"])


def test_a_split_of_one_is_a_file(tmp_path: Path) -> None:
    write_split(tmp_path, [[tensor("a", 1)]])
    assert list(entries(tmp_path)) == ["a"]


def two_parts(folder: Path, *said: tuple[int, int, int], names: str = "ab") -> Path:
    for number, (numbers, name) in enumerate(zip(said, names, strict=True)):
        path = folder / f"m-{number + 1:05}-of-{len(said):05}.gguf"
        path.write_bytes(gguf([tensor(name, number)], split_pairs(*numbers)))
    return folder


@pytest.mark.parametrize(
    ("said", "names", "says"),
    [
        (((0, 2, 2), (0, 2, 2)), "ab", r"00002-of-00002\.gguf: split\.no is 0, 1 is expected of part 2 of 2"),
        (((1, 2, 2), (0, 2, 2)), "ab", r"00001-of-00002\.gguf: split\.no is 1, 0 is expected"),
        (((0, 2, 2), (1, 3, 2)), "ab", r"00002-of-00002\.gguf: split\.count is 3, 2 is expected"),
        (((0, 2, 3), (1, 2, 3)), "ab", r"split\.tensors\.count is 3, the 2 parts hold 2 tensors"),
        (((0, 2, -1), (1, 2, 2)), "ab", r"split\.tensors\.count must be a whole number, it is '-1'"),
        (((0, 2, 2), (1, 2, 2)), "aa", r"00001-of-00002\.gguf and m-00002-of-00002\.gguf both hold tensor 'a'"),
    ],
)
def test_parts_that_disagree_are_refused(
    tmp_path: Path, said: tuple[tuple[int, int, int], ...], names: str, says: str
) -> None:
    with pytest.raises(CorruptFile, match=says):
        open_files(two_parts(tmp_path, *said, names=names))


def test_numbered_files_that_say_nothing_of_a_split_are_refused(tmp_path: Path) -> None:
    put(tmp_path, "m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    with pytest.raises(CorruptFile, match=r"split\.count is not there"):
        open_files(tmp_path)
