"""Parameters have the pages of files that are cached until vLLM has made of them what it uses, and none afterwards."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_index, write_safetensors
from helpers.fake_vllm import FakeVllm, LoadConfig, installed, model_config
from helpers.ranks import Ranks
from helpers.reading_ways import is_leased, let_go
from tensorferry import ConfigError, PlanError, ReadError
from tensorferry.execute import borrowing
from tensorferry.execute.borrowed import Borrowed
from tensorferry.storage import local, pages
from tensorferry.storage.joined import JoinedStorage
from tensorferry.storage.local import LocalStorage
from tensorferry.storage.pages import Pages, can_borrow

pytestmark = pytest.mark.skipif(not can_borrow(), reason="this system cannot be asked for pages")

WIDTH, ROWS, VOCABULARY = 512, 256, 1024


class Model(nn.Module):
    """A vocabulary, three matrices in one, one whose first columns are wanted, and a vector: a rank of two."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.down, self.zeta = nn.Module(), nn.Module(), nn.Module(), nn.Module()
        self.embed.weight = nn.Parameter(torch.full((VOCABULARY, WIDTH), 77.0))
        self.qkv.weight = nn.Parameter(torch.full((3 * ROWS, WIDTH), 77.0))
        self.down.weight = nn.Parameter(torch.full((WIDTH, ROWS), 77.0))
        self.zeta.weight = nn.Parameter(torch.full((WIDTH,), 77.0))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        done = set()
        for name, tensor in weights:
            module, _, leaf = name.partition(".")
            if module in "qkv":
                self.qkv.get_parameter("weight").data.narrow(0, "qkv".index(module) * ROWS, ROWS).copy_(tensor[:ROWS])
                done.add("qkv.weight")
                continue
            into = self.get_submodule(module).get_parameter(leaf)
            into.data.copy_(tensor[:, : into.shape[1]] if module == "down" else tensor)
            done.add(name)
        return done


def contents() -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (VOCABULARY, WIDTH),
        "q": (2 * ROWS, WIDTH),
        "k": (2 * ROWS, WIDTH),
        "v": (2 * ROWS, WIDTH),
    }
    shapes |= {"down": (WIDTH, 2 * ROWS), "zeta": (WIDTH,)}
    return {f"{name}.weight": ar(*shape, start=1000 * n) for n, (name, shape) in enumerate(shapes.items())}


def expected() -> dict[str, torch.Tensor]:
    model = Model()
    model.load_weights(contents().items())
    return model.state_dict()


