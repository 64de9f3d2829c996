"""Run:ai model streamer, with its defaults (io_uring and direct reads where it can), and with memory of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.peers.contestant import Contestant

if TYPE_CHECKING:
    from benchmarks.peers.task import Task

_IMPORTS = ("runai_model_streamer",)


def _stream(task: Task, *, own: bool) -> None:
    from runai_model_streamer import SafetensorsStreamer

    take = task.give if own else task.put
    options: dict[str, Any] = {"owned": own}
    if task.work.part == "ep":
        options["tensor_names"] = set(task.parts)
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(list(task.files), **options)
        for name, tensor in streamer.get_tensors():
            take(name, tensor)


def _given(task: Task) -> None:
    _stream(task, own=False)


def _own(task: Task) -> None:
    _stream(task, own=True)


CONTESTANTS = (
    Contestant("runai streamer", _given, "stream_files(owned=False), copy_", imports=_IMPORTS),
    Contestant(
        "runai streamer, own memory", _own, "stream_files(owned=True)", ("full", "moe", "ep", "many"),
        imports=_IMPORTS, memory="own",
    ),
)  # fmt: skip
