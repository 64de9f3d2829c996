"""tensorferry: `load` into a module that has memory, or on meta; again by `Reloader`; GGUF by `load_model`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.peers.contestant import OURS, Contestant

if TYPE_CHECKING:
    from benchmarks.peers.task import Task

_IMPORTS = ("tensorferry", "tensorferry.api")


def _load(task: Task) -> None:
    import tensorferry

    task.kept.append(tensorferry.load(task.module, task.folder))


def _load_own(task: Task) -> None:
    _load(task)
    task.parameters = dict(task.module.named_parameters())


def _load_first(task: Task) -> None:
    """Load once before the clock starts: who reloads has loaded."""
    from tensorferry import Reloader

    reloader = Reloader(task.module)
    reloader.load(task.folder)
    for parameter in task.parameters.values():
        parameter.data.fill_(1)
    task.kept.append(reloader)


def _reload(task: Task) -> None:
    task.kept.append(task.kept[-1].load(task.folder))


def _declare_parts(task: Task) -> None:
    """Say which part of a tensor each parameter is; this belongs to the model, as layers of engines know their part."""
    from tensorferry import Box, Region, Slot

    def slots(name: str) -> dict[str, Any]:
        shape, part = task.shapes[name], task.parts[name]
        local = tuple(task.parameters[name].shape)
        first = tuple(part[1] if part and d == part[0] else 0 for d in range(len(shape)))
        last = tuple(a + n for a, n in zip(first, local, strict=True))
        return {"": Slot(Region.whole(local), shape, Region(shape, Box(first, last)))}

    for name in (name for name, part in task.parts.items() if part is not None):
        holder, _, leaf = name.rpartition(".")
        found = {leaf: slots(name)}
        task.module.get_submodule(holder).tensor_slots = lambda found=found: found  # type: ignore[assignment]


def _load_gguf(task: Task) -> None:
    import tensorferry

    task.take_model(tensorferry.load_model(task.files[0], dtype="bfloat16"))


CONTESTANTS = (
    Contestant(
        OURS, _load, "load(module, folder)", works=("full", "tp", "moe", "ep", "many", "bin"),
        environment="tensorferry", imports=_IMPORTS, prepare=_declare_parts,
    ),
    Contestant(
        f"{OURS}, on meta", _load_own, "load(module on meta, folder)", works=("full", "tp", "moe", "ep", "many", "bin"),
        environment="tensorferry", imports=_IMPORTS, prepare=_declare_parts, memory="own",
    ),
    Contestant(
        f"{OURS}, again", _reload, "Reloader.load(folder)", works=("reload",),
        environment="tensorferry", imports=(*_IMPORTS, "tensorferry.reload"), prepare=_load_first,
    ),
    Contestant(
        f"{OURS}, GGUF", _load_gguf, 'load_model(file, dtype="bfloat16")', works=("q8_0", "q4_k"),
        environment="tensorferry", memory="own", imports=(*_IMPORTS, "transformers.models.llama.modeling_llama"),
    ),
)  # fmt: skip
