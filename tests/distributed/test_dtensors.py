"""Models that torch's own libraries divide among ranks: FSDP2, tensor parallelism, and both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from helpers.checkpoints import write_safetensors
from helpers.ranks import Fault, Ranks
from helpers.tiny_transformers import by_transformers, saved

WIDTH, INNER, TOKENS = 6, 10, 7  # none of which four ranks divide


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = x + self.down(functional.silu(self.up(x)))
        return down


class Model(nn.Module):
    """Two layers between an embedding and a head, which may be one tensor."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(MLP() for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


IDS = torch.tensor([[0, 3, 6, 1, 5]])


def written(folder: Path, *, seed: int = 0, tied: bool = False) -> Path:
    torch.manual_seed(seed)
    state = Model(tied=tied).state_dict()
    if tied:
        del state["head.weight"]
    write_safetensors(folder / "model.safetensors", state)
    return folder


def whole(folder: Path, *, tied: bool = False) -> Model:
    from tensorferry import load

    model = Model(tied=tied)
    load(model, folder)
    return model


def answer(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits and the gradient of the embedding, as a whole tensor."""
    model.zero_grad()
    out = model(IDS)
    out.square().sum().backward()
    grad: Any = model.get_parameter("embed.weight").grad
    return out.detach(), grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    state = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    assert state.keys() == expected.state_dict().keys()
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in state.items())
    for found, wanted in zip(answer(model), answer(expected), strict=True):
        torch.testing.assert_close(found, wanted)


def sharded(size: int, device: str, *, tied: bool = False, **more: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    with torch.device(device):
        model = Model(tied=tied)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **more)
    return fully_shard(model, mesh=mesh, **more)


def local_bytes(model: nn.Module) -> int:
    parameters: Any = model.parameters()
    return sum(p.to_local().nbytes for p in parameters)


def load_sharded(rank: int, size: int, folder: Path, device: str, tied: bool) -> tuple[int, int, int]:
    from tensorferry import ReadOptions, load

    model = sharded(size, device, tied=tied)
    report = load(model, folder, options=ReadOptions(max_gap=0))
    mine = local_bytes(model)
    model.train()
    assert_same(model, whole(folder, tied=tied))
    return report.bytes_needed, report.bytes_read, mine


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("tied", [False, True])
def test_fsdp_trains_with_what_was_loaded_and_each_rank_reads_its_part(
    device: str, tied: bool, two_ranks: Ranks, tmp_path: Path
) -> None:
    folder = written(tmp_path, tied=tied)
    found = two_ranks.run(load_sharded, folder, device, tied)
    assert all(needed == read == mine for needed, read, mine in found)
    assert sum(mine for *_, mine in found) == sum(t.nbytes for t in whole(folder, tied=tied).parameters())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fsdp_on_four_ranks_of_which_some_have_less_or_nothing(device: str, four_ranks: Ranks, tmp_path: Path) -> None:
    folder = written(tmp_path)
    found = four_ranks.run(load_sharded, folder, device, False)
    assert all(needed == read == mine for needed, read, mine in found)
    assert len({mine for *_, mine in found}) > 1


def load_again(rank: int, size: int, one: Path, other: Path, atomic: bool) -> None:
    from tensorferry import Reloader

    model = sharded(size, "meta")
    reloader = Reloader(model)
    reloader.load(one)
    model.train()
    assert_same(model, whole(one))
    kept = {name: (tensor, tensor._local_tensor.data_ptr()) for name, tensor in model.named_parameters()}
    with torch.no_grad():
        model(IDS)  # leaves the parameters of the root whole
    reloader.load(other, atomic=atomic)
    now = {name: (tensor, tensor._local_tensor.data_ptr()) for name, tensor in model.named_parameters()}
    assert all(now[name][0] is tensor and now[name][1] == at for name, (tensor, at) in kept.items())
    assert_same(model, whole(other))


@pytest.mark.parametrize("atomic", [False, True])
def test_fsdp_goes_on_with_new_values_in_the_same_memory(atomic: bool, two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(load_again, written(tmp_path / "a"), written(tmp_path / "b", seed=1), atomic)


def load_after_a_forward_pass(rank: int, size: int, folder: Path) -> None:
    from tensorferry import load

    model = sharded(size, "cpu")
    with torch.no_grad():
        model(IDS)
    assert not hasattr(model.embed.weight, "to_local")
    load(model, folder)
    model.train()
    assert_same(model, whole(folder))


def test_whole_parameters_of_a_forward_pass_are_not_what_is_filled(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(load_after_a_forward_pass, written(tmp_path))


def load_offloaded(rank: int, size: int, folder: Path) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    from tensorferry import load

    model = sharded(
        size, "meta", offload_policy=CPUOffloadPolicy(pin_memory=False),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )  # fmt: skip
    load(model, folder, device="cpu")
    expected = whole(folder)
    torch.testing.assert_close(model(IDS).float(), expected(IDS), atol=0.1, rtol=0.1)


def test_fsdp_with_parameters_on_the_cpu_and_in_another_type(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(load_offloaded, written(tmp_path))


def load_untied(rank: int, size: int, folder: Path) -> None:
    from tensorferry import load

    load(sharded(size, "cpu", tied=True), folder)


def test_fsdp_would_tie_again_what_a_checkpoint_takes_apart(two_ranks: Ranks, tmp_path: Path) -> None:
    """Its parameters are hung anew in every forward pass."""
    faults = two_ranks.tried(load_untied, written(tmp_path))
    assert all(isinstance(fault, Fault) and fault.kind == "PlanError" and not fault.touched for fault in faults)
    assert "FSDP keeps them tied" in faults[0].words


def both(device: str) -> Any:
    """Return the model divided by two ways of tensor parallelism and two of FSDP."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device(device):
        model = Model()
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def load_both(rank: int, size: int, folder: Path, device: str) -> tuple[int, int]:
    from tensorferry import load

    model = both(device)
    report = load(model, folder)
    mine = local_bytes(model)
    model.train()
    assert_same(model, whole(folder))
    return report.bytes_needed, mine


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fsdp_and_tensor_parallelism_together(device: str, four_ranks: Ranks, tmp_path: Path) -> None:
    folder = written(tmp_path)
    found = four_ranks.run(load_both, folder, device)
    assert all(needed == mine for needed, mine in found)
    plain: Any = whole(folder)
    halved = [plain.embed.weight, plain.head.weight, *(layer.down.bias for layer in plain.layers)]
    copies = sum(p.nbytes for p in halved)  # tensor parallelism leaves these whole
    assert sum(mine for _, mine in found) == sum(p.nbytes for p in plain.parameters()) + copies


def load_a_transformer(rank: int, size: int, folder: Path) -> tuple[int, int]:
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from tensorferry import load

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    report = load(model, folder)
    mine, theirs = local_bytes(model), by_transformers(folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.full_tensor(), theirs.state_dict()[name]), name
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, theirs(IDS).logits)
    return report.bytes_needed, mine


@pytest.mark.transformers
@pytest.mark.parametrize("name", ["tied Llama", "Mixtral"])
def test_models_of_transformers_whose_experts_are_joined(name: str, two_ranks: Ranks, tmp_path: Path) -> None:
    found = two_ranks.run(load_a_transformer, saved(name, tmp_path))
    assert all(needed == mine for needed, mine in found)
