"""What a file's name says, and nothing more."""

from __future__ import annotations

import pytest

from tensorferry.core.names import natural_key
from tensorferry.formats.file_names import (
    format_of,
    is_side_file,
    matches_any,
    parse_index_name,
    parse_weight_name,
    what_else,
)


def parts(path: str, variant: str | None = None) -> tuple[object, ...]:
    name = parse_weight_name(path, variant)
    return () if name is None else (name.stem, name.variant, name.part, name.count, name.suffix)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model.safetensors", ("model", None, None, None, ".safetensors")),
        ("model.fp16.safetensors", ("model", "fp16", None, None, ".safetensors")),
        ("model-00001-of-00002.safetensors", ("model", None, 1, 2, ".safetensors")),
        ("model.fp16-00001-of-00002.safetensors", ("model", "fp16", 1, 2, ".safetensors")),
        ("model-00001-of-00002.fp16.safetensors", ("model", "fp16", 1, 2, ".safetensors")),
        ("model-00001-of-000163.safetensors", ("model", None, 1, 163, ".safetensors")),
        ("pytorch_model-00001-of-00002.bin", ("pytorch_model", None, 1, 2, ".bin")),
        (
            "unet/diffusion_pytorch_model.fp16.safetensors",
            ("diffusion_pytorch_model", "fp16", None, None, ".safetensors"),
        ),
        ("Qwen2.5-0.5B.safetensors", ("Qwen2.5-0.5B", None, None, None, ".safetensors")),
        ("consolidated.00.pth", ("consolidated.00", None, None, None, ".pth")),
        ("config.json", ()),
        (".hidden.safetensors", ()),
    ],
)
def test_a_weight_name_falls_into_its_parts(path: str, expected: tuple[object, ...]) -> None:
    assert parts(path) == expected


def test_a_dotted_word_after_any_stem_is_a_variant_where_it_is_asked_for() -> None:
    assert parts("mine.fp16.safetensors") == ("mine.fp16", None, None, None, ".safetensors")
    assert parts("mine.fp16.safetensors", "fp16") == ("mine", "fp16", None, None, ".safetensors")


@pytest.mark.parametrize(
    ("path", "variant"),
    [
        ("model.safetensors.index.json", None),
        ("model.safetensors.index.fp16.json", "fp16"),
        ("model.fp16.safetensors.index.json", "fp16"),
    ],
)
def test_an_index_stands_for_the_weights_it_is_named_after(path: str, variant: str | None) -> None:
    index = parse_index_name(path)
    assert index is not None
    assert (index.weights.stem, index.weights.suffix, index.weights.variant) == ("model", ".safetensors", variant)


@pytest.mark.parametrize("path", ["config.json", "index.json", "model.safetensors", "vocab.index.json"])
def test_other_names_are_no_index(path: str) -> None:
    assert parse_index_name(path) is None


@pytest.mark.parametrize(
    ("path", "role"),
    [
        ("adapter_model.safetensors", "adapter"),
        ("training_args.bin", "training state"),
        ("optimizer.pt", "training state"),
        ("optimizer_0.bin", "training state"),
        ("scheduler.pt", "training state"),
        ("scaler.pt", "training state"),
        ("rng_state_0.pth", "training state"),
        ("trainer_state.pt", "training state"),
        ("model-rank-0-part-0.safetensors", "sharded state of single ranks"),
        ("model.safetensors", ""),
        ("my_optimizer_study.safetensors", ""),
    ],
)
def test_a_role_other_than_base_weights_is_told_by_the_start_of_the_name(path: str, role: str) -> None:
    name = parse_weight_name(path)
    assert name is not None
    assert name.role == role


def test_natural_order_counts_instead_of_spelling() -> None:
    names = ["m-10.bin", "m-2.bin", "a.bin", "m.bin"]
    assert sorted(names, key=natural_key) == ["a.bin", "m-2.bin", "m-10.bin", "m.bin"]


def test_formats_are_told_by_suffix() -> None:
    assert [format_of(p) for p in ("a.safetensors", "a.bin", "a.ckpt", "a.gguf")] == [
        "safetensors",
        "torch",
        "torch",
        "gguf",
    ]
    assert what_else("a.onnx") == "ONNX"


def test_patterns_match_a_whole_path_or_its_last_part() -> None:
    assert matches_any("original/consolidated.00.pth", ["original/*"])
    assert matches_any("original/consolidated.00.pth", ["*.pth"])
    assert not matches_any("model.safetensors", ["MODEL*"])


@pytest.mark.parametrize(
    "path", ["config.json", "tokenizer.model", "chat_template.jinja", "modeling_x.py", "merges.txt", "params.json"]
)
def test_what_a_model_needs_beside_its_weights_is_a_side_file(path: str) -> None:
    assert is_side_file(path, 1000)


@pytest.mark.parametrize(
    "path",
    [
        "model.safetensors",
        "x.gguf",
        "tf_model.h5",
        "model.safetensors.index.json",
        ".gitattributes",
        "README.md",
        "a.png",
    ],
)
def test_weights_indexes_pages_and_pictures_are_no_side_files(path: str) -> None:
    assert not is_side_file(path, 1000)


def test_a_large_file_is_no_side_file() -> None:
    assert not is_side_file("data.txt", 1 << 30)
