"""Models of transformers in Meta's and Mistral's own layout, by names, row orders and cuts spelled out here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from helpers.checkpoints import write_index, write_safetensors
from helpers.gguf_models import checkpoint_of
from helpers.tiny_transformers import SIZES, tiny

NAMES = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
    "block_sparse_moe": "feed_forward",
}  # fmt: skip
CUT_BY_ROWS = ("wq", "wk", "wv", "w1", "w3", "output")
CUT_BY_COLUMNS = ("wo", "w2")

Tensors = dict[str, torch.Tensor]


def tiny_llama(**changes: Any) -> Any:
    """Return the tiny Llama with norms that differ, and no padding token."""
    return varied(tiny("Llama", pad_token_id=None, **changes))


def tiny_mixtral(**changes: Any) -> Any:
    """Return the tiny Mixtral with norms that differ, and no padding token."""
    return varied(tiny("Mixtral", pad_token_id=None, **changes))


def tiny_mistral(kind: str = "Mistral", **changes: Any) -> Any:
    """Return a Mistral, or another `kind` of it, with a head size of its own, a window and the sizes of `SIZES`."""
    import transformers

    torch.manual_seed(1)
    sizes = {**SIZES, "pad_token_id": None, "head_dim": 16, "sliding_window": 5, **changes}
    return varied(getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes)))


def varied(model: Any) -> Any:
    """Return `model` in eval mode, with norms that are not all ones, so that none can stand for another."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(torch.rand_like(parameter) + 0.5)
    return model.eval()


def native(model: Any, folder: Path) -> Tensors:
    """Return the tensors of a model under Meta's names, the rows of its queries and keys in Meta's order."""
    config = model.config
    heads = {"wq": config.num_attention_heads, "wk": config.num_key_value_heads}
    made = {}
    for name, tensor in checkpoint_of(model, folder).items():
        ours = name.removeprefix("model.") if ".layers." in name else name
        for theirs, mine in NAMES.items():
            ours = ours.replace(theirs, mine)
        kind = ours.split(".")[-2]
        made[ours] = alternating(tensor, heads[kind]) if kind in heads else tensor
    return made


def alternating(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return `rows` so that those of a head alternate: first of its first half, first of its second half, second …"""
    made = torch.empty_like(rows)
    size = rows.shape[0] // heads
    for head in range(heads):
        whole, half = rows[head * size : (head + 1) * size], size // 2
        made[head * size : (head + 1) * size : 2] = whole[:half]
        made[head * size + 1 : (head + 1) * size : 2] = whole[half:]
    return made


def mistral_params(config: Any, **more: Any) -> dict[str, Any]:
    """Return what Mistral's params.json says of a configuration."""
    return {
        "dim": config.hidden_size, "n_layers": config.num_hidden_layers,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "hidden_dim": config.intermediate_size, "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads, "norm_eps": config.rms_norm_eps, "vocab_size": config.vocab_size,
        "rope_theta": config.rope_parameters["rope_theta"], "max_position_embeddings": config.max_position_embeddings,
        **more,
    }  # fmt: skip


def meta_params(config: Any, **more: Any) -> dict[str, Any]:
    """Return what Meta's params.json says of a configuration whose width is 8/3 of its hidden state, up to 48."""
    return {
        "dim": config.hidden_size, "n_layers": config.num_hidden_layers, "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads, "norm_eps": config.rms_norm_eps, "vocab_size": -1,
        "multiple_of": 48, "ffn_dim_multiplier": 0.5, **more,
    }  # fmt: skip


def write_params(folder: Path, params: Mapping[str, Any]) -> Path:
    """Write params.json into `folder`, and return the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(dict(params)))
    return folder


def write_consolidated(folder: Path, tensors: Tensors, params: Mapping[str, Any], shards: int = 1) -> Path:
    """Write Mistral's layout: one file of safetensors, or several and their index."""
    write_params(folder, params)
    if shards == 1:
        write_safetensors(folder / "consolidated.safetensors", tensors)
        return folder
    files = {name: f"consolidated-{n % shards + 1:05}-of-{shards:05}.safetensors" for n, name in enumerate(tensors)}
    for file in set(files.values()):
        write_safetensors(folder / file, {name: tensors[name] for name in tensors if files[name] == file})
    write_index(folder / "consolidated.safetensors.index.json", files)
    return folder


def write_parts(
    folder: Path, tensors: Tensors, params: Mapping[str, Any], count: int, *, words: int = 0, name: str = "consolidated"
) -> Path:
    """Write Meta's layout in `count` parts. words: the dimension along which the embeddings are cut."""
    write_params(folder, params)
    for n in range(count):
        part = {key: cut(key, tensor, n, count, words) for key, tensor in tensors.items()}
        torch.save(part, folder / f"{name}.{n:02}.pth")
    return folder


def cut(name: str, tensor: torch.Tensor, n: int, count: int, words: int = 0) -> torch.Tensor:
    """Return what part `n` of `count` holds of a tensor: equal rows, equal columns, or all of it."""
    kind = re.sub(r"\.weight$", "", name).split(".")[-1]
    if kind == "tok_embeddings":
        return tensor.chunk(count, dim=words)[n].clone()
    if kind in CUT_BY_ROWS:
        return tensor.chunk(count, dim=0)[n].clone()
    return tensor.chunk(count, dim=1)[n].clone() if kind in CUT_BY_COLUMNS else tensor.clone()
