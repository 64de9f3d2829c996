"""A conversion holds a bounded part of the checkpoint, however large a tensor of it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.checkpoints import write_safetensors
from helpers.gguf_bytes import Q8_0, T, gguf
from helpers.measuring import measured

MIB = 1 << 20
BOUND, SLACK = 8 * MIB, 32 * MIB

CONVERT = """
bound, to, dtype = int(sys.argv[2]), sys.argv[3], sys.argv[4]
options = ReadOptions(max_staging=bound, max_read=bound // 8)
out = folder + "/out"
peak.of(lambda: tensorferry.convert(folder + "/small", folder + "/warm", to=to, dtype=dtype))
told["peak"], told["after"] = peak.of(
    lambda: tensorferry.convert(folder + "/src", out, to=to, dtype=dtype, max_shard_size=None, options=options)
)
told["staged"], told["read"] = peak.result.staging_peak, peak.result.bytes_read
with tensorferry.open_checkpoint(out, load_format=to if to != "safetensors" else "auto") as made:
    told["kept"] = made.catalogue["large"].nbytes
"""


def source(tmp_path: Path) -> None:
    """One tensor of ten times what may be held, and small ones."""
    large = torch.arange(BOUND * 10 // 2 // 4096, dtype=torch.float32)[:, None].expand(-1, 4096).to(torch.bfloat16)
    small = {f"s{n}": torch.full((100,), float(n)) for n in range(50)}
    write_safetensors(tmp_path / "src" / "model.safetensors", {"large": large, **small})
    write_safetensors(tmp_path / "small" / "model.safetensors", small)


PACKED = """
options = ReadOptions(max_staging=int(sys.argv[2]), max_read=int(sys.argv[2]) // 8)
peak.of(lambda: tensorferry.convert(folder + "/small.gguf", folder + "/warm", dtype="bfloat16", names="keep"))
how = {"dtype": "bfloat16", "names": "keep", "options": options}
told["peak"], told["after"] = peak.of(lambda: tensorferry.convert(folder + "/large.gguf", folder + "/out", **how))
told["written"], told["staged"] = peak.result.nbytes, peak.result.staging_peak
"""


def test_packed_blocks_of_one_large_tensor_become_numbers_within_the_bound(tmp_path: Path) -> None:
    for name, rows in (("small", 4), ("large", 10 * BOUND // 2 // 4096)):
        data = bytes(range(1, 35)) * (rows * 4096 // 32)
        (tmp_path / f"{name}.gguf").write_bytes(gguf([T("w", (4096, rows), Q8_0, data)]))
    told = measured(PACKED, tmp_path, str(BOUND))
    assert told["written"] == 10 * BOUND
    assert told["staged"] <= BOUND
    assert told["peak"] <= BOUND + SLACK


@pytest.mark.parametrize(
    ("to", "dtype"), [("safetensors", "bfloat16"), ("safetensors", "float32"), ("tensorizer", "float32")]
)
def test_a_tensor_of_ten_times_the_bound_is_converted_within_the_bound_and_little_more(
    tmp_path: Path, to: str, dtype: str
) -> None:
    source(tmp_path)
    told = measured(CONVERT, tmp_path, str(BOUND), to, dtype)
    size = 10 * BOUND * (2 if dtype == "float32" else 1)
    assert told["kept"] == size
    assert told["read"] <= 10 * BOUND + size + 2 * MIB  # once to convert it, once to read it back
    assert told["staged"] <= BOUND
    assert told["peak"] <= BOUND + SLACK
    assert told["after"] <= SLACK
