"""Loading a module: planned first, strict, in place or onto new memory, and told of in a report."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from tensorferry import (
    Box,
    Drop,
    Layout,
    Place,
    ReadOptions,
    Region,
    RuleSet,
    Slot,
    Strictness,
    load,
    open_checkpoint,
    plan,
)
from tensorferry.api import prepare, run
from tensorferry.errors import ConfigError, CorruptFile, FinalizeError, PlanError, ReadError
from tensorferry.execute import SimpleExecutor

LIN = {"weight": ar(3, 2), "bias": ar(3, start=10)}


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_safetensors(tmp_path / "model.safetensors", LIN)
    return tmp_path


def _write(folder: Path, **tensors: torch.Tensor) -> Path:
    write_safetensors(folder / "model.safetensors", {n.replace("__", "."): t for n, t in tensors.items()})
    return folder


def _meta(build: Any, *args: Any, **more: Any) -> Any:  # any class of module
    with torch.device("meta"):
        return build(*args, **more)


class TestFilling:
    def test_a_model_with_memory_is_filled_in_place(self, folder: Path) -> None:
        model = nn.Linear(2, 3)
        weight = model.weight
        load(model, folder)
        assert model.weight is weight
        assert {n: p.tolist() for n, p in model.named_parameters()} == {n: t.tolist() for n, t in LIN.items()}

    def test_a_model_on_meta_gets_memory(self, folder: Path) -> None:
        model = _meta(nn.Linear, 2, 3)
        load(model, folder)
        assert torch.equal(model.weight, LIN["weight"])
        assert model.weight.requires_grad

    def test_the_model_is_in_eval_mode_afterwards(self, folder: Path) -> None:
        model = nn.Sequential(nn.Linear(2, 3), nn.Dropout()).train()
        load(model, folder, rules=RuleSet(Place("{n}", "0.{n}"), Place("{n:part}", "0.{n}")))
        assert not model.training
        assert not model[1].training

    def test_the_type_of_the_parameter_wins(self, folder: Path) -> None:
        model = nn.Linear(2, 3, dtype=torch.bfloat16)
        report = load(model, folder)
        assert model.weight.dtype == torch.bfloat16
        assert torch.equal(model.weight, LIN["weight"].bfloat16())
        assert report.casts == {"F32 -> BF16": 2}

    def test_rules_say_how_names_differ(self, tmp_path: Path) -> None:
        _write(tmp_path, kernel=LIN["weight"], beta=LIN["bias"], junk=ar(1))
        rules = RuleSet(Place("kernel", "weight"), Place("beta", "bias"), Drop("junk", "of another tool"))
        model = nn.Linear(2, 3)
        report = load(model, tmp_path, rules=rules)
        assert torch.equal(model.weight, LIN["weight"])
        assert report.dropped == {"junk": "of another tool"}

    def test_memory_formats_and_views_are_respected(self, tmp_path: Path) -> None:
        values = ar(4, 2, 3, 3)
        _write(tmp_path, weight=values)
        model: Any = nn.Conv2d(2, 4, 3, bias=False)
        model.to(memory_format=torch.channels_last)
        load(model, tmp_path)
        assert torch.equal(model.weight, values)
        assert model.weight.is_contiguous(memory_format=torch.channels_last)

    def test_parameters_that_need_no_gradient_still_need_none(self, folder: Path) -> None:
        for model in (nn.Linear(2, 3).requires_grad_(False), _meta(nn.Linear, 2, 3).requires_grad_(False)):
            load(model, folder)
            assert not any(p.requires_grad for p in model.parameters())

    def test_tensors_without_elements_are_filled_with_nothing(self, tmp_path: Path) -> None:
        _write(tmp_path, b=torch.empty(0, 4), s=torch.tensor(3.0))
        model = nn.Module()
        model.register_buffer("b", torch.empty(0, 4, device="meta"))
        model.register_buffer("s", torch.empty((), device="meta"))
        load(model, tmp_path)
        assert not any(b.is_meta for b in model.buffers())

    @pytest.mark.parametrize("shapes", [((), (1,)), ((1,), ())])
    def test_scalars_and_vectors_of_one_take_each_other(self, tmp_path: Path, shapes: Any) -> None:
        _write(tmp_path, s=torch.full(shapes[0], 2.5))
        model = nn.ParameterList([torch.zeros(shapes[1])])
        load(model, tmp_path, rules=RuleSet(Place("s", "0")))
        assert (model[0].shape, model[0].item()) == (shapes[1], 2.5)

    @pytest.mark.parametrize("name", ["bool", "float8_e4m3fn", "complex64", "uint16", "int64", "float64"])
    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_every_sort_of_number_is_loaded_bit_by_bit(self, tmp_path: Path, name: str, device: str) -> None:
        values = (torch.arange(32) % 2).to(torch.uint8).view(getattr(torch, name))
        _write(tmp_path, b=values)
        model: Any = nn.Module()
        model.register_buffer("b", torch.zeros_like(values, device=device))
        load(model, tmp_path)
        assert torch.equal(model.b.view(torch.uint8), values.view(torch.uint8))

    @pytest.mark.parametrize("inside", [False, True])
    def test_inference_mode_of_model_or_caller_does_not_matter(self, folder: Path, inside: bool) -> None:
        with torch.inference_mode():
            model = nn.Linear(2, 3, dtype=torch.float64)
        with torch.inference_mode(inside):
            load(model, folder)
        assert torch.equal(model.weight, LIN["weight"].double())

    def test_a_model_filled_within_inference_mode_can_be_trained(self, folder: Path) -> None:
        model = _meta(nn.Linear, 2, 3)
        with torch.inference_mode():
            load(model, folder)
        assert model(torch.ones(1, 2)).requires_grad

    def test_a_default_device_of_the_caller_does_not_matter(self, folder: Path) -> None:
        model = nn.Linear(2, 3, dtype=torch.bfloat16)
        with torch.device("meta"):
            load(model, folder)
        assert torch.equal(model.weight, LIN["weight"].bfloat16())


def _saved(tmp_path: Path, module: nn.Module) -> Path:
    return _write(tmp_path, **{n.replace(".", "__"): t.clone() for n, t in module.state_dict().items()})


class TestModulesOfTorch:
    """Modules that keep their weights in ways of their own give the same results after a load onto meta."""

    @pytest.mark.parametrize(
        ("build", "inputs"),
        [
            (lambda: nn.LSTM(3, 4, 2, bidirectional=True), (ar(5, 1, 3),)),
            (lambda: nn.GRU(3, 4), (ar(5, 1, 3),)),
            (lambda: nn.MultiheadAttention(4, 2), (ar(3, 1, 4),) * 3),
            (lambda: nn.TransformerEncoderLayer(4, 2, 8), (ar(3, 1, 4),)),
            (lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), (ar(2, 3),)),
            (lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), (ar(2, 3),)),
            (lambda: nn.BatchNorm1d(3), (ar(2, 3),)),
            (lambda: nn.EmbeddingBag(5, 3), (torch.tensor([[1, 2], [3, 4]]),)),
        ],
    )
    def test_results_are_the_same(self, tmp_path: Path, build: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        torch.manual_seed(0)
        original = build().eval()
        filled = _meta(build)
        load(filled, _saved(tmp_path, original))
        one, other = original(*inputs), filled(*inputs)
        one, other = (r[0] if isinstance(r, tuple) else r for r in (one, other))
        assert torch.equal(one, other)

    def test_batch_statistics_and_their_count_are_loaded(self, tmp_path: Path) -> None:
        original = nn.BatchNorm1d(3)
        original(ar(4, 3))
        filled = _meta(nn.BatchNorm1d, 3)
        report = load(filled, _saved(tmp_path, original))
        assert filled.num_batches_tracked.item() == 1
        assert report.dropped == {}

    def test_a_lazy_module_is_refused_and_stays_lazy(self, folder: Path) -> None:
        model = nn.LazyLinear(3)
        with pytest.raises(PlanError, match="weight has no shape yet") as caught:
            load(model, folder)
        assert not caught.value.touched
        assert model.has_uninitialized_params()


class TestStrictness:
    def test_what_is_missing_is_refused_and_nothing_is_touched(self, tmp_path: Path) -> None:
        _write(tmp_path, weight=LIN["weight"])
        model, on_meta = nn.Linear(2, 3), _meta(nn.Linear, 2, 3)
        before = {n: p.clone() for n, p in model.named_parameters()}
        for one in (model, on_meta):
            with pytest.raises(PlanError, match=r"1 problem; the model was not touched\n  missing: bias") as caught:
                load(one, tmp_path)
            assert not caught.value.touched
        assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
        assert all(p.is_meta for p in on_meta.parameters())
        assert model.training

    def test_what_may_be_missing_keeps_what_it_holds(self, tmp_path: Path) -> None:
        _write(tmp_path, weight=LIN["weight"])
        for strict in (Strictness(missing="warn"), Strictness(may_miss=("bias",))):
            model = nn.Linear(2, 3)
            bias = model.bias.clone()
            report = load(model, tmp_path, strict=strict)
            assert report.missing == ("bias",)
            assert "missing: bias" in report.warnings
            assert torch.equal(model.bias, bias)

    def test_what_may_be_missing_must_have_values_all_the_same(self, tmp_path: Path) -> None:
        _write(tmp_path, weight=LIN["weight"])
        with pytest.raises(FinalizeError, match="nothing filled bias") as caught:
            load(_meta(nn.Linear, 2, 3), tmp_path, strict=Strictness(missing="warn"))
        assert caught.value.touched

    def test_what_is_unexpected_is_reported_or_refused(self, tmp_path: Path) -> None:
        _write(tmp_path, **LIN, extra__stat=ar(3))
        assert load(nn.Linear(2, 3), tmp_path).unexpected == ("extra.stat",)
        with pytest.raises(PlanError, match=r"unexpected: extra\.stat"):
            load(nn.Linear(2, 3), tmp_path, strict=Strictness.strict())

    def test_another_shape_is_always_refused(self, tmp_path: Path) -> None:
        _write(tmp_path, weight=ar(2, 3), bias=LIN["bias"])
        lax = Strictness(missing="warn", unexpected="warn", lossy="warn")
        with pytest.raises(PlanError, match=r"shape: weight: the checkpoint has \(2, 3\), the model expects \(3, 2\)"):
            load(nn.Linear(2, 3), tmp_path, strict=lax)

    def test_another_sort_of_number_is_refused_or_reported(self, tmp_path: Path) -> None:
        _write(tmp_path, weight=LIN["weight"].to(torch.int32), bias=LIN["bias"])
        with pytest.raises(PlanError, match="lossy dtype: weight: I32 in the checkpoint, F32 in the model"):
            load(nn.Linear(2, 3), tmp_path)
        model = nn.Linear(2, 3)
        report = load(model, tmp_path, strict=Strictness(lossy="warn"))
        assert torch.equal(model.weight, LIN["weight"])
        assert any(w.startswith("lossy dtype: weight") for w in report.warnings)

    def test_values_that_overflow_are_refused_or_reported(self, tmp_path: Path) -> None:
        _write(tmp_path, weight=torch.full((3, 2), 1e6), bias=LIN["bias"])
        with pytest.raises(FinalizeError, match=r"weight: 6 overflow, 0 underflow\).*bfloat16 or float32") as caught:
            load(nn.Linear(2, 3, dtype=torch.float16), tmp_path)
        assert caught.value.touched
        report = load(nn.Linear(2, 3, dtype=torch.float16), tmp_path, strict=Strictness(lossy="warn"))
        assert report.losses == {"weight": (6, 0)}
        assert "weight: 6 overflow, 0 underflow when cast" in report.warnings

    def test_every_problem_is_told_at_once(self, tmp_path: Path) -> None:
        _write(tmp_path, weight=ar(2, 3), offset=ar(3))
        with pytest.raises(PlanError) as caught:
            load(nn.Linear(2, 3), tmp_path, strict=Strictness.strict())
        assert {p.kind.value for p in caught.value.problems} == {"shape", "missing", "unexpected"}


class TestErrors:
    def test_a_file_that_is_cut_off_while_it_is_loaded_is_a_read_error(self, folder: Path) -> None:
        model = nn.Linear(2, 3)
        with open_checkpoint(folder) as checkpoint:
            prepared = prepare(model, checkpoint)
            os.truncate(folder / "model.safetensors", 180)
            with pytest.raises(ReadError, match=r"model\.safetensors.*while reading") as caught:
                run(model, prepared)
        assert caught.value.touched

    def test_a_file_that_changes_while_it_is_loaded_is_a_read_error(self, folder: Path) -> None:
        class Changes(nn.Linear):
            def process_weights_after_loading(self) -> None:
                os.utime(folder / "model.safetensors", ns=(1, 1))

        with pytest.raises(ReadError, match="changed while it was in use") as caught:
            load(Changes(2, 3), folder)
        assert caught.value.touched

    def test_an_error_of_post_processing_says_where_and_that_the_model_was_touched(self, folder: Path) -> None:
        class Fails(nn.Linear):
            def process_weights_after_loading(self) -> None:
                raise ValueError("no kernel")

        with pytest.raises(ValueError, match="no kernel") as caught:
            load(Fails(2, 3), folder)
        where, touched = caught.value.__notes__
        assert "while post-processing the module '(root)'" in where
        assert "some parameters of the model had been written" in touched

    def test_no_file_stays_open_whatever_happens(self, folder: Path) -> None:
        def opened() -> int:
            return len(os.listdir("/proc/self/fd"))

        before = opened()
        load(nn.Linear(2, 3), folder)
        with pytest.raises(PlanError):
            load(nn.Linear(9, 9), folder)
        with pytest.raises(PlanError):
            plan(nn.Linear(9, 9), folder).raise_for_problems()
        assert opened() == before

    def test_a_device_to_which_nothing_would_go_is_refused(self, folder: Path) -> None:
        model = nn.Linear(2, 3)
        with pytest.raises(ConfigError, match=r"device 'cuda': the model's tensors have memory on cpu already"):
            load(model, folder, device="cuda")
        load(model, folder, device="cpu")
        load(_meta(nn.Linear, 2, 3), folder, device="cpu")

    def test_a_parameter_whose_elements_share_memory_is_refused_before_anything_is_touched(self, folder: Path) -> None:
        model = nn.Linear(2, 3)
        model.bias = nn.Parameter(torch.zeros(1).expand(3))
        before = model.weight.clone()
        with pytest.raises(PlanError, match=r"bias has shape \(3,\) and strides \(0,\): its elements share memory"):
            load(model, folder)
        assert torch.equal(model.weight, before)

    def test_a_part_that_is_no_view_of_a_strided_parameter_is_refused_before_anything_is_touched(
        self, tmp_path: Path
    ) -> None:
        class Flat(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.zeros(2, 3).t())

            def tensor_slots(self) -> Mapping[str, Mapping[str, Slot]]:
                halves = {n: Region((6,), Box((i,), (i + 3,))) for n, i in (("a", 0), ("b", 3))}
                return {"weight": {n: Slot(r, (3,), Region.whole((3,))) for n, r in halves.items()}}

        _write(tmp_path, a=ar(3), b=ar(3))
        rules = RuleSet(Place("a", "weight", "a"), Place("b", "weight", "b"))
        with pytest.raises(PlanError, match=r"weight .* strides \(1, 3\): its part .* make it contiguous") as caught:
            load(Flat(), tmp_path, rules=rules)
        assert not caught.value.touched

    def test_options_beside_a_checkpoint_that_is_open_are_refused(self, folder: Path) -> None:
        with open_checkpoint(folder) as checkpoint:
            with pytest.raises(ConfigError, match=r"options: .* is open already"):
                load(nn.Linear(2, 3), checkpoint, options=ReadOptions())
            with pytest.raises(ConfigError, match=r"variant: .* is open already"):
                load(nn.Linear(2, 3), checkpoint, variant="fp16")


class TestPlanning:
    def test_a_plan_touches_nothing_and_collects_problems(self, folder: Path) -> None:
        model = _meta(nn.Linear, 2, 3)
        made = plan(model, folder)
        assert made.problems == ()
        assert made.bytes_needed == 36
        assert model.weight.is_meta
        assert plan(nn.Linear(9, 9), folder).fatal

    def test_a_checkpoint_that_is_open_stays_open(self, folder: Path) -> None:
        with open_checkpoint(folder) as checkpoint:
            plan(nn.Linear(2, 3), checkpoint)
            load(nn.Linear(2, 3), checkpoint)
            assert torch.equal(checkpoint.read("bias"), LIN["bias"])

    def test_what_was_prepared_can_be_run_again(self, folder: Path) -> None:
        model = nn.Linear(2, 3)
        with open_checkpoint(folder) as checkpoint:
            prepared = prepare(model, checkpoint)
            for _ in range(2):
                model.weight.data.zero_()
                run(model, prepared)
                assert torch.equal(model.weight, LIN["weight"])

    def test_another_executor_may_do_it(self, folder: Path) -> None:
        model = nn.Linear(2, 3)
        with open_checkpoint(folder) as checkpoint:
            report = run(model, prepare(model, checkpoint), executor=SimpleExecutor())
        assert report.executor == "SimpleExecutor"
        assert torch.equal(model.weight, LIN["weight"])


class TestReport:
    def test_it_tells_what_was_done(self, folder: Path) -> None:
        report = load(nn.Linear(2, 3), folder)
        assert (report.source, report.format, report.files) == (str(folder), "safetensors", ("model.safetensors",))
        assert (report.parameters, report.entries, report.bytes_needed) == (2, 2, 36)
        assert (report.bytes_read, report.direct_bytes, report.staging_peak) == (36, 36, 0)
        assert report.executor == "ThreadedExecutor"
        assert report.verified == "contents not verified"
        assert report.warnings == ()
        assert list(report.seconds) == ["describe", "plan", "schedule", "load", "finalize"]

    def test_it_counts_tensors_by_device_and_names_what_was_post_processed(self, folder: Path) -> None:
        class Packs(nn.Linear):
            def process_weights_after_loading(self) -> None:
                self.scale = nn.Parameter(torch.ones(1))

        report = load(_meta(Packs, 2, 3), folder)
        assert report.devices == {"cpu": 3}
        assert report.post_processed == ("",)

    def test_a_wrapper_prefix_that_was_stripped_is_told(self, tmp_path: Path) -> None:
        _write(tmp_path, **{f"module__{n}": t for n, t in LIN.items()})
        report = load(nn.Linear(2, 3), tmp_path)
        assert report.warnings == ("the prefix module. that a wrapper left on every name was stripped",)

    def test_leftovers_behind_a_wrapper_prefix_are_known_for_what_they_are(self, tmp_path: Path) -> None:
        names = {f"module__{n}": t for n, t in LIN.items()}
        _write(tmp_path, **names, module__rotary_emb__inv_freq=ar(2))
        model = nn.Linear(2, 3)
        report = load(model, tmp_path, strict=Strictness.strict())
        assert report.dropped == {"module.rotary_emb.inv_freq": "the model computes it"}

    def test_contents_are_verified_where_that_is_asked_for(self, folder: Path) -> None:
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        (folder / "SHA256SUMS").write_text(f"{digest}  model.safetensors\n")
        report = load(nn.Linear(2, 3), folder, verify=True)
        assert report.verified.startswith("sha256 of 1 of 1 files verified against")
        assert next(iter(report.seconds)) == "verify"
        (folder / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
        model = nn.Linear(2, 3)
        before = model.weight.clone()
        with pytest.raises(CorruptFile, match=digest) as caught:
            load(model, folder, verify=True)
        assert not caught.value.touched
        assert torch.equal(model.weight, before)

    def test_what_does_not_fit_is_told_before_contents_are_verified(self, folder: Path) -> None:
        (folder / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
        with pytest.raises(PlanError, match="weight"):
            load(nn.Linear(3, 2), folder, verify=True)

    def test_one_line_at_the_start_and_one_at_the_end_are_logged(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, "tensorferry.api"):
            load(nn.Linear(2, 3), folder)
        first, last = (r.message for r in caplog.records if r.name == "tensorferry.api")
        assert first == f"loading {folder}: 36 bytes to read"
        assert last.startswith(f"loaded {folder} in ")


class TestNonsense:
    @pytest.mark.parametrize("model", [None, nn.Linear, {}, nn.Linear(2, 3).state_dict(), 3])
    def test_what_is_no_module_is_refused(self, model: Any, folder: Path) -> None:
        with pytest.raises(ConfigError, match="model: a Module is expected, not "):
            load(model, folder)

    @pytest.mark.parametrize("rules", [[], {}, "x", Place("a", "b")])
    def test_what_is_no_set_of_rules_is_refused(self, rules: Any, folder: Path) -> None:
        with pytest.raises(ConfigError, match="rules: a RuleSet is expected, not "):
            load(nn.Linear(2, 3), folder, rules=rules)

    @pytest.mark.parametrize("strict", [True, False, 0, "error", {}, Strictness])
    def test_what_is_no_strictness_is_refused_and_not_passed_over(self, strict: Any, folder: Path) -> None:
        with pytest.raises(ConfigError, match="strict: a Strictness is expected, not "):
            load(nn.Linear(2, 3), folder, strict=strict)

    def test_torchs_own_word_for_it_is_answered_with_ours(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match=r"strict=False is Strictness\(missing='warn'\)"):
            load(nn.Linear(2, 3), folder, strict=False)  # type: ignore[arg-type]

    def test_a_model_for_a_path_is_refused(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match="model: a Module is expected, not PosixPath: the model comes first"):
            load(folder, nn.Linear(2, 3))  # type: ignore[arg-type]

    @pytest.mark.parametrize("device", ["meta", torch.device("meta"), "gpu", "", "xla", 3.5])
    def test_a_device_where_nothing_can_be_put_is_refused_before_anything_is_touched(
        self, device: Any, folder: Path
    ) -> None:
        model = _meta(nn.Linear, 2, 3)
        with pytest.raises(ConfigError, match="device "):
            load(model, folder, device=device)
        assert model.weight.is_meta

    def test_the_first_cpu_is_the_cpu(self, folder: Path) -> None:
        model = nn.Linear(2, 3)
        load(model, folder, device="cpu:0")
        assert torch.equal(model.weight, LIN["weight"])


def test_padding_is_filled_and_slots_of_other_ranks_are_dropped(tmp_path: Path) -> None:
    class Experts(nn.Module):
        """Rank 1's expert of two, with a row of padding."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((3, 2), 9.0))

        def tensor_slots(self) -> Mapping[str, Layout]:
            rows = Slot.of(Region((3, 2), Box((0, 0), (2, 2))), (2, 2))
            return {"weight": Layout({"1": rows}, default=0.0, absent={"0"})}

    write_safetensors(tmp_path / "model.safetensors", {"experts.0": ar(2, 2), "experts.1": ar(2, 2, start=4)})
    model = Experts()
    report = load(model, tmp_path, rules=RuleSet(Place("experts.{e}", "weight", slot="{e}")))
    assert model.weight.tolist() == [[4, 5], [6, 7], [0, 0]]
    assert report.dropped == {"experts.0": "not on this rank"}
    assert report.bytes_needed == 16
