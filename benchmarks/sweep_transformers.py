"""Which causal language models of transformers load bit-identical through tensorferry and through `from_pretrained`.

Every class of MODEL_FOR_CAUSAL_LM_MAPPING is built from a tiny configuration with random weights, saved with
`save_pretrained`, loaded both ways and compared: state, buffers, dtypes, ties, generation settings and logits. Each
class has a process of its own. Prints `N of M classes load bit-identical`, and the reason of each miss.

    python benchmarks/sweep_transformers.py [--only LlamaForCausalLM …] [--dtype bfloat16] [--timeout 120]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

import tensorferry

TINY: Mapping[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embedding_size": 32, "emb_dim": 32,
    "word_embed_proj_dim": 32, "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48, "d_ff": 48, "d_inner": 48,
    "ffn_hidden_size": 48, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "hidden_dim": 48, "ffn_config": None,
    "num_hidden_layers": 4, "num_layers": 4, "n_layer": 4, "n_layers": 4, "encoder_layers": 2, "decoder_layers": 2,
    "num_attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8,
    "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "max_seq_len": 64, "block_size": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2, "top_k_experts": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "expert_ffn_hidden_size": 16, "n_group": 2, "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "state_size": 8, "mamba_d_state": 8, "lru_width": 32, "projection_dim": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "sliding_window": 16, "attention_window_size": 16,
    "rotary_dim": 4,
}  # fmt: skip
"""Small values for the names that configurations use; a class takes those that it knows."""

_HYBRID = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
EXACT: Mapping[str, Mapping[str, Any]] = {
    "BambaForCausalLM": {**_HYBRID, "attn_layer_indices": [1]},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 2]]},
    "GraniteMoeHybridForCausalLM": {**_HYBRID, "layer_types": ["mamba", "attention", "mamba", "attention"]},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "MoshiForCausalLM": {"audio_vocab_size": 64},
    "ReformerModelWithLMHead": {"is_decoder": True, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "Zamba2ForCausalLM": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "Gemma4AssistantForCausalLM": {
        "text_config": {
            "model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        },
    },
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "DbrxAttentionConfig": {"rope_theta": 1e4, "clip_qkv": 8.0},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 2},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "XLNetConfig": {"max_position_embeddings": ...},
    "ZambaConfig": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "Inkling2ForCausalLM": {"unpadded_vocab_size": 90},
    "Inkling2LoopForCausalLM": {"unpadded_vocab_size": 90},
}  # fmt: skip
"""More values, by class, where the usual ones do not fit together; ... for one that is not set."""

OPTIONAL = ("pad_token_id", "bos_token_id", "eos_token_id", "num_key_value_heads", "head_dim")
"""Names that are set even where the default is None."""


class Outcome(NamedTuple):
    """What came of a class.

    kind: identical, differs, failed, or not built. detail: the reason; of an identical one, why neither model runs on
    token ids alone, so that its logits were not compared.
    """

    name: str
    kind: str
    detail: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep and print its account; 1 where a class that builds is not identical."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="CLASS")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for each class")
    options = parser.parse_args(arguments)
    outcomes = []
    for config_class, name in classes(options.only):
        outcome = isolated(config_class, name, options.dtype, options.timeout)
        outcomes.append(outcome)
        if outcome.kind != "identical":
            print(f"{outcome.kind}: {outcome.name}: {outcome.detail}", flush=True)
    counts = Counter(o.kind for o in outcomes)
    built = len(outcomes) - counts["not built"]
    silent = [o for o in outcomes if o.kind == "identical" and o.detail]
    for outcome in silent:
        print(f"no logits: {outcome.name}: {outcome.detail}")
    print(
        f"{counts['identical']} of {built} classes load bit-identical ({len(silent)} of them by state alone); "
        f"{counts['not built']} more do not build from a tiny configuration"
    )
    return int(counts["identical"] < built)


def classes(only: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """Yield configuration class and name of every causal language model, each name once."""
    seen = set()
    found: Any
    for found in transformers.MODEL_FOR_CAUSAL_LM_MAPPING.values():
        for kind in found if isinstance(found, list | tuple) else [found]:
            if kind.__name__ not in seen and (not only or kind.__name__ in only):
                seen.add(kind.__name__)
                yield kind.config_class, kind.__name__


def isolated(config_class: type, name: str, dtype: str, timeout: float) -> Outcome:
    """Return the outcome of a class, tried in a process of its own: a fork of this one, which has run no thread."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, config_class, name, dtype))
    process.start()
    theirs.close()
    try:
        if ours.poll(timeout):
            return Outcome(name, *ours.recv())
        return Outcome(name, "failed", f"no answer within {timeout:.0f} seconds")
    except EOFError:
        return Outcome(name, "failed", "the process ended without an answer")
    finally:
        process.kill()
        process.join()


