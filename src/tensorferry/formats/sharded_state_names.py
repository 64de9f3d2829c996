"""Names of the files of a sharded state: one rank's parts after a pattern, and its manifest. Looks at no content.

The layout is vLLM's: every rank writes the tensors that it has, in parts counted from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import NamedTuple

from tensorferry.core.amounts import counted, few
from tensorferry.core.names import natural_key
from tensorferry.errors import ConfigError, LocateError, shown
from tensorferry.storage.base import File

__all__ = [
    "EXPERT_PATTERN",
    "PIPELINE_PATTERN",
    "RANK_PATTERN",
    "PartNames",
    "RankNumbers",
    "manifest_name",
    "manifests_in",
    "written_by_a_rank",
]

RANK_PATTERN = "model-rank-{rank}-part-{part}.safetensors"
PIPELINE_PATTERN = "model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors"
EXPERT_PATTERN = "model-ep-{ep_rank}-part-{part}.safetensors"
_PIPELINED_EXPERTS = "model-pp-{pp_rank}-ep-{ep_rank}-part-{part}.safetensors"

_FIELDS = {"pp_rank": "pp", "tp_rank": "tp", "rank": "tp", "ep_rank": "ep"}
"""What names may say of a rank, and which of its numbers that is: `rank` is the tensor-parallel one, as in vLLM."""

_NUMBER = "(0|[1-9][0-9]{0,8})"
_MANIFEST = re.compile(rf"tensorferry-sharded-state-pp-{_NUMBER}-tp-{_NUMBER}-ep-{_NUMBER}\.json")
_MAX_RANKS = 1 << 16
_LISTED = 4


class RankNumbers(NamedTuple):
    """How many ranks share a model, by tensor, expert and pipeline parallelism, and which of them one is."""

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0

    @property
    def spread(self) -> bool:
        """Whether experts are divided among more ranks than tensor parallelism tells apart."""
        return self.ep_size > self.tp_size

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes, in words for messages."""
        return {
            "tensor-parallel size": self.tp_size,
            "expert-parallel size": self.ep_size,
            "pipeline-parallel size": self.pp_size,
        }

    @property
    def member(self) -> tuple[int, int]:
        """What tells this rank from all others that write: its stage, and its number in there."""
        return self.pp_rank, self.ep_rank if self.spread else self.tp_rank

    @property
    def members(self) -> int:
        """How many ranks write a state."""
        return self.pp_size * max(self.tp_size, self.ep_size)

    @property
    def fault(self) -> str:
        """What makes these no ranks, or ""."""
        for kind, size, rank in (("tp", *self[:2]), ("ep", *self[2:4]), ("pp", *self[4:])):
            if not (1 <= size <= _MAX_RANKS and 0 <= rank < size):
                return f"{kind}_rank {rank} of {kind}_size {size}"
        return "" if self.members <= _MAX_RANKS else f"{self.members} ranks"

    def __str__(self) -> str:
        stage = f"pipeline stage {self.pp_rank}, " if self.pp_size > 1 else ""
        expert = f", expert-parallel rank {self.ep_rank}" if self.spread else ""
        return f"{stage}rank {self.tp_rank}{expert}"


@dataclass(frozen=True, slots=True)
class PartNames:
    """The names of one rank's files.

    pattern: with fields in braces, ``{part}`` and those that say which rank it is.
    """

    pattern: str
    ranks: RankNumbers

    @classmethod
    def of(cls, pattern: str | None, ranks: RankNumbers) -> PartNames:
        """Return the names after `pattern`, or after the usual one for that many ranks.

        Raises ConfigError for a pattern in which two ranks or two parts would have one name, or that is no file name.

        >>> PartNames.of(None, RankNumbers(tp_size=2, tp_rank=1)).name(0)
        'model-rank-1-part-0.safetensors'
        """
        text = _usual(ranks) if pattern is None else pattern
        if not isinstance(text, str):
            raise ConfigError(f"pattern {text!r}: text is expected, not {type(text).__name__}")
        fields = {field for _, field in _pieces(text) if field}
        fault = _fault_of_name(text) or _fault_of_fields(fields, ranks)
        if fault:
            raise ConfigError(f"pattern {shown(text)!r} {fault}")
        return cls(text, ranks)

    def name(self, part: int) -> str:
        """Return the name of the part of that number."""
        values = self._values() | {"part": str(part)}
        return "".join(literal + values.get(field, "") for literal, field in _pieces(self.pattern))

    @property
    def one_file(self) -> bool:
        """Whether the pattern has no number of the part, so that there can be one file only."""
        return all(field != "part" for _, field in _pieces(self.pattern))

    def number(self, path: str) -> int | None:
        """Return which part of this rank the file `path` is, or None if it is none.

        >>> PartNames.of(None, RankNumbers(16, 1)).number("model-rank-10-part-0.safetensors")
        """
        values = {field: re.escape(value) for field, value in self._values().items()}
        match = _regex(self.pattern, values | {"part": f"(?P<part>{_NUMBER})"}).fullmatch(path)
        return None if match is None else int(match.groupdict().get("part") or 0)

    def parts(self, files: Iterable[File], where: str) -> list[File]:
        """Return this rank's files in the order of their numbers.

        Raises LocateError where there are none, naming the ranks that have some, and where a number is left out.
        """
        files = list(files)
        found = {n: file for file in files if (n := self.number(file.path)) is not None}
        if not found:
            raise LocateError(f"{where}: {self.ranks} has no files {self._every()}. {self._inventory(files)}")
        missing = [n for n in range(max(found)) if n not in found][:_LISTED]
        if missing:
            raise LocateError(
                f"{where}: {self.ranks} has {counted(len(found), 'part')}, up to number {max(found)}, and lacks "
                f"{', '.join(shown(self.name(n)) for n in missing)}: fetch what is missing"
            )
        return [found[n] for n in sorted(found)]

    def _values(self) -> dict[str, str]:
        numbers = {"tp": self.ranks.tp_rank, "ep": self.ranks.ep_rank, "pp": self.ranks.pp_rank}
        return {field: str(numbers[kind]) for field, kind in _FIELDS.items()}

    def _every(self) -> str:
        values = self._values() | {"part": "*"}
        return shown("".join(literal + values.get(field, "") for literal, field in _pieces(self.pattern)))

    def _inventory(self, files: Sequence[File]) -> str:
        """Return one sentence on what is there: files of other ranks, or files of other names."""
        any_rank = _regex(self.pattern, dict.fromkeys([*_FIELDS, "part"], _NUMBER))
        others = [f.path for f in files if any_rank.fullmatch(f.path)]
        if not others:
            others = [f.path for f in files if f.path.endswith(".safetensors")]
        if not others:
            return "There is no safetensors file at all."
        return f"There is: {few(map(shown, sorted(others, key=natural_key)), _LISTED)}."


