"""The examples in docstrings run as written."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from contextlib import nullcontext
from pathlib import Path

import pytest

import tensorferry
from helpers.fake_vllm import installed

MODULES = sorted(module.name for module in pkgutil.walk_packages(tensorferry.__path__, "tensorferry."))


@pytest.mark.transformers
@pytest.mark.parametrize("name", [name for name in ["tensorferry", *MODULES] if not name.endswith("__main__")])
def test_the_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with installed() if name.startswith("tensorferry.compat.vllm") else nullcontext():
        module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0
