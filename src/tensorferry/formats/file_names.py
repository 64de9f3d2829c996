"""What the names of files say about a checkpoint: tables of patterns, and one parser. Looks at no content."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

__all__ = [
    "CANONICAL_STEMS",
    "FAMILIES",
    "LOAD_FORMATS",
    "Family",
    "IndexName",
    "WeightName",
    "format_of",
    "is_side_file",
    "matches_any",
    "parse_index_name",
    "parse_weight_name",
    "relative",
    "what_else",
]


@dataclass(frozen=True, slots=True)
class Family:
    """A way of naming the files of a checkpoint. Another format joins by another row in `FAMILIES`.

    label: what messages call it. format: the name of its file format. suffix: how its files end.
    consolidated: whether it is Mistral's and Meta's naming, `consolidated*`, or everything else; None for either.
    pickled: whether its files are. whole: whether each of its files, or each split, is a model by itself, so that
    several are a choice to be made. layout: how its files make up one checkpoint, as in `base.Selection`.
    """

    label: str
    format: str
    suffix: str
    consolidated: bool | None = False
    pickled: bool = False
    whole: bool = False
    layout: str = "files"

    def takes(self, name: WeightName) -> bool:
        """Tell whether a file of that name is one of this family."""
        return name.suffix == self.suffix and self.consolidated in (None, name.consolidated)


FAMILIES = {
    "safetensors": Family("HF safetensors", "safetensors", ".safetensors"),
    "mistral": Family("Mistral consolidated safetensors", "safetensors", ".safetensors", consolidated=True),
    "bin": Family("PyTorch .bin", "torch", ".bin", consolidated=None, pickled=True),
    "pt": Family("PyTorch .pt", "torch", ".pt", consolidated=None, pickled=True),
    "pth": Family("PyTorch .pth", "torch", ".pth", pickled=True),
    "parts": Family("consolidated .pth", "torch", ".pth", consolidated=True, pickled=True, layout="model-parallel"),
    "ckpt": Family("PyTorch .ckpt", "torch", ".ckpt", consolidated=None, pickled=True),
    "gguf": Family("GGUF", "gguf", ".gguf", consolidated=None, whole=True),
    "tensorizer": Family("Tensorizer", "tensorizer", ".tensors", consolidated=None, whole=True),
}

LOAD_FORMATS: dict[str, tuple[str, ...]] = {
    "auto": ("safetensors", "mistral", "bin", "gguf", "pt", "pth", "parts", "ckpt", "tensorizer"),
    "hf": ("safetensors", "bin", "pt", "pth", "parts", "ckpt"),
    "safetensors": ("safetensors",),
    "mistral": ("mistral", "parts"),
    "pt": ("pt", "pth", "parts", "ckpt", "bin"),
    "gguf": ("gguf",),
    "tensorizer": ("tensorizer",),
    "npcache": ("bin", "pt"),
    "sharded_state": ("safetensors",),
}
"""Which families each `load_format` takes, best first."""

CANONICAL_STEMS = ("model", "pytorch_model", "diffusion_pytorch_model")
"""What writers call the file, or the set of shards, that is the whole model."""

_FORMATS = {family.suffix: family.format for family in FAMILIES.values()}

_NOT_BASE_WEIGHTS = (
    ("adapter_*", "adapter"),
    ("adapters.*", "adapter"),
    ("training_args*", "training state"),
    ("optimizer*", "training state"),
    ("scheduler*", "training state"),
    ("scaler*", "training state"),
    ("rng_state*", "training state"),
    ("trainer_state*", "training state"),
    ("*-rank-*-part-*", "sharded state of single ranks"),
    ("*-tp-*-part-*", "sharded state of single ranks"),
    ("*-ep-*-part-*", "sharded state of single ranks"),
    ("openvino_*", "OpenVINO model"),
    ("mmproj*.gguf", "multimodal projector"),
    ("*[.-]mmproj*.gguf", "multimodal projector"),
    ("*imatrix*.gguf", "importance matrix"),
)
"""Files that end like weights and are no base weights, by the start of their name."""

_OTHER_SUFFIXES = {
    ".ggml": "GGML",
    ".npz": "NumPy",
    ".npy": "NumPy",
    ".onnx": "ONNX",
    ".onnx_data": "ONNX",
    ".h5": "Keras",
    ".keras": "Keras",
    ".msgpack": "Flax",
    ".ot": "rust-bert",
    ".tflite": "TensorFlow Lite",
    ".mlmodel": "Core ML",
    ".nemo": "NeMo",
    ".distcp": "torch distributed checkpoint",
    ".pkl": "pickle",
    ".tar": "tar archive",
    ".gz": "compressed archive",
    ".zip": "zip archive",
}
"""Weights of formats that no `load_format` above reads, to say what lies there."""

_NO_SIDE_FILES = (".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf", ".mp4", ".mp3", ".wav", ".parquet")
_MAX_SIDE_FILE = 64 << 20

_SPLIT = re.compile(r"(?P<stem>.+?)-(?P<part>\d{1,9})-of-(?P<count>\d{1,9})(?:\.(?P<variant>[\w-]+))?")
_INDEX = re.compile(r"(?P<base>.+?)\.index(?:\.(?P<variant>[\w-]+))?\.json")
_VARIANT = re.compile(r"[A-Za-z][\w-]*")


@dataclass(frozen=True, slots=True)
class WeightName:
    """The parts of a weight file's name: ``stem[.variant][-part-of-count][.variant]suffix``.

    role: why it is no base weights ("adapter", "training state"), or "" where it may be.
    """

    path: str
    stem: str
    suffix: str
    variant: str | None = None
    part: int | None = None
    count: int | None = None
    role: str = ""

    @property
    def consolidated(self) -> bool:
        """Whether it is named as Mistral and Meta name their own layout."""
        return self.stem.startswith("consolidated")


@dataclass(frozen=True, slots=True)
class IndexName:
    """The parts of a shard index's name; `weights` is the single file that the set stands for."""

    path: str
    weights: WeightName


