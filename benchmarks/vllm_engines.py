"""Engines of vLLM with more than one model or rank: is every parameter, of every model in them, filled as by vLLM?

For each case tiny random models are written, and two engines started, one with vLLM's default loader and one with ours.
All values that the workers hold afterwards, of the served model and of the one that drafts for it, have to be the same
bit for bit, after vLLM's post-processing, and so have the tokens. In the environment that ``trace_vllm.py`` says how to
make, on CPUs::

    vllm/bin/python benchmarks/vllm_engines.py [CASE …]

*stages*: two pipeline stages. *experts*: whole experts on each of two ranks. With these two, vLLM generates nothing on
a CPU, and values alone are compared. *halved-experts*: a half of each expert on each of two ranks. *tied*: a tied head
on two ranks; *tied-stages*: on two stages. *draft*: a small Llama drafts, on two ranks; *draft-elsewhere*: and
``weights`` says where those of the served model are. *eagle*: an EAGLE head with an embedding of its own;
*eagle-bare*: one that takes it from the served model. *medusa*: Medusa heads. Exits with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trace_vllm import write_checkpoint
from vllm_tokens import compared, holds_only, run, tiny_llama

Case = tuple[Path, int, dict[str, Any]]
"""What to serve, on how many tensor-parallel ranks, and the other options of the engine."""


def stages(folder: Path) -> Case:
    return tiny_llama(folder / "served"), 1, {"pipeline_parallel_size": 2}


def experts(folder: Path) -> Case:
    return halved_experts(folder)[0], 2, {"enable_expert_parallel": True}


def halved_experts(folder: Path) -> Case:
    write_checkpoint("qwen3moe", folder / "served", head_dim=32)  # vLLM's attention on CPUs takes no heads of 8
    return folder / "served", 2, {}


def tied(folder: Path) -> Case:
    return tiny_llama(folder / "served", tie_word_embeddings=True), 2, {}


def tied_stages(folder: Path) -> Case:
    return tiny_llama(folder / "served", tie_word_embeddings=True), 1, {"pipeline_parallel_size": 2}


def speculation(method: str, model: Path) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "model": str(model), "num_speculative_tokens": 2}}


def draft(folder: Path) -> Case:
    tiny_llama(folder / "draft", seed=1)
    more = speculation("draft_model", folder / "draft")
    more["speculative_config"]["draft_tensor_parallel_size"] = 2
    return tiny_llama(folder / "served"), 2, more


def draft_elsewhere(folder: Path) -> Case:
    """The configuration of the served model lies beside other weights than its own, of the same shapes."""
    _, _, more = draft(folder)
    tiny_llama(folder / "elsewhere", seed=2)
    return folder / "served", 2, {**more, "weights": str(folder / "elsewhere")}


def eagle(folder: Path, *, bare: bool = False) -> Case:
    import torch
    from safetensors.torch import save_file

    served, head = tiny_llama(folder / "served"), folder / "head"
    written = json.loads((served / "config.json").read_text())
    head.mkdir()
    config = written | {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
    (head / "config.json").write_text(json.dumps(config))
    tensors = {
        name.removeprefix("model."): value
        for name, value in llama_values(folder / "donor", seed=1).items()
        if not name.startswith(("model.layers.1.", "model.layers.0.input_layernorm.", "model.norm.", "lm_head."))
    }
    tensors["fc.weight"] = torch.randn(256, 512).to(torch.bfloat16)
    if bare:
        del tensors["embed_tokens.weight"]
    save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
    return served, 1, speculation("eagle", head)


def eagle_bare(folder: Path) -> Case:
    return eagle(folder, bare=True)


def medusa(folder: Path) -> Case:
    import torch
    from safetensors.torch import save_file

    served, heads = tiny_llama(folder / "served"), folder / "heads"
    heads.mkdir()
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": 256, "vocab_size": 256,
              "num_heads": 2, "num_hidden_layers": 1, "max_paths": 8, "topk": 2}  # fmt: skip
    (heads / "config.json").write_text(json.dumps(config))
    tensors = {}
    for head in range(2):
        tensors[f"blocks.{head}.layers.0.weight"] = torch.randn(256, 256).to(torch.bfloat16)
        tensors[f"blocks.{head}.layers.0.bias"] = torch.randn(256).to(torch.bfloat16)
        tensors[f"lm_heads.{head}.weight"] = torch.randn(256, 256).to(torch.bfloat16)
    save_file(tensors, heads / "model.safetensors", metadata={"format": "pt"})
    return served, 1, speculation("medusa", heads)


def llama_values(folder: Path, seed: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    tiny_llama(folder, seed=seed)
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


CASES: dict[str, Callable[[Path], Case]] = {
    "stages": stages, "experts": experts, "halved-experts": halved_experts, "tied": tied, "tied-stages": tied_stages,
    "draft": draft, "draft-elsewhere": draft_elsewhere, "eagle": eagle, "eagle-bare": eagle_bare, "medusa": medusa,
}  # fmt: skip


def tried(name: str) -> bool:
    with tempfile.TemporaryDirectory() as made:
        served, size, more = CASES[name](Path(made))
        weights = more.pop("weights", None)
        extra = {} if weights is None else {"weights": weights}
        ours = run(served, "tensorferry", size, options=more, **extra)
        if weights is not None:  # vLLM's loader looks beside the configuration only
            replace_weights(served, Path(weights))
        return compared(name, ours, run(served, "auto", size, options=more), no_tokens=holds_only(more))


def replace_weights(folder: Path, by: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    for file in by.glob("*.safetensors*"):
        file.rename(folder / file.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"some of {' '.join(CASES)} (default: all)")
    options = parser.parse_args()
    if find_spec("vllm") is None:
        print("vLLM is not in this environment; trace_vllm.py says how to make one that has it")
        return 0
    good = [tried(name) for name in options.cases or list(CASES)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