def _answer(out: Connection, config_class: type, name: str, dtype: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        out.send(attempt(config_class, getattr(transformers, name), dtype))


def attempt(config_class: type, kind: type, dtype: str) -> tuple[str, str]:
    """Return kind and detail of the outcome of one class."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            save_tiny(config_class, kind, dtype, Path(folder))
            theirs = kind.from_pretrained(folder)  # type: ignore[attr-defined]
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
            return "not built", _words(error)
        try:
            ours = tensorferry.load_model(folder, auto_class=kind)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
            return "failed", _words(error)
        found, silent = differences(ours, theirs), ""
        made = [logits(model) for model in (ours, theirs)]
        if isinstance(made[0], str) and made[0] == made[1]:
            silent = made[0]
        elif isinstance(made[0], str) or isinstance(made[1], str) or not same(made[0], made[1]):
            found.append("logits")
        return ("differs", "; ".join(found[:4])) if found else ("identical", silent)


def _words(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({Path(where.filename).name}:{where.lineno})"


def save_tiny(config_class: type, kind: type, dtype: str, folder: Path) -> None:
    """Build a tiny model with random weights and save it."""
    torch.manual_seed(0)
    model = kind(tiny_config(config_class, EXACT.get(kind.__name__, {})))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.normal_(std=0.05)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def tiny_config(config_class: Any, exact: Mapping[str, Any]) -> Any:
    """Return a configuration with every size made small that the class knows, and `exact` values on top."""
    exact = {**EXACT.get(config_class.__name__, {}), **exact}
    default = _default(config_class, exact)
    known = {k: v for k, v in TINY.items() if v is not None and _takes(default, k)}
    if "kv_lora_rank" in known and "num_key_value_heads" in known:
        known["num_key_value_heads"] = known["num_attention_heads"]
    parts = getattr(config_class, "sub_configs", {})
    for key in parts:
        inner = getattr(default, key, None)
        if inner is not None and hasattr(inner, "sub_configs"):
            known[key] = tiny_config(type(inner), exact.get(key, {})).to_dict()
    known.update({k: v for k, v in exact.items() if k not in parts})
    known = {k: v for k, v in known.items() if v is not ...}
    return _accepted(config_class, known)


def _default(config_class: Any, exact: Mapping[str, Any]) -> Any:
    """Return the configuration that the class has by default, or one with `exact` where it has none."""
    try:
        return config_class()
    except Exception:  # noqa: BLE001 - its own validation has errors of its own
        return config_class(**exact)


def _accepted(config_class: Any, values: dict[str, Any]) -> Any:
    """Return a configuration with `values` but for those that its errors name."""
    while True:
        try:
            return config_class(**values)
        except Exception as error:
            refused = [k for k in values if re.search(rf"\b{k}\b", str(error)) and k in TINY]
            if not refused:
                raise
            values = {k: v for k, v in values.items() if k not in refused}


def _takes(default: Any, key: str) -> bool:
    """Whether a configuration has a number under `key`, or may have one."""
    try:
        value = getattr(default, key, default)
    except Exception:  # noqa: BLE001 - values that differ from layer to layer cannot be asked for
        return False
    return isinstance(value, int) or (value is None and key in OPTIONAL)


def differences(ours: Any, theirs: Any) -> list[str]:
    """Return in words what differs between two models; empty for identical ones."""
    found = _tensors("state", ours.state_dict(), theirs.state_dict())
    found += _tensors("buffer", dict(ours.named_buffers()), dict(theirs.named_buffers()))
    grads = [{n: p.requires_grad for n, p in m.named_parameters(remove_duplicate=False)} for m in (ours, theirs)]
    ties = [[n for n, _ in m.named_parameters()] for m in (ours, theirs)]
    configs = [{**m.config.to_dict(), "name_or_path": m.config.name_or_path} for m in (ours, theirs)]
    generation = [getattr(m, "generation_config", None) for m in (ours, theirs)]
    said = [g.to_dict() if g is not None else None for g in generation]
    named: dict[str, Sequence[Any]] = {
        "requires_grad": grads,
        "ties": ties,
        "config": configs,
        "generation config": said,
    }
    found += [what for what, (a, b) in named.items() if a != b]
    if ours.training != theirs.training or ours.dtype != theirs.dtype:
        found.append("mode or dtype")
    return found


def _tensors(what: str, a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[str]:
    if a.keys() != b.keys():
        return [f"{what} names: {sorted(a.keys() ^ b.keys())[:3]}"]
    return [f"{what} {name}" for name in a if not same(a[name], b[name])]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, in type and shape too."""
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*bits)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor | str:
    """Return the logits for fixed token ids, or why there are none."""
    torch.manual_seed(0)
    try:
        made: torch.Tensor = model(input_ids=torch.arange(3, 19).reshape(1, 16)).logits
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
        return _words(error)
    return made


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    began = time.perf_counter()
    code = main()
    print(f"in {time.perf_counter() - began:.0f} s, transformers {transformers.__version__}, torch {torch.__version__}")
    sys.exit(code)
