"""Tensorizer files: where the bytes of their tensors are. Headers are read in `tensorizer_header`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tensorferry.core.amounts import counted, few
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.errors import ConfigError, shown
from tensorferry.formats.tensorizer_decrypt import DecryptedStorage, decrypted_path
from tensorferry.formats.tensorizer_header import TensorizerHeader, is_encrypted, read_header
from tensorferry.formats.tensorizer_keys import read_secret
from tensorferry.storage.base import File, Storage

__all__ = ["TensorizerFormat"]


class TensorizerFormat:
    """The `FileFormat` of ``.tensors`` files of version 1 to 5, encrypted or not.

    Names are those of the file: the dot before tensors of a module's root is left out, and nested dictionaries and
    lists are joined with dots. Tensors without data (of torch's meta device) are left out, with a note.

    Encryption keeps every byte in its place, so that encrypted tensors have spans, too: in a file of another path,
    which only the storage that `unlock` returns can read.
    """

    name = "tensorizer"

    def catalogue(self, storage: Storage, file: File) -> Catalogue:
        """Return what the headers of `file` declare, in the order of the bytes. Needs no key, and reads no data.

        Raises CorruptFile, UnsupportedDtype or UnknownFormat: see `read_header`.
        """
        header = read_header(storage, file)
        path = decrypted_path(file.path) if header.encrypted else file.path
        return Catalogue(
            [TensorEntry.at(t.name, t.dtype, t.shape, path, t.data) for t in header.tensors if not t.absent],
            format=self.name,
            files=(file.path,),
            notes=[f"{shown(file.path)}: {note}" for note in _notes(header)],
        )

    def unlock(self, storage: Storage, files: Sequence[File], keyfile: str | None) -> Storage:
        """Return `storage` with the decrypted tensors of those `files` that are encrypted; itself where none is.

        keyfile: a file with the key. Without one, reading encrypted tensors raises AccessDenied; with a wrong one,
        this does. Raises ConfigError for a key that nothing needs, and where what decrypts is not installed.
        """
        locked = [file for file in files if is_encrypted(storage, file)]
        if keyfile is not None and len(locked) < len(files):
            plain = next(file for file in files if file not in locked)
            raise ConfigError(
                f"{shown(plain.path)} ({shown(storage.uri, 300)}) is not encrypted, and encryption_keyfile was given: "
                "leave it out, or find out who replaced the file"
            )
        if not locked:
            return storage
        secret = None if keyfile is None else read_secret(keyfile)
        return DecryptedStorage(storage, {file.path: read_header(storage, file) for file in locked}, secret)


def _notes(header: TensorizerHeader) -> Iterator[str]:
    if absent := [t for t in header.tensors if t.absent]:
        listed = few((shown(t.name) for t in absent), 3)
        yield f"{counted(len(absent), 'tensor')} without data, {listed}, left out: written from the meta device"
