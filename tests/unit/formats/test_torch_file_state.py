"""Which of the things in a torch file is the model's state, and what is said about the rest."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.checkpoints import ar
from helpers.torch_files import a_dict, a_tensor, catalogue_of_bytes, pickled, saved, zip_file
from tensorferry.errors import FormatError
from tensorferry.formats.torch_state import WRAPPERS

OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}


def names(folder: Path, value: Any) -> list[str]:
    return sorted(catalogue_of_bytes(folder, saved(value)))


def notes(folder: Path, value: Any) -> str:
    return "\n".join(catalogue_of_bytes(folder, saved(value)).notes)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_state_under_a_known_key_is_unwrapped_and_the_note_says_so(wrapper: str, tmp_path: Path) -> None:
    value = {"epoch": 3, wrapper: {"lin.weight": ar(2, 2), "scale": ar(1)}, "optimizer": OPTIMIZER}
    assert names(tmp_path, value) == ["lin.weight", "scale"]
    said = notes(tmp_path, value)
    assert f"found under '{wrapper}'" in said
    assert "'epoch' (a number), 'optimizer' (1 tensor)" in said


def test_wrappers_are_unwrapped_one_inside_the_other(tmp_path: Path) -> None:
    value = {"model": {"args": {"dim": 2}, "state_dict": OrderedDict(w=ar(2))}, "optimizer": OPTIMIZER}
    assert names(tmp_path, value) == ["w"]
    assert "under 'model' > 'state_dict'" in notes(tmp_path, value)


def test_a_wrapper_without_tensors_does_not_count(tmp_path: Path) -> None:
    assert names(tmp_path, {"model": {"kind": "tiny"}, "state_dict": {"w": ar(2)}}) == ["w"]


def test_two_wrappers_with_tensors_are_refused_with_their_names(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"model\.pt: 'params', 'params_ema' each hold tensors"):
        names(tmp_path, {"params": {"w": ar(2)}, "params_ema": {"w": ar(2)}})


def test_the_averaged_weights_beside_a_state_are_left_out_by_name(tmp_path: Path) -> None:
    value = {"state_dict": {"w": ar(2)}, "state_dict_ema": {"w": ar(2, start=5)}}
    assert names(tmp_path, value) == ["w"]
    assert "'state_dict_ema' (1 tensor)" in notes(tmp_path, value)


def test_a_best_score_that_is_a_tensor_does_not_hide_the_state(tmp_path: Path) -> None:
    value = {"state_dict": {"w": ar(2)}, "best": torch.tensor(0.5)}
    assert names(tmp_path, value) == ["w"]
    assert "'best' (a tensor)" in notes(tmp_path, value)


def test_a_sub_module_called_model_is_no_wrapper_beside_dotted_names(tmp_path: Path) -> None:
    assert names(tmp_path, {"lin.weight": ar(2), "model": {"w": ar(2)}}) == ["lin.weight", "model.w"]


def test_a_flat_state_of_a_module_called_module_is_left_alone(tmp_path: Path) -> None:
    assert names(tmp_path, {"module.lin.weight": ar(2), "module.lin.bias": ar(2)}) == [
        "module.lin.bias",
        "module.lin.weight",
    ]


def test_several_states_under_other_keys_are_joined_with_dots(tmp_path: Path) -> None:
    value = {"generator": {"w": ar(2), "deep": {"v": ar(1)}}, "mel": {"w": ar(3)}, "optimizer_g": OPTIMIZER}
    assert names(tmp_path, value) == ["generator.deep.v", "generator.w", "mel.w"]
    said = notes(tmp_path, value)
    assert "the dicts 'generator', 'mel' were flattened, their names joined with dots" in said
    assert "'optimizer_g' (1 tensor)" in said


def test_training_state_under_names_is_no_part_of_the_model(tmp_path: Path) -> None:
    value = {"enc": {"w": ar(2)}, "optimizer_state_dict": {"w": {"exp_avg": ar(2)}}, "rng_state": {"cpu": ar(4)}}
    assert names(tmp_path, value) == ["enc.w"]


def test_a_name_that_is_there_flat_and_nested_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"'a\.w' is there twice"):
        names(tmp_path, {"a.w": ar(2), "a": {"w": ar(2)}})


def test_tensors_that_are_tied_are_two_entries_of_one_span(tmp_path: Path) -> None:
    weight = ar(2, 2)
    found = catalogue_of_bytes(tmp_path, saved({"embed": weight, "head": weight}))
    assert found["embed"].span == found["head"].span


LEFT_OUT = {
    "a numpy scalar": (np.float64(0.1), "numpy scalar"),
    "a numpy array": (np.arange(3), "numpy array"),
    "a large numpy array": (np.zeros(100_000), "numpy array"),
    "a numpy dtype": (np.dtype("f4"), "numpy dtype"),
    "text": ("x", "text"),
    "long text": ("x" * 100_000, "long text"),
    "bytes": (b"\xff", "bytes"),
    "a bytearray": (bytearray(b"\xff"), "bytes"),
    "a number": (1 << 70, "a number"),
    "a complex number": (1 + 2j, "a number"),
    "a list": ([1, [2]], "a list"),
    "tensors in a list": ([ar(1), ar(2)], "2 tensors"),
    "a set": ({1, 2}, "a value"),
    "a frozenset": (frozenset({1}), "a value"),
    "a counter": (Counter("ab"), "a dict"),
    "a defaultdict": (defaultdict(list, a=[1]), "a dict"),
    "a dict with tuples for keys": ({(1, (2,)): 3}, "a dict"),
    "a device": (torch.device("cuda:0"), "torch.device"),
    "a dtype": (torch.float16, "a value"),
    "a size": (torch.Size([1, 2]), "a tuple"),
    "a storage": (ar(2).untyped_storage(), "a storage"),
    "nothing": (None, "None"),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(("value", "kind"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_harmless_value_beside_tensors_is_left_out_and_named(
    value: Any, kind: str, protocol: int, tmp_path: Path
) -> None:
    found = catalogue_of_bytes(tmp_path, saved({"w": ar(2), "other": value}, pickle_protocol=protocol))
    assert list(found) == ["w"]
    assert any(f"'other' ({kind}" in note for note in found.notes)


def test_a_namespace_of_arguments_is_left_out(tmp_path: Path) -> None:
    from argparse import Namespace

    found = catalogue_of_bytes(tmp_path, saved({"model": {"w": ar(2)}, "args": Namespace(lr=0.1, deep=Namespace())}))
    assert list(found) == ["w"]
    assert any("'args' (argparse.Namespace)" in note for note in found.notes)


def test_a_note_names_a_few_values_and_counts_the_rest(tmp_path: Path) -> None:
    said = notes(tmp_path, {"w": ar(2)} | {f"k{i}": i for i in range(50)})
    assert "'k5' (a number) and 44 more" in said
    assert "k6" not in said


NOT_A_STATE = {
    "a list": ([ar(2)], "its top object is a list"),
    "a tensor": (ar(2), "its top object is a tensor"),
    "a number": (3, "its top object is a number"),
    "numbers": ({"lr": 1.0}, "no tensor is in it ('lr')"),
    "nothing": ({}, "no tensor is in it (no keys)"),
    "an optimizer": (OPTIMIZER, "as in the state of an optimizer ('state', 'param_groups')"),
    "numbered tensors": ({0: ar(2)}, "as in the state of an optimizer"),
}


@pytest.mark.parametrize(("value", "says"), NOT_A_STATE.values(), ids=NOT_A_STATE)
def test_an_object_without_named_tensors_is_no_checkpoint(value: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError) as error:
        names(tmp_path, value)
    assert says in str(error.value)
    assert "model.pt" in str(error.value)


def test_a_tensor_that_is_left_out_is_checked_all_the_same(tmp_path: Path) -> None:
    bad = a_dict(state_dict=a_dict(w=a_tensor()), optimizer=b"](" + a_tensor(shape=(5,)) + b"e")
    with pytest.raises(FormatError, match=r"'optimizer\.0': elements 0 to 5 of a storage that has 4"):
        catalogue_of_bytes(tmp_path, zip_file(pickled(bad)))


def test_dicts_that_share_dicts_do_not_multiply(tmp_path: Path) -> None:
    layers = [a_dict(w=a_tensor()) + b"q\0"]
    for depth in range(60):
        below = b"h" + bytes([depth])
        layers.append(a_dict(a=below, b=below) + b"q" + bytes([depth + 1]))
    with pytest.raises(FormatError, match="share their contents"):
        catalogue_of_bytes(tmp_path, zip_file(pickled(b"0".join(layers))))
