"""Memory for parameters of which runs are pages of files, leased as long as they are: nothing is copied for them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple, NoReturn, Self

import torch

from tensorferry.core.amounts import few
from tensorferry.core.plan import Plan
from tensorferry.errors import ReadError, shown
from tensorferry.execute.lying import Paged
from tensorferry.numerics.memory import bytes_of, tensor_over
from tensorferry.numerics.torch_dtypes import torch_dtype, torch_shape
from tensorferry.storage.base import LeasedFile, Storage, SupportsLeasedFiles
from tensorferry.storage.pages import PAGE, Pages

__all__ = ["Borrowed", "Piece"]


class Piece(NamedTuple):
    """`length` bytes of a file from `start` on, which are those of a parameter from byte `at` of its pages on."""

    parameter: str
    file: str
    start: int
    at: int
    length: int

    @property
    def whole_pages(self) -> tuple[int, int]:
        """Where in the pages of the parameter those begin and end that are the file's; equal where there are none."""
        begin = -(-self.at // PAGE) * PAGE
        return begin, max(begin, (self.at + self.length) // PAGE * PAGE)


class Borrowed:
    """Parameters of which pieces are pages of files. Whoever wants to write to such a file, or to cut it, waits until
    `settle` has copied what is left of them then; see `SupportsLeasedFiles` for how long they do.

    Users of the parameters notice nothing of it all; what they write to them never reaches a file. It is a context
    manager that has zeros in place of what is borrowed in the end, unless it was settled.

    tensors: the parameters, by name, until `hand_over` is called.
    """

    def __init__(self, storage: Storage, plan: Plan) -> None:
        self._storage, self._plan = storage, plan
        self._pages: dict[str, Pages] = {}
        self._pieces: list[Piece] = []
        self._steps: set[int] = set()
        self._files: dict[str, LeasedFile | None] = {}
        self._leases = ExitStack()
        self.tensors: dict[str, torch.Tensor] = {}

    @property
    def pieces(self) -> list[Piece]:
        """All that is borrowed, in the order in which it lies in files."""
        return sorted(self._pieces, key=lambda piece: (piece.file, piece.start))

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.length for piece in self._pieces)

    @property
    def rest(self) -> Plan:
        """The plan without the steps that need no reading."""
        steps = (step for number, step in enumerate(self._plan.steps) if number not in self._steps)
        return replace(self._plan, steps=tuple(steps))

    @property
    def in_use(self) -> list[Pages]:
        """The memory of the parameters that are alive."""
        return [pages for pages in self._pages.values() if pages.is_in_use]

    def add(self, name: str, found: Paged) -> bool:
        """Make memory for a parameter. False where that cannot be: a file cannot be leased, or is too short."""
        if not all(self._reaches(run.file, run.start + run.length) for run in found.runs):
            return False
        spec = self._plan.parameters[name]
        try:
            pages = self._pages[name] = Pages(found.begin, spec.dtype.nbytes(spec.shape))
            pieces = [Piece(name, run.file, run.start, pages.lead + run.at, run.length) for run in found.runs]
            for piece in pieces:
                begin, end = piece.whole_pages
                file = self._files[piece.file]
                assert file is not None
                pages.borrow(file.fd, piece.start + begin - piece.at, begin, end - begin)
        except MemoryError:
            self._pages.pop(name, None)
            return False
        kind = torch_dtype(spec.dtype)
        self.tensors[name] = tensor_over(pages.take(), pages.lead, torch_shape(spec.dtype, spec.shape), kind)
        self._pieces += pieces
        self._steps.update(found.steps)
        return True

    def bring(self, piece: Piece) -> None:
        """Have a piece be there. Raises ReadError."""
        pages = self._pages[piece.parameter]
        begin, end = piece.whole_pages
        if begin < end and not pages.bring(begin, end - begin):
            self._refuse(piece)
        memory = bytes_of(self.tensors[piece.parameter])
        for first, last in ((piece.at, min(begin, piece.at + piece.length)), (end, piece.at + piece.length)):
            if first < last:
                out = memory[first - pages.lead : last - pages.lead]
                self._storage.read_into(piece.file, piece.start + first - piece.at, out)

    def hand_over(self) -> None:
        """Keep the parameters no longer: each goes with its last user."""
        self.tensors.clear()

    def settle(self) -> None:
        """Copy what is borrowed, in place, and give files back. Nobody may write to it meanwhile. Raises ReadError."""
        for name, pages in self._pages.items():
            if not pages.own():
                files = sorted({piece.file for piece in self._pieces if piece.parameter == name})
                raise self._lost(f"{few(files, 3)}: {shown(name)} could not be copied: memory is short, a disk failed")
        changed = sorted(path for path, file in self._files.items() if file is not None and not file.is_same())
        if changed:
            raise self._lost(f"{few(changed, 3)}: changed while parameters had pages of it")
        self.close()

    def close(self) -> None:
        """Put zeros in place of what is borrowed, and give the files back; idempotent."""
        self.tensors.clear()
        with self._leases:
            for pages in self._pages.values():
                pages.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _reaches(self, path: str, end: int) -> bool:
        """Whether a file is leased, if need be from now on, and has at least `end` bytes."""
        if path not in self._files:
            self._files[path] = None
            if isinstance(self._storage, SupportsLeasedFiles):
                with ExitStack() as if_not_leased:
                    self._files[path] = if_not_leased.enter_context(self._storage.leased(path))
                    if self._files[path] is not None:
                        self._leases.enter_context(if_not_leased.pop_all())
        file = self._files[path]
        return file is not None and end <= file.size

    def _lost(self, what: str) -> ReadError:
        """Return what to raise where a model that has been filled already has not all that it should have."""
        error = ReadError(
            f"{what}, or somebody wrote to it after waiting for as long as the system has them wait: load again "
            f"({shown(self._storage.uri, 300)})"
        )
        error.touched = True
        return error

    def _refuse(self, piece: Piece) -> NoReturn:
        """Raise what is wrong with the file of a piece that cannot be had."""
        byte, end = memoryview(bytearray(1)), piece.start + piece.length
        for at in (*range(piece.start, end, PAGE), end - 1):
            self._storage.read_into(piece.file, at, byte)
        raise ReadError(
            f"{piece.file}: what lies at offset {piece.start} could not be had: memory is short, or the disk failed"
        )
