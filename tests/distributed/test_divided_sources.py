"""Where a divided model comes from and what it is part of make no difference; what it generates is what one would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.consolidated_models import meta_params, native, tiny_llama, write_consolidated
from helpers.gguf_models import tiny_llama as gguf_llama
from helpers.measuring import measured
from helpers.ranks import Ranks
from helpers.tiny_transformers import SIZES, saved
from tensorferry import ParallelConfig, load_model

pytestmark = pytest.mark.transformers

IDS = torch.arange(3, 19).reshape(1, 16)


def part(rank: int, size: int, path: Path) -> Any:
    return load_model(path, parallel=ParallelConfig(tp_size=size, tp_rank=rank))


def logits(rank: int, size: int, path: Path) -> torch.Tensor:
    with torch.inference_mode():
        made: torch.Tensor = part(rank, size, path)(IDS).logits
    return made


def assert_right(ranks: Ranks, path: Path) -> None:
    with torch.inference_mode():
        expected = load_model(path)(IDS).logits
    for found in ranks.run(logits, path):
        assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def packed_gguf(folder: Path) -> Path:
    """Blocks of 32 columns, which two ranks cut in the middle."""
    return gguf_llama(folder, packed={"attn_output.weight": "Q8_0", "token_embd.weight": "Q8_0"})[0]


def two_parts(folder: Path) -> Path:
    model = tiny_llama()
    return write_consolidated(folder / "parts", native(model, folder / "hf"), meta_params(model.config), shards=2)


def with_pictures(folder: Path) -> Path:
    import transformers

    tower: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
        "patch_size": 8, "projection_dim": 16,
    }  # fmt: skip
    settings: dict[str, Any] = {
        "vision_config": transformers.CLIPVisionConfig(**tower), "text_config": transformers.LlamaConfig(**SIZES),
        "image_token_id": 95,
    }  # fmt: skip
    config = transformers.LlavaConfig(**settings)
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")  # what is inferred or assumed of a configuration is told by other tests
@pytest.mark.parametrize("source", [packed_gguf, two_parts, with_pictures])
def test_any_source_is_divided(source: Any, two_ranks: Ranks, tmp_path: Path) -> None:
    assert_right(two_ranks, source(tmp_path))


def generated(rank: int, size: int, path: Path, cache: str | None) -> tuple[list[int], list[int]]:
    more = {} if cache is None else {"cache_implementation": cache}
    out = part(rank, size, path).generate(IDS, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, **more)
    return out.sequences[0].tolist(), list(out.past_key_values.layers[0].keys.shape)


@pytest.mark.parametrize("cache", [None, "static"])
def test_ranks_generate_together_and_cache_their_own_heads(cache: str | None, two_ranks: Ranks, tmp_path: Path) -> None:
    folder = saved("Llama", tmp_path)
    whole: Any = load_model(folder)
    expected = whole.generate(IDS, max_new_tokens=8, do_sample=False)[0].tolist()
    for tokens, (_, heads, *_rest) in two_ranks.run(generated, folder, cache):
        assert tokens == expected
        assert heads == 1


ONE_RANK = """
from tensorferry import ParallelConfig, load_model
load_model(sys.argv[2], parallel=ParallelConfig(tp_size=2))  # what is imported and cached is in memory then
told["peak"], told["after"] = peak.of(
    lambda: load_model(folder, parallel=ParallelConfig(tp_size=4, tp_rank=1), options=ReadOptions(max_staging=16 << 20))
)
told["part"] = sum(p.nbytes for p in peak.result.parameters())
"""


def test_a_rank_never_holds_more_than_its_part_and_the_staging_bound(tmp_path: Path) -> None:
    small, large = saved("Llama", tmp_path / "small"), tmp_path / "large"
    changes: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    }
    saved("Llama", large, num_hidden_layers=3, **changes)
    told = measured(ONE_RANK, large, str(small))
    assert told["part"] > 80 << 20  # of 340 MiB
    assert told["peak"] <= told["part"] + (16 << 20) + (48 << 20)
