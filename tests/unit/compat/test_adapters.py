"""A model's library is known by the packages of its classes; what adapts it is imported only then."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch import nn

from helpers.tiny_transformers import tiny
from tensorferry.core.catalogue import Catalogue
from tensorferry.modules.adapters import adapt

NOTHING = Catalogue([], format="none")


def test_a_model_of_no_known_library_is_not_adapted() -> None:
    assert adapt(nn.Linear(2, 2), NOTHING) is None


@pytest.mark.transformers
def test_a_class_that_derives_from_a_known_library_is_adapted() -> None:
    model = tiny("Llama")
    model.__class__ = type("Mine", (type(model),), {"__module__": "mine"})
    adapted = adapt(model, NOTHING)
    assert adapted is not None
    assert "model.embed_tokens.weight" in adapted.target


@pytest.mark.transformers
def test_a_single_layer_of_such_a_library_is_an_ordinary_module() -> None:
    assert adapt(tiny("Llama").model.layers[0], NOTHING) is None


def test_loading_another_model_does_not_import_transformers() -> None:
    code = (
        "import sys, torch, tensorferry.api, tensorferry.modules.adapters\n"
        "from tensorferry.core.catalogue import Catalogue\n"
        "tensorferry.modules.adapters.adapt(torch.nn.Linear(2, 2), Catalogue([], format='none'))\n"
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
