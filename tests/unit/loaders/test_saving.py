"""Saving a sharded state: in parts, whole or not at all, with nothing of an earlier save left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from helpers.checkpoints import ar
from helpers.sharded_models import Model, filled, load_rank, on_meta, ranks
from tensorferry import ParallelConfig, save_sharded_state
from tensorferry.errors import ConfigError, CorruptFile, FormatError, LocateError

MANIFEST = "tensorferry-sharded-state-pp-0-tp-0-ep-0.json"


def vectors(count: int, start: float = 0) -> nn.ParameterDict:
    return nn.ParameterDict({f"v{n}": nn.Parameter(ar(4, start=start + 10 * n)) for n in range(count)})


def test_parts_hold_at_most_so_many_bytes_and_at_least_one_tensor(tmp_path: Path) -> None:
    names = save_sharded_state(vectors(5), tmp_path, max_part_size=32)
    assert names == (*(f"model-rank-0-part-{n}.safetensors" for n in range(3)), MANIFEST)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert len(save_sharded_state(vectors(5), tmp_path / "tiny", max_part_size=1)) == 6
    assert len(save_sharded_state(vectors(5), tmp_path / "one", max_part_size=None)) == 2
    for folder in (tmp_path, tmp_path / "tiny", tmp_path / "one"):
        model, _ = load_rank(folder, vectors(5, start=1000))
        assert model.get_parameter("v3").tolist() == [30, 31, 32, 33]


def test_a_later_save_leaves_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    save_sharded_state(vectors(5), tmp_path, max_part_size=1)
    other = ParallelConfig(tp_size=2, tp_rank=1)
    save_sharded_state(vectors(1), tmp_path, parallel=other)
    names = save_sharded_state(vectors(2, start=7), tmp_path, max_part_size=1)
    assert {path.name for path in tmp_path.glob("model-rank-0-*")} == set(names) - {MANIFEST}
    assert (tmp_path / "model-rank-1-part-0.safetensors").exists()
    model, _ = load_rank(tmp_path, vectors(2))
    assert model.get_parameter("v0").tolist() == [7, 8, 9, 10]


def test_ranks_may_save_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(lambda p: save_sharded_state(filled(Model(p)), tmp_path / "new" / "folder", parallel=p), ranks(4))
        )
    loaded, _ = load_rank(tmp_path / "new" / "folder", on_meta(ParallelConfig()))
    wanted = filled(Model(ParallelConfig())).state_dict()
    assert all(torch.equal(values, wanted[name]) for name, values in loaded.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_values_of_any_type_and_stride_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    class Odd(nn.Module):
        def __init__(self, values: torch.Tensor) -> None:
            super().__init__()
            self.strided = nn.Parameter(values.t(), requires_grad=False)
            self.every_other = nn.Parameter(values[:, ::2], requires_grad=False)
            self.register_buffer("scalar", values[1, 1].clone())
            self.register_buffer("empty", values[:0].clone())
            self.register_buffer("computed", values.clone(), persistent=False)

    saved = Odd((ar(3, 4) % 2).to(dtype))
    save_sharded_state(saved, tmp_path)
    fresh = Odd(torch.zeros(3, 4).to(dtype))
    load_rank(tmp_path, fresh)
    for name, values in saved.state_dict().items():
        assert torch.equal(fresh.state_dict()[name].float(), values.float()), name


def test_conjugated_and_negated_views_are_saved_by_value(tmp_path: Path) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    module = nn.Module()
    module.register_buffer("conjugated", values.conj())
    module.register_buffer("negated", values.conj().imag)
    save_sharded_state(module, tmp_path)
    with safe_open(tmp_path / "model-rank-0-part-0.safetensors", framework="pt") as file:
        assert file.get_tensor("conjugated").tolist() == [1 - 2j, 3 + 4j]
        assert file.get_tensor("negated").tolist() == [-2, 4]


def test_large_tensors_are_copied_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorferry.loaders.saving._CHUNK", 64)
    model = nn.ParameterDict({"a": nn.Parameter(ar(100)), "b": nn.Parameter(ar(30, 7).t())})
    save_sharded_state(model, tmp_path)
    fresh = nn.ParameterDict({"a": nn.Parameter(torch.zeros(100)), "b": nn.Parameter(torch.zeros(7, 30))})
    load_rank(tmp_path, fresh)
    assert torch.equal(fresh["a"], model["a"])
    assert torch.equal(fresh["b"], model["b"])


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        (lambda: nn.Linear(2, 2, device="meta"), ConfigError, "weight is on meta, where tensors have no values"),
        (
            lambda: nn.ParameterDict({"c": nn.Parameter(ar(2).to(torch.complex128))}),
            FormatError,
            "c is of the type C128",
        ),
        (nn.Identity, ConfigError, "has no parameters"),
        (lambda: "model", ConfigError, "an nn.Module is expected"),
    ],
)
def test_what_cannot_be_saved_is_refused_and_nothing_written(tmp_path: Path, model: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        save_sharded_state(model(), tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_tensors_that_post_processing_hangs_up_as_plain_attributes_are_refused(tmp_path: Path) -> None:
    class Hook(nn.Linear):
        def process_weights_after_loading(self) -> None:
            self.transposed = self.weight.detach().t()

    model = Hook(2, 2)
    model.process_weights_after_loading()
    with pytest.raises(
        FormatError, match="transposed is a tensor of a post-processed module and neither a parameter nor"
    ):
        save_sharded_state(model, tmp_path)


@pytest.mark.parametrize("options", [{"max_part_size": 0}, {"max_part_size": "1"}, {"label": 3}, {"post_processed": 1}])
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        save_sharded_state(vectors(1), tmp_path, **options)


def test_a_pattern_for_one_file_holds_one_part(tmp_path: Path) -> None:
    save_sharded_state(vectors(2), tmp_path, pattern="w.safetensors")
    with pytest.raises(ConfigError, match=r"lacks \{part\}, and there are 2 parts"):
        save_sharded_state(vectors(2), tmp_path, pattern="w.safetensors", max_part_size=1)
    assert load_rank(tmp_path, vectors(2, start=5))[0].get_parameter("v1").tolist() == [10, 11, 12, 13]


def test_ranks_of_saves_with_different_labels_are_not_put_together(tmp_path: Path) -> None:
    for parallel, label in zip(ranks(2), ("step 100", "step 200"), strict=True):
        save_sharded_state(filled(Model(parallel)), tmp_path, parallel=parallel, label=label)
    with pytest.raises(ConfigError, match="label 'step 100' for rank 0, 'step 200' for rank 1"):
        load_rank(tmp_path, on_meta(ParallelConfig()))


def test_the_manifest_says_what_was_saved(tmp_path: Path) -> None:
    parallel = ranks(2)[1]
    save_sharded_state(filled(Model(parallel)), tmp_path, parallel=parallel, quantization="none", label="a")
    data = json.loads((tmp_path / "tensorferry-sharded-state-pp-0-tp-1-ep-1.json").read_text())
    assert (data["format"], data["version"], data["label"]) == ("tensorferry-sharded-state", 1, "a")
    assert data["parallel"] == {"tp_size": 2, "tp_rank": 1, "ep_size": 2, "ep_rank": 1, "pp_size": 1, "pp_rank": 0}
    assert data["tensors"]["columns.weight"] == {
        "dtype": "F32",
        "shape": [12, 6],
        "slots": {"": [[12, 6], [0, 0], [12, 6], [12, 12], [12, 12], [0, 6], [12, 12]]},
    }
    assert data["tensors"]["embed.weight"]["default"] == -1
    assert len(data["tensors"]["norm.weight"]["digest"]) == 64


KILLED = """
import os, sys
import torch
from torch import nn
from tensorferry import save_sharded_state
import tensorferry.formats.writing as writing

