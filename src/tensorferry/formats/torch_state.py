"""Finds the state dict in what a torch file holds: unwraps, flattens, and says what it left out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tensorferry.errors import FormatError, shown
from tensorferry.formats.pickle_values import DictValue, LeftOut, survey
from tensorferry.formats.torch_values import StorageRef, TensorRef

__all__ = ["WRAPPERS", "State", "find_state"]

WRAPPERS = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "module",
    "net",
    "network",
    "net_state_dict",
    "params",
    "params_ema",
    "weights",
)
"""Keys under which training programs keep a model's state beside other things."""

_OF_TRAINING = re.compile(r"optim|(lr_?|grad_?)?(sched|scaler)|(.*_)?rng_state")
"""Keys of dicts that hold the state of training, with tensors that are no weights."""

_KINDS: Mapping[type, str] = {
    DictValue: "a dict",
    TensorRef: "a tensor",
    StorageRef: "a storage",
    list: "a list",
    tuple: "a tuple",
    str: "text",
    bytes: "bytes",
    bool: "a truth value",
    int: "a number",
    float: "a number",
    complex: "a number",
    type(None): "None",
}
_NAMED = 6
"""How many keys a message lists."""
_MAX_LEFT_OUT = 2_000_000


@dataclass(frozen=True, slots=True)
class State:
    """tensors: by full name. metadata: plain values beside them, as text. notes: what was done, one sentence each."""

    tensors: Mapping[str, TensorRef]
    metadata: Mapping[str, str]
    notes: tuple[str, ...]


def find_state(path: str, top: object, distinct: int) -> State:
    """Return the state in the object of the file at `path`; `distinct` is how many tensors there are in it.

    A dict of tensors is the state. Else one of WRAPPERS is unwrapped, repeatedly, if exactly one of those present
    holds tensors; else dicts of tensors inside it are flattened, their keys joined by dots.
    Raises FormatError where there is no named tensor, or where two wrappers hold some.
    """
    if not isinstance(top, DictValue):
        raise FormatError(
            f"{shown(path)}: its top object is {_kind(top)}, not a dict of named tensors; save the model's state_dict()"
        )
    search = _Search(path, distinct)
    inner, trail = top, list[str]()
    while (key := search.wrapper(inner)) is not None and isinstance(found := inner.items[key], DictValue):
        for other, value in inner.items.items():
            if other != key:
                search.leave_out(other, value)
        trail.append(key)
        inner = found
    tensors = search.flatten(inner)
    if not tensors:
        raise FormatError(f"{shown(path)}: {_why_none(top)}; it is no checkpoint of a model")
    notes = [f"{shown(path)}: the state was found under {' > '.join(repr(shown(k)) for k in trail)}"] if trail else []
    return State(tensors, _metadata(top), (*notes, *search.notes()))


@dataclass(slots=True)
class _Search:
    path: str
    distinct: int
    counts: dict[int, int] = field(default_factory=dict)
    joined: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    left_out_count: int = 0

    def count(self, value: object) -> int:
        """Return how many names tensors have in `value`: through dicts with text keys."""
        if not isinstance(value, DictValue):
            return int(isinstance(value, TensorRef))
        if id(value) not in self.counts:
            self.counts[id(value)] = 0
            self.counts[id(value)] = sum(self.count(v) for k, v in value.items.items() if isinstance(k, str))
        return self.counts[id(value)]

    def wrapper(self, state: DictValue) -> str | None:
        """Return the key to unwrap, or None where `state` is the state itself."""
        if any(isinstance(k, str) and "." in k and isinstance(v, TensorRef) for k, v in state.items.items()):
            return None
        holding = [k for k in WRAPPERS if isinstance(v := state.items.get(k), DictValue) and self.count(v)]
        if len(holding) > 1:
            raise FormatError(
                f"{shown(self.path)}: {', '.join(map(repr, holding))} each hold tensors, and one state is read: "
                f"save the one that is meant alone"
            )
        return holding[0] if holding else None

    def leave_out(self, key: object, value: object) -> None:
        self.left_out_count += 1
        if self.left_out_count <= _NAMED:
            self.left_out.append(_described(key, value))

    def flatten(self, state: DictValue) -> dict[str, TensorRef]:
        """Return all tensors in `state` under names joined by dots."""
        found: dict[str, TensorRef] = {}
        most = 1000 + 4 * self.distinct
        for name, tensor in self._walk(state, ""):
            if name in found:
                raise FormatError(f"{shown(self.path)}: tensor {shown(name)!r} is there twice, once in a nested dict")
            if len(found) >= most or self.left_out_count > _MAX_LEFT_OUT:
                raise FormatError(f"{shown(self.path)}: dicts that share their contents give over {most:,} names")
            found[name] = tensor
        return found

    def _walk(self, state: DictValue, prefix: str) -> Iterator[tuple[str, TensorRef]]:
        for key, value in state.items.items():
            if isinstance(key, str) and isinstance(value, TensorRef):
                yield prefix + key, value
            elif isinstance(key, str) and isinstance(value, DictValue) and self._belongs(prefix + key, value):
                if not prefix:
                    self.joined.append(key)
                yield from self._walk(value, f"{prefix}{key}.")
            else:
                self.leave_out(prefix + key if isinstance(key, str) else key, value)
        for pair in state.rest:
            self.leave_out("under a key that is no text", pair)

    def _belongs(self, name: str, value: DictValue) -> bool:
        return self.count(value) > 0 and not _OF_TRAINING.match(name)

    def notes(self) -> Iterator[str]:
        if self.joined:
            keys = _enumerated([repr(shown(key)) for key in self.joined[:_NAMED]], len(self.joined))
            yield f"{shown(self.path)}: the dicts {keys} were flattened, their names joined with dots"
        if self.left_out:
            what = _enumerated(self.left_out, self.left_out_count)
            yield f"{shown(self.path)}: left out what is no tensor of the model: {what}"


def _enumerated(words: list[str], count: int) -> str:
    more = count - _NAMED
    return ", ".join(words[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _described(key: object, value: object) -> str:
    tensors = sum(1 for _ in survey(value, TensorRef))
    inside = f"{tensors:,} tensor{'' if tensors == 1 else 's'}"
    what = inside if isinstance(value, DictValue | list | tuple) and tensors else _kind(value)
    return f"{shown(str(key))!r} ({what})"


def _kind(value: object) -> str:
    """Return what a described value is, in words."""
    if isinstance(value, LeftOut):
        return value.kind
    return _KINDS.get(type(value), "a value")


def _why_none(top: DictValue) -> str:
    tensors = sum(1 for _ in survey(top, TensorRef))
    keys = _enumerated([repr(shown(str(key))) for key in list(top.items)[:_NAMED]], len(top.items)) or "no keys"
    if tensors:
        return f"{tensors:,} tensors are in it but none under a name, as in the state of an optimizer ({keys})"
    return f"no tensor is in it ({keys})"


def _metadata(top: DictValue) -> dict[str, str]:
    return {
        key: str(value)
        for key, value in top.items.items()
        if isinstance(key, str) and isinstance(value, str | int | float) and len(str(value)) <= 1000
    }
