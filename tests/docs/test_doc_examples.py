"""Which examples of a page are run, and how."""

from __future__ import annotations

from helpers.doc_examples import Block, Command, blocks, commands

PAGE = """\
Text.

```python
x = 1
```

<!-- skip: needs a GPU -->
```python
y = 2
```

```toml
not = "an example"
```

<!-- exits 1 -->
```console
$ tensorferry verify broken
error
```
"""


def test_python_and_console_blocks_are_examples_and_others_are_not() -> None:
    assert [(block.language, block.text, block.line) for block in blocks(PAGE)] == [
        ("python", "x = 1\n", 4),
        ("python", "y = 2\n", 9),
        ("console", "$ tensorferry verify broken\nerror\n", 18),
    ]


def test_a_comment_before_a_block_skips_it_or_gives_its_exit_code() -> None:
    assert [(block.skipped, block.exit_code) for block in blocks(PAGE)] == [(False, 0), (True, 0), (False, 1)]


def test_a_comment_further_up_says_nothing_about_a_block() -> None:
    assert list(blocks("<!-- skip: no -->\n\n```python\n```\n")) == [Block("python", "", 4, "")]


def test_a_console_block_is_commands_with_the_output_below_each() -> None:
    text = "$ cd there\n$ tensorferry \\\n  inspect .\nfirst\nsecond\n"
    assert list(commands(text)) == [Command("cd there", ""), Command("tensorferry   inspect .", "first\nsecond\n")]
