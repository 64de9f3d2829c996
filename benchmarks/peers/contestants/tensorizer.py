"""tensorizer, of files in its own format, which a checkpoint has to be converted to.

Its writer refuses many tensors ("Metadata overflow").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.peers.contestant import Contestant

if TYPE_CHECKING:
    from benchmarks.peers.task import Task


def _load(task: Task) -> None:
    from tensorizer import TensorDeserializer

    wanted = None if task.work.part == "full" else task.parts.__contains__
    with TensorDeserializer(task.files[0], device="cpu", filter_func=wanted) as found:
        for name in list(found):
            task.give(name, found[name])


CONTESTANTS = (
    Contestant(
        "tensorizer, own memory and format", _load, "TensorDeserializer(file)", ("full", "moe", "ep"),
        imports=("tensorizer",), memory="own", family="tensors",
    ),
)  # fmt: skip
