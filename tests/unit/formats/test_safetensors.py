"""What a sound safetensors file is catalogued as. What is refused stands in tests/attacks."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from helpers.checkpoints import ar, write_safetensors
from helpers.safetensors_bytes import NAME, catalogue, entry, one, st_file, two
from tensorferry.core.catalogue import Span, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.errors import LocateError
from tensorferry.formats.base import FileFormat
from tensorferry.formats.safetensors import SAFETENSORS_DTYPES, SafetensorsFormat
from tensorferry.storage.local import Counters, LocalStorage


def test_it_is_a_file_format() -> None:
    format_: FileFormat = SafetensorsFormat()
    assert format_.name == "safetensors"


def test_an_entry_says_where_its_bytes_are(tmp_path: Path) -> None:
    header = (
        '{"w":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"s":{"dtype":"BF16","shape":[],"data_offsets":[8,10]}}'
    )
    found = catalogue(tmp_path, st_file(header, bytes(10)))
    base = 8 + len(header)
    assert list(found.values()) == [
        TensorEntry.at("w", DTYPES["F32"], (2, 1), NAME, base),
        TensorEntry.at("s", DTYPES["BF16"], (), NAME, base + 8),
    ]
    assert found["s"].span == Span(NAME, base + 8, 2)
    assert (found.format, found.files) == ("safetensors", (NAME,))


def test_entries_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    late, early = entry(shape="[3]", offsets="[2,5]"), entry(shape="[2]", offsets="[0,2]")
    assert list(catalogue(tmp_path, two(late, early, 5))) == ["b", "a"]


def test_empty_tensors_take_no_place(tmp_path: Path) -> None:
    found = catalogue(tmp_path, two(entry(), entry("F32", "[3,0]", "[0,0]"), 1))
    assert list(found) == ["b", "a"]
    assert (found["b"].nbytes, found["b"].shape) == (0, (3, 0))


def test_an_odd_start_is_legal(tmp_path: Path) -> None:
    found = catalogue(tmp_path, two(entry(), entry("F64", "[1]", "[1,9]"), 9))
    assert found["b"].span is not None
    assert found["b"].span.offset % 2 == 1


def test_fields_may_come_in_any_order_and_with_others(tmp_path: Path) -> None:
    fields = {"note": {"a": [1.5, None]}, "data_offsets": [0, 2], "shape": [2], "dtype": "U8"}
    assert catalogue(tmp_path, st_file(json.dumps({"t": fields}), b"ab"))["t"].shape == (2,)


def test_spaces_between_the_parts_mean_nothing(tmp_path: Path) -> None:
    fields = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "__metadata__": {"k": "v"}}
    found = catalogue(tmp_path, st_file(json.dumps(fields, indent=1), b"\1"))
    assert (list(found), dict(found.metadata)) == (["a"], {"k": "v"})


def test_metadata_is_kept_as_text(tmp_path: Path) -> None:
    header = f'{{"__metadata__":{{"format":"pt","é":"\\ud83d\\ude00"}},"t":{entry()}}}'
    assert dict(catalogue(tmp_path, st_file(header, b"\1")).metadata) == {"format": "pt", "é": "😀"}


def test_a_file_without_tensors_is_legal(tmp_path: Path) -> None:
    assert len(catalogue(tmp_path, st_file("{}"))) == 0


@pytest.mark.parametrize("name", ["", "a b", "é", "a-0", "\\u0000", '\\"', "data_offsets", "__metadata", "x" * 5000])
def test_any_text_is_a_name(name: str, tmp_path: Path) -> None:
    assert list(catalogue(tmp_path, st_file(f'{{"{name}":{entry()}}}', b"\1"))) == [json.loads(f'"{name}"')]


def test_minus_zero_in_a_name_and_a_number_are_told_apart(tmp_path: Path) -> None:
    header = f'{{"layer-0":{entry()},"layer-01":{entry(offsets="[1,2]")}}}'
    assert list(catalogue(tmp_path, st_file(header, b"\1\2"))) == ["layer-0", "layer-01"]


def test_types_of_less_than_a_byte_are_counted_in_bits(tmp_path: Path) -> None:
    assert catalogue(tmp_path, one("F4", "[3,2]", "[0,3]", 3))["t"].nbytes == 3
    assert catalogue(tmp_path, one("F6_E3M2", "[2,4]", "[0,6]", 6))["t"].nbytes == 6


def test_the_types_are_those_that_the_format_defines() -> None:
    whole = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "BF16", "F32", "F64", "C64"}
    eight = {"F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
    assert set(SAFETENSORS_DTYPES) == whole | eight | {"F4", "F6_E2M3", "F6_E3M2"}


def test_what_the_reference_library_wrote_is_read_with_every_type(tmp_path: Path) -> None:
    types = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    types += [torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.complex64]
    types += [
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
    ]
    made = {str(dtype): ar(2, 3).remainder(2).to(dtype) for dtype in types}
    write_safetensors(tmp_path / NAME, made)
    with LocalStorage(tmp_path) as storage, safe_open(tmp_path / NAME, "pt") as reference:
        found = SafetensorsFormat().catalogue(storage, storage.stat(NAME))
        assert {name: e.dtype.name for name, e in found.items()} == {
            name: reference.get_slice(name).get_dtype() for name in made
        }


def test_only_the_header_is_read(tmp_path: Path) -> None:
    content = one("F32", "[100]", "[0,400]", 400)
    (tmp_path / NAME).write_bytes(content)
    with LocalStorage(tmp_path) as storage:
        SafetensorsFormat().catalogue(storage, storage.stat(NAME))
        assert storage.counters == Counters(bytes_read=len(content) - 400, reads=2)


def test_a_long_header_is_read_in_pieces_wherever_they_are_cut(tmp_path: Path) -> None:
    count = 30_000
    names = [f"é😀\\u00e9.{n}" if n % 3 else f"layer-0.{n}" for n in range(count)]
    header = "{" + ", ".join(f'"{name}" : {entry(offsets=f"[{n},{n + 1}]")}' for n, name in enumerate(names)) + "}"
    (tmp_path / NAME).write_bytes(st_file(header, bytes(count)))
    with LocalStorage(tmp_path) as storage:
        found = SafetensorsFormat().catalogue(storage, storage.stat(NAME))
        assert storage.counters.reads == 1 + -(-len(header.encode()) // (1 << 20))
        assert storage.counters.reads > 2
    assert list(found) == [name.replace("\\u00e9", "é") for name in names]
    assert [e.span.offset for e in found.values() if e.span] == list(
        range(8 + len(header.encode()), 8 + len(header.encode()) + count)
    )


def test_a_file_in_a_sub_folder_keeps_its_path(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / NAME).write_bytes(one())
    with LocalStorage(tmp_path) as storage:
        assert SafetensorsFormat().catalogue(storage, storage.stat(f"sub/{NAME}"))["t"].files == (f"sub/{NAME}",)


def test_a_broken_link_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / NAME).symlink_to("../../blobs/nope")
    with LocalStorage(tmp_path) as storage, pytest.raises(LocateError, match=f"broken link {NAME}.*blobs/nope"):
        SafetensorsFormat().catalogue(storage, storage.list()[0])


def test_data_beyond_what_memory_holds_costs_nothing(tmp_path: Path) -> None:
    header = f'{{"t":{entry("F64", "[137438953472]", f"[0,{2**40}]")}}}'.encode()
    with (tmp_path / NAME).open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        out.truncate(8 + len(header) + 2**40)
    with LocalStorage(tmp_path) as storage:
        assert SafetensorsFormat().catalogue(storage, storage.stat(NAME)).nbytes == 2**40


def test_torch_is_not_imported() -> None:
    code = "import sys, tensorferry.formats.safetensors, tensorferry.storage.local; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
