"""SmolLM2, a real model, in every layout that `make weights` writes: the same tensors and the same text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tensorferry
from helpers.tiny_transformers import equal_bits
from helpers.weights import variant

pytestmark = [pytest.mark.weights, pytest.mark.transformers]

BF16_LAYOUTS = ("bf16-sharded", "bf16-bin", "bf16-bin-legacy", "bf16-bin-sharded")
PROMPT = "1, 2, 3, 4,"
COUNTED = [216, 37, 28, 216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28, 216, 33, 33, 28, 216]
PROMPT_IDS = [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28]


def loaded(layout: str) -> Any:
    return tensorferry.load_model(variant(layout))


@torch.no_grad()
def next_logits(model: Any) -> torch.Tensor:
    """Return the logits of the token after the prompt, in float32."""
    made: torch.Tensor = model(torch.tensor([PROMPT_IDS])).logits[0, -1].float()
    return made


@pytest.fixture(scope="module")
def bf16() -> Any:
    return loaded("bf16")


@pytest.mark.parametrize("layout", BF16_LAYOUTS)
def test_every_bfloat16_layout_loads_to_the_same_tensors(layout: str, bf16: Any) -> None:
    state, expected = loaded(layout).state_dict(), bf16.state_dict()
    assert list(state) == list(expected)
    assert [name for name in state if not equal_bits(state[name], expected[name])] == []


def test_the_other_precisions_are_the_same_tensors_but_for_their_rounding(bf16: Any) -> None:
    f32 = loaded("f32").state_dict()
    f16 = loaded("f16").state_dict()
    assert [n for n, t in bf16.state_dict().items() if not equal_bits(t, f32[n].bfloat16())] == []
    assert [n for n, t in f16.items() if not equal_bits(t, f32[n].half())] == []


@pytest.mark.parametrize("layout", ["f32", "f16"])
def test_the_other_precisions_predict_the_same_with_nearly_the_same_logits(layout: str, bf16: Any) -> None:
    logits, expected = next_logits(loaded(layout)), next_logits(bf16)
    assert int(logits.argmax()) == COUNTED[0]
    assert float((logits - expected).abs().max()) < 0.5


def test_the_model_is_the_one_that_from_pretrained_makes(bf16: Any) -> None:
    from transformers import LlamaForCausalLM

    theirs = LlamaForCausalLM.from_pretrained(variant("bf16"))
    assert equal_bits(next_logits(bf16), next_logits(theirs))
    assert bf16.lm_head.weight is bf16.model.embed_tokens.weight


def test_it_goes_on_counting() -> None:
    ids = torch.tensor([PROMPT_IDS])
    made = loaded("f32").generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    assert made[0, len(PROMPT_IDS) :].tolist() == COUNTED


def test_the_tokens_are_those_of_the_text() -> None:
    from transformers import AutoTokenizer

    folder = variant("bf16")
    if not (folder / "tokenizer.json").exists():
        pytest.skip("this layout was written without its tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(PROMPT)["input_ids"] == PROMPT_IDS
    assert tokenizer.decode(COUNTED) == " 5, 6, 7, 8, 9, 10, 11, "
