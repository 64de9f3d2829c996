"""The pure heart: values and decisions. Standard library only; no torch, no I/O, no logging."""

from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.catalogue import Catalogue, Chunk, Made, Span, TensorEntry
from tensorferry.core.dtypes import DTYPES, Cast, DType, Kind, cast_kind
from tensorferry.core.lower import lower
from tensorferry.core.making import Assemble, Each, Scale
from tensorferry.core.plan import Dropped, Plan, Source, Step, Strictness
from tensorferry.core.planning import make_plan
from tensorferry.core.rules import Drop, Ignore, Join, Part, Place, Split
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.schedule import Batch, Input, Piece, Read, Schedule, Task
from tensorferry.core.target import Layout, Slot, Target, TargetTensor
from tensorferry.core.transforms import (
    Add,
    Chain,
    Concat,
    Custom,
    Dequantize,
    Permute,
    Stack,
    Take,
    TensorSpec,
    Transform,
    Transpose,
)

__all__ = [
    "DTYPES",
    "Add",
    "Assemble",
    "Batch",
    "Box",
    "Cast",
    "Catalogue",
    "Chain",
    "Chunk",
    "Concat",
    "Custom",
    "DType",
    "Dequantize",
    "Drop",
    "Dropped",
    "Each",
    "Ignore",
    "Input",
    "Join",
    "Kind",
    "Layout",
    "Made",
    "Part",
    "Permute",
    "Piece",
    "Place",
    "Plan",
    "Read",
    "Region",
    "RuleSet",
    "Scale",
    "Schedule",
    "Shape",
    "Slot",
    "Source",
    "Span",
    "Split",
    "Stack",
    "Step",
    "Strictness",
    "Take",
    "Target",
    "TargetTensor",
    "Task",
    "TensorEntry",
    "TensorSpec",
    "Transform",
    "Transpose",
    "cast_kind",
    "lower",
    "make_plan",
]
