"""Errors of reads say which tensors were being read."""

from __future__ import annotations

import pytest

from tensorferry.errors import AccessDenied, ReadError, TensorferryError
from tensorferry.execute.blame import reading_for


@pytest.mark.parametrize("kind", [ReadError, AccessDenied, TensorferryError])
def test_the_message_gains_the_tensor_and_the_class_stays(kind: type[TensorferryError]) -> None:
    with pytest.raises(kind) as caught, reading_for(["model.norm.weight"]):
        raise kind("m.safetensors: cut off")
    assert type(caught.value) is kind
    assert str(caught.value) == "m.safetensors: cut off (while reading model.norm.weight)"


def test_layer_numbers_are_folded_and_long_lists_cut() -> None:
    names = [f"h.{i}.w" for i in range(9)] + ["a", "b", "c", "a"]
    with pytest.raises(ReadError, match=r"\(while reading h\.\{0\.\.8\}\.w, a, b and 1 more\)$"), reading_for(names):
        raise ReadError("x")


def test_names_out_of_files_are_made_safe() -> None:
    with pytest.raises(ReadError) as caught, reading_for(["a\x1b[31m"]):
        raise ReadError("x")
    assert "\x1b" not in str(caught.value)


def test_errors_of_others_get_a_note() -> None:
    with pytest.raises(ConnectionError) as caught, reading_for(["w"]):
        raise ConnectionError("reset by peer")
    assert caught.value.args == ("reset by peer",)
    assert caught.value.__notes__ == ["while reading w"]


def test_interrupts_are_left_alone() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, reading_for(["w"]):
        raise KeyboardInterrupt
    assert not hasattr(caught.value, "__notes__")