folder, at, start = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
model = nn.ParameterDict({f"v{n}": nn.Parameter(torch.arange(4.0) + start + 10 * n) for n in range(3)})
count = 0

def deadly(name):
    real = getattr(os, name)
    def call(*arguments, **settings):
        global count
        count += 1
        if count == at:
            os.kill(os.getpid(), 9)
        return real(*arguments, **settings)
    return call

for name in ("fsync", "unlink", "rename", "replace"):
    setattr(os, name, deadly(name))
save_sharded_state(model, folder, max_part_size=1)
print(count)
"""


def save_in_a_child(folder: Path, at: int, start: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", KILLED, str(folder), str(at), str(start)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_save_that_is_killed_leaves_no_state_and_the_next_one_ends(tmp_path: Path) -> None:
    """Killed at several of the calls that change the folder, into a folder that holds an earlier state."""
    whole = save_in_a_child(tmp_path / "count", 0, 500)
    assert whole.returncode == 0, whole.stderr
    calls = int(whole.stdout)
    assert calls >= 8
    for at in (1, 2, calls // 2, calls):
        folder = tmp_path / str(at)
        save_sharded_state(vectors(3), folder, max_part_size=1)
        assert save_in_a_child(folder, at, 500).returncode == -signal.SIGKILL
        try:
            model, _ = load_rank(folder, vectors(3, start=-1))
        except (CorruptFile, LocateError):
            pass
        else:
            firsts = {model.get_parameter(f"v{n}")[0].item() - 10 * n for n in range(3)}
            assert firsts in ({0.0}, {500.0}), "a mixture of two saves was loaded"
        save_sharded_state(vectors(3, start=9), folder, max_part_size=1)
        assert load_rank(folder, vectors(3))[0].get_parameter("v0").tolist() == [9, 10, 11, 12]


def test_files_get_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        names = save_sharded_state(vectors(1), tmp_path)
    finally:
        os.umask(before)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in names} == {0o640}
