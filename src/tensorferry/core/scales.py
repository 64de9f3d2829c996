"""Noticing weights that were quantized: small floats whose scales lie beside them and would be left behind."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from tensorferry.core.dtypes import Kind
from tensorferry.core.plan import Step
from tensorferry.core.transforms import TensorSpec

__all__ = ["unscaled"]

_BESIDE = ("{name}_scale_inv", "{name}_scale", "{name}_scales", "{name}.scale", "{stem}.scale", "{stem}.scales")


def unscaled(
    steps: Iterable[Step], parameters: Mapping[str, TensorSpec], left: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield (entry, scale) for entries of 8 bits or fewer that `steps` widen while their scale is among `left`.

    Copied without their scale, such numbers are wrong by that factor, and nothing else would tell.
    """
    names = set(left)
    for step in steps if names else ():
        for entry, _ in step.sources:
            if entry.dtype.kind is Kind.FLOAT and entry.dtype.bits <= 8 < parameters[step.parameter].dtype.bits:
                stem = entry.name.rpartition(".")[0]
                beside = (pattern.format(name=entry.name, stem=stem) for pattern in _BESIDE)
                scale = next((name for name in beside if name in names), None)
                if scale is not None:
                    yield entry.name, scale