BORROWED = 4 * (VOCABULARY + 3 * ROWS) * WIDTH
"""Bytes of what lies in the file as it does in memory, and is large enough."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_safetensors(tmp_path / "model.safetensors", contents())
    with LocalStorage(tmp_path) as storage, storage.lend("model.safetensors", 0, 10) as lent:
        if lent is None:
            pytest.skip("temporary files cannot be leased")
    return tmp_path


Process = Callable[[Any], None]


def loaded(
    vllm: FakeVllm, folder: Path, process: Process = lambda model: None, kind: type[Model] = Model, **extra: Any
) -> tuple[Any, Any]:
    """Return the loader and the model that it has made; process: what vLLM does after the weights."""
    loader = vllm.loader(LoadConfig(model_loader_extra_config=extra))
    loader.process = process
    config = SimpleNamespace(build=kind, parallel_config=SimpleNamespace(data_parallel_size=1))
    return loader, loader.load_model(config, model_config(folder))


def is_mapped(folder: Path) -> bool:
    return str(folder) in Path("/proc/self/maps").read_text()


def is_right(model: nn.Module) -> bool:
    return all(torch.equal(model.state_dict()[name], values) for name, values in expected().items())


def borrowed_of(loader: Any) -> int:
    return int(loader.report.ways.get("cached: borrowed", 0))


def test_what_is_cached_is_borrowed_and_copied_when_vllm_is_done(vllm: FakeVllm, folder: Path) -> None:
    seen: list[bool] = []
    loader, model = loaded(vllm, folder, lambda model: seen.extend([is_mapped(folder), is_right(model)]))
    assert seen == [True, True]
    assert borrowed_of(loader) == BORROWED
    assert loader.report.bytes_needed == BORROWED + 4 * (WIDTH * ROWS + WIDTH) <= loader.report.bytes_read
    assert is_right(model)
    assert not is_mapped(folder)
    assert not is_leased(folder / "model.safetensors")


def test_parameters_are_the_same_objects(vllm: FakeVllm, folder: Path) -> None:
    made, loader = Model(), vllm.loader()
    made.get_parameter("qkv.weight").weight_loader = print  # type: ignore[attr-defined]
    kept = dict(made.named_parameters())
    config = SimpleNamespace(build=lambda: made, parallel_config=SimpleNamespace(data_parallel_size=1))
    model = loader.load_model(config, model_config(folder))
    assert all(parameter is kept[name] for name, parameter in model.named_parameters())
    assert model.qkv.weight.weight_loader is print
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_what_vllm_has_made_something_else_of_is_not_copied(
    vllm: FakeVllm, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def pack(model: Any) -> None:
        model.qkv.weight = nn.Parameter(model.qkv.weight.t().contiguous())

    caplog.set_level(logging.INFO, "vllm")
    _, model = loaded(vllm, folder, pack)
    assert torch.equal(model.qkv.weight, expected()["qkv.weight"].t())
    assert any("copied 2.0 MiB" in record.getMessage() for record in caplog.records)


def test_what_vllm_writes_to_parameters_does_not_reach_the_file(vllm: FakeVllm, folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    _, model = loaded(vllm, folder, lambda model: model.embed.weight.data.mul_(2))
    assert torch.equal(model.embed.weight, 2 * expected()["embed.weight"])
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("code", ["open(path, 'r+b').write(bytes(9_000_000))", "os.truncate(path, 5)"])
def test_who_wants_to_write_to_a_file_waits_until_what_is_left_of_it_has_been_copied(
    vllm: FakeVllm, folder: Path, code: str
) -> None:
    writers = []

    def wait(model: Any) -> None:
        source = f"import os; path = {str(folder / 'model.safetensors')!r}; print(flush=True); {code}"
        writers.append(subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE))
        assert writers[0].stdout is not None
        writers[0].stdout.readline()
        time.sleep(0.2)
        assert writers[0].poll() is None

    _, model = loaded(vllm, folder, wait)
    writers[0].communicate(timeout=20)
    assert writers[0].returncode == 0
    assert is_right(model)


def test_where_vllm_fails_the_file_is_given_back_and_nothing_is_mapped(vllm: FakeVllm, folder: Path) -> None:
    kept = []

    def fail(model: Any) -> None:
        kept.append(model)
        raise ValueError("cannot be packed")

    with pytest.raises(ValueError, match="cannot be packed"):
        loaded(vllm, folder, fail)
    assert not is_mapped(folder)
    assert not is_leased(folder / "model.safetensors")
    assert bool((kept[0].embed.weight[10:-10] == 0).all())


def test_a_plan_that_does_not_fit_leaves_the_model_and_the_file_alone(vllm: FakeVllm, folder: Path) -> None:
    values = contents()
    del values["v.weight"]
    write_safetensors(folder / "model.safetensors", values)
    made, loader = Model(), vllm.loader()
    config = SimpleNamespace(build=lambda: made, parallel_config=SimpleNamespace(data_parallel_size=1))
    with pytest.raises(Exception, match=r"qkv\.weight") as caught:
        loader.load_model(config, model_config(folder))
    assert not caught.value.touched  # type: ignore[attr-defined]
    assert all(bool((tensor == 77).all()) for tensor in made.state_dict().values())
    assert not is_mapped(folder)
    assert not is_leased(folder / "model.safetensors")


@pytest.mark.parametrize(
    "extra",
    [{"borrow": False}, {"read": {"direct": "never"}}, {"read": {"keep_cache": False}}, {"read": {"huge_pages": True}},
     {"strategy": "eager"}, {"own_loader": "stream"}],
)  # fmt: skip
def test_it_is_read_where_that_is_asked_for(vllm: FakeVllm, folder: Path, extra: dict[str, Any]) -> None:
    seen: list[bool] = []
    loader, model = loaded(vllm, folder, lambda model: seen.append(is_mapped(folder)), **extra)
    assert seen == [False]
    assert borrowed_of(loader) == 0
    assert is_right(model)


def test_what_is_not_cached_is_read(vllm: FakeVllm, folder: Path) -> None:
    let_go(folder / "model.safetensors")
    loader, model = loaded(vllm, folder)
    if borrowed_of(loader):
        pytest.skip("temporary files stay in memory")
    assert is_right(model)


def test_it_is_read_where_nobody_will_say_that_the_model_is_done(vllm: FakeVllm, folder: Path) -> None:
    loader, model = vllm.loader(), Model()
    loader.load_weights(model, model_config(folder))
    assert borrowed_of(loader) == 0
    assert is_right(model)
    loader, _ = loaded(vllm, folder)
    loader.load_weights(model, model_config(folder))
    assert borrowed_of(loader) == 0


def test_a_parameter_whose_memory_somebody_else_uses_is_filled_there(vllm: FakeVllm, folder: Path) -> None:
    made, loader = Model(), vllm.loader()
    view = made.get_parameter("embed.weight").data[1:]
    config = SimpleNamespace(build=lambda: made, parallel_config=SimpleNamespace(data_parallel_size=1))
    loader.load_model(config, model_config(folder))
    assert borrowed_of(loader) == BORROWED - 4 * VOCABULARY * WIDTH
    assert torch.equal(view, expected()["embed.weight"][1:])
    assert is_right(made)


def test_of_runs_that_lie_differently_those_with_most_bytes_are_borrowed(vllm: FakeVllm, folder: Path) -> None:
    values = contents()
    order = ["q.weight", "zeta.weight", "k.weight", "v.weight", "embed.weight", "down.weight"]
    for number, name in enumerate(order):  # each in a file of its own, whose header is otherwise as long
        write_safetensors(folder / f"{number}.safetensors", {name: values[name]})
    (folder / "model.safetensors").unlink()
    write_index(folder / "model.safetensors.index.json", {name: f"{n}.safetensors" for n, name in enumerate(order)})
    pad(folder / "0.safetensors", 8)
    loader, model = loaded(vllm, folder)
    assert borrowed_of(loader) == BORROWED - 4 * ROWS * WIDTH
    assert is_right(model)


def pad(path: Path, nbytes: int) -> None:
    """Make the header of a safetensors file longer."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes(
        (length + nbytes).to_bytes(8, "little") + data[8 : 8 + length] + b" " * nbytes + data[8 + length :]
    )


