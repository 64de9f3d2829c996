"""Steps over entries that lie in no file, written as steps over the entries that these are made of."""

from __future__ import annotations

from collections.abc import Sequence

from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import Made, TensorEntry
from tensorferry.core.making import Each
from tensorferry.core.plan import Source, Step
from tensorferry.core.transforms import Chain, TensorSpec, Transform

__all__ = ["chained", "resolved"]


def chained(first: Transform | None, then: Transform | None) -> Transform | None:
    """Return the transform that does both."""
    if first is None or then is None:
        return then if first is None else first
    steps = [step for via in (first, then) for step in (via.steps if isinstance(via, Chain) else (via,))]
    return Chain(tuple(steps))


def resolved(step: Step) -> Step:
    """Return the step that does the same as `step` and reads nothing but entries that lie in files."""
    sources = step.sources
    if len(sources) == 1 and sources[0].entry.made is None:
        return step
    made = [source.entry.made for source in sources]
    if not any(made):
        return step
    if len(made) > 1:
        return _of_several(step, made)
    ((_, region),), (how,) = step.sources, made
    assert how is not None
    if how.via is None:
        return resolved(step._replace(sources=(Source(how.inputs[0], region),)))
    window = region if step.via is None or step.window is None else step.window
    return resolved(_pulling(step, how.inputs, chained(how.via, step.via), window))


def _of_several(step: Step, made: Sequence[Made | None]) -> Step:
    assert step.via is not None
    assert step.window is not None
    each = tuple((1, None) if how is None else (len(how.inputs), how.via) for how in made)
    inputs = [one for s, how in zip(step.sources, made, strict=True) for one in (how.inputs if how else (s.entry,))]
    plain = all(via is None for _, via in each)
    return resolved(_pulling(step, inputs, step.via if plain else Each(each, step.via), step.window))


def _pulling(step: Step, inputs: Sequence[TensorEntry], via: Transform | None, window: Region) -> Step:
    """Return `step` with `via` of `inputs`, of each of which it reads what `window` of the outcome needs."""
    assert via is not None
    specs = [TensorSpec(entry.dtype, entry.shape) for entry in inputs]
    made = via.infer(specs).shape
    boxes = via.pull(window.box if window.view == made else Box.whole(made), specs)
    sources = (Source(entry, Region(entry.shape, box)) for entry, box in zip(inputs, boxes, strict=True))
    return step._replace(sources=tuple(sources), via=via, window=window)
