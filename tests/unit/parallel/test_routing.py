"""Which experts a token is sent to, and with which weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensorferry.parallel import sigmoid_routing, softmax_routing


def test_the_likeliest_experts_share_a_weight_of_one() -> None:
    weights, experts = softmax_routing(torch.tensor([[0.0, 1.0, 0.0, 1.0]]).log1p(), 2)
    assert sorted(experts[0].tolist()) == [1, 3]
    assert weights.tolist() == [[0.5, 0.5]]


def test_a_bias_decides_who_is_chosen_and_does_not_weigh() -> None:
    """Sigmoids of 0 are one half: the bias lifts expert 2 over expert 0, and both are weighed alike."""
    logits, bias = torch.zeros(1, 4), torch.tensor([0.1, 0.0, 0.2, 0.0])
    weights, experts = sigmoid_routing(logits, 2, bias, scale=3.0)
    assert experts.tolist() == [[2, 0]]
    assert weights.tolist() == [[1.5, 1.5]]


def test_experts_of_the_best_groups_are_chosen_only() -> None:
    """The best expert is in the first group, and the second group is better by its two best together."""
    scores = torch.tensor([[0.9, 0.1, 0.8, 0.7]])
    assert sorted(sigmoid_routing(scores.logit(), 2, groups=2, top_groups=1)[1][0].tolist()) == [2, 3]


@pytest.mark.transformers
def test_routing_is_that_of_deepseek() -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    config = DeepseekV3Config(
        hidden_size=8, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=2.5
    )
    torch.manual_seed(0)
    moe = modeling_deepseek_v3.DeepseekV3MoE(config)
    router: Any = moe.gate
    with torch.no_grad():
        torch.nn.init.normal_(router.weight)
        torch.nn.init.normal_(router.e_score_correction_bias, std=0.3)
        x = torch.randn(50, 8)
        found = router(x)
        expected, chosen = found[-2:] if found[-1].dtype == torch.int64 else found[-2:][::-1]
        logits = x @ router.weight.T
        weights, experts = sigmoid_routing(logits, 4, router.e_score_correction_bias, groups=4, top_groups=2, scale=2.5)
    table = torch.zeros(50, 16)
    assert torch.allclose(table.scatter(1, experts, weights), table.scatter(1, chosen, expected), atol=1e-6)
