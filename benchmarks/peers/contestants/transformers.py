"""transformers: `from_pretrained`, also for one rank of tensor parallelism, and of GGUF.

On the CPU its parameters stay views of mapped files, so they are copied into the module afterwards, within the time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from benchmarks.peers.contestant import Contestant
from benchmarks.peers.contestants._fake_group import fake_mesh

if TYPE_CHECKING:
    from benchmarks.peers.task import Task

_IMPORTS = (
    "transformers.models.llama.modeling_llama", "transformers.models.mixtral.modeling_mixtral",
    "transformers.core_model_loading", "torch.distributed.tensor", "torch.testing._internal.distributed.fake_pg",
)  # fmt: skip


def _model(task: Task, **options: Any) -> Any:
    import torch

    transformers: Any = import_module("transformers")

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers.AutoModelForCausalLM.from_pretrained(str(task.folder), dtype=torch.bfloat16, **options)


def _mapped(task: Task) -> None:
    options = {} if task.work.part == "full" else {"tp_plan": "auto", "device_mesh": fake_mesh()}
    for name, parameter in _model(task, **options).named_parameters():
        tensor = parameter.data.to_local() if hasattr(parameter.data, "to_local") else parameter.data
        if tensor.shape == task.parameters[name].shape:
            task.parameters[name].data.copy_(tensor)
        else:  # one that its plan keeps whole on every rank
            task.put(name, tensor)


def _read(task: Task) -> None:
    task.take_model(_model(task, disable_mmap=True))


def _gguf(task: Task) -> None:
    task.take_model(_model(task, gguf_file="model.gguf"))


CONTESTANTS = (
    Contestant("transformers", _mapped, "from_pretrained, copy_", ("full", "tp", "bin"), imports=_IMPORTS),
    Contestant(
        "transformers, own memory", _read, "from_pretrained(disable_mmap=True)", ("full",), imports=_IMPORTS,
        memory="own",
    ),
    Contestant(
        "transformers, GGUF", _gguf, "from_pretrained(gguf_file=)", ("q8_0", "q4_k"), memory="own",
        imports=(*_IMPORTS, "transformers.modeling_gguf_pytorch_utils", "gguf"),
    ),
)  # fmt: skip
