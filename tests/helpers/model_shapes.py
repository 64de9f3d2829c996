"""Names and shapes of well-known models, written out from their configurations; no weights, no network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tensorferry.core.boxes import Shape

Tensor = tuple[str, str, Shape]
"""Name, dtype, shape."""


@dataclass(frozen=True)
class Llama:
    """A decoder as Hugging Face names it. The defaults are Llama-3-70B's."""

    layers: int = 80
    hidden: int = 8192
    inner: int = 28672
    heads: int = 64
    kv_heads: int = 8
    head: int = 128
    vocabulary: int = 128256
    tied: bool = False

    def tensors(self) -> Iterator[Tensor]:
        yield "model.embed_tokens.weight", "BF16", (self.vocabulary, self.hidden)
        for i in range(self.layers):
            yield from self._layer(f"model.layers.{i}.")
        yield "model.norm.weight", "BF16", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", "BF16", (self.vocabulary, self.hidden)

    def _layer(self, at: str) -> Iterator[Tensor]:
        yield at + "input_layernorm.weight", "BF16", (self.hidden,)
        for name, out in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            yield f"{at}self_attn.{name}_proj.weight", "BF16", (out * self.head, self.hidden)
        yield at + "self_attn.o_proj.weight", "BF16", (self.hidden, self.heads * self.head)
        yield at + "post_attention_layernorm.weight", "BF16", (self.hidden,)
        yield at + "mlp.gate_proj.weight", "BF16", (self.inner, self.hidden)
        yield at + "mlp.up_proj.weight", "BF16", (self.inner, self.hidden)
        yield at + "mlp.down_proj.weight", "BF16", (self.hidden, self.inner)


SMOLLM2_135M = Llama(30, 576, 1536, 9, 3, 64, 49152, tied=True)


@dataclass(frozen=True)
class Mixtral:
    """A mixture of experts as Mixtral names it, tiny."""

    layers: int = 2
    hidden: int = 32
    inner: int = 48
    experts: int = 4
    vocabulary: int = 64

    def tensors(self) -> Iterator[Tensor]:
        yield "model.embed_tokens.weight", "BF16", (self.vocabulary, self.hidden)
        for i in range(self.layers):
            at = f"model.layers.{i}."
            for name in ("q", "k", "v", "o"):
                yield f"{at}self_attn.{name}_proj.weight", "BF16", (self.hidden, self.hidden)
            yield at + "block_sparse_moe.gate.weight", "BF16", (self.experts, self.hidden)
            for e in range(self.experts):
                for name, shape in (
                    ("w1", (self.inner, self.hidden)),
                    ("w2", (self.hidden, self.inner)),
                    ("w3", (self.inner, self.hidden)),
                ):
                    yield f"{at}block_sparse_moe.experts.{e}.{name}.weight", "BF16", shape
            yield at + "input_layernorm.weight", "BF16", (self.hidden,)
            yield at + "post_attention_layernorm.weight", "BF16", (self.hidden,)
        yield "model.norm.weight", "BF16", (self.hidden,)
        yield "lm_head.weight", "BF16", (self.vocabulary, self.hidden)


@dataclass(frozen=True)
class DeepSeek:
    """A mixture of experts with compressed attention, in 8 bits with block scales. The defaults are DeepSeek-V3's."""

    layers: int = 61
    dense: int = 3
    hidden: int = 7168
    inner: int = 18432
    expert_inner: int = 2048
    experts: int = 256
    vocabulary: int = 129280
    block: int = 128

    def tensors(self) -> Iterator[Tensor]:
        yield "model.embed_tokens.weight", "BF16", (self.vocabulary, self.hidden)
        for i in range(self.layers):
            yield from self._layer(f"model.layers.{i}.", dense=i < self.dense)
        yield "model.norm.weight", "BF16", (self.hidden,)
        yield "lm_head.weight", "BF16", (self.vocabulary, self.hidden)

    def _layer(self, at: str, *, dense: bool) -> Iterator[Tensor]:
        h = self.hidden
        for name, size in (("input_layernorm", h), ("post_attention_layernorm", h)):
            yield f"{at}{name}.weight", "BF16", (size,)
        for name, size in (("q_a_layernorm", 1536), ("kv_a_layernorm", 512)):
            yield f"{at}self_attn.{name}.weight", "BF16", (size,)
        for name, shape in (
            ("q_a_proj", (1536, h)),
            ("q_b_proj", (24576, 1536)),
            ("kv_a_proj_with_mqa", (576, h)),
            ("kv_b_proj", (32768, 512)),
            ("o_proj", (h, 16384)),
        ):
            yield from self._scaled(f"{at}self_attn.{name}", shape)
        if dense:
            yield from self._mlp(at + "mlp.", self.inner)
            return
        yield at + "mlp.gate.weight", "BF16", (self.experts, h)
        yield at + "mlp.gate.e_score_correction_bias", "F32", (self.experts,)
        yield from self._mlp(at + "mlp.shared_experts.", self.expert_inner)
        for e in range(self.experts):
            yield from self._mlp(f"{at}mlp.experts.{e}.", self.expert_inner)

    def _mlp(self, at: str, inner: int) -> Iterator[Tensor]:
        for name, shape in (
            ("gate_proj", (inner, self.hidden)),
            ("up_proj", (inner, self.hidden)),
            ("down_proj", (self.hidden, inner)),
        ):
            yield from self._scaled(at + name, shape)

    def _scaled(self, name: str, shape: tuple[int, int]) -> Iterator[Tensor]:
        yield name + ".weight", "F8_E4M3", shape
        yield name + ".weight_scale_inv", "F32", (-(-shape[0] // self.block), -(-shape[1] // self.block))
