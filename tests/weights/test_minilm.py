"""MiniLM, a real sentence encoder: the same model as `from_pretrained` makes, straight from its file."""

from __future__ import annotations

import pytest
import torch

import tensorferry
from helpers.tiny_transformers import differences
from helpers.weights import minilm

pytestmark = [pytest.mark.weights, pytest.mark.transformers]


def test_minilm_is_the_model_that_from_pretrained_makes() -> None:
    from transformers import BertModel

    model = tensorferry.load_model(minilm())
    assert type(model) is BertModel
    assert differences(model, BertModel.from_pretrained(minilm())) == []


def test_an_instance_is_filled_with_the_same_values_and_old_buffers_are_left_out_with_a_reason() -> None:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig.from_pretrained(minilm()))
    report = tensorferry.load(model, minilm())
    expected = tensorferry.load_model(minilm()).state_dict()
    assert all(torch.equal(t, expected[n]) for n, t in model.state_dict().items())
    assert report.parameters == len(expected)
    assert set(report.dropped) <= {"embeddings.position_ids"}
