"""Torch checkpoints (.bin, .pt, .pth, .ckpt) as catalogues: zip and legacy files, read without pickle or torch.

This module ties the parts together: `torch_zip` and `torch_legacy` find pickles and storages, `pickles` describes the
object, `torch_state` finds the names in it, `torch_views` checks each tensor and says where its bytes are.
"""

from __future__ import annotations

from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.errors import CorruptFile, UnknownFormat, shown
from tensorferry.formats.sniff import SNIFF_BYTES, describe_foreign
from tensorferry.formats.torch_contents import TorchContents
from tensorferry.formats.torch_legacy import read_legacy
from tensorferry.formats.torch_state import find_state
from tensorferry.formats.torch_views import entry_of
from tensorferry.formats.torch_zip import differing_records, read_zip
from tensorferry.formats.windows import Window
from tensorferry.storage.base import File, Storage

__all__ = ["TorchFileFormat", "verify_crc"]

_ZIP = b"PK\3\4"


class TorchFileFormat:
    """Reads what ``torch.save`` writes: the state dict of a file becomes entries that are spans of it.

    Tensors may share storages, so spans may overlap; views that are not row-major have strides. Names are those of
    the state dict, which may lie inside other objects: `Catalogue.notes` says where it was and what was left out.
    """

    name: str = "torch"

    def catalogue(self, storage: Storage, file: File) -> Catalogue:
        """Return the entries of `file` in storage order, from its pickle and its directory alone.

        Raises UnsafeFile where it asks for anything but tensors and plain values, UnsupportedDtype for torch's
        quantized types, UnknownFormat where it is another sort of file, FormatError where it holds no named tensors
        or one state too many, and CorruptFile where it contradicts itself.
        """
        contents = _read(storage, file)
        state = find_state(file.path, contents.top, len(contents.tensors))
        entries = [entry_of(name, ref, file, contents.places) for name, ref in state.tensors.items()]
        named = {id(ref) for ref in state.tensors.values()}
        for name, ref in contents.tensors:
            if id(ref) not in named:  # what is not loaded must be sound too: a damaged file is not half believed
                entry_of(name, ref, file, contents.places)
        entries.sort(key=_begin)
        return Catalogue(
            entries,
            format=self.name,
            files=(file.path,),
            metadata=state.metadata,
            notes=(*contents.notes, *state.notes),
        )


def verify_crc(storage: Storage, file: File) -> int:
    """Read all of a zip torch file, compare every record with its checksum, and return how many bytes were compared.

    Legacy files, and files written without checksums, have nothing to compare: 0. Raises CorruptFile with the names of
    the records that differ.
    """
    if Window(storage, file, block=0).read(0, min(file.size, 4)) != _ZIP:
        return 0
    compared, differing = differing_records(storage, file)
    if differing:
        names = ", ".join(repr(shown(name)) for name in differing[:10])
        raise CorruptFile(
            f"{shown(file.path)}: damaged: {len(differing):,} records differ from their checksums: {names}"
            f"{' and others' if len(differing) > 10 else ''}"
        )
    return compared


def _read(storage: Storage, file: File) -> TorchContents:
    if not file.size:
        raise CorruptFile(f"{shown(file.path)}: it is empty; incomplete download?")
    head = Window(storage, file, block=0).read(0, min(file.size, SNIFF_BYTES))
    if head.startswith(_ZIP):
        return read_zip(storage, file)
    if head[257:262] == b"ustar":
        raise UnknownFormat(
            f"{shown(file.path)}: a tar archive, as torch before 0.4 wrote them: load it there, if you trust "
            f"it, and save its state_dict() with a torch of today"
        )
    if head[:1] == b"\x80" or head.startswith(b"L119547037146038801333356L"):
        return read_legacy(storage, file)
    found = describe_foreign(head) or "nothing that is known here"
    raise UnknownFormat(f"{shown(file.path)}: not a torch file: it is {found}")


def _begin(entry: TensorEntry) -> int:
    span = entry.chunks[0].span
    return span.offset if span is not None else 0
