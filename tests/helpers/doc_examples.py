"""Takes the examples out of Markdown pages: ```python blocks, and ```console blocks with `$ tensorferry …` commands.

An HTML comment on the line before a block says what differs: `<!-- skip: reason -->` or `<!-- exits 1 -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_BLOCK = re.compile(
    r"(?:^<!--[ ]*(?P<note>[^\n]*?)[ ]*-->\n)?^```(?P<language>python|pycon|console)[ ]*\n(?P<body>.*?)^```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, its text, the line of the page where the text begins, and the note before it."""

    language: str
    text: str
    line: int
    note: str

    @property
    def skipped(self) -> bool:
        """Whether the page says why this block cannot run."""
        return self.note.startswith("skip: ")

    @property
    def exit_code(self) -> int:
        """What each command of the block exits with."""
        return int(self.note.removeprefix("exits ")) if self.note.startswith("exits ") else 0


@dataclass(frozen=True, slots=True)
class Command:
    """A command line after `$`, and the output shown below it, "" if none is shown."""

    line: str
    output: str


def blocks(page: str) -> Iterator[Block]:
    """Yield the examples of a page in order."""
    for found in _BLOCK.finditer(page):
        line = page.count("\n", 0, found.start("body")) + 1
        yield Block(found["language"], found["body"], line, found["note"] or "")


def commands(text: str) -> Iterator[Command]:
    """Yield the commands of a console block; a line that ends in a backslash goes on in the next."""
    for part in re.split(r"^\$ ", text.replace("\\\n", ""), flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        yield Command(line, output)
