"""Rules for experts as checkpoints have them: each by itself, gate and up in one, or all of them in one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tensorferry.core.rules import Part, Rule, Split
from tensorferry.core.transforms import Take
from tensorferry.parallel.expert_layout import PROJECTIONS, Extent, StackedExperts, expert_of

__all__ = ["ExpertRules"]


@dataclass(frozen=True, slots=True)
class ExpertRules:
    """What names and tensors on disk are for the experts of a rank.

    extents: of its parameters, by name. routed, shared: how many experts there are that are chosen, and that are not.
    """

    stacks: StackedExperts
    extents: Mapping[str, Extent]
    routed: int
    shared: int

    def of_each(self, into: str, source: str, names: Mapping[str, str]) -> Iterator[Rule]:
        """Yield rules of tensors of one projection of one expert. names: of projections, by kind."""
        for kind, name in names.items():
            parameter = f"{into}{PROJECTIONS[kind]}_{{leaf}}"
            for expert in self._copied():
                parts = tuple(Part(parameter, slot) for slot in self._places(expert, kind))
                yield Split(f"{source}{name}.{{leaf:part}}".replace("{e}", str(expert)), parts)
            yield Split(f"{source}{name}.{{leaf:part}}", (Part(parameter, f"{{e}}.{kind}"),))

    def of_pairs(self, into: str, source: str) -> Iterator[Rule]:
        """Yield rules of tensors of gate and up of one expert."""
        for parameter, extent in self.extents.items():
            stack, _, leaf = parameter.partition("_")
            halves = {kind: self.stacks.half(kind, extent) for kind, where in PROJECTIONS.items() if where == "w13"}
            if stack != "w13":
                continue
            for expert in self._copied():
                parts = [Part(into + parameter, s, via) for k, via in halves.items() for s in self._places(expert, k)]
                yield Split(f"{source}.{leaf}".replace("{e}", str(expert)), tuple(parts))
            parts = [Part(into + parameter, f"{{e}}.{kind}", via) for kind, via in halves.items()]
            yield Split(f"{source}.{leaf}", tuple(parts))

    def of_shared(self, into: str, source: str, names: Mapping[str, str]) -> Iterator[Rule]:
        """Yield rules of shared experts: one, or several whose matrices are one of so many times the inner size."""
        for kind, name in names.items():
            if self.shared == 1:
                parameter = f"{into}{PROJECTIONS[kind]}_{{leaf}}"
                yield Split(
                    f"{source}{name}.{{leaf:part}}",
                    tuple(Part(parameter, slot) for slot in self._places(self.routed, kind)),
                )
                continue
            yield Split(f"{source}{name}.weight", tuple(self._parts_of_shared(f"{into}{PROJECTIONS[kind]}", kind)))

    def stacked(self, into: str, source: str, parameter: str, *, interleaved: bool) -> Rule:
        """Return the rule of a tensor that stacks what `parameter` has of all experts that are chosen."""
        parts = [
            Part(into + parameter, slot, self.in_stack(parameter, slot, interleaved=interleaved))
            for slot in self.stacks.layout(parameter.partition("_")[0], self.extents[parameter]).slots
            if expert_of(slot) < self.routed
        ]
        return Split(source, tuple(parts))

    def in_stack(self, parameter: str, slot: str, *, interleaved: bool = False, alone: bool = False) -> Take:
        """Return where a slot lies in such a tensor; `alone` where that has only gates, or only ups."""
        extent = self.extents[parameter]
        return self.stacks.in_stack(slot, extent, self.routed, interleaved=interleaved, alone=alone)

    def _parts_of_shared(self, stack: str, kind: str) -> Iterator[Part]:
        for number in range(self.shared):
            via = self.stacks.of_several(kind, number, self.shared)
            for slot in self._places(self.routed + number, kind):
                yield Part(f"{stack}_weight", slot, via)

    def _copied(self) -> Iterator[int]:
        return (expert for expert in self.stacks.copied() if expert < self.routed)

    def _places(self, expert: int, kind: str) -> list[str]:
        """Return the slots of an expert: one for each time that it is here, or the one that is declared absent."""
        return [slot for slot in self.stacks.slots(kind) if expert_of(slot) == expert] or [f"{expert}.{kind}"]
