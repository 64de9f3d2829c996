"""Loaders that do more than copying: what cannot be planned is named, streamed, and right in the end."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from helpers.old_loaders import Loaded, load_both_ways, poisoned
from tensorferry.errors import ConfigError, FinalizeError
from tensorferry.execute import ThreadedExecutor
from tensorferry.formats.opening import open_files
from tensorferry.loaders import LoadConfig, ModelConfig, get_model_loader
from tensorferry.modules.trace import Traced, stream_opaque, trace
from tensorferry.problems import ProblemKind
from tensorferry.report import Report

Load = Callable[["Model", dict[str, torch.Tensor], str, torch.Tensor], None]
SHAPES = {"a": (4, 6), "b": (4, 6), "norm": (6,)}


class Model(nn.Module):
    """Parameters called like the entries; `each` loads one entry, `end` comes after the last."""

    a: nn.Parameter
    b: nn.Parameter
    norm: nn.Parameter
    table: torch.Tensor
    kept: torch.Tensor
    flags: object
    sparse: torch.Tensor
    codes: torch.Tensor

    def __init__(self, each: Load, end: Callable[[Model], None] | None = None) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.register_buffer("table", torch.empty(6), persistent=False)
        self.each, self.end = each, end

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        parameters = {n: p.data for n, p in self.named_parameters()}
        for name, weight in weights:
            self.each(self, parameters, name, weight)
        if self.end is not None:
            self.end(self)
        return None


def plainly(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
    parameters[name].copy_(weight)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {name: ar(*shape, start=100.0 * i + 1) for i, (name, shape) in enumerate(SHAPES.items())}
    return write_safetensors(tmp_path / "model.safetensors", tensors).parent


def traced_of(folder: Path, make: Callable[[], nn.Module]) -> Traced:
    with open_files(folder) as opened:
        return trace(make(), opened.catalogue)


def both(folder: Path, each: Load, end: Callable[[Model], None] | None = None) -> Loaded:
    """Trace on a twin and on the model itself; both must end right and agree."""
    on_meta = load_both_ways(lambda: Model(each, end), folder)
    itself = load_both_ways(lambda: Model(each, end), folder, on_meta=False)
    on_meta.assert_equal()
    itself.assert_equal()
    assert on_meta.traced.stream == itself.traced.stream
    assert on_meta.traced.opaque == itself.traced.opaque
    return on_meta


def test_adding_one_is_opaque_and_only_that_entry_is_streamed(folder: Path) -> None:
    def gemma(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        parameters[name].copy_(weight + 1 if name == "norm" else weight)

    loaded = both(folder, gemma)
    assert loaded.traced.opaque == {"norm": "is computed by add"}
    assert loaded.traced.stream == ("norm",)
    assert {s.parameter for s in loaded.traced.plan.steps} == {"a", "b"}
    assert loaded.counters.bytes_read == loaded.traced.plan.bytes_needed == 2 * 4 * 6 * 4


def test_a_change_in_place_after_the_copy_is_opaque(folder: Path) -> None:
    def mamba(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        parameters[name].copy_(weight)
        if name == "norm":
            parameters[name].copy_(-torch.exp(parameters[name].float() * 0.01))

    loaded = both(folder, mamba)
    assert loaded.traced.opaque == {"norm": "is computed by neg"}
    assert loaded.traced.stream == ("norm",)


@pytest.mark.parametrize("change", [lambda p: p.mul_(2), lambda p: p[:2].add_(1), lambda p: p.neg_().exp_()])
def test_an_operation_that_writes_to_the_parameter_is_opaque(
    folder: Path, change: Callable[[torch.Tensor], object]
) -> None:
    def each(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        parameters[name].copy_(weight)
        if name == "b":
            change(parameters[name])

    loaded = both(folder, each)
    assert list(loaded.traced.opaque) == ["b"]
    assert loaded.traced.stream == ("b",)


def test_a_change_of_the_entry_itself_is_opaque(folder: Path) -> None:
    def each(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        parameters[name].copy_(weight.mul_(3) if name == "a" else weight)

    assert both(folder, each).traced.opaque == {"a": "is changed in place by mul_"}


def test_what_is_written_after_the_last_entry_needs_the_entries_that_it_came_from(folder: Path) -> None:
    def end(model: Model) -> None:
        model.a.data.copy_(-torch.exp(model.a.data * 0.01))

    loaded = both(folder, plainly, end)
    assert loaded.traced.opaque == {"a": "is computed by neg"}
    assert loaded.traced.stream == ("a",)


def test_a_value_of_several_entries_needs_them_all(folder: Path) -> None:
    class Held(Model):
        def __init__(self) -> None:
            super().__init__(plainly)

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            held = {}
            for name, weight in weights:
                held[name] = weight
                if name == "b":
                    self.a.data.copy_(held["a"] * held["b"])
                elif name == "norm":
                    self.norm.data.copy_(weight)
                    self.b.data.fill_(1)

    loaded = load_both_ways(Held, folder)
    loaded.assert_equal()
    assert loaded.traced.opaque == {"a": "is computed by mul"}
    assert loaded.traced.stream == ("a", "b")


def test_entries_gathered_first_and_used_later_are_traced_too(folder: Path) -> None:
    class Gathering(Model):
        def __init__(self) -> None:
            super().__init__(plainly)

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            held = dict(weights)
            for name, weight in held.items():
                self.get_parameter(name).data.copy_(weight)

    loaded = load_both_ways(Gathering, folder)
    loaded.assert_equal()
    assert not loaded.traced.opaque


def test_a_loader_that_needs_every_entry_for_an_opaque_part_gets_every_entry(folder: Path) -> None:
    class Demanding(Model):
        def __init__(self) -> None:
            super().__init__(plainly)

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            held = dict(weights)
            self.a.data.copy_(held["a"] + 1)
            self.b.data.copy_(held["b"])
            self.norm.data.copy_(held["norm"])

    loaded = load_both_ways(Demanding, folder)
    loaded.assert_equal()
    assert loaded.traced.fallback is not None
    assert loaded.traced.fallback.startswith("cannot load a part of the checkpoint: it fails without values: KeyError")
    assert loaded.traced.stream == ("a", "b", "norm")
    assert loaded.traced.plan.steps == ()


def test_a_loader_whose_second_run_would_undo_the_plan_gets_every_entry(folder: Path) -> None:
    class Clearing(Model):
        def __init__(self) -> None:
            super().__init__(plainly)

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            self.a.data.zero_()
            for name, weight in weights:
                self.get_parameter(name).data.copy_(weight * 2 if name == "norm" else weight)

    loaded = load_both_ways(Clearing, folder)
    loaded.assert_equal()
    assert loaded.traced.fallback == "treats a otherwise when it gets only a part of the checkpoint"


@pytest.mark.parametrize("look", [
    lambda w: w.sum().item(), lambda w: bool((w == 0).all()), lambda w: w.flatten().tolist(),
    lambda w: torch.equal(w, w), lambda w: w.numpy(), lambda w: w.nonzero(), lambda w: float(w.flatten()[0]),
])  # fmt: skip
def test_a_loader_that_looks_at_values_is_streamed_whole(folder: Path, look: Callable[[torch.Tensor], object]) -> None:
    def each(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        look(weight)
        parameters[name].copy_(weight)

    loaded = both(folder, each)
    assert loaded.traced.stream == ("a", "b", "norm")
    assert set(loaded.traced.opaque) == {"a", "b", "norm"}
    assert loaded.traced.fallback is not None
    assert "values" in loaded.traced.fallback


def test_values_in_memory_that_the_loader_made_are_not_looked_at_either(folder: Path) -> None:
    def each(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        scratch = torch.zeros(weight.shape)
        scratch.copy_(weight)
        parameters[name].copy_(weight if scratch.sum().item() > 0 else -weight)

    loaded = both(folder, each)
    assert loaded.traced.fallback == "looks at values (item)"


def test_a_loader_that_swallows_the_refusal_is_not_believed(folder: Path) -> None:
    def each(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        try:
            scale = weight.max().item()
        except RuntimeError:
            scale = 1.0
        parameters[name].fill_(scale)

    assert both(folder, each).traced.fallback == "looks at values (item)"


def test_assigning_to_data_is_opaque(folder: Path) -> None:
    def each(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        if name == "a":
            model.a.data = weight.clone()
        else:
            parameters[name].copy_(weight)

    assert both(folder, each).traced.opaque == {"a": "is replaced by assigning to its data"}


def test_a_new_parameter_object_is_opaque_and_the_old_one_stays_while_tracing(folder: Path) -> None:
    def each(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        if name == "a":
            model.a = nn.Parameter(weight * 2)
        else:
            parameters[name].copy_(weight)

    model = Model(each)
    before = model.a
    traced = traced_of(folder, lambda: model)
    assert model.a is before
    assert traced.opaque == {"a": "is set by the loader to a tensor of its own"}
    assert traced.stream == ("a",)


def test_a_parameter_that_is_replaced_by_the_entry_itself_is_opaque(folder: Path) -> None:
    def replace(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        if name == "a":
            model.a = nn.Parameter(weight)
        else:
            parameters[name].copy_(weight)

    loaded = both(folder, replace)
    assert list(loaded.traced.opaque) == ["a"]
    assert loaded.traced.stream == ("a",)
    assert not loaded.traced.plan.problems


def test_a_quantized_weight_whose_scale_the_loader_ignores_stops_the_load(tmp_path: Path) -> None:
    weight = ar(4, 6).to(torch.float8_e4m3fn)
    write_safetensors(tmp_path / "model.safetensors", {"a": weight, "a_scale_inv": ar(1, 1)})

    def each(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        if name == "a":
            parameters[name].copy_(weight)

    plan = traced_of(tmp_path, lambda: Model(each)).plan
    assert [(p.kind, p.detail) for p in plan.fatal if p.subject == "a"] == [
        (ProblemKind.LOSSY_DTYPE, "its numbers are to be multiplied by a_scale_inv, which no rule does")
    ]


def test_attributes_that_the_loader_sets_are_taken_back_and_set_again_by_streaming(folder: Path) -> None:
    def each(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        if name == "norm":
            model.kept = weight * 2
            model.flags = {"norm": weight}
        parameters[name].copy_(weight)

    model = Model(each)
    traced = traced_of(folder, lambda: model)
    assert not hasattr(model, "kept")
    assert not hasattr(model, "flags")
    assert traced.stream == ("norm",)
    assert set(traced.opaque) == {"kept", "flags[norm]"}
    loaded = load_both_ways(lambda: Model(each), folder)
    assert isinstance(loaded.got, Model)
    assert isinstance(loaded.expected, Model)
    assert torch.equal(loaded.got.kept, loaded.expected.kept)


class Noting(Model):
    """It counts what it loads, and remembers names."""

    def __init__(self, each: Load = plainly) -> None:
        super().__init__(each)
        self.last = ""
        self.count = 0
        self.seen: list[str] = []
        self.untouched = {"a": 1}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                self.last = name
                self.count += 1
                self.seen.append(name)
                yield name, weight

        return super().load_weights(noted())

    @property
    def notes(self) -> tuple[object, ...]:
        return self.last, self.count, self.seen, self.untouched


ALL_NOTED = ("norm", 3, ["a", "b", "norm"], {"a": 1})


def load_by_its_loader(folder: Path, model: nn.Module) -> Report:
    loader = get_model_loader(LoadConfig())
    loader.load_model(ModelConfig(str(folder)), build=lambda config: model)
    assert loader.report is not None
    return loader.report


def test_what_a_loader_notes_is_told_and_the_model_has_it_only_in_the_end(folder: Path) -> None:
    model = Noting()
    seen = model.seen
    traced = traced_of(folder, lambda: model)
    assert model.notes == ("", 0, [], {"a": 1})
    assert {n.attribute: n.value for n in traced.settings} == {"last": "norm", "count": 3, "seen": ["a", "b", "norm"]}
    stream_opaque(model, traced, ())
    assert model.notes == ALL_NOTED
    assert model.seen is seen


def test_notes_of_inner_modules_are_put_on_another_model_of_the_same_make(folder: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Noting()

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
            return self.inner.load_weights(weights)

    loaded = load_both_ways(Outer, folder)
    loaded.assert_equal()
    assert isinstance(loaded.got, Outer)
    assert loaded.got.inner.notes == ALL_NOTED


def test_notes_are_of_the_whole_checkpoint_when_a_part_is_streamed(folder: Path) -> None:
    def each(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        parameters[name].copy_(weight + 1 if name == "b" else weight)

    model = Noting(each)
    assert list(load_by_its_loader(folder, model).streamed) == ["b"]
    assert model.notes == ALL_NOTED


def test_a_hook_finds_what_the_loader_has_noted(folder: Path) -> None:
    class Hooked(Noting):
        found: tuple[object, ...] = ()

        def process_weights_after_loading(self) -> None:
            self.found = self.notes

    model = Hooked()
    report = load_by_its_loader(folder, model)
    assert report.executor == "ThreadedExecutor"
    assert model.found == ALL_NOTED


def test_a_load_that_fails_before_anything_is_whole_leaves_what_the_loader_would_set(folder: Path) -> None:
    def fail(*given: object, **more: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    model = Noting()
    loader, config = get_model_loader(LoadConfig()), ModelConfig(str(folder))
    before = model.notes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadedExecutor, "run", fail)
        with pytest.raises(OSError, match="Input/output"):
            loader.load_model(config, build=lambda config: model)
    assert model.notes == before


def test_shapes_and_members_of_enumerations_are_noted(folder: Path) -> None:
    class Kind(Enum):
        GATED = "gated"

    def each(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        model.flags = {"shape": weight.shape, "kind": Kind.GATED, "inner": [{"dtype": weight.dtype}]}
        plainly(model, parameters, name, weight)

    model = Model(each)
    (setting,) = traced_of(folder, lambda: model).settings
    assert setting.value["kind"] is Kind.GATED
    assert setting.value["inner"] == [{"dtype": torch.float32}]
    assert setting.value["shape"] == torch.Size(SHAPES["norm"])


def test_what_stand_ins_say_of_their_device_is_not_noted(folder: Path) -> None:
    def each(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        model.flags = [str(weight.device)]
        plainly(model, parameters, name, weight)

    model = Model(each)
    assert traced_of(folder, lambda: model).settings == ()


def test_a_list_that_the_loader_puts_in_the_place_of_another_leaves_that_one_as_it_is(folder: Path) -> None:
    def each(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        model.flags = [name]
        plainly(model, parameters, name, weight)

    model = Model(each)
    model.flags = before = ["there"]
    stream_opaque(model, traced_of(folder, lambda: model), ())
    assert model.flags == ["norm"]
    assert before == ["there"]


def test_what_cannot_be_set_again_is_logged_and_the_model_is_loaded(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def each(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        if "scale" in model._buffers:
            del model._buffers["scale"]
        model.scale = 2.0  # type: ignore[assignment]
        plainly(model, parameters, name, weight)

    model = Model(each)
    model.register_buffer("scale", torch.ones(()), persistent=False)
    load_by_its_loader(folder, model)
    assert "scale, which the model's loader set, could not be set again: cannot assign 'float'" in caplog.text


def test_containers_that_hold_themselves_or_are_deep_are_let_be(folder: Path) -> None:
    model = Model(plainly)
    ring: dict[str, object] = {}
    ring["self"] = [ring]
    deep: list[object] = []
    for _ in range(2000):
        deep = [deep]
    model.ring, model.deep = ring, deep  # type: ignore[assignment]
    assert traced_of(folder, lambda: model).settings == ()


def test_what_held_tensors_and_holds_names_then_is_noted(folder: Path) -> None:
    def each(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        model.flags[0] = name  # type: ignore[index]
        plainly(model, parameters, name, weight)

    model = Model(each)
    model.flags = [torch.ones(2)]
    assert [n.value for n in traced_of(folder, lambda: model).settings] == [["norm"]]


def test_a_buffer_that_no_checkpoint_fills_is_left_to_the_loader(folder: Path) -> None:
    def each(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        parameters[name].copy_(weight)
        if name == "norm":
            model.table.copy_(weight)

    loaded = both(folder, each)
    assert loaded.traced.opaque == {"table": "is no parameter, and filled by the loader"}
    assert torch.equal(loaded.got.get_buffer("table"), loaded.expected.get_buffer("table"))
    assert {s.parameter for s in loaded.traced.plan.steps} == {"a", "b", "norm"}


def test_a_tensor_that_is_neither_the_models_nor_the_loaders_is_not_written_while_tracing(folder: Path) -> None:
    outside = torch.zeros(6)

    def each(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        parameters[name].copy_(weight)
        if name == "norm":
            outside.copy_(weight)

    traced = traced_of(folder, lambda: Model(each))
    assert torch.equal(outside, torch.zeros(6))
    assert list(traced.opaque) == ["a tensor that is no parameter"]
    assert traced.stream == ("norm",)


def test_a_parameter_that_only_the_loader_computes_is_streamed_without_entries(folder: Path) -> None:
    class Constant(Model):
        def __init__(self) -> None:
            super().__init__(plainly)

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, weight in weights:
                if name != "norm":
                    self.get_parameter(name).data.copy_(weight)
            self.norm.data.copy_(torch.arange(6.0))

    loaded = load_both_ways(Constant, folder)
    loaded.assert_equal()
    assert loaded.traced.opaque == {"norm": "is written from a tensor that is not in the checkpoint"}
    assert loaded.traced.stream == ()
    assert loaded.traced.plan.unexpected == ("norm",)


def test_a_loader_that_fails_says_why_everything_is_streamed(folder: Path) -> None:
    def each(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        raise KeyError(name)

    traced = traced_of(folder, lambda: Model(each))
    assert traced.fallback == "fails without values at entry a: KeyError: 'a'"
    assert traced.opaque["b"] == f"everything is streamed, because the model's loader {traced.fallback}"
    with pytest.raises(KeyError) as failed:
        stream_opaque(Model(each), traced, [("a", torch.zeros(1))])
    assert failed.value.__notes__ == ["tensorferry: the model's loader had entry 'a' when this happened"]


def test_streaming_passes_over_other_entries_and_misses_none(folder: Path) -> None:
    def gemma(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        parameters[name].copy_(weight + 1 if name != "b" else weight)

    seen: list[str] = []

    def all_of_them() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in SHAPES.items():
            seen.append(name)
            yield name, torch.ones(shape)

    model = poisoned(Model(gemma))
    traced = traced_of(folder, lambda: model)
    stream_opaque(model, traced, all_of_them())
    assert seen == ["a", "b", "norm"]
    assert set(model.get_parameter("a").flatten().tolist()) == {2.0}
    assert set(model.get_parameter("b").flatten().tolist()) == {77.0}
    with pytest.raises(FinalizeError, match=r"1 entries that the model's loader needs were not streamed.*'norm'"):
        stream_opaque(model, traced, [("a", torch.ones(4, 6))])


def test_nothing_is_streamed_where_nothing_is_opaque(folder: Path) -> None:
    traced = traced_of(folder, lambda: Model(plainly))
    assert stream_opaque(Model(plainly), traced, iter(())) is None


def test_a_model_without_a_loader_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="Linear has no load_weights"):
        traced_of(folder, lambda: nn.Linear(2, 2))


def test_a_loader_may_be_passed_beside_the_model(folder: Path) -> None:
    model = Model(plainly)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
        for name, weight in weights:
            model.get_parameter(name).data.copy_(weight)
            yield name

    with open_files(folder) as opened:
        traced = trace(model, opened.catalogue, load_weights=load)
    assert traced.loaded == frozenset({"a", "b", "norm"})
    assert len(traced.plan.steps) == 3


def test_a_result_that_is_no_collection_of_names_is_not_taken_for_one(folder: Path) -> None:
    model = Model(plainly)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[str], list[str]]:
        model.load_weights(weights)
        return [], []

    with open_files(folder) as opened:
        assert trace(model, opened.catalogue, load_weights=load).loaded is None


def test_loaders_in_inference_mode_are_followed_too(folder: Path) -> None:
    def each(model: Model, parameters: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
        with torch.inference_mode():
            parameters[name].reshape(-1).copy_(weight.to(torch.float32).reshape(2, -1).chunk(1)[0].flatten())

    assert both(folder, each).traced.opaque == {}


def test_a_model_that_holds_sparse_tensors_and_types_of_no_checkpoint_is_traced(folder: Path) -> None:
    model = Model(plainly)
    model.sparse = torch.eye(3).to_sparse()
    model.codes = torch.empty(3, dtype=torch.bits8)
    assert traced_of(folder, lambda: model).opaque == {}
