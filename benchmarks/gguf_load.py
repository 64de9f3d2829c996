"""One load of a GGUF model in a process of its own, and what it took; `gguf.py` runs it for each of those it compares.

    python benchmarks/gguf_load.py {tensorferry,numba,torch,transformers} {float32,bfloat16} FILE

Prints a line of JSON. numba starts it at once, torch never; tensorferry decides. Both sides import the same library and
the class of the model before the clock of the load starts. Memory is the peak of the process in MiB, on Linux.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]  # gguf.py is not gguf-py

BEGAN = time.perf_counter(), time.process_time()


def main() -> None:
    who, dtype, file = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    load = loader_of(who)
    imported = (time.perf_counter(), time.process_time(), peak())
    model = load(file, dtype)
    loaded = (time.perf_counter(), time.process_time(), peak())
    parts = [tensor for name, tensor in sorted(model.state_dict().items())]
    print(json.dumps({
        "import_s": imported[0] - BEGAN[0],
        "load_s": loaded[0] - imported[0],
        "load_cpu_s": loaded[1] - imported[1],
        "total_s": loaded[0] - BEGAN[0],
        "total_cpu_s": loaded[1] - BEGAN[1],
        "peak_mib": loaded[2],
        "over_import_mib": loaded[2] - imported[2],
        "weights_mib": sum(p.nbytes for p in {p.data_ptr(): p for p in parts}.values()) / 2**20,
        "digest": digest(parts),
    }))  # fmt: skip


def loader_of(who: str) -> Any:
    """Import what is needed, and return what loads a file in a dtype."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401 - the class, for both sides

    if who == "transformers":
        return lambda file, dtype: AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    import tensorferry
    from tensorferry.numerics import dequantize

    if who != "tensorferry":
        dequantize._WORTH = {"cpu": 0 if who == "numba" else 1 << 62}
    load = tensorferry.load_model
    return lambda file, dtype: load(file, dtype=dtype)


def peak() -> float:
    """Return the most memory that this process has had, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def digest(tensors: Any) -> str:
    """Return what is the same for the same values."""
    import torch

    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    main()
