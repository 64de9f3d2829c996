"""Models that draft for the one that vLLM serves: which they are, and what they may lack."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import write_safetensors
from helpers.fake_vllm import FakeVllm, LoadConfig, model_config
from helpers.old_loaders import nano_checkpoint
from tensorferry import LocateError, PlanError

PARTS = {"embed_tokens.weight": torch.ones(4, 2), "fc.weight": torch.ones(2, 4), "lm_head.weight": torch.ones(4, 2)}


class Head(nn.Module):
    """As EAGLE heads are: it notes which of the layers that the served model has, too, are in the checkpoint."""

    has_own_embed_tokens = False
    has_own_lm_head = False

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(4, 2)
        self.model.fc = nn.Linear(4, 2, bias=False)
        self.lm_head = nn.Linear(2, 4, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.named_parameters())
        for name, value in weights:
            self.has_own_embed_tokens |= "embed_tokens" in name
            self.has_own_lm_head |= "lm_head" in name
            filled = own[name if "lm_head" in name else f"model.{name}"].data
            filled[: len(value)].copy_(value)


def speculating(
    vllm: FakeVllm, folder: Path, method: str = "eagle", *, stages: int = 1, width: int = 2, own_config: bool = False
) -> Any:
    """Have vLLM load a draft from `folder`; return its configuration. own_config: as if it was served for itself."""
    draft = SimpleNamespace(**vars(model_config(folder)), get_hidden_size=lambda: 2)
    served = SimpleNamespace(get_hidden_size=lambda: width)
    vllm.config = SimpleNamespace(
        model_config=draft if own_config else served,
        speculative_config=SimpleNamespace(method=method, draft_model_config=draft),
        parallel_config=SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=stages),
    )
    return draft


def write_head(folder: Path, *left_out: str) -> Path:
    parts = {name: value for name, value in PARTS.items() if not name.startswith(left_out or ("-",))}
    write_safetensors(folder / "model.safetensors", parts)
    return folder


def load_head(vllm: FakeVllm, config: Any, **extra: Any) -> Any:
    loader = vllm.loader(LoadConfig(model_loader_extra_config=extra))
    loader.load_weights(Head(), config)
    return loader.report


BOTH = pytest.mark.parametrize("own_loader", ["trace", "stream"])


@BOTH
def test_an_eagle_head_may_lack_what_it_shares_with_the_served_model(
    vllm: FakeVllm, tmp_path: Path, own_loader: str
) -> None:
    draft = speculating(vllm, write_head(tmp_path, "embed_tokens", "lm_head"))
    report = load_head(vllm, draft, own_loader=own_loader)
    assert report.computed == ("model.embed_tokens.weight", "lm_head.weight")
    assert report.missing == ()


def test_a_head_that_is_refused_is_not_said_to_lack_what_it_may_lack(vllm: FakeVllm, tmp_path: Path) -> None:
    parts = {name: value for name, value in PARTS.items() if "embed_tokens" not in name}
    write_safetensors(tmp_path / "model.safetensors", parts | {"bogus.weight": torch.ones(1)})
    with pytest.raises(PlanError) as caught:
        load_head(vllm, speculating(vllm, tmp_path))
    assert [problem.subject for problem in caught.value.problems] == ["bogus.weight"]


def test_what_an_eagle_head_has_itself_is_loaded(vllm: FakeVllm, tmp_path: Path) -> None:
    assert load_head(vllm, speculating(vllm, write_head(tmp_path))).computed == ()


@pytest.mark.parametrize("left_out", [(), ("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")], ids=str)
def test_vllm_is_told_what_an_eagle_head_has_itself(vllm: FakeVllm, tmp_path: Path, left_out: tuple[str, ...]) -> None:
    """Where the head does not say that it has an embedding, vLLM puts that of the served model in its place."""
    head = Head()
    vllm.loader().load_weights(head, speculating(vllm, write_head(tmp_path, *left_out)))
    assert head.has_own_embed_tokens == ("embed_tokens" not in left_out)
    assert head.has_own_lm_head == ("lm_head" not in left_out)


@BOTH
def test_a_part_of_what_a_head_may_lack_is_no_whole(vllm: FakeVllm, tmp_path: Path, own_loader: str) -> None:
    write_safetensors(tmp_path / "model.safetensors", PARTS | {"embed_tokens.weight": torch.ones(3, 2)})
    with pytest.raises(PlanError, match=r"missing: model\.embed_tokens\.weight"):
        load_head(vllm, speculating(vllm, tmp_path), own_loader=own_loader)


@BOTH
def test_an_eagle_head_may_not_lack_anything_else(vllm: FakeVllm, tmp_path: Path, own_loader: str) -> None:
    with pytest.raises(PlanError, match=r"missing: model\.fc\.weight"):
        load_head(vllm, speculating(vllm, write_head(tmp_path, "fc")), own_loader=own_loader)


@pytest.mark.parametrize(
    "differs", [{"stages": 2}, {"width": 8}, {"method": "draft_model"}, {"method": "mtp"}], ids=str
)
def test_an_embedding_that_vllm_does_not_share_has_to_be_there(
    vllm: FakeVllm, tmp_path: Path, differs: dict[str, Any]
) -> None:
    with pytest.raises(PlanError, match=r"missing: model\.embed_tokens\.weight"):
        load_head(vllm, speculating(vllm, write_head(tmp_path, "embed_tokens"), **differs))


def test_the_served_model_may_not_lack_what_a_head_may(vllm: FakeVllm, tmp_path: Path) -> None:
    speculating(vllm, write_head(tmp_path, "embed_tokens"))
    with pytest.raises(PlanError, match=r"missing: model\.embed_tokens\.weight"):
        load_head(vllm, _served(vllm, tmp_path))


def _served(vllm: FakeVllm, folder: Path) -> Any:
    vllm.config.model_config = model_config(folder)
    return vllm.config.model_config


@pytest.mark.parametrize("own_config", [False, True])
def test_a_draft_model_is_never_loaded_from_the_weights_of_the_served_one(
    vllm: FakeVllm, tmp_path: Path, own_config: bool
) -> None:
    from tensorferry.compat.vllm import engine

    (tmp_path / "weights").mkdir()
    elsewhere = nano_checkpoint(tmp_path / "weights")
    draft = speculating(vllm, tmp_path / "draft", own_config=own_config)
    assert engine.is_drafted(draft)
    loader = vllm.loader(LoadConfig(model_loader_extra_config={"weights": str(elsewhere)}))
    with pytest.raises(LocateError):
        loader.load_weights(Head(), draft)


def test_what_vllm_loads_with_counts_where_nothing_is_current(vllm: FakeVllm, tmp_path: Path) -> None:
    draft = speculating(vllm, write_head(tmp_path, "embed_tokens"))
    given, vllm.config = vllm.config, None
    given.build = Head
    loader = vllm.loader()
    loader.load_model(vllm_config=given, model_config=draft)
    assert loader.report.computed == ("model.embed_tokens.weight",)
