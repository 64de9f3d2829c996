"""Tiny Llama checkpoints with random weights, quantized as other programs write them, for ``trace_vllm.py``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GROUP = 32
LLAMA: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 256, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


def ints(*shape: int, kind: str = "int32") -> Any:
    import torch

    top = {"int32": 2**31 - 1, "int8": 127}[kind]
    return torch.randint(-top, top, shape, dtype=getattr(torch, kind))


def floats(*shape: int, kind: str = "float32") -> Any:
    import torch

    return torch.rand(shape).add(0.1).to(getattr(torch, kind))


def gptq(out: int, into: int) -> dict[str, Any]:
    import torch

    return {
        "qweight": ints(into // 8, out), "qzeros": ints(into // GROUP, out // 8),
        "scales": floats(into // GROUP, out, kind="float16"), "g_idx": torch.arange(into, dtype=torch.int32) // GROUP,
    }  # fmt: skip


def awq(out: int, into: int) -> dict[str, Any]:
    scales = floats(into // GROUP, out, kind="float16")
    return {"qweight": ints(into, out // 8), "qzeros": ints(into // GROUP, out // 8), "scales": scales}


def fp8_block(out: int, into: int) -> dict[str, Any]:
    return {"weight": floats(out, into, kind="float8_e4m3fn"), "weight_scale_inv": floats(out // 128, into // 128)}


def fp8_tensor(out: int, into: int) -> dict[str, Any]:
    return {"weight": floats(out, into, kind="float8_e4m3fn"), "weight_scale": floats()}


def fp8_static(out: int, into: int) -> dict[str, Any]:
    return {**fp8_tensor(out, into), "input_scale": floats()}


def int8(out: int, into: int) -> dict[str, Any]:
    return {"weight": ints(out, into, kind="int8"), "weight_scale": floats(out, 1)}


def packed4(out: int, into: int) -> dict[str, Any]:
    import torch

    scale = floats(out, into // GROUP, kind="bfloat16")
    return {"weight_packed": ints(out, into // 8), "weight_scale": scale, "weight_shape": torch.tensor([out, into])}


def _compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed",
    }  # fmt: skip


_FOUR = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
_NUMBERS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}

QUANTIZED: dict[str, tuple[Callable[[int, int], dict[str, Any]], dict[str, Any]]] = {
    "gptq": (gptq, _FOUR),
    "gptq-act": (gptq, _FOUR | {"desc_act": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "fp8-block": (
        fp8_block, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "fp8": (fp8_tensor, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8-static": (fp8_static, {"quant_method": "fp8", "activation_scheme": "static"}),
    "ct-int8": (
        int8,
        _compressed(
            "int-quantized", _NUMBERS | {"strategy": "channel"},
            _NUMBERS | {"strategy": "token", "dynamic": True},
        ),
    ),
    "ct-int4": (
        packed4,
        _compressed("pack-quantized", _NUMBERS | {"num_bits": 4, "strategy": "group", "group_size": GROUP}, None),
    ),
}  # fmt: skip
"""What each linear layer has in place of its weight, and the quantization_config that says so."""


def write_quantized(kind: str, folder: Path, *, without: str | None = None) -> None:
    """Write the checkpoint and its configuration. without: the name of a tensor that is left out."""
    import torch
    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(0)
    parts, method = QUANTIZED[kind]
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).to(torch.bfloat16)
    tensors: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        if owner.rpartition(".")[2] in LINEAR and leaf == "weight":
            out, into = value.shape
            tensors |= {f"{owner}.{part}": made for part, made in parts(out, into).items()}
        else:
            tensors[name] = torch.rand(value.shape).to(torch.bfloat16)
    if without is not None:
        del tensors[without]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    file = folder / "config.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps(written | {"architectures": ["LlamaForCausalLM"], "quantization_config": method}))


UNBUILT = ("gptq-act", "fp8-block")
"""Of these, those that vLLM 0.32 does not build on every CPU: it has given up the one, and wants AMX for the other."""
