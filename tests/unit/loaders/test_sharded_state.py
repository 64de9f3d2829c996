"""A rank loads what it saved: nothing else is read, nothing is processed twice, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from helpers.sharded_models import load_rank, ranks
from tensorferry import ModelConfig, ParallelConfig, open_checkpoint
from tensorferry.errors import ConfigError, CorruptFile, FormatError, LocateError, PlanError
from tensorferry.loaders import LoadConfig, get_model_loader
from tensorferry.loaders.saving import save_sharded_state

MANIFEST = "tensorferry-sharded-state-pp-0-tp-0-ep-0.json"


def linear(start: float = 0, **how: Any) -> nn.Linear:
    model = nn.Linear(2, 3, **how)
    with torch.no_grad():
        model.weight.copy_(ar(3, 2, start=start))
        if model.bias is not None:
            model.bias.copy_(ar(3, start=start + 100))
    return model


class Method:
    """Packs a weight into bytes with scales beside, as kernels want it, and takes the bias away."""

    def __init__(self) -> None:
        self.runs = 0

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.runs += 1
        weight = layer.get_parameter("weight")
        layer.weight = nn.Parameter((weight.t() + 1).contiguous().to(torch.int8), requires_grad=False)
        layer.register_parameter("scales", nn.Parameter(ar(2, start=7), requires_grad=False))
        layer.register_buffer("zeros", torch.full((1,), 3.0))
        layer.register_parameter("bias", None)


class Quantized(nn.Linear):
    def __init__(self, method: object = None) -> None:
        super().__init__(2, 3)
        self.quant_method = method or Method()
        vars(self.weight)["weight_loader"] = "kept"


class Net(nn.Module):
    def __init__(self, method: object = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.proj = Quantized(method)


def loaded_and_saved(folder: Path, **settings: Any) -> Net:
    """Return a model that was loaded from a checkpoint, post-processed, and saved into `folder`."""
    write_safetensors(folder.parent / "source" / "model.safetensors", nn.Sequential(linear(5)).state_dict())
    source = {"norm.weight": ar(2), "norm.bias": ar(2), "proj.weight": ar(3, 2, start=5), "proj.bias": ar(3)}
    write_safetensors(folder.parent / "source" / "model.safetensors", source)
    net = Net()
    get_model_loader(LoadConfig()).load_model(ModelConfig(str(folder.parent / "source")), lambda _: net)
    save_sharded_state(net, folder, **settings)
    return net


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_was_post_processed_is_laid_out_as_it_was_saved_and_not_processed_again(
    tmp_path: Path, device: str
) -> None:
    saved = loaded_and_saved(tmp_path / "state")
    with torch.device(device):
        fresh = Net()
    for _ in range(2):  # again into the model that has been laid out anew
        net, report = load_rank(tmp_path / "state", fresh)
        method: Any = fresh.proj.quant_method
        assert method.runs == 0
        assert report.post_processed == ("proj",)
        assert {n: t.tolist() for n, t in net.state_dict().items()} == {
            n: t.tolist() for n, t in saved.state_dict().items()
        }
        assert net.state_dict()["proj.weight"].dtype == torch.int8
        assert vars(net.get_parameter("proj.weight"))["weight_loader"] == "kept"
        assert fresh.proj._parameters["bias"] is None
        assert isinstance(fresh.proj.scales, nn.Parameter)
        assert [name for name, _ in fresh.proj.named_buffers()] == ["zeros"]


def test_a_model_that_was_laid_out_anew_can_be_saved_and_loaded_again(tmp_path: Path) -> None:
    saved = loaded_and_saved(tmp_path / "state")
    once, _ = load_rank(tmp_path / "state", Net())
    save_sharded_state(once, tmp_path / "again")
    again, _ = load_rank(tmp_path / "again", Net())
    assert {n: t.tolist() for n, t in again.state_dict().items()} == {
        n: t.tolist() for n, t in saved.state_dict().items()
    }


def test_a_state_from_before_post_processing_is_processed(tmp_path: Path) -> None:
    net = Net()
    save_sharded_state(net, tmp_path, post_processed=False)
    loaded, report = load_rank(tmp_path, Net())
    method: Any = loaded.get_submodule("proj").quant_method
    assert method.runs == 1
    assert report.post_processed == ("proj",)
    assert loaded.state_dict()["proj.scales"].tolist() == [7, 8]


def test_a_state_that_was_laid_out_anew_is_not_resharded(tmp_path: Path) -> None:
    loaded_and_saved(tmp_path / "state")
    words = r"load asks for 2, and the state cannot be resharded: proj\.\w+ was saved after"
    with pytest.raises(ConfigError, match=words):
        load_rank(tmp_path / "state", Net(), ParallelConfig(tp_size=2))
    with pytest.raises(FormatError, match="was saved after post-processing"):
        open_checkpoint(tmp_path / "state", load_format="sharded_state")


class Doubling(nn.Linear):
    """Post-processing that keeps the layout, and says so."""

    processing_keeps_layout = True

    def process_weights_after_loading(self) -> None:
        with torch.no_grad():
            self.weight.mul_(2)


def test_a_module_that_says_that_its_layout_is_kept_is_resharded_and_not_processed_again(tmp_path: Path) -> None:
    model = Doubling(2, 3)
    with torch.no_grad():
        model.weight.copy_(ar(3, 2))
    save_sharded_state(model, tmp_path)
    other, report = load_rank(tmp_path, Doubling(2, 3), ranks(2)[1])
    assert torch.equal(other.get_parameter("weight"), ar(3, 2))
    assert report.post_processed == ("",)
    assert not any("must not be run again" in warning for warning in report.warnings)
    with open_checkpoint(tmp_path, load_format="sharded_state") as checkpoint:
        assert "saved after post-processing (the model), which must not be run again" in checkpoint.warnings[0]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: linear(dtype=torch.bfloat16), r"weight: saved as F32 \[3, 2\], the model has BF16 \[3, 2\]"),
        (lambda: nn.Linear(3, 3), r"weight: saved as F32 \[3, 2\], the model has F32 \[3, 3\]"),
        (lambda: nn.Linear(2, 3, bias=False), "bias: the model lacks it"),
        (lambda: _with_extra(), "extra: the state lacks it"),
    ],
)
def test_a_model_that_is_not_what_was_saved_is_refused_unread(tmp_path: Path, model: Any, words: str) -> None:
    save_sharded_state(linear(), tmp_path)
    fresh = model()
    before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    with pytest.raises(ConfigError, match=words) as caught:
        load_rank(tmp_path, fresh)
    assert "nothing was read" in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in fresh.state_dict().items())


def _with_extra() -> nn.Linear:
    model = nn.Linear(2, 3)
    model.register_parameter("extra", nn.Parameter(ar(1)))
    return model


def test_a_processed_state_is_held_against_what_the_model_is_before_processing(tmp_path: Path) -> None:
    loaded_and_saved(tmp_path / "state")
    with pytest.raises(
        ConfigError, match=r"proj\.weight: saved as F32 \[3, 2\] and then I8 \[2, 3\], the model has BF16 \[3, 2\]"
    ):
        load_rank(tmp_path / "state", Net().to(torch.bfloat16))


def test_another_quantization_is_refused_with_both(tmp_path: Path) -> None:
    class Other(Method):
        pass

    loaded_and_saved(tmp_path / "state", quantization="int8")
    with pytest.raises(ConfigError, match="proj was saved with the quantization method Method, and has Other here"):
        load_rank(tmp_path / "state", Net(Other()))
    with pytest.raises(ConfigError, match="saved with the quantization 'int8', and the load asks for 'fp8'"):
        load_rank(tmp_path / "state", Net(), quantization="fp8")
    load_rank(tmp_path / "state", Net(), quantization="int8")


def test_an_unknown_version_is_refused(tmp_path: Path) -> None:
    save_sharded_state(linear(), tmp_path)
    data = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(data | {"version": 2}))
    with pytest.raises(FormatError, match="version 2, and version 1 is read here"):
        load_rank(tmp_path, linear())


def test_the_wrong_pattern_is_refused_with_both(tmp_path: Path) -> None:
    save_sharded_state(linear(), tmp_path, pattern="w-{rank}-{part}.safetensors")
    load_rank(tmp_path, linear())
    with pytest.raises(ConfigError, match=r"pattern 'w-{rank}-{part}.safetensors', and the load asks for 'v-"):
        load_rank(tmp_path, linear(), options={"pattern": "v-{rank}-{part}.safetensors"})


def test_a_rank_whose_save_did_not_end_is_told(tmp_path: Path) -> None:
    for parallel in ranks(2):
        save_sharded_state(linear(), tmp_path, parallel=parallel)
    (tmp_path / "tensorferry-sharded-state-pp-0-tp-1-ep-1.json").unlink()
    with pytest.raises(LocateError, match="rank 1 has parts and no manifest: its save did not end"):
        load_rank(tmp_path, linear(), ranks(2)[1])
    with pytest.raises(ConfigError, match="saved by 2 ranks, and 1 manifest are there: rank 1 has none"):
        load_rank(tmp_path, linear())
    (tmp_path / MANIFEST.replace("ep-0", "ep-0")).unlink()
    with pytest.raises(
        CorruptFile, match="written by tensorferry, and the manifest is not there: the save did not end"
    ):
        load_rank(tmp_path, linear(), ranks(2)[1])


def test_parts_of_two_saves_are_told_apart(tmp_path: Path) -> None:
    save_sharded_state(linear(), tmp_path)
    manifest = (tmp_path / MANIFEST).read_bytes()
    save_sharded_state(linear(start=1), tmp_path)
    (tmp_path / MANIFEST).write_bytes(manifest)
    with pytest.raises(
        CorruptFile, match=r"model-rank-0-part-0.safetensors is of another save than tensorferry-sharded"
    ):
        load_rank(tmp_path, linear())


def test_a_part_of_another_size_is_refused(tmp_path: Path) -> None:
    save_sharded_state(linear(), tmp_path)
    with (tmp_path / "model-rank-0-part-0.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CorruptFile, match=r"bytes, and tensorferry-sharded-state.* says"):
        load_rank(tmp_path, linear())


def test_a_part_that_is_gone_is_named(tmp_path: Path) -> None:
    save_sharded_state(linear(), tmp_path, max_part_size=12)
    (tmp_path / "model-rank-0-part-1.safetensors").unlink()
    with pytest.raises(LocateError, match=r"names model-rank-0-part-1.safetensors, which is not there"):
        load_rank(tmp_path, linear())


# without a manifest, as vLLM writes them


def written(folder: Path, rank: int = 0, /, **tensors: torch.Tensor) -> None:
    for part, (name, tensor) in enumerate(tensors.items()):
        write_safetensors(folder / f"model-rank-{rank}-part-{part}.safetensors", {name: tensor})


def test_a_state_of_vllm_fills_the_parameters_of_its_rank(tmp_path: Path) -> None:
    for rank in (0, 1, 10):
        written(tmp_path, rank, weight=ar(3, 2, start=rank), bias=ar(3))
    for rank in (0, 1, 10):
        model, report = load_rank(tmp_path, nn.Linear(2, 3), ParallelConfig(tp_size=11, tp_rank=rank))
        assert model.get_parameter("weight").tolist() == ar(3, 2, start=rank).tolist()
        assert report.files == tuple(f"model-rank-{rank}-part-{n}.safetensors" for n in (0, 1))


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    written(tmp_path, weight=ar(3, 2))
    write_safetensors(tmp_path / "model-rank-0-part-1.safetensors", {"weight": ar(3, 2)})
    with pytest.raises(
        FormatError, match=r"'weight' is there twice, in model-rank-0-part-0.safetensors and model-rank-0-part-1"
    ):
        load_rank(tmp_path, nn.Linear(2, 3, bias=False))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"weight": ar(3, 2)}, "missing: bias"),
        ({"weight": ar(3, 2), "bias": ar(3), "extra": ar(1)}, "unexpected: extra"),
        (
            {"weight": ar(3, 3), "bias": ar(3)},
            r"shape: weight: the checkpoint has \(3, 3\), the model expects \(3, 2\)",
        ),
    ],
)
def test_without_a_manifest_names_and_shapes_must_be_those_of_the_model(
    tmp_path: Path, tensors: dict[str, torch.Tensor], words: str
) -> None:
    written(tmp_path, 0, **tensors)
    with pytest.raises(PlanError, match=words):
        load_rank(tmp_path, nn.Linear(2, 3))


def test_without_a_manifest_a_model_that_post_processes_must_be_told_of(tmp_path: Path) -> None:
    written(tmp_path, weight=ar(3, 2), bias=ar(3))
    with pytest.raises(ConfigError, match="no manifest, and the model post-processes its weights"):
        load_rank(tmp_path, Doubling(2, 3))
    for processed, first in ((True, 1), (False, 2)):
        model, _ = load_rank(tmp_path, Doubling(2, 3), options={"post_processed": processed})
        assert model.get_parameter("weight")[0, 1] == first


def test_views_into_other_parameters_are_left_out_as_vllm_leaves_them_out(tmp_path: Path) -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = nn.Parameter(torch.zeros(4, 2))
            self.rows = nn.Parameter(self.whole.data[1:3])

    written(tmp_path, whole=ar(4, 2))
    model, _ = load_rank(tmp_path, Viewing())
    assert model.get_parameter("rows").tolist() == [[2, 3], [4, 5]]
    save_sharded_state(model, tmp_path / "ours")
    again, _ = load_rank(tmp_path / "ours", Viewing())
    assert again.get_parameter("rows").tolist() == [[2, 3], [4, 5]]


def test_one_rank_without_a_manifest_is_a_checkpoint_and_several_are_not(tmp_path: Path) -> None:
    written(tmp_path, weight=ar(3, 2))
    with open_checkpoint(tmp_path, load_format="sharded_state") as checkpoint:
        assert list(checkpoint.catalogue) == ["weight"]
    written(tmp_path, 1, weight=ar(3, 2))
    with pytest.raises(ConfigError, match=r"several ranks have files \(model-rank-1-part-0.safetensors\).*no manifest"):
        open_checkpoint(tmp_path, load_format="sharded_state")


def test_auto_takes_no_ranks_for_a_checkpoint(tmp_path: Path) -> None:
    save_sharded_state(linear(), tmp_path, parallel=ParallelConfig(pp_size=2))
    with pytest.raises(LocateError, match="sharded state of single ranks"):
        open_checkpoint(tmp_path)


def test_the_files_are_safetensors_that_others_read(tmp_path: Path) -> None:
    save_sharded_state(linear(), tmp_path)
    with safe_open(tmp_path / "model-rank-0-part-0.safetensors", framework="pt") as file:
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118
            "weight": ar(3, 2).tolist(),
            "bias": ar(3, start=100).tolist(),
        }
