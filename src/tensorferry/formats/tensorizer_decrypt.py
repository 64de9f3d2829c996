"""Encrypted Tensorizer files as plain ones: a storage over another one. Boxes are opened by `tensorizer_keys`."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from threading import Lock

from tensorferry.errors import AccessDenied, CorruptFile, shown
from tensorferry.formats.tensorizer_header import StoredTensor, TensorizerHeader
from tensorferry.formats.tensorizer_keys import Secret, nonce_of, open_box
from tensorferry.formats.tensorizer_sealed import MAC_BYTES
from tensorferry.storage.base import File, Storage, StorageKind, SupportsLocalPath, SupportsReadAhead
from tensorferry.storage.reading import kind_of, nested, read_bytes, scatter

__all__ = ["DecryptedStorage", "decrypted_path"]

_KEPT = 8
"""Boxes that are kept, since the next read most often begins where the last one ended."""
_TRIED = 3
"""Tensors that a key is tried on before it is called wrong: damage to one of them is not taken for that."""


def decrypted_path(path: str) -> str:
    """Return what a storage calls the decrypted contents of `path`: below a file, where no disk has anything.

    >>> decrypted_path("model.tensors")
    'model.tensors/decrypted'
    """
    return f"{path}/decrypted"


class DecryptedStorage:
    """The files of another storage, and beside each encrypted one its decrypted contents, byte for byte in place.

    Boxes are opened when they are read, one at a time in each thread; eight of those that were read in part are kept.
    Without a `secret`, reading decrypted contents raises AccessDenied; with a wrong one, making this does. A box that
    was changed since it was sealed raises CorruptFile. Closing it closes the other storage.
    """

    def __init__(self, storage: Storage, headers: Mapping[str, TensorizerHeader], secret: Secret | None) -> None:
        self._inner = storage
        self._files = {decrypted_path(path): _Encrypted(storage, path, headers[path]) for path in headers}
        if secret is not None:
            for file in self._files.values():
                file.unlock(secret)

    @property
    def uri(self) -> str:
        return self._inner.uri

    def list(self) -> Sequence[File]:
        return self._inner.list()

    def stat(self, path: str) -> File:
        """Return the file at `path`; decrypted contents are as long as the file that they are in."""
        found = self._files.get(path)
        return self._inner.stat(path) if found is None else replace(self._inner.stat(found.path), path=path)

    def nested(self) -> Sequence[str]:
        """Return the paths of the files one level below, as the other storage tells them."""
        return nested(self._inner)

    def read_into(self, path: str, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` of `path`, decrypted where that is its path."""
        found = self._files.get(path)
        if found is None:
            self._inner.read_into(path, offset, out)
        else:
            found.read_into(offset, out if out.format == "B" and out.ndim == 1 else out.cast("B"))

    def read_vector(self, path: str, offset: int, outs: Sequence[memoryview]) -> None:
        """Fill `outs` one after the other; with one read, where nothing is to be decrypted."""
        if path not in self._files:
            scatter(self._inner, path, offset, outs)
            return
        for out in outs:
            self.read_into(path, offset, out)
            offset += out.nbytes

    def read_ahead(self, path: str, offset: int, length: int) -> None:
        """Pass the hint on; bytes are not decrypted ahead."""
        found = self._files.get(path)
        if isinstance(self._inner, SupportsReadAhead):
            self._inner.read_ahead(path if found is None else found.path, offset, length)

    def local_path(self, path: str) -> str | None:
        """Return where a file is on this machine; None for decrypted contents, which are nowhere."""
        inner = self._inner
        return inner.local_path(path) if path not in self._files and isinstance(inner, SupportsLocalPath) else None

    def kind(self, path: str) -> StorageKind:
        """Return which kind of storage a file, or the one that its decrypted contents are in, lies on."""
        found = self._files.get(path)
        return kind_of(self._inner, path if found is None else found.path)

    def check_unchanged(self) -> None:
        self._inner.check_unchanged()

    def close(self) -> None:
        """Close the other storage, and forget keys and what was decrypted."""
        for file in self._files.values():
            file.lock()
        self._inner.close()

    def locked(self, path: str) -> bool:
        """Whether `path` is the decrypted contents of a file whose key is not known."""
        return path in self._files and not self._files[path].unlocked

    def __repr__(self) -> str:
        return f"DecryptedStorage({self._inner!r}, {len(self._files)} encrypted)"