def parse_weight_name(path: str, variant: str | None = None) -> WeightName | None:
    """Return the parts of `path`'s last component, or None if it does not end like weights that are read here.

    A dotted word counts as a variant after a canonical stem, or where it is the `variant` asked for. In names of GGUF
    files, where it says how they are quantized, only the latter counts, and a dash may stand before it.

    >>> name = parse_weight_name("model.fp16-00002-of-00003.safetensors")
    >>> name.stem, name.variant, name.part, name.count
    ('model', 'fp16', 2, 3)
    >>> parse_weight_name("Qwen2.5.safetensors").stem
    'Qwen2.5'
    """
    base = posixpath.basename(path)
    body, suffix = posixpath.splitext(base)
    if suffix not in _FORMATS or base.startswith("."):
        return None
    split = _SPLIT.fullmatch(body)
    stem, found = (split["stem"], split["variant"]) if split else (body, None)
    if found is None:
        stem, found = _cut_variant(stem, suffix, variant)
    part, count = (int(split["part"]), int(split["count"])) if split else (None, None)
    return WeightName(path, stem, suffix, found, part, count, _role_of(base))


def parse_index_name(path: str, variant: str | None = None) -> IndexName | None:
    """Return the parts of a shard index's name, or None if it is no such name.

    >>> parse_index_name("model.safetensors.index.fp16.json").weights.variant
    'fp16'
    """
    match = _INDEX.fullmatch(posixpath.basename(path))
    weights = parse_weight_name(match["base"], variant) if match else None
    if match is None or weights is None:
        return None
    folder = posixpath.dirname(path)
    said = match["variant"] or weights.variant
    return IndexName(
        path, WeightName(posixpath.join(folder, match["base"]), weights.stem, weights.suffix, said, role=weights.role)
    )


def format_of(path: str) -> str | None:
    """Return the name of the file format that `path` ends like, or None."""
    return _FORMATS.get(posixpath.splitext(path)[1])


def what_else(path: str) -> str | None:
    """Return what weights `path` is where its name says that tensorferry's `load_format`s do not read it, or None.

    >>> what_else("decoder.onnx"), what_else("config.json")
    ('ONNX', None)
    """
    return _OTHER_SUFFIXES.get(posixpath.splitext(path)[1])


def is_side_file(path: str, size: int) -> bool:
    """Tell whether `path` is one of the small files that a model needs beside its weights.

    Configuration, tokenizer, templates and code; not weights of any format, their indexes, or pages and pictures.
    """
    base = posixpath.basename(path)
    if base.startswith(".") or size > _MAX_SIDE_FILE or base.lower().endswith(_NO_SIDE_FILES):
        return False
    return format_of(path) is None and what_else(path) is None and parse_index_name(path) is None


def relative(path: str, folder: str) -> str:
    """Return the path of what lies below `folder` as seen from there, and any other path as it is.

    >>> relative("original/params.json", "original"), relative("config.json", "original")
    ('params.json', 'config.json')
    """
    return path.removeprefix(folder + "/") if folder else path


def matches_any(path: str, patterns: Iterable[str]) -> bool:
    """Tell whether `path`, or its last component, matches one of the shell `patterns`; case counts."""
    base = posixpath.basename(path)
    return any(fnmatchcase(path, pattern) or fnmatchcase(base, pattern) for pattern in patterns)


def _cut_variant(stem: str, suffix: str, variant: str | None) -> tuple[str, str | None]:
    gguf = suffix == FAMILIES["gguf"].suffix
    if variant is not None and (stem.endswith(f".{variant}") or (gguf and stem.endswith(f"-{variant}"))):
        return stem[: -len(variant) - 1], variant
    if gguf:
        return stem, None
    head, _, tail = stem.partition(".")
    if head in CANONICAL_STEMS and _VARIANT.fullmatch(tail):
        return head, tail
    return stem, None


def _role_of(base: str) -> str:
    return next((role for pattern, role in _NOT_BASE_WEIGHTS if fnmatchcase(base, pattern)), "")