@pytest.mark.parametrize("shift", [0, 8, 40, 56])
def test_what_is_left_lies_on_a_good_address_unless_others_use_it(vllm: FakeVllm, folder: Path, shift: int) -> None:
    pad(folder / "model.safetensors", shift)
    views: list[torch.Tensor] = []
    _, model = loaded(vllm, folder, lambda model: views.append(model.qkv.weight.detach()[1:]))
    assert model.embed.weight.data_ptr() % 64 == 0
    assert is_right(model)
    model.get_parameter("qkv.weight").data[1, 0] = 5
    assert views[0][0, 0] == 5
    assert not is_mapped(folder)


@pytest.mark.parametrize("most", [0, 1, 3, 4])
def test_there_is_a_bound_on_pieces(vllm: FakeVllm, folder: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(borrowing, "_MOST", most)
    loader, model = loaded(vllm, folder)
    embed, qkv = 4 * VOCABULARY * WIDTH, 4 * 3 * ROWS * WIDTH
    assert borrowed_of(loader) == {0: 0, 1: embed, 3: embed, 4: embed + qkv}[most]
    assert is_right(model)


def test_a_file_that_is_open_for_writing_is_read(vllm: FakeVllm, folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b"):
        loader, model = loaded(vllm, folder)
    assert borrowed_of(loader) == 0
    assert is_right(model)


def test_what_cannot_be_had_is_told_with_file_and_tensor(
    vllm: FakeVllm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pages, "bring", lambda self, at, length: False)
    with pytest.raises(ReadError, match=r"model\.safetensors.*could not be had.*while reading embed\.weight") as caught:
        loaded(vllm, folder)
    assert caught.value.touched
    assert not is_leased(folder / "model.safetensors")
    assert not is_mapped(folder)


def test_what_cannot_be_copied_in_the_end_is_told(
    vllm: FakeVllm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pages, "own", lambda self: False)
    with pytest.raises(ReadError, match=r"model\.safetensors: \w+\.weight could not be copied.*load again") as caught:
        loaded(vllm, folder)
    assert caught.value.touched
    assert not is_leased(folder / "model.safetensors")
    assert not is_mapped(folder)


def test_a_file_that_changes_all_the_same_is_told(vllm: FakeVllm, folder: Path) -> None:
    before = (folder / "model.safetensors").stat()

    def lose(model: Any) -> None:
        assert is_leased(folder / "model.safetensors")  # who asks is told, and the lease counts as lost from then on
        os.utime(folder / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))

    with pytest.raises(ReadError, match=r"model\.safetensors: changed while parameters had pages of it") as caught:
        loaded(vllm, folder, lose)
    assert caught.value.touched
    assert not is_leased(folder / "model.safetensors")


@pytest.mark.parametrize("act", ["touch", "chmod"])
def test_what_does_not_change_what_is_in_a_file_that_is_leased_does_no_harm(
    vllm: FakeVllm, folder: Path, act: str
) -> None:
    file = folder / "model.safetensors"
    _, model = loaded(vllm, folder, lambda model: file.touch() if act == "touch" else file.chmod(0o600))
    assert is_right(model)


def test_a_loader_that_two_threads_use_has_each_settle_its_own(vllm: FakeVllm, folder: Path) -> None:
    loader, began, over = vllm.loader(), threading.Event(), threading.Event()

    def process(model: Any) -> None:
        if threading.current_thread().name == "first":
            began.set()
            assert over.wait(20)
        else:
            raise ValueError("cannot be packed")

    loader.process = process
    found: list[Any] = []

    def load() -> None:
        config = SimpleNamespace(build=Model, parallel_config=SimpleNamespace(data_parallel_size=1))
        found.append(loader.load_model(config, model_config(folder)))

    first = threading.Thread(target=load, name="first")
    first.start()
    assert began.wait(20)
    with pytest.raises(ValueError, match="cannot be packed"):
        load()
    over.set()
    first.join()
    assert is_right(found[0])


def test_where_there_is_no_room_for_zeros_the_file_is_given_back_all_the_same(
    vllm: FakeVllm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: Any) -> None:
        monkeypatch.setattr(pages, "_map", no_room)
        raise ValueError("cannot be packed")

    def no_room(*args: Any) -> int:
        raise MemoryError

    with pytest.raises(ValueError, match="cannot be packed"):
        loaded(vllm, folder, fail)
    assert not is_leased(folder / "model.safetensors")


def test_a_parameter_that_was_replaced_since_the_plan_was_made_is_told(
    vllm: FakeVllm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, loader, add = Model(), vllm.loader(), Borrowed.add

    def replaced(self: Any, name: str, found: Any) -> bool:
        made.embed.weight = nn.Parameter(torch.full((VOCABULARY, WIDTH), 77.0))
        return add(self, name, found)

    monkeypatch.setattr(Borrowed, "add", replaced)
    config = SimpleNamespace(build=lambda: made, parallel_config=SimpleNamespace(data_parallel_size=1))
    with pytest.raises(PlanError, match=r"embed\.weight is not the parameter any more"):
        loader.load_model(config, model_config(folder))


class Streamed(Model):
    """Computes one parameter, and sets an attribute and what is left of a parameter."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        def doubled() -> Iterable[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                yield name, (tensor * 2 if name == "zeta.weight" else tensor)

        self.is_loaded = True
        return super().load_weights(doubled())


def test_what_is_streamed_comes_beside_what_is_borrowed(vllm: FakeVllm, folder: Path) -> None:
    loader, model = loaded(vllm, folder, kind=Streamed)
    assert borrowed_of(loader) == BORROWED
    assert set(loader.report.streamed) == {"zeta.weight"}
    assert model.is_loaded
    values = expected()
    values["zeta.weight"] = values["zeta.weight"] * 2
    assert all(torch.equal(model.state_dict()[name], value) for name, value in values.items())


class Tied(Model):
    """Has its vocabulary twice."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Module()
        self.head.weight = self.embed.weight


def test_tied_parameters_stay_tied(vllm: FakeVllm, folder: Path) -> None:
    loader, model = loaded(vllm, folder, kind=Tied)
    assert borrowed_of(loader) == BORROWED
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, expected()["embed.weight"])


def in_files(folder: Path, names: Iterable[str]) -> None:
    """Write each tensor to a file of its own."""
    values = contents()
    (folder / "model.safetensors").unlink()
    for name in names:
        write_safetensors(folder / f"{name}.safetensors", {name: values[name]})
    write_index(folder / "model.safetensors.index.json", {name: f"{name}.safetensors" for name in names})


def test_of_several_files_those_are_borrowed_that_can_be(vllm: FakeVllm, folder: Path) -> None:
    in_files(folder, contents())
    with (folder / "embed.weight.safetensors").open("r+b"):
        loader, model = loaded(vllm, folder)
    assert borrowed_of(loader) == 4 * 3 * ROWS * WIDTH
    assert is_right(model)


def test_not_all_files_are_kept_open(vllm: FakeVllm, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_files(folder, contents())
    monkeypatch.setattr(local, "_most_descriptors", lambda: 8 * 4)
    loader, model = loaded(vllm, folder)
    assert 0 < borrowed_of(loader) < BORROWED
    assert is_right(model)


@pytest.mark.parametrize(("odd", "share"), [(1, 0), (2, 0), (4, 1)])
def test_on_addresses_that_do_not_suit_a_type_nothing_is_borrowed(
    vllm: FakeVllm, folder: Path, odd: int, share: int
) -> None:
    pad(folder / "model.safetensors", odd)
    loader, model = loaded(vllm, folder)
    assert borrowed_of(loader) == share * BORROWED
    assert is_right(model)


def load_on_a_rank(rank: int, size: int, folder: Path) -> Any:
    import torch.distributed as dist

    with installed() as vllm:
        vllm.share(size, rank, dist.group.WORLD)
        loader, model = loaded(vllm, folder)
        return borrowed_of(loader), is_right(model), is_mapped(folder)


def test_ranks_borrow_the_same_pages(two_ranks: Ranks, folder: Path) -> None:
    assert two_ranks.run(load_on_a_rank, folder) == [(BORROWED, True, False)] * 2
    assert not is_leased(folder / "model.safetensors")


def test_files_of_several_places_are_borrowed(tmp_path: Path) -> None:
    for part in "ab":
        write_safetensors(tmp_path / part / "f", {"w": ar(ROWS, WIDTH, start=ord(part))})
    storage = JoinedStorage({part: LocalStorage(tmp_path / part) for part in "ab"})
    with closing(storage), storage.leased("a/f") as one, storage.leased("b/f") as two:
        if one is None or two is None:
            pytest.skip("temporary files cannot be leased")
        assert is_leased(tmp_path / "a" / "f")
        assert is_leased(tmp_path / "b" / "f")
        assert one.is_same()
        assert one.size == (tmp_path / "a" / "f").stat().st_size
    assert not is_leased(tmp_path / "a" / "f")


def test_without_such_calls_it_is_read(vllm: FakeVllm, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrowing, "can_borrow", lambda: False)
    loader, model = loaded(vllm, folder)
    assert borrowed_of(loader) == 0
    assert is_right(model)


def test_nothing_is_left_behind(vllm: FakeVllm, folder: Path) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        loaded(vllm, folder)
    gc.collect()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_the_option_is_true_or_false(vllm: FakeVllm) -> None:
    with pytest.raises(ConfigError, match="borrow"):
        vllm.loader(LoadConfig(model_loader_extra_config={"borrow": "yes"}))
