"""Reported failures of pickle checkpoints, as far as their catalogue goes: what is in them, under which names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.checkpoints import ar
from helpers.torch_files import catalogue_of, read_all
from tensorferry.errors import FormatError, UnsafeFile


class TrainingArguments:
    """Stands for the class that a trainer pickles beside its weights."""


def test_disc_09_a_bin_that_is_no_mapping_of_tensors_is_named_and_described(tmp_path: Path) -> None:
    torch.save({"lr": 1.0}, tmp_path / "training_args.bin")
    torch.save({"state": {0: ar(2)}}, tmp_path / "optimizer.bin")
    with pytest.raises(FormatError, match=r"training_args\.bin: no tensor is in it \('lr'\); it is no checkpoint"):
        catalogue_of(tmp_path / "training_args.bin")
    with pytest.raises(FormatError, match=r"optimizer\.bin: .* as in the state of an optimizer \('state'\)"):
        catalogue_of(tmp_path / "optimizer.bin")


def test_disc_09_pickled_training_arguments_are_refused_by_their_class(tmp_path: Path) -> None:
    torch.save(TrainingArguments(), tmp_path / "training_args.bin")
    with pytest.raises(UnsafeFile, match=r"training_args\.bin: its pickle asks for '.*\.TrainingArguments'"):
        catalogue_of(tmp_path / "training_args.bin")


def test_pkl_01_a_numpy_scalar_beside_the_tensors_is_reported(tmp_path: Path) -> None:
    torch.save({"w": ar(2), "lr": np.float64(0.1)}, tmp_path / "pytorch_model.bin")
    found = catalogue_of(tmp_path / "pytorch_model.bin")
    assert list(found) == ["w"]
    assert found.notes == ("pytorch_model.bin: left out what is no tensor of the model: 'lr' (numpy scalar)",)


def test_pkl_04_views_of_one_storage_have_their_logical_values(tmp_path: Path) -> None:
    f = ar(4, 2)
    torch.save({"q": f[:2], "k": f[2:], "t": f.t()}, tmp_path / "pytorch_model.bin")
    ours = read_all(tmp_path / "pytorch_model.bin")
    assert ours["q"].tolist() == [[0, 1], [2, 3]]
    assert ours["k"].tolist() == [[4, 5], [6, 7]]
    assert ours["t"].tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_pkl_04_a_storage_seen_as_two_dtypes_has_the_values_of_both(tmp_path: Path) -> None:
    halves = torch.tensor([1, 0, 2, 0]).to(torch.uint16)
    torch.save({"a": halves, "b": halves.view(torch.uint32)}, tmp_path / "pytorch_model.bin")
    ours = read_all(tmp_path / "pytorch_model.bin")
    assert ours["a"].tolist() == [1, 0, 2, 0]
    assert ours["b"].tolist() == [1, 2]


def test_pkl_04_a_small_view_of_a_huge_storage_is_a_small_span(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1 << 20)[100:104]}, tmp_path / "pytorch_model.bin")
    span = catalogue_of(tmp_path / "pytorch_model.bin")["w"].span
    assert span is not None
    assert span.length == 16


def test_pkl_05_names_of_a_module_called_module_are_reported_as_they_are(tmp_path: Path) -> None:
    torch.save({"module.lin.weight": ar(2, 2), "module.lin.bias": ar(2)}, tmp_path / "pytorch_model.bin")
    assert set(catalogue_of(tmp_path / "pytorch_model.bin")) == {"module.lin.weight", "module.lin.bias"}


def test_pkl_06_a_state_under_a_key_is_unwrapped_and_reported(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "state_dict": {"module._orig_mod.lin.weight": ar(2, 2)}}, tmp_path / "m.pt")
    found = catalogue_of(tmp_path / "m.pt")
    assert list(found) == ["module._orig_mod.lin.weight"]
    assert found.notes[0] == "m.pt: the state was found under 'state_dict'"
    assert read_all(tmp_path / "m.pt")["module._orig_mod.lin.weight"].tolist() == [[0, 1], [2, 3]]


def test_pkl_06_two_states_are_an_error_that_lists_their_keys(tmp_path: Path) -> None:
    torch.save({"model": {"w": ar(2)}, "state_dict": {"w": ar(2)}}, tmp_path / "m.pt")
    with pytest.raises(FormatError, match=r"m\.pt: 'state_dict', 'model' each hold tensors"):
        catalogue_of(tmp_path / "m.pt")
