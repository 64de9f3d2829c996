"""Writing the checkpoints, each by the library of its format, and the digests that loads have to end with.

Runs in the environment of the libraries, once for each work and size:

    python -m benchmarks.peers.checkpoints FOLDER SIZE WORK FAMILY...

Values are random bits of ordinary bfloat16 numbers, other ones in every tensor; those of GGUF are blocks
with ordinary scales.
Digests are made of the files by numpy (of GGUF by gguf-py), not by any contestant.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.peers.digest import digest_of
from benchmarks.peers.files import digest_file, folder_of, headers
from benchmarks.peers.works import CHECKPOINTS, WORKS, Part, Shape, Work, part_of

__all__ = ["gguf_tensors"]

SHARDS = 4
_PERIOD = 8388593  # a prime, so that no two rows of a tensor are alike
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm", "input_layernorm": "attn_norm",
}  # fmt: skip


def main(root: Path, size: str, work: Work, families: list[str]) -> None:
    """Write what is not there yet."""
    for family in families:
        folder = folder_of(root, size, work.checkpoint, family)
        if not (folder / "config.json").exists():
            print(f"writing {folder}", flush=True)
            folder.mkdir(parents=True, exist_ok=True)
            WRITERS[family](folder, work.checkpoint, size)
            (folder / "config.json").write_text(json.dumps(CHECKPOINTS[work.checkpoint].sized(size), indent=1))
    known = digest_file(root, size, work)
    if not known.exists():
        source = folder_of(root, size, work.checkpoint, "gguf" if work.family == "gguf" else "safetensors")
        values = _decoded(source, work.checkpoint, size) if work.family == "gguf" else _parts(source, work, size)
        known.write_text(digest_of(values))


def _values(shapes: Mapping[str, Shape]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield each tensor as the bits of its numbers."""
    bits = np.random.default_rng(1).integers(0, 1 << 16, _PERIOD, dtype=np.uint16) & 0x81FF | 0x3C00
    for number, (name, shape) in enumerate(shapes.items()):
        turned = np.roll(bits, number * 104729)
        yield name, np.resize(turned[: np.prod(shape, dtype=int)], shape)


def _shards(checkpoint: str, size: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the tensors of each shard, of about equal size."""
    import torch

    shapes = CHECKPOINTS[checkpoint].shapes(size)
    whole = sum(int(np.prod(shape)) for shape in shapes.values())
    number, before, held = 0, 0, dict[str, Any]()
    for name, values in _values(shapes):
        if before * SHARDS // whole > number and held:
            yield number, held
            number, held = number + 1, {}
        held[name] = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        before += values.size
    yield number, held


def _write_shards(
    folder: Path, checkpoint: str, size: str, stem: str, suffix: str, save: Callable[..., object]
) -> None:
    index: dict[str, str] = {}
    for number, tensors in _shards(checkpoint, size):
        name = f"{stem}-{number + 1:05}-of-{SHARDS:05}.{suffix}"
        save(tensors, str(folder / name))
        index |= dict.fromkeys(tensors, name)
    total = sum(2 * int(np.prod(shape)) for shape in CHECKPOINTS[checkpoint].shapes(size).values())
    data = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(data))


def _write_safetensors(folder: Path, checkpoint: str, size: str) -> None:
    from safetensors.torch import save_file

    def save(tensors: dict[str, Any], path: str) -> None:
        save_file(tensors, path, metadata={"format": "pt"})

    _write_shards(folder, checkpoint, size, "model", "safetensors", save)


def _write_bin(folder: Path, checkpoint: str, size: str) -> None:
    import torch

    _write_shards(folder, checkpoint, size, "pytorch_model", "bin", torch.save)


def _write_tensors(folder: Path, checkpoint: str, size: str) -> None:
    from tensorizer import TensorSerializer

    serializer = TensorSerializer(str(folder / "model.tensors"))
    serializer.write_state_dict({name: t for _, shard in _shards(checkpoint, size) for name, t in shard.items()})
    serializer.close()


def _write_gguf(folder: Path, checkpoint: str, size: str) -> None:
    import gguf

    config, kind = CHECKPOINTS[checkpoint].sized(size), gguf.GGMLQuantizationType[checkpoint.upper()]
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    for number, (name, shape) in enumerate(CHECKPOINTS[checkpoint].shapes(size).items()):
        if len(shape) == 1:
            writer.add_tensor(_gguf_name(name), np.linspace(0.5, 1.5 + number, shape[0], dtype=np.float32))
        else:
            writer.add_tensor(_gguf_name(name), _blocks(kind, shape, number), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(kind: Any, shape: Shape, number: int) -> np.ndarray[Any, Any]:
    """Return random blocks whose scales are between 0.006 and 0.03."""
    import gguf

    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    count = shape[0] * shape[1] // elements
    raw = np.random.default_rng(number).integers(0, 256, (count, nbytes), dtype=np.uint8)
    for at in (1, 3) if kind.name == "Q4_K" else (1,):
        raw[:, at] = raw[:, at] % 10 + 0x1E
    return raw.reshape(shape[0], -1)


def _gguf_name(name: str) -> str:
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _parts(folder: Path, work: Work, size: str) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    parts = part_of(work, size)
    for path in sorted(folder.glob("*.safetensors")):
        start, header = headers(path)
        bits = np.memmap(path, np.uint8, "r")
        for name, entry in header.items():
            if name in parts:
                first, last = (start + at for at in entry["data_offsets"])
                whole = bits[first:last].view(np.uint16).reshape(entry["shape"])
                yield name, np.ascontiguousarray(whole[_index(parts[name])])


def _index(part: Part | None) -> tuple[slice, ...]:
    return () if part is None else (*[slice(None)] * part[0], slice(part[1], part[1] + part[2]))


def _decoded(folder: Path, checkpoint: str, size: str) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    import torch

    for name, values in gguf_tensors(folder, checkpoint, size):
        yield name, torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()


def gguf_tensors(folder: Path, checkpoint: str, size: str) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield what gguf-py makes of a GGUF file: float32, by the names and with the rows in the order of transformers."""
    import gguf

    config = CHECKPOINTS[checkpoint].sized(size)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = {t.name: t for t in gguf.GGUFReader(folder / "model.gguf").tensors}
    for name in CHECKPOINTS[checkpoint].shapes(size):
        tensor = tensors[_gguf_name(name)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for projection, count in heads.items():
            if projection in name:  # llama.cpp keeps the halves of each head in turns
                turns = values.reshape(count, -1, 2, values.shape[-1])
                values = turns.swapaxes(1, 2).reshape(values.shape)
        yield name, values if values.flags.writeable else values.copy()


WRITERS = {"safetensors": _write_safetensors, "bin": _write_bin, "tensors": _write_tensors, "gguf": _write_gguf}

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], WORKS[sys.argv[3]], sys.argv[4:])