def manifest_name(ranks: RankNumbers) -> str:
    """Return the name of a rank's manifest.

    >>> manifest_name(RankNumbers(tp_size=4, tp_rank=3))
    'tensorferry-sharded-state-pp-0-tp-3-ep-0.json'
    """
    return f"tensorferry-sharded-state-pp-{ranks.pp_rank}-tp-{ranks.tp_rank}-ep-{ranks.ep_rank}.json"


def manifests_in(files: Iterable[File]) -> list[File]:
    """Return the files that are called like manifests, in the order of the ranks."""
    return sorted((file for file in files if _MANIFEST.fullmatch(file.path)), key=lambda f: natural_key(f.path))


def written_by_a_rank(path: str) -> bool:
    """Tell whether `path` is called as the parts of ranks are, after one of the usual patterns.

    >>> written_by_a_rank("model-pp-1-tp-0-part-2.safetensors"), written_by_a_rank("model.safetensors")
    (True, False)
    """
    usual = (RANK_PATTERN, PIPELINE_PATTERN, EXPERT_PATTERN, _PIPELINED_EXPERTS)
    return any(_regex(pattern, dict.fromkeys([*_FIELDS, "part"], _NUMBER)).fullmatch(path) for pattern in usual)


def _usual(ranks: RankNumbers) -> str:
    if ranks.spread:
        return _PIPELINED_EXPERTS if ranks.pp_size > 1 else EXPERT_PATTERN
    return PIPELINE_PATTERN if ranks.pp_size > 1 else RANK_PATTERN


def _pieces(pattern: str) -> list[tuple[str, str]]:
    """Return the pattern as pairs of literal text and the field after it, "" at the end."""
    try:
        pieces = list(Formatter().parse(pattern))
    except ValueError as error:
        raise ConfigError(f"pattern {shown(pattern)!r}: {error}") from None
    for _, field, spec, conversion in pieces:
        if field is not None and (field not in (*_FIELDS, "part") or spec or conversion):
            known = ", ".join(f"{{{name}}}" for name in (*_FIELDS, "part"))
            raise ConfigError(
                f"pattern {shown(pattern)!r} has the field {shown(field)!r}: {known} are there, as they are"
            )
    return [(literal, field or "") for literal, field, _, _ in pieces]


def _regex(pattern: str, values: dict[str, str]) -> re.Pattern[str]:
    return re.compile("".join(re.escape(literal) + values.get(field, "") for literal, field in _pieces(pattern)))


def _fault_of_name(pattern: str) -> str:
    """Return what keeps `pattern` from being the name of a file that can be told from all others, or ""."""
    if set(pattern) & {"/", "\\", "\0"} or pattern.startswith("."):
        return "is no name of a file in the folder: no slashes, no dot at the start"
    if not pattern.endswith(".safetensors"):
        return "does not end in .safetensors"
    pieces = _pieces(pattern)
    fields = [field for _, field in pieces if field]
    if len(set(fields)) < len(fields):
        return "has a field twice"
    before = [literal for literal, field in pieces if field]
    after = [literal for literal, _ in pieces[1:]]
    if any(text[-1:].isdigit() for text in before) or any(not text or text[0].isdigit() for text in after):
        return "has numbers that run into each other: put something that is no digit between them"
    return ""


def _fault_of_fields(fields: set[str], ranks: RankNumbers) -> str:
    """Return what makes ranks of `ranks` share a name, or ""."""
    has_tp = bool(fields & {"tp_rank", "rank"})
    if ranks.pp_size > 1 and "pp_rank" not in fields:
        return f"lacks {{pp_rank}}, so that the {ranks.pp_size} pipeline stages would write the same file"
    if ranks.pp_size == 1 and "pp_rank" in fields:
        return "has {pp_rank}, and the pipeline-parallel size is 1"
    if ranks.spread and "ep_rank" not in fields:
        return f"lacks {{ep_rank}}, so that the {ranks.ep_size} expert-parallel ranks would write the same file"
    if ranks.tp_size > 1 and not (has_tp or (ranks.spread and "ep_rank" in fields)):
        return f"lacks {{rank}} or {{tp_rank}}, so that the {ranks.tp_size} ranks would write the same file"
    return ""