class _Encrypted:
    """One encrypted file: which box holds which bytes, and the boxes that were opened last."""

    def __init__(self, storage: Storage, path: str, header: TensorizerHeader) -> None:
        self.path = path
        self._storage = storage
        self._tensors = [t for t in header.tensors if t.length]
        self._starts = [t.data for t in self._tensors]
        self._key: bytes | None = None
        self._lock = Lock()
        self._kept: OrderedDict[tuple[int, int], bytes] = OrderedDict()

    @property
    def unlocked(self) -> bool:
        return self._key is not None

    def unlock(self, secret: Secret) -> None:
        """Find the key that opens a box. Raises AccessDenied where none does."""
        smallest = sorted(self._tensors, key=lambda t: min(t.length, _size(t)))[:_TRIED]
        derivation = next((t.sealed.derivation for t in self._tensors if t.sealed is not None), None)
        for key in secret.keys(derivation):
            if not smallest or any(self._open(t, 0, key) is not None for t in smallest):
                self._key = key
                return
        raise AccessDenied(
            f"{shown(self.path)} ({shown(self._storage.uri, 300)}): the key in encryption_keyfile {secret.source} does "
            "not open it"
        )

    def lock(self) -> None:
        with self._lock:
            self._key = None
            self._kept.clear()

    def read_into(self, offset: int, out: memoryview) -> None:
        at, end = offset, offset + len(out)
        while at < end:
            tensor, stop = self._at(at)
            stop = min(stop, end)
            into = out[at - offset : stop - offset]
            if tensor is None:
                self._storage.read_into(self.path, at, into)
            else:
                for box, part, place in _pieces(tensor, at, stop):
                    into[place] = self._box(tensor, box, whole=part == slice(0, _length(tensor, box)))[part]
            at = stop

    def _at(self, offset: int) -> tuple[StoredTensor | None, int]:
        """Return the tensor whose data are at `offset`, or None, and where that ends."""
        number = bisect_right(self._starts, offset)
        if number and offset < (end := self._starts[number - 1] + self._tensors[number - 1].length):
            return self._tensors[number - 1], end
        return None, self._starts[number] if number < len(self._starts) else 1 << 63

    def _box(self, tensor: StoredTensor, box: int, *, whole: bool) -> bytes:
        key = self._key
        what = f"{shown(self.path)} ({shown(self._storage.uri, 300)}): tensor {shown(tensor.name)!r}"
        if key is None:
            raise AccessDenied(f"{what} is encrypted: name the file with the key by the option encryption_keyfile")
        with self._lock:
            kept = self._kept.get((tensor.data, box))
        if kept is not None:
            return kept
        opened = self._open(tensor, box, key)
        if opened is None:
            raise CorruptFile(
                f"{what} was changed after it was encrypted: its MAC does not match {_length(tensor, box):,} bytes "
                f"from byte {tensor.data + box * _size(tensor):,}; fetch it again"
            )
        if not whole:
            self._keep((tensor.data, box), opened)
        return opened

    def _keep(self, place: tuple[int, int], opened: bytes) -> None:
        with self._lock:
            self._kept[place] = opened
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)

    def _open(self, tensor: StoredTensor, box: int, key: bytes) -> bytes | None:
        assert tensor.sealed is not None
        mac = read_bytes(self._storage, self.path, tensor.sealed.macs + box * MAC_BYTES, MAC_BYTES)
        start, length = tensor.data + box * _size(tensor), _length(tensor, box)
        data = read_bytes(self._storage, self.path, start, length)
        return open_box(mac, data, nonce_of(tensor.sealed.nonce, box), key)


def _size(tensor: StoredTensor) -> int:
    assert tensor.sealed is not None
    return tensor.sealed.size


def _length(tensor: StoredTensor, box: int) -> int:
    return min(_size(tensor), tensor.length - box * _size(tensor))


def _pieces(tensor: StoredTensor, start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield box, part of it, and where that goes, for the bytes `start` to `stop` of the file, all of `tensor`."""
    at, size = start, _size(tensor)
    while at < stop:
        box, inside = divmod(at - tensor.data, size)
        take = min(_length(tensor, box) - inside, stop - at)
        yield box, slice(inside, inside + take), slice(at - start, at - start + take)
        at += take
