"""Layers that declare what are no slots are told what is expected, by name."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tensorferry.core.target import Slot
from tensorferry.errors import PlanError
from tensorferry.modules.describe import describe


class Declares(nn.Linear):
    """A layer whose `tensor_slots` returns what it is given."""

    def __init__(self, slots: Any) -> None:
        super().__init__(2, 3, device="meta")
        self.slots = slots

    def tensor_slots(self) -> Any:
        return self.slots


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        (None, "tensor_slots of Declares returns a NoneType, not a mapping of parameters to their slots"),
        ([Slot.whole((3, 2))], "returns a list, not a mapping"),
        ({"weight": Slot.whole((3, 2))}, "gives 'weight' a Slot, not a mapping of slot names to Slots"),
        ({"weight": {"q": (3, 2)}}, "gives 'weight' 'q': a tuple, where a name and a Slot are expected"),
        ({"weight": {"q": Slot}}, "gives 'weight' 'q': the class Slot, where"),
        ({"weight": {0: Slot.whole((3, 2))}}, "gives 'weight' 0: a Slot, where a name"),
        ({"wieght": {}}, "declares slots of wieght, which it does not have"),
    ],
)
def test_what_are_no_slots_is_refused(slots: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        describe(Declares(slots))
