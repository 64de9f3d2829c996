"""Noticing casts that spoil every value: another sort of number, or a quantized weight without its scale."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from tensorferry.core.dtypes import Cast, DType, Kind, cast_kind
from tensorferry.core.plan import Step, Strictness
from tensorferry.core.transforms import TensorSpec
from tensorferry.problems import Problem, ProblemKind

__all__ = ["changed_kind", "unscaled"]

_BESIDE = ("{name}_scale_inv", "{name}_scale", "{name}_scales", "{name}.scale", "{stem}.scale", "{stem}.scales")


def changed_kind(name: str, source: DType, target: DType, strict: Strictness) -> Problem | None:
    """Return what is wrong with casting the entry `name` to `target`; None where it stays the same sort of number."""
    if cast_kind(source, target) is not Cast.CHANGES_KIND:
        return None
    if target.kind is Kind.PACKED:
        detail = f"{source} in the checkpoint, {target} in the model, which keeps blocks as they are: make it {source}"
        return Problem(ProblemKind.LOSSY_DTYPE, name, detail)
    return _lossy(name, f"{source} in the checkpoint, {target} in the model: not the same sort of number", strict)


def unscaled(
    steps: Iterable[Step], parameters: Mapping[str, TensorSpec], left: Collection[str], strict: Strictness
) -> Iterator[Problem]:
    """Yield a problem for each entry of 8 bits or fewer, or of blocks, that `steps` widen while its scale is `left`.

    Copied without their scale, such numbers are wrong by that factor, and nothing else would tell.
    """
    names = set(left)
    for step in steps if names else ():
        for entry, _ in step.sources:
            if _is_small(entry.dtype) and not _is_small(parameters[step.parameter].dtype):
                stem = entry.name.rpartition(".")[0]
                beside = (pattern.format(name=entry.name, stem=stem) for pattern in _BESIDE)
                scale = next((name for name in beside if name in names), None)
                if scale is not None:
                    yield _lossy(entry.name, f"its numbers are to be multiplied by {scale}, which no rule does", strict)


def _is_small(dtype: DType) -> bool:
    return dtype.kind is Kind.PACKED or (dtype.kind is Kind.FLOAT and dtype.bits <= 8)


def _lossy(name: str, detail: str, strict: Strictness) -> Problem:
    return Problem(ProblemKind.LOSSY_DTYPE, name, detail, fatal=strict.lossy == "error")
