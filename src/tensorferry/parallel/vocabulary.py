"""Embeddings and output heads whose rows, one for each token, are divided among ranks."""

from __future__ import annotations

import torch
from torch.nn import functional

from tensorferry.config import ParallelConfig
from tensorferry.core.target import Layout
from tensorferry.errors import ConfigError
from tensorferry.parallel.division import even_part, padded, part_slot
from tensorferry.parallel.groups import Ranks
from tensorferry.parallel.layer import ParallelLayer
from tensorferry.parallel.linear import ALONE

__all__ = ["ParallelLMHead", "VocabParallelEmbedding"]


class VocabParallelEmbedding(ParallelLayer):
    """An embedding of which each rank has some tokens.

    num_embeddings: tokens in the checkpoint. added: tokens that come after these and are in no checkpoint.
    padding_size: both are padded to multiples of it, which the ranks must divide. A rank's rows are, in this order, its
    tokens of the checkpoint, their padding, its added tokens, and their padding; all but the first are zeros after
    loading.
    input: token ids, any shape; output: ``[..., embedding_dim]``.
    """

    weight: torch.Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        added: int = 0,
        padding_size: int = 64,
        parallel: ParallelConfig = ALONE,
        group: torch.distributed.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if padding_size < 1:
            raise ConfigError(f"{type(self).__name__}: padding_size {padding_size}: at least 1 is expected")
        self.num_embeddings, self.embedding_dim, self.added = num_embeddings, embedding_dim, added
        self.ranks = Ranks(parallel.tp_size, parallel.tp_rank, group)
        self._known = self._part(padded(num_embeddings, padding_size), padding_size)
        self._more = self._part(padded(added, padding_size), padding_size)
        self._rows = len(self._known) + len(self._more)
        self._declare_tokens("weight", (embedding_dim,), dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embedding of each token, on every rank. Raises IndexError for ids past the last token."""
        if self.ranks.size == 1 and self._rows == self.num_embeddings:
            return functional.embedding(ids, self.weight)
        rows, mine = self.rows_of(ids)
        found = functional.embedding(rows, self.weight)
        return self.ranks.sum(found.masked_fill_(~mine.unsqueeze(-1), 0))

    @property
    def _division(self) -> tuple[int, int, range, range]:
        return self.num_embeddings, self.added, self._known, self._more

    def _part(self, size: int, padding_size: int) -> range:
        what = f"{type(self).__name__}: rows, padded to a multiple of {padding_size}"
        return even_part(size, self.ranks.size, self.ranks.rank, what=what)

    def _declare_tokens(self, parameter: str, rest: tuple[int, ...], dtype: torch.dtype | None) -> None:
        local = (self._rows, *rest)
        slot = part_slot(local, 0, (self.num_embeddings, *rest), self._known, 0)
        self.declare(parameter, local, Layout({"": slot}, default=0.0), dtype=dtype)

    def rows_of(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return in which row of this rank each token is, and whether it is here at all; row 0 where not."""
        total = self.num_embeddings + self.added
        if ids.numel() and ids.device.type == "cpu" and (int(ids.min()) < 0 or int(ids.max()) >= total):
            raise IndexError(f"token ids from {int(ids.min())} to {int(ids.max())}: there are {total} tokens")
        known, more = ids - self._known.start, ids - self.num_embeddings - self._more.start
        is_known = (ids < self.num_embeddings) & (known >= 0) & (known < len(self._known))
        is_more = (ids >= self.num_embeddings) & (more >= 0) & (more < len(self._more))
        rows = torch.where(is_known, known, more + len(self._known))
        mine = is_known | is_more
        return rows.masked_fill(~mine, 0), mine


class ParallelLMHead(VocabParallelEmbedding):
    """An output head of which each rank has some tokens; its weight may be an embedding's of the same sizes.

    input: ``[..., embedding_dim]``, output: logits ``[..., num_embeddings + added]``, on every rank.
    """

    bias: torch.Tensor | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        *,
        added: int = 0,
        padding_size: int = 64,
        parallel: ParallelConfig = ALONE,
        group: torch.distributed.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, added=added, padding_size=padding_size, parallel=parallel, group=group,
            dtype=dtype,
        )  # fmt: skip
        self.register_parameter("bias", None)
        if bias:
            self._declare_tokens("bias", (), dtype)

    def tie_weights(self, embedding: VocabParallelEmbedding) -> None:
        """Use the weight of `embedding`. Raises ConfigError where it is divided in another way."""
        if self._division != embedding._division or embedding.weight.shape != self.weight.shape:
            raise ConfigError(
                f"a head of {self.num_embeddings} tokens, {tuple(self.weight.shape)} of them here, cannot share the"
                f" weight of an embedding of {embedding.num_embeddings}, {tuple(embedding.weight.shape)}"
            )
        self.weight = embedding.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of all tokens."""
        logits = self.ranks.join(functional.linear(hidden, self.weight, self.bias))
        if logits.shape[-1] == self.num_embeddings:
            return logits
        each = logits.view(*logits.shape[:-1], self.ranks.size, self._rows)
        known = each[..., : len(self._known)].flatten(-2)[..., : self.num_embeddings]
        if not self.added:
            return known
        more = each[..., len(self._known) :].flatten(-2)[..., : self.added]
        return torch.cat([known, more], dim=-1)
