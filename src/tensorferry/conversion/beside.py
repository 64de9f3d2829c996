"""The small files beside the weights: which go along, which are made anew, and which stay behind."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from tensorferry.checkpoint import Checkpoint
from tensorferry.core.dtypes import DType, Kind
from tensorferry.errors import CorruptFile, LocateError, TensorferryError, shown
from tensorferry.formats.file_names import format_of, is_side_file, what_else
from tensorferry.formats.params_json import PARAMS_FILE
from tensorferry.formats.writing import new_file
from tensorferry.manifest import BESIDE as SHA256SUMS
from tensorferry.storage.base import File, Storage
from tensorferry.storage.object_uri import is_uri
from tensorferry.storage.reading import nested, read_bytes, seen

__all__ = ["CONFIG", "Beside", "read_config", "side_files", "write_side_files"]

CONFIG = "config.json"
_MAX_CONFIG = 16 << 20
_BLOCK = 1 << 20
_OF_A_MODEL = frozenset(
    {
        CONFIG, "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
        "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
        "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
    }
)  # fmt: skip
"""What belongs to the model for certain, in a folder of which only one file was named."""

_DTYPE_KEYS = ("dtype", "torch_dtype")
_TORCH_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True, slots=True)
class Beside:
    """The files to write beside the weights: of the source as they are, or with new contents.

    done: path to what becomes of it, in a word. left: path to why it stays behind.
    """

    copied: tuple[File, ...] = ()
    made: Mapping[str, bytes] = field(default_factory=dict)
    done: Mapping[str, str] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(f.size for f in self.copied) + sum(map(len, self.made.values()))


def read_config(storage: Storage) -> dict[str, Any] | None:
    """Return config.json of the source, None where there is none. Raises CorruptFile for what is no JSON object."""
    try:
        file = storage.stat(CONFIG)
    except LocateError:
        return None
    what = f"{CONFIG} ({shown(storage.uri, 300)})"
    if file.size > _MAX_CONFIG:
        raise CorruptFile(f"{what}: {file.size:,} bytes; none is larger than {_MAX_CONFIG:,}")
    try:
        data = json.loads(read_bytes(storage, CONFIG, 0, file.size))
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{what}: is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise CorruptFile(f"{what}: a JSON object is expected, found a {type(data).__name__}")
    return data


def side_files(
    checkpoint: Checkpoint,
    config: Mapping[str, Any] | None,
    *,
    named: bool,
    dtype: DType | None,
    made: Mapping[str, bytes],
    renamed: bool,
) -> Beside:
    """Return what goes along from beside `checkpoint`.

    named: only one file of the folder was named, so that others there may be of anything. config: what config.json of
    the source says; its type becomes `dtype`, and its quantization goes where packed blocks become numbers. made: other
    files with new contents, which win. renamed: params.json, which goes with other names, stays behind.
    """
    storage = checkpoint.storage
    taken, left = _sorted_out(storage, checkpoint, named=named)
    if renamed:
        left |= {file.path: "says in another way what config.json does" for file in taken if file.path == PARAMS_FILE}
        taken = [file for file in taken if file.path != PARAMS_FILE]
    news = dict(made)
    packed = any(entry.dtype.kind is Kind.PACKED for entry in checkpoint.catalogue.values())
    changed = None if config is None or CONFIG in made else _changed(config, dtype, dequantized=packed)
    if changed is not None:
        news[CONFIG] = _json(changed)
    copied = tuple(file for file in taken if file.path not in news)
    done = dict.fromkeys((f.path for f in copied), "as it is")
    done |= {path: "changed" if path == CONFIG and changed is not None else "made" for path in news}
    return Beside(copied, news, done, left)


def _sorted_out(storage: Storage, checkpoint: Checkpoint, *, named: bool) -> tuple[list[File], dict[str, str]]:
    selected = {file.path for file in checkpoint.selection.files} | {checkpoint.selection.index_file}
    left = {path: why for path, why in checkpoint.selection.ignored if path not in selected}
    taken = []
    for file in (*seen(storage, sorted(_OF_A_MODEL)), *([] if named else _nested(storage))):
        if file.path in selected or file.path in left:
            continue
        why = _left_behind(file, named=named)
        if why == "":
            why = _unreadable(storage, file)
        if why == "":
            taken.append(file)
        elif why is not None:
            left[file.path] = why
    return taken, left


def _left_behind(file: File, *, named: bool) -> str | None:
    """Return why `file` does not go along, "" where it does, and None where nobody would expect it to."""
    if file.path == SHA256SUMS:
        return "digests of other files"
    if _is_ours(file.path) or not is_side_file(file.path, file.size):
        return None
    if named and file.path not in _OF_A_MODEL:
        return None
    return ""


def _unreadable(storage: Storage, file: File) -> str:
    """Return why `file` cannot be copied, "" where it can. Raises UnsafeFile where it leads out of the folder."""
    if file.broken is not None:
        return f"a broken link, to {shown(file.broken)}"
    if not is_uri(storage.uri) and not Path(storage.uri, file.path).is_file():
        return "a pipe, a socket or a device"
    storage.stat(file.path)
    return ""


def _is_ours(name: str) -> bool:
    """Whether a file is part of how a checkpoint is kept: the record of a cache, the manifest of a saved state."""
    return name.startswith("tensorferry")


def _nested(storage: Storage) -> Iterator[File]:
    """Yield the files of folders one level down that hold no weights."""
    for _, paths in groupby(nested(storage), posixpath.dirname):
        files = list(paths)
        names = list(map(posixpath.basename, files))
        if any(format_of(name) or what_else(name) or _is_ours(name) for name in names):
            continue
        for path in files:
            with suppress(TensorferryError):  # a broken link, or one that leads out
                yield storage.stat(path)


def _changed(config: Mapping[str, Any], dtype: DType | None, *, dequantized: bool) -> dict[str, Any] | None:
    """Return a configuration that says what is written; None where the old one does."""
    new = dict(config) if dtype is None else _with_dtype(config, _TORCH_NAMES[dtype.name])
    if dtype is not None and not any(key in new for key in _DTYPE_KEYS):
        new["torch_dtype"] = _TORCH_NAMES[dtype.name]
    if dequantized:
        new.pop("quantization_config", None)
    return None if new == config else new


def _with_dtype(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a configuration in which every type of parameters is `name`, those of its parts, too."""
    return {
        key: name
        if key in _DTYPE_KEYS and isinstance(value, str)
        else _with_dtype(value, name)
        if isinstance(value, dict) and key.endswith("_config") and key != "quantization_config"
        else value
        for key, value in config.items()
    }


def made_config(config: Mapping[str, Any], dtype: DType) -> bytes:
    """Return the config.json of a source that had none."""
    return _json({**config, "torch_dtype": _TORCH_NAMES.get(dtype.name, "float32")})


def _json(data: Mapping[str, Any]) -> bytes:
    try:
        return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can only escape
        return (json.dumps(data, indent=2) + "\n").encode()


def write_side_files(beside: Beside, storage: Storage, folder: Path) -> None:
    """Write the files into `folder`, each whole; what lies there already stays. Raises ReadError, OSError."""
    for path, data in beside.made.items():
        _write(folder / path, [data])
    for file in beside.copied:
        _write(folder / file.path, _contents(storage, file))


def _write(path: Path, data: Sequence[bytes] | Iterator[bytes]) -> None:
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as out:
        for block in data:
            out.write(block)


def _contents(storage: Storage, file: File) -> Iterator[bytes]:
    for at in range(0, file.size, _BLOCK):
        yield read_bytes(storage, file.path, at, min(_BLOCK, file.size - at))
