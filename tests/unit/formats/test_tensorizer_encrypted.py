"""Encrypted Tensorizer files: opened with a key or a passphrase, in both directions with the library; refused else."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import pytest
import torch

import tensorferry
from helpers.memory_storage import MemoryStorage
from helpers.tensorizer_library import (
    SAMPLES,
    key_file,
    library,
    needs_sodium,
    new_tensor,
    read_by_library,
    write_by_library,
)
from helpers.tiny_transformers import equal_bits
from tensorferry.errors import AccessDenied, ConfigError, CorruptFile, LocateError, ReadError
from tensorferry.formats.tensorizer import TensorizerFormat
from tensorferry.formats.tensorizer_decrypt import DecryptedStorage
from tensorferry.formats.tensorizer_keys import read_secret
from tensorferry.formats.tensorizer_write import write_tensorizer
from tensorferry.storage.local import LocalStorage

KEY = bytes(range(32))
NEW = {name: new_tensor(tensor) for name, tensor in SAMPLES.items()}
WITHOUT_EMPTY = {name: tensor for name, tensor in SAMPLES.items() if tensor.numel()}  # the library cannot


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    write_tensorizer(tmp_path / "model.tensors", NEW, key=KEY)
    return tmp_path / "model.tensors"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return key_file(tmp_path / "key", KEY)


def differing(path: Path, keyfile: Path, expected: dict[str, torch.Tensor]) -> list[str]:
    with tensorferry.open_checkpoint(path, encryption_keyfile=keyfile) as checkpoint:
        return [name for name, tensor in expected.items() if not equal_bits(checkpoint.read(name), tensor)]


def test_what_we_encrypt_we_read(ours: Path, key: Path) -> None:
    assert differing(ours, key, dict(SAMPLES)) == []


@needs_sodium
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_what_we_encrypt_the_library_reads(lazy: bool, ours: Path) -> None:
    read = read_by_library(ours, lazy=lazy, encryption=library().DecryptionParams.from_key(KEY))
    assert [name for name, tensor in SAMPLES.items() if not equal_bits(read[name], tensor)] == []


@needs_sodium
def test_what_the_library_encrypts_we_read(tmp_path: Path, key: Path) -> None:
    parameters = library().EncryptionParams(KEY)
    file = write_by_library(tmp_path / "m.tensors", WITHOUT_EMPTY, encryption=parameters)
    assert differing(file, key, WITHOUT_EMPTY) == []
    found = tensorferry.verify(file, encryption_keyfile=key)
    assert found.files[0].checksummed == sum(t.nbytes for t in WITHOUT_EMPTY.values())


@needs_sodium
@pytest.mark.parametrize("passphrase", ["correct horse\n", "exactly thirty-two bytes, really"])
def test_a_passphrase_is_made_a_key_as_the_file_says(passphrase: str, tmp_path: Path) -> None:
    parameters = library().EncryptionParams.from_string(passphrase.rstrip("\n"), opslimit=1, memlimit=8192)
    file = write_by_library(tmp_path / "m.tensors", {"w": SAMPLES["int8"]}, encryption=parameters)
    assert differing(file, key_file(tmp_path / "phrase", passphrase.encode()), {"w": SAMPLES["int8"]}) == []
    assert differing(file, key_file(tmp_path / "key", parameters.key), {"w": SAMPLES["int8"]}) == []
    with pytest.raises(AccessDenied, match="does not open it"):
        tensorferry.open_checkpoint(file, encryption_keyfile=key_file(tmp_path / "other", b"another"))


def test_headers_need_no_key_and_tensors_do(ours: Path) -> None:
    with tensorferry.open_checkpoint(ours) as checkpoint:
        assert {n: e.shape for n, e in checkpoint.catalogue.items()}["boxes"] == (1200, 1000)
        with pytest.raises(AccessDenied, match=r"'boxes' is encrypted: .*the option encryption_keyfile"):
            checkpoint.read("boxes")


def test_a_storage_that_knows_nothing_of_encryption_gives_no_garbage(ours: Path) -> None:
    storage = LocalStorage(ours.parent)
    entry = TensorizerFormat().catalogue(storage, storage.stat(ours.name))["boxes"]
    assert entry.span is not None
    with pytest.raises(LocateError):
        storage.read_into(entry.span.file, entry.span.offset, memoryview(bytearray(8)))


def test_a_wrong_key_is_denied_when_opening(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(AccessDenied, match=r"model\.tensors.*encryption_keyfile .*wrong does not open it"):
        tensorferry.open_checkpoint(ours, encryption_keyfile=key_file(tmp_path / "wrong", os.urandom(32)))


def test_no_message_or_repr_shows_a_key(ours: Path, tmp_path: Path) -> None:
    secret = b"S3CRETS3CRETS3CRETS3CRETS3CRETS3"
    file = key_file(tmp_path / "wrong", secret)
    with pytest.raises(AccessDenied) as denied:
        tensorferry.open_checkpoint(ours, encryption_keyfile=file)
    told = "".join(traceback.format_exception(denied.value))
    assert "S3CRET" not in f"{told} {denied.value!r} {read_secret(file)!r}"


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (b"", ConfigError, "1 to 65,536 bytes"),
        (b"x" * 31, ConfigError, "a key of 32 bytes is expected, it has 31"),
        (b"x" * 70_000, ConfigError, "1 to 65,536 bytes"),
    ],
)
def test_a_key_file_that_is_none_is_refused(
    content: bytes, error: type[Exception], words: str, ours: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        tensorferry.open_checkpoint(ours, encryption_keyfile=key_file(tmp_path / "key", content))


def test_a_key_file_that_is_not_there_is_said(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(LocateError, match=r"encryption_keyfile .*nowhere"):
        tensorferry.open_checkpoint(ours, encryption_keyfile=tmp_path / "nowhere")


def test_a_key_for_a_plain_file_is_refused_since_somebody_may_have_replaced_it(tmp_path: Path, key: Path) -> None:
    write_tensorizer(tmp_path / "plain.tensors", NEW)
    with pytest.raises(ConfigError, match=r"plain\.tensors.*is not encrypted"):
        tensorferry.open_checkpoint(tmp_path / "plain.tensors", encryption_keyfile=key)


def test_a_changed_box_names_its_tensor_whatever_the_others_are(ours: Path, key: Path) -> None:
    with tensorferry.open_checkpoint(ours) as checkpoint:
        span = checkpoint.catalogue["boxes"].span
    assert span is not None
    data = bytearray(ours.read_bytes())
    data[span.offset + (2 << 20) + 5] ^= 1  # in the second box
    ours.write_bytes(data)
    with tensorferry.open_checkpoint(ours, encryption_keyfile=key) as checkpoint:
        assert equal_bits(checkpoint.read("int8"), SAMPLES["int8"])
        with pytest.raises(CorruptFile, match=r"'boxes' was changed after it was encrypted: .*2,097,152 bytes from"):
            checkpoint.read("boxes")


def test_verify_needs_the_key_unless_there_is_another_digest(ours: Path, key: Path) -> None:
    with pytest.raises(AccessDenied, match="encryption_keyfile"):
        tensorferry.verify(ours)
    digest = tensorferry.verify(ours, encryption_keyfile=key).files[0].sha256
    found = tensorferry.verify(ours, manifest={"model.tensors": digest})
    assert found.summary == "sha256 of 1 of 1 files verified against the manifest"


def test_any_part_of_a_file_is_decrypted_and_each_box_once_by_reads_that_follow_each_other(key: Path) -> None:
    folder = key.parent
    write_tensorizer(folder / "m.tensors", NEW, key=KEY)
    write_tensorizer(folder / "plain.tensors", NEW)
    inner = MemoryStorage({"m.tensors": (folder / "m.tensors").read_bytes()})
    file = inner.stat("m.tensors")
    storage = TensorizerFormat().unlock(inner, [file], str(key))
    assert isinstance(storage, DecryptedStorage)
    span = TensorizerFormat().catalogue(inner, file)["boxes"].span
    assert span is not None
    assert storage.stat(span.file).size == file.size
    inner.reads.clear()
    step, got = 300_001, bytearray()
    for at in range(0, span.length, step):
        out = bytearray(min(step, span.length - at))
        storage.read_into(span.file, span.offset + at, memoryview(out))
        got += out
    assert got == SAMPLES["boxes"].numpy().tobytes()
    assert sum(length for _, _, length in inner.reads if length > 16) == span.length
    around = bytearray(span.length + 18)  # and the zeros at the end of the file
    storage.read_vector(span.file, span.offset - 10, [memoryview(around)[:100], memoryview(around)[100:]])
    assert around[10:-8] == got
    assert around[:10] == inner.files["m.tensors"][span.offset - 10 : span.offset]


def test_what_decrypts_is_named_where_it_is_not_installed(
    ours: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nacl.bindings", None)
    with pytest.raises(ConfigError, match=r"PyNaCl.*pip install 'tensorferry\[tensorizer\]'"):
        tensorferry.open_checkpoint(ours, encryption_keyfile=key)


def test_nothing_is_read_when_it_is_closed(ours: Path, key: Path) -> None:
    checkpoint = tensorferry.open_checkpoint(ours, encryption_keyfile=key)
    checkpoint.close()
    with pytest.raises((AccessDenied, ReadError)):
        checkpoint.read("int8")


def test_decrypted_contents_cannot_be_mapped(ours: Path, key: Path) -> None:
    with (
        tensorferry.open_checkpoint(ours, encryption_keyfile=key) as checkpoint,
        pytest.raises(ConfigError, match="cannot be mapped"),
    ):
        next(checkpoint.tensors(mapped=True))
