"""What torch.save writes, torch.load and we read alike, from the spans of our catalogue."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar
from helpers.torch_files import (
    TORCH_DTYPES,
    a_dict,
    a_tensor,
    catalogue_of,
    catalogue_of_bytes,
    legacy,
    pickled,
    read_all,
    same,
    saved,
    zip_file,
)
from tensorferry.errors import CorruptFile, FormatError, UnsupportedDtype
from tensorferry.formats.torch_file import TorchFileFormat, verify_crc
from tensorferry.storage.local import LocalStorage

# torch warns of one type whenever it touches it
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

WRITERS = pytest.mark.parametrize("write", [saved, legacy], ids=["zip", "legacy"])


def agree(path: Path) -> bool:
    """Whether we read exactly the tensors that torch loads, in value, shape and dtype."""
    ours = read_all(path)
    theirs = torch.load(path, weights_only=True, map_location="cpu")
    assert ours.keys() == theirs.keys()
    return all(same(ours[name], theirs[name]) for name in theirs)


def of_dtype(dtype: torch.dtype) -> torch.Tensor:
    """Twelve different bit patterns, in 3 rows."""
    if dtype is torch.bool:
        return torch.arange(12).reshape(3, 4) % 3 == 0
    return torch.arange(12 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(3, 4)


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.LSTM(3, 2))


def tied() -> dict[str, torch.Tensor]:
    weight = ar(3, 2)
    return {"embed": weight, "head": weight, "row": weight[1]}


def with_attribute(value: torch.Tensor) -> torch.Tensor:
    value.origin = "here"  # type: ignore[attr-defined]
    return value


VALUES: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"a": ar(2, 3), "b": ar(4, start=9)},
    "OrderedDict": lambda: OrderedDict(a=ar(2, 3)),
    "state_dict with _metadata": lambda: module().state_dict(),
    "Parameters": lambda: {"p": nn.Parameter(ar(2, 3)), "q": nn.Parameter(ar(2), requires_grad=False)},
    "a Parameter with attributes": lambda: {"p": with_attribute(nn.Parameter(ar(2)))},
    "a tensor with attributes": lambda: {"t": with_attribute(ar(2))},
    "one tensor twice": tied,
    "slices of one storage": lambda: dict(zip("abc", torch.split(ar(6, 3), 2), strict=True)),
    "every second column": lambda: {"w": ar(4, 6)[:, 1::2]},
    "a transpose": lambda: {"w": ar(3, 5).t()},
    "a permuted slice": lambda: {"w": ar(3, 4, 5).permute(2, 0, 1)[1:, 1:]},
    "channels last": lambda: {"w": ar(2, 3, 4, 5).to(memory_format=torch.channels_last)},
    "a diagonal": lambda: {"w": ar(4, 4).diagonal(), "v": ar(2, 3, 3).diagonal(0, 1, 2)},
    "scalars": lambda: {"n": torch.tensor(7), "x": ar(4)[2]},
    "empty": lambda: {"e": torch.empty(0), "f": torch.empty(3, 0, 2), "g": ar(4, 3)[4:]},
    "sizes of one": lambda: {"w": ar(3, 4).t()[:, :1].unsqueeze(0)},
    "names of all sorts": lambda: {"": ar(1), "a.b": ar(2), "ü/\0": ar(3), "x" * 500: ar(4)},
}


@WRITERS
@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
def test_reads_the_values_that_torch_load_reads(make: Callable[[], Any], write: Any, tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(write(make()))
    assert agree(tmp_path / "m.pt")


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_reads_every_dtype_of_torch(name: str, tmp_path: Path) -> None:
    value = of_dtype(TORCH_DTYPES[name])
    (tmp_path / "m.pt").write_bytes(saved({"w": value, "t": value[1:].t()}))
    assert catalogue_of(tmp_path / "m.pt")["w"].dtype.name == name
    assert agree(tmp_path / "m.pt")


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_reads_every_dtype_from_a_legacy_file(name: str, tmp_path: Path) -> None:
    value = of_dtype(TORCH_DTYPES[name])
    (tmp_path / "m.pt").write_bytes(legacy({"w": value, "t": value[1:].t()}))
    ours = read_all(tmp_path / "m.pt")
    assert same(ours["w"], value)
    assert same(ours["t"], value[1:].t())


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
@WRITERS
def test_reads_every_binary_pickle_protocol(protocol: int, write: Any, tmp_path: Path) -> None:
    state = module().state_dict() | {"n": torch.tensor(1 << 40), "u": ar(3).to(torch.int16)}
    (tmp_path / "m.pt").write_bytes(write(state, pickle_protocol=protocol))
    ours = read_all(tmp_path / "m.pt")
    assert ours.keys() == state.keys()
    assert all(same(ours[name], state[name]) for name in state)


def test_packed_float4_counts_elements_where_torch_counts_bytes(tmp_path: Path) -> None:
    packed = torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(torch.float4_e2m1fn_x2)
    entry = catalogue_of_bytes(tmp_path, saved({"w": packed}))["w"]
    assert (entry.dtype.name, entry.shape, entry.nbytes) == ("F4", (2, 6), 6)
    with pytest.raises(UnsupportedDtype, match="'w'"):
        catalogue_of_bytes(tmp_path, saved({"w": packed.t()}))


@WRITERS
def test_a_view_is_a_span_from_its_first_element_to_its_last(write: Any, tmp_path: Path) -> None:
    base = ar(6, 4)
    found = catalogue_of_bytes(tmp_path, write({"base": base, "rows": base[2:4], "t": base.t(), "column": base[1:, 3]}))
    start = found["base"].chunks[0].span
    assert start is not None
    spans = {name: e.chunks[0].span for name, e in found.items()}
    relative = {name: (s.offset - start.offset, s.length) for name, s in spans.items() if s}
    assert relative == {"base": (0, 96), "rows": (32, 32), "t": (0, 96), "column": (28, 68)}
    assert {name: e.chunks[0].strides for name, e in found.items()} == {
        "base": None,
        "rows": None,
        "t": (1, 4),
        "column": (4,),
    }


def test_entries_come_in_storage_order(tmp_path: Path) -> None:
    found = catalogue_of_bytes(tmp_path, legacy({f"w{i}": ar(4, start=i) for i in range(12)}))
    offsets = [entry.span.offset for entry in found.values() if entry.span]
    assert len(offsets) == 12
    assert offsets == sorted(offsets)


def test_a_catalogue_says_what_it_was_read_from(tmp_path: Path) -> None:
    found = catalogue_of_bytes(tmp_path, saved({"w": ar(2), "epoch": 3, "by": "me"}))
    assert (found.format, found.files) == (TorchFileFormat.name, ("model.pt",))
    assert dict(found.metadata) == {"epoch": "3", "by": "me"}


def test_a_file_in_a_folder_of_its_storage_keeps_its_path(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "m.pt").write_bytes(saved({"w": ar(2)}))
    with LocalStorage(tmp_path) as storage:
        found = TorchFileFormat().catalogue(storage, storage.stat("inner/m.pt"))
    assert found["w"].files == ("inner/m.pt",)


def test_the_newer_records_of_an_archive_are_tolerated(tmp_path: Path) -> None:
    data = saved({"w": ar(2)})
    for record in (b"byteorder", b".format_version", b".storage_alignment", b".data/serialization_id", b"version"):
        assert record in data
    assert list(catalogue_of_bytes(tmp_path, data)) == ["w"]


def test_an_alignment_of_a_page_is_honoured(tmp_path: Path) -> None:
    from torch.utils.serialization import config

    before = config.save.storage_alignment
    config.save.storage_alignment = 4096
    try:
        (tmp_path / "m.pt").write_bytes(saved({"w": ar(2), "v": ar(3)}))
    finally:
        config.save.storage_alignment = before
    assert all(e.span and e.span.offset % 4096 == 0 for e in catalogue_of(tmp_path / "m.pt").values())
    assert agree(tmp_path / "m.pt")


def test_records_beyond_four_gigabytes_are_found(tmp_path: Path) -> None:
    """torch reserves the space and leaves a hole in the file, so this takes no disk and no memory."""
    size = (1 << 32) + 4096
    weights = {"big": torch.empty(size, dtype=torch.uint8, device="meta"), "late": torch.empty(5, device="meta")}
    with torch.serialization.skip_data():
        torch.save({name: torch.empty_like(w, device="cpu") for name, w in weights.items()}, tmp_path / "m.pt")
    found = catalogue_of(tmp_path / "m.pt")
    big, late = found["big"].span, found["late"].span
    assert big is not None
    assert late is not None
    assert (big.length, late.length) == (size, 20)
    assert late.offset > 1 << 32


def test_verify_reads_everything_that_has_a_checksum(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(saved({"w": ar(1000), "v": ar(7)}))
    with LocalStorage(tmp_path) as storage:
        assert verify_crc(storage, storage.stat("m.pt")) > 4028


def test_verify_names_the_record_with_a_flipped_bit(tmp_path: Path) -> None:
    data = bytearray(saved({"w": ar(1000), "v": ar(7)}))
    (tmp_path / "m.pt").write_bytes(data)
    span = catalogue_of(tmp_path / "m.pt")["w"].span
    assert span is not None
    data[span.offset + 17] ^= 1
    (tmp_path / "m.pt").write_bytes(data)
    assert list(catalogue_of(tmp_path / "m.pt")) == ["w", "v"]  # opening does not read tensors
    with (
        LocalStorage(tmp_path) as storage,
        pytest.raises(CorruptFile, match=r"m\.pt.*1 records.*'m/data/0'|archive/data/0"),
    ):
        verify_crc(storage, storage.stat("m.pt"))


def test_verify_has_nothing_to_compare_in_a_legacy_file(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(legacy({"w": ar(4)}))
    with LocalStorage(tmp_path) as storage:
        assert verify_crc(storage, storage.stat("m.pt")) == 0


def test_a_file_written_without_checksums_is_read_and_says_so(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        (tmp_path / "m.pt").write_bytes(saved({"w": ar(4)}))
    finally:
        torch.serialization.set_crc32_options(True)
    found = catalogue_of(tmp_path / "m.pt")
    assert any("without checksums" in note for note in found.notes)
    assert agree(tmp_path / "m.pt")
    with LocalStorage(tmp_path) as storage:
        assert verify_crc(storage, storage.stat("m.pt")) == 0


def test_one_storage_seen_as_two_dtypes_keeps_both(tmp_path: Path) -> None:
    base = torch.arange(8).to(torch.uint16)
    (tmp_path / "m.pt").write_bytes(saved({"a": base, "b": base.view(torch.uint32)}))
    ours = read_all(tmp_path / "m.pt")
    assert same(ours["a"], base)
    assert same(ours["b"], base.view(torch.uint32))


def test_names_stay_those_of_the_state_dict_in_a_module_within_a_module(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(saved(module().state_dict()))
    assert set(catalogue_of(tmp_path / "m.pt")) == set(module().state_dict())


UNREAD = {
    "sparse": (lambda: ar(3).to_sparse(), FormatError, "sparse"),
    "meta": (lambda: torch.empty(2, device="meta"), FormatError, "meta"),
    "conjugated": (lambda: torch.ones(2, dtype=torch.complex64).conj(), FormatError, "resolve_conj"),
    "expanded": (lambda: ar(1, 3).expand(4, 3), CorruptFile, r"expanded.*contiguous\(\)"),
    "overlapping": (lambda: ar(6).unfold(0, 3, 1), CorruptFile, "expanded"),
}


@pytest.mark.parametrize(("make", "error", "says"), UNREAD.values(), ids=UNREAD)
def test_what_is_no_plain_tensor_is_refused_by_name(
    make: Callable[[], torch.Tensor], error: type[FormatError], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=f"model.pt.*'odd'.*{says}"):
        catalogue_of_bytes(tmp_path, saved({"w": ar(2), "odd": make()}))


def test_no_torch_is_imported_to_list_a_file(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(saved({"w": ar(2)}))
    code = (
        "import sys\nfrom tensorferry.formats.torch_file import TorchFileFormat\n"
        "from tensorferry.storage.local import LocalStorage\n"
        "s = LocalStorage(sys.argv[1]); print(len(TorchFileFormat().catalogue(s, s.stat('m.pt'))))\n"
        "assert not {'torch', 'numpy', 'pickle', 'zipfile'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


@pytest.mark.parametrize("first", [0, 1, 2, 70_000])
@pytest.mark.parametrize("again", [True, False])
def test_a_memo_may_begin_anywhere_and_the_last_value_under_a_number_counts(
    first: int, again: bool, tmp_path: Path
) -> None:
    def put(n: int) -> bytes:
        return b"r" + struct.pack("<I", first + n)

    values = [a_tensor((1,), (1,), offset) + put(offset) + b"0" for offset in range(3)]
    values += [a_tensor((1,), (1,), 3) + put(1) + b"0"] if again else []
    state = a_dict(**{f"t{n}": b"j" + put(n)[1:] for n in range(3)})
    found = catalogue_of_bytes(tmp_path, zip_file(pickled(*values, state)))
    at = {name: span.offset for name, entry in found.items() if (span := entry.span) is not None}
    assert at["t2"] - at["t0"] == 8
    assert at["t1"] - at["t0"] == (12 if again else 4)
