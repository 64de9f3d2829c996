"""Compiles the kernels that decode on GPUs, for a GPU that need not be there, and prints what they do with floats.

Run as a program by a test, for Triton either compiles or interprets in a process. Prints JSON: for each type and kind
of destination, the floating-point instructions of its PTX.
"""

from __future__ import annotations

import json
import re
from typing import Any

from triton import compile as compiled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tensorferry.core.dtypes import DTYPES
from tensorferry.numerics.gguf.device.filling import OPTIONS, elements_of, kernel
from tensorferry.numerics.gguf.families import FAMILY

KINDS = {"float32": "*fp32", "bfloat16": "*i16", "float16": "*fp16"}
CONSTANT = ("element", "block", "block_bytes", "kind", "size")
NUMBERS = ("row", "row_stride", "stride", "total")


def ptx_of(name: str, kind: str) -> str:
    signature = {"packed": "*u8", "into": KINDS[kind], "table": "*i8", "lost": "*i32", **dict.fromkeys(NUMBERS, "i32")}
    dtype = DTYPES[name]
    constants = (elements_of(name), dtype.block, dtype.block_bytes, kind, 1024)
    source = ASTSource(
        kernel,
        {**signature, **dict.fromkeys(CONSTANT, "constexpr")},
        constexprs=dict(zip(CONSTANT, constants, strict=True)),
    )
    made: Any = compiled(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS)
    text: str = made.asm["ptx"]
    return text


def instructions(ptx: str) -> list[str]:
    return sorted(set(re.findall(r"^\s*(?:@\S+\s+)?([a-z]+\.[a-z0-9.]*f32[a-z0-9.]*)\s", ptx, re.MULTILINE)))


def main() -> None:
    kinds = list(KINDS)
    found = {}
    for n, name in enumerate(sorted(FAMILY)):
        for kind in kinds if name == "Q4_K" else [kinds[n % len(kinds)]]:
            found[f"{name} {kind}"] = instructions(ptx_of(name, kind))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
