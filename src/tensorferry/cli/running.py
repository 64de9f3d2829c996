"""What ``tensorferry run`` does: load a model of transformers, and let it continue a text greedily. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tensorferry.checkpoint import open_checkpoint
from tensorferry.cli.loading import refuse_unusable
from tensorferry.compat.transformers import load_model
from tensorferry.errors import ConfigError, shown
from tensorferry.formats.side_files import described
from tensorferry.progress import Progress
from tensorferry.report import Report
from tensorferry.storage.object_uri import is_uri

__all__ = ["Ran", "run_model"]


@dataclass(frozen=True, slots=True)
class Ran:
    """What a model made of a prompt. text: without the prompt and without special tokens. tokens: all new ones."""

    prompt: str
    text: str
    tokens: tuple[int, ...]
    report: Report


def run_model(
    path: str | Path,
    prompt: str,
    *,
    max_new_tokens: int,
    dtype: str | None,
    device: str,
    tokenizer: Path | None,
    progress: Progress,
    **opening: Any,
) -> Ran:
    """Load the model at `path` and return how it goes on after `prompt`: always by the likeliest token.

    tokenizer: a folder that transformers loads one from; by default the one beside the weights, or in a GGUF file.
    Raises ConfigError where there is none, and what `load_model` raises.
    """
    refuse_unusable(device)
    tokens = _tokenizer(path, tokenizer, opening)
    encoded = tokens(prompt, return_tensors="pt").to(device)
    count = encoded["input_ids"].shape[1]
    if count == 0:
        raise ConfigError("--prompt: the tokenizer makes no token of it, so there is nothing to go on from")
    model: Any
    model, report = load_model(path, dtype=dtype, device=device, progress=progress, return_report=True, **opening)
    if not getattr(model, "can_generate", lambda: False)():
        raise ConfigError(f"{shown(str(path), 300)}: {type(model).__name__} does not generate text")
    ending = tokens.pad_token_id if tokens.pad_token_id is not None else tokens.eos_token_id
    with torch.inference_mode():
        made = model.generate(**encoded, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=ending)
    new = made[0, count:].tolist()
    return Ran(prompt, tokens.decode(new, skip_special_tokens=True), tuple(new), report)


def _tokenizer(path: str | Path, given: Path | None, opening: dict[str, Any]) -> Any:
    """Return the tokenizer that transformers builds; of a GGUF file, out of the file unless one lies beside it."""
    if given is not None:
        return _made_of(given, given, {})
    with described(path, opening.get("subfolder"), tokenizer=True) as (folder, storage):
        inside = {} if _has_tokenizer(folder) or is_uri(path) else _inside_gguf(path, opening)
        return _made_of(folder, storage.uri, inside)


def _made_of(folder: Path, where: str | Path, inside: dict[str, str]) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, **inside)
    except Exception as error:  # whatever is wrong with it, transformers has its own words for it
        said = shown(str(error).partition("\n")[0], 300)
        raise ConfigError(f"{where}: transformers makes no tokenizer of it ({said}): give --tokenizer") from error


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"))


def _inside_gguf(path: str | Path, opening: dict[str, Any]) -> dict[str, str]:
    with open_checkpoint(path, **opening) as checkpoint:
        if checkpoint.catalogue.format != "gguf":
            return {}
        return {"gguf_file": checkpoint.catalogue.files[0]}
