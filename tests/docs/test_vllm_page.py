"""The options that the page on vLLM gives are taken as they stand; its command lines themselves need vLLM."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from helpers.fake_vllm import FakeVllm, LoadConfig

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "how-to" / "vllm.md"
OPTIONS = re.findall(r"--model-loader-extra-config '(.*?)'", PAGE.read_text(), flags=re.DOTALL)


def test_the_page_gives_options() -> None:
    assert len(OPTIONS) >= 2


@pytest.mark.parametrize("given", OPTIONS)
def test_options_that_the_page_gives_are_taken(vllm: FakeVllm, given: str) -> None:
    extra = json.loads(given)
    config = vllm.loader(LoadConfig(model_loader_extra_config=extra)).config
    assert config.strictness.may_miss == tuple(extra.get("strictness", {}).get("may_miss", ()))
