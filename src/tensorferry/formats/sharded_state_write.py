"""Writes whole checkpoints as the sharded state of a single rank. Saving what a model has is for `loaders`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorferry.formats.safetensors_write import planned_file, shards_of, write_safetensors
from tensorferry.formats.sharded_state_manifest import FORMAT, RankManifest, SavedTensor, manifest_json
from tensorferry.formats.sharded_state_names import PartNames, RankNumbers, manifest_name
from tensorferry.formats.writing import NewFile, NewTensor, new_file

__all__ = ["ShardedStateWriter"]

_STATE_BYTES = 16


class ShardedStateWriter:
    """The `CheckpointWriter` of ``model-rank-0-part-0.safetensors`` and so on, and the manifest that comes last.

    The tensors are one undivided rank's, before any post-processing; loading divides them for as many ranks as ask.
    """

    name = "sharded_state"
    has_shards = True

    def files(
        self, tensors: Mapping[str, NewTensor], *, metadata: Mapping[str, str], max_shard_size: int | None
    ) -> Sequence[NewFile]:
        """Return what `write` would write; see `PlansFiles`."""
        state = "0" * 2 * _STATE_BYTES
        parts = self._parts(tensors, metadata, max_shard_size, state)
        size = sum(map(len, manifest_json(_manifest(tensors, [p.nbytes for p in parts], state))))
        return [*parts, NewFile(manifest_name(RankNumbers()), size)]

    def write(
        self,
        folder: Path,
        tensors: Mapping[str, NewTensor],
        *,
        metadata: Mapping[str, str],
        max_shard_size: int | None,
    ) -> Sequence[str]:
        """Write the parts and their manifest; see `CheckpointWriter`."""
        state = secrets.token_hex(_STATE_BYTES)
        parts = self._parts(tensors, metadata, max_shard_size, state)
        manifest = manifest_name(RankNumbers())
        (folder / manifest).unlink(missing_ok=True)  # or it would belong to other parts for a while
        for name, _, held in parts:
            write_safetensors(folder / name, {n: tensors[n] for n in held}, metadata={**metadata, FORMAT: state})
        with new_file(folder / manifest) as out:
            for piece in manifest_json(_manifest(tensors, [part.nbytes for part in parts], state)):
                out.write(piece)
        return [*(part.name for part in parts), manifest]

    def _parts(
        self, tensors: Mapping[str, NewTensor], metadata: Mapping[str, str], most: int | None, state: str
    ) -> list[NewFile]:
        names = PartNames.of(None, RankNumbers())
        shards = list(shards_of(tensors, most)) or [[]]
        return [
            planned_file(names.name(n), tensors, shard, {**metadata, FORMAT: state}) for n, shard in enumerate(shards)
        ]


def _manifest(tensors: Mapping[str, NewTensor], sizes: Sequence[int], state: str) -> RankManifest:
    saved = {name: SavedTensor(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return RankManifest(RankNumbers(), PartNames.of(None, RankNumbers()).pattern, tuple(sizes), state, saved)
