"""Torch files from 0.4 to 1.5: five pickles one after the other, then each storage as its length and its bytes.

Layout: `torch/serialization.py` (_legacy_save, _legacy_load) of PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorferry.core.catalogue import Span
from tensorferry.errors import CorruptFile, FormatError, UnknownFormat, shown
from tensorferry.formats.pickle_values import DictValue
from tensorferry.formats.pickles import read_pickle
from tensorferry.formats.plain_globals import PLAIN_GLOBALS
from tensorferry.formats.torch_contents import TorchContents, tensors_of
from tensorferry.formats.torch_values import TORCH_GLOBALS, StorageRef, Storages, TensorRef
from tensorferry.formats.windows import Stream, Window
from tensorferry.storage.base import File, Storage

__all__ = ["read_legacy"]

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001


def read_legacy(storage: Storage, file: File) -> TorchContents:
    """Return what a legacy torch file describes, and where its storages lie; of these only the lengths are read.

    Raises UnknownFormat for another pickle, CorruptFile, UnsafeFile and FormatError.
    """
    window = Window(storage, file, block=1 << 16)
    stream = Stream(window, 0, file.size)
    _check_preamble(stream, file)
    storages = Storages(legacy=True)
    top = read_pickle(stream, file.path, TORCH_GLOBALS, storages)
    keys = _storage_keys(stream, file)
    if set(keys) != set(storages.found) or len(keys) != len(storages.found):
        odd = sorted(set(keys) ^ set(storages.found)) or sorted(keys)
        raise CorruptFile(
            f"{shown(file.path)}: {len(storages.found):,} storages are used and {len(keys):,} are listed, "
            f"differing in {shown(odd[0])!r}"
        )
    tensors = tensors_of(file, top)
    lengths = Window(storage, file, block=8)
    at, places = stream.position, {}
    for key in keys:
        place = _place(lengths, at, storages.found[key], tensors)
        places[key], at = place, place.offset + place.length
    if at != file.size:
        raise CorruptFile(f"{shown(file.path)}: {file.size - at:,} bytes follow its last storage")
    return TorchContents(top, tensors, places)


def _check_preamble(stream: Stream, file: File) -> None:
    if read_pickle(stream, file.path, PLAIN_GLOBALS) != MAGIC:
        raise UnknownFormat(f"{shown(file.path)}: a Python pickle that torch.save did not write")
    if read_pickle(stream, file.path, PLAIN_GLOBALS) != PROTOCOL:
        raise CorruptFile(f"{shown(file.path)}: a legacy torch file of another version than {PROTOCOL}")
    system = read_pickle(stream, file.path, PLAIN_GLOBALS)
    if not isinstance(system, DictValue):
        raise CorruptFile(f"{shown(file.path)}: the description of the system that wrote it is missing")
    if system.items.get("little_endian") is False:
        raise FormatError(
            f"{shown(file.path)}: its values are in big-endian byte order; load and save it once with torch on a "
            f"little-endian machine"
        )


def _storage_keys(stream: Stream, file: File) -> list[str]:
    keys = read_pickle(stream, file.path, PLAIN_GLOBALS)
    if not isinstance(keys, list):
        raise CorruptFile(f"{shown(file.path)}: the list of its storages is missing")
    texts = [key.decode("latin-1") if isinstance(key, bytes) else key for key in keys]
    if not all(isinstance(key, str) for key in texts):
        raise CorruptFile(f"{shown(file.path)}: the list of its storages holds something else than keys")
    return texts


def _place(window: Window, at: int, ref: StorageRef, tensors: Sequence[tuple[str, TensorRef]]) -> Span:
    """Return where the bytes of a storage lie whose length is at `at`, after comparing both with the file."""
    file, need = window.file, at + 8 + ref.nbytes
    if need > file.size:
        raise CorruptFile(
            f"{shown(file.path)}: truncated: storage {shown(ref.key)!r}{_first_tensor(ref, tensors)} ends at byte "
            f"{need:,}, the file has {file.size:,}; incomplete download?"
        )
    numel = int.from_bytes(window.read(at, 8), "little")
    if numel != ref.numel:
        raise CorruptFile(
            f"{shown(file.path)}: storage {shown(ref.key)!r}{_first_tensor(ref, tensors)} has {ref.numel:,} elements "
            f"by its tensors and {numel:,} by its length"
        )
    return Span(file.path, at + 8, ref.nbytes)


def _first_tensor(ref: StorageRef, tensors: Sequence[tuple[str, TensorRef]]) -> str:
    name = next((name for name, tensor in tensors if tensor.storage.key == ref.key), None)
    return f" of tensor {shown(name)!r}" if name is not None else ""
