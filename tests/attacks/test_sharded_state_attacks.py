"""Manifests that lie: refused by name, cheaply, and with nothing read outside of the folder."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.sharded_models import Model, filled, load_rank, on_meta, ranks
from tensorferry import ParallelConfig, open_checkpoint, save_sharded_state
from tensorferry.errors import FormatError, LocateError, TensorferryError

NAME = "tensorferry-sharded-state-pp-0-tp-0-ep-0.json"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    save_sharded_state(filled(Model(ParallelConfig())), tmp_path / "state")
    return tmp_path / "state"


def changed(state: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((state / NAME).read_text())
    change(data)
    (state / NAME).write_text(json.dumps(data))


def tensor(data: dict[str, Any], **fields: Any) -> None:
    data["tensors"]["rows.weight"].update(fields)


WHOLE = [[12, 12], [0, 0], [12, 12]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(pattern="../../x-{rank}-{part}.safetensors"), "no name of a file in the folder"),
        (lambda d: d.update(pattern="/etc/{rank}-{part}.safetensors"), "no name of a file in the folder"),
        (lambda d: d.update(pattern="{rank.__class__}-{part}.safetensors"), "has the field 'rank.__class__'"),
        (lambda d: d.update(pattern=5), "pattern: text is expected"),
        (lambda d: d.update(parts=[]), "parts: at least one"),
        (lambda d: d.update(parts=[-1]), "parts: whole numbers"),
        (lambda d: d.update(parts=[1.5]), "parts: whole numbers"),
        (lambda d: d.update(parts=[0] * 70000), "at most 65536 numbers"),
        (lambda d: d["parallel"].update(tp_size=0), "tp_rank 0 of tp_size 0"),
        (lambda d: d["parallel"].update(tp_size=2**80), "tp_rank 0 of tp_size"),
        (lambda d: d["parallel"].update(tp_size=60000, pp_size=60000), "ranks"),
        (lambda d: d["parallel"].update(tp_rank=True), "numbers are expected"),
        (lambda d: d["parallel"].update(world=1), "no field 'world'"),
        (lambda d: d["parallel"].update(tp_size=2, tp_rank=1), "it is the manifest of rank 1"),
        (lambda d: d.update(tensors=[]), "tensors must be a JSON object"),
        (lambda d: d.update(format="else"), "its format is not"),
        (lambda d: d.update(version=True), "version"),
        (lambda d: d.update(aliases={"a": "nothing"}), "'a' is tied to 'nothing'"),
        (lambda d: d.update(aliases={"rows.weight": "rows.weight"}), "is tied to 'rows.weight'"),
        (lambda d: d.update(changed={"rows.weight": ["F32"]}), "a type and a shape"),
        (lambda d: d.update(unset={}), "unset: a list is expected"),
        (lambda d: tensor(d, dtype="Q4_0"), "the type 'Q4_0' is none of safetensors"),
        (lambda d: tensor(d, shape=[2**40, 2**40]), "is no tensor"),
        (lambda d: tensor(d, shape=[0] * 65), "at most 64 numbers"),
        (lambda d: tensor(d, shape=[12, -12]), "whole numbers"),
        (lambda d: tensor(d, file="/etc/passwd"), "no field 'file'"),
        (lambda d: tensor(d, default="12"), "default: a number"),
        (lambda d: tensor(d, buffer=1), "buffer: true or false"),
        (lambda d: tensor(d, slots={"": [*WHOLE, [12, 12], *WHOLE[:2], [13, 12]]}), "not inside of these"),
        (lambda d: tensor(d, slots={"": [[12, 12], [0, 0], [99, 12], [12, 12], *WHOLE]}), "not inside of these"),
        (lambda d: tensor(d, slots={"": [[2**62, 4], [0, 0], [12, 12], [12, 12], *WHOLE]}), "not inside of these"),
        (lambda d: tensor(d, slots={"": [*WHOLE, [12, 12], [12, 12], [0, 0], [6, 12]]}), "slot takes 72 elements"),
        (lambda d: tensor(d, slots={"": [[12, 12], [6], [12, 12], [12, 12], *WHOLE]}), "tensor 'rows.weight'"),
        (lambda d: tensor(d, slots={"": WHOLE}), "a slot is seven lists"),
        (lambda d: tensor(d, slots=[]), "slots: an object is expected"),
        (lambda d: tensor(d, dtype="BF16"), r"is F32 .* and tensorferry-sharded.* says BF16"),
        (lambda d: d["tensors"].update({"extra": {"dtype": "F32", "shape": [1]}}), "'extra', and its files lack it"),
        (lambda d: d["tensors"].pop("rows.weight"), "a file has the tensor 'rows.weight'"),
    ],
)  # fmt: skip
def test_a_manifest_that_lies_is_refused(state: Path, change: Callable[[dict[str, Any]], object], words: str) -> None:
    changed(state, change)
    with pytest.raises(FormatError, match=words):
        open_checkpoint(state, load_format="sharded_state")
    fresh = Model(ParallelConfig())
    with pytest.raises(TensorferryError):
        load_rank(state, fresh)
    assert not fresh.rows.weight.any()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "tensorferry-sharded-state", "version": 1',
        '{"format": "tensorferry-sharded-state", "version": 1, "version": 1}',
        '{"format": "tensorferry-sharded-state", "version": NaN}',
        '{"tensors": {}, "format": "tensorferry-sharded-state", "version": 1}',
        '{"format": "tensorferry-sharded-state", "version": 1} x',
        '{"format": "tensorferry-sharded-state", "version": 1, "tensors": {"a": {"shape": [1]}, "a": {}}}',
        '{"format": "tensorferry-sharded-state", "version": 1, "label": "\\ud800"}',
        '{"format": "tensorferry-sharded-state", "version": 1, "label": ' + "[" * 200 + "]" * 200 + "}",
        '{"format": "tensorferry-sharded-state", "version": 1, "parts": [' + "9" * 5000 + "]}",
    ],
)
def test_what_is_no_strict_json_is_refused(state: Path, text: str) -> None:
    (state / NAME).write_text(text)
    with pytest.raises(FormatError):
        open_checkpoint(state, load_format="sharded_state")


def test_a_manifest_of_any_size_is_refused_cheaply(state: Path) -> None:
    head = b'{"format": "tensorferry-sharded-state", "version": 1, "unset": ['
    with (state / NAME).open("wb") as file:
        file.write(head)
        file.truncate(100 << 20)
    with pytest.raises(FormatError, match="a manifest has 1 to"):
        open_checkpoint(state, load_format="sharded_state")
    (state / NAME).write_bytes(head + b"[]," * (10 << 20))
    tracemalloc.start()
    with pytest.raises(FormatError, match="takes over"):
        open_checkpoint(state, load_format="sharded_state")
    assert tracemalloc.get_traced_memory()[1] < 400 << 20
    tracemalloc.stop()


def test_a_link_out_of_the_folder_is_not_followed(state: Path, tmp_path: Path) -> None:
    part = state / "model-rank-0-part-0.safetensors"
    part.rename(tmp_path / "elsewhere.safetensors")
    part.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(FormatError, match=r"leads out|outside"):
        load_rank(state, Model(ParallelConfig()))


def test_names_of_tensors_are_shown_escaped(state: Path) -> None:
    changed(state, lambda d: d["tensors"].update({"\x1b[31m": {"dtype": "F32", "shape": [1]}}))
    with pytest.raises(FormatError) as caught:
        open_checkpoint(state, load_format="sharded_state")
    assert "\x1b" not in str(caught.value)


def test_two_ranks_that_disagree_are_refused(tmp_path: Path) -> None:
    for parallel in ranks(2):
        save_sharded_state(filled(Model(parallel)), tmp_path, parallel=parallel)
    other = tmp_path / "tensorferry-sharded-state-pp-0-tp-1-ep-1.json"
    data = json.loads(other.read_text())
    data["tensors"]["rows.weight"]["slots"][""][3] = [24, 12]
    data["tensors"]["rows.weight"]["slots"][""][4] = [24, 12]
    other.write_text(json.dumps(data))
    with pytest.raises(FormatError, match=r"rows\.weight has the shape \[12, 12\] for rank 0, \[24, 12\] for rank 1"):
        open_checkpoint(tmp_path, load_format="sharded_state")


def test_a_state_without_the_files_it_names_is_refused(state: Path) -> None:
    (state / "model-rank-0-part-0.safetensors").unlink()
    with pytest.raises(LocateError, match="names model-rank-0-part-0"):
        load_rank(state, Model(ParallelConfig()))


def test_a_model_on_meta_stays_there_when_a_state_is_refused(state: Path) -> None:
    changed(state, lambda d: d["tensors"].pop("rows.weight"))
    model = on_meta(ParallelConfig())
    with pytest.raises(TensorferryError):
        load_rank(state, model)
    assert all(p.is_meta for p in model.parameters())
