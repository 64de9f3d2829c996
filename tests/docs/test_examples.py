"""What README.md and the pages of docs/ show runs as written, in a folder that holds a small model, `tiny-llama`."""

from __future__ import annotations

import doctest
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.doc_examples import Block, blocks, commands

CHECKOUT = Path(__file__).resolve().parent.parent.parent
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
LENIENT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

pytestmark = pytest.mark.transformers


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the small checkpoint of the examples, by the script that readers run for that."""
    folder = tmp_path_factory.mktemp("examples") / "tiny-llama"
    runpy.run_path(str(CHECKOUT / "examples" / "make_tiny_llama.py"))["write"](folder)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_the_examples_of_a_page_run(
    page: Path, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_llama, tmp_path / "tiny-llama")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page.read_text()):
        if not block.skipped:
            run_block(page, block, names)


def run_block(page: Path, block: Block, names: dict[str, object]) -> None:
    """Run one block; the Python blocks of a page share `names`."""
    if block.language == "console":
        run_console(page, block)
    elif block.text.startswith(">>> "):
        test = doctest.DocTestParser().get_doctest(block.text, names, page.name, str(page), block.line - 1)
        assert doctest.DocTestRunner(optionflags=LENIENT).run(test, clear_globs=False).failed == 0
        names.update(test.globs)
    else:
        # The blank lines make a traceback name the line of the page.
        exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)


def run_console(page: Path, block: Block) -> None:
    """Run the tensorferry commands of a block, and compare the output where the page shows some."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    for command in commands(block.text):
        if command.line.split()[0] != "tensorferry":
            continue
        where = f"{page.name}:{block.line}: $ {command.line}"
        done = subprocess.run(["bash", "-c", command.line], capture_output=True, text=True, env=environment)
        found = done.stdout + done.stderr
        assert done.returncode == block.exit_code, f"{where}\n{found}"
        if command.output.strip():
            shown = doctest.OutputChecker().check_output(command.output, found, LENIENT)
            assert shown, f"{where}\nshown:\n{command.output}\nfound:\n{found}"
