"""How commands end: with which status and which words, whatever happens to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.checkpoints import ar, write_safetensors
from helpers.command_line import CommandLine, command, in_a_process


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_safetensors(tmp_path / "model.safetensors", {"w": ar(2)})
    return tmp_path


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Have every checkpoint that is opened raise `error`."""

    def opened(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("tensorferry.checkpoint.open_checkpoint", opened)


def test_a_good_checkpoint_is_status_0(checkpoint: Path) -> None:
    ran = in_a_process("inspect", checkpoint)
    assert (ran.status, ran.err) == (0, "")


def test_a_checkpoint_at_fault_is_status_1_and_a_line_that_names_the_file(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"\1\0\0")
    ran = in_a_process("inspect", checkpoint)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith(f"tensorferry: model.safetensors ({checkpoint}): ")
    assert len(ran.err.splitlines()) == 1


def test_an_option_that_does_not_exist_is_status_2(checkpoint: Path) -> None:
    ran = in_a_process("inspect", checkpoint, "--nope")
    assert (ran.status, ran.out) == (2, "")
    assert "--nope" in ran.err


def test_a_value_that_an_option_does_not_take_is_status_2(run: CommandLine, checkpoint: Path) -> None:
    ran = run("inspect", checkpoint, "--load-format", "zip")
    assert (ran.status, ran.out) == (2, "")
    assert "one of auto, hf, safetensors, mistral, pt, gguf, " in ran.err


@pytest.mark.parametrize("arguments", [(), ("inspect",), ("unpack", "."), ("inspect", ".", "more")])
def test_a_call_that_makes_no_sense_is_status_2(run: CommandLine, arguments: tuple[str, ...]) -> None:
    assert run(*arguments).status == 2


def test_help_and_version_are_status_0(run: CommandLine) -> None:
    assert run("--help").status == 0
    assert run("verify", "--help").status == 0
    assert run("--version").out.startswith("tensorferry ")


def test_a_place_where_nothing_is_is_status_1(run: CommandLine, tmp_path: Path) -> None:
    ran = run("inspect", tmp_path / "absent")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err == f"tensorferry: {tmp_path / 'absent'}: there is no such file or folder\n"


def test_a_name_that_the_system_does_not_take_is_an_error_in_words(run: CommandLine) -> None:
    ran = run("inspect", "x" * 300)
    assert (ran.status, ran.err.endswith("File name too long\n")) == (1, True)


def test_a_folder_that_may_not_be_looked_into_is_an_error_in_words(checkpoint: Path) -> None:
    # The first call imports what root's home may hold; whoever is root is somebody else in the second.
    code = (
        "import contextlib, os, sys; from tensorferry.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main(['inspect', sys.argv[1]])\n"
        "os.chmod(sys.argv[1], 0)\n"
        "if os.geteuid() == 0: os.seteuid(65534)\n"
        "main(['inspect', sys.argv[1]])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(checkpoint)], capture_output=True, text=True, check=False)
    checkpoint.chmod(0o700)
    assert done.returncode == 1
    assert done.stderr == f"tensorferry: {checkpoint}: Permission denied\n"


def test_a_file_that_may_not_be_read_is_an_error_in_words(
    run: CommandLine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raising(monkeypatch, PermissionError(13, "Permission denied", "model\x1b.safetensors"))
    ran = run("inspect", checkpoint)
    assert (ran.status, ran.err) == (1, "tensorferry: model\\x1b.safetensors: Permission denied\n")


def test_an_error_of_several_lines_is_one_paragraph(
    run: CommandLine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorferry.errors import PlanError

    raising(monkeypatch, PlanError("they do not fit:\n\n  missing: a\n  missing: b\n"))
    assert run("inspect", checkpoint).err == "tensorferry: they do not fit:\n  missing: a\n  missing: b\n"


def test_an_error_says_if_parts_of_the_model_had_been_written(
    run: CommandLine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorferry.errors import ReadError

    error = ReadError("model.safetensors: changed while it was in use")
    error.touched = True
    raising(monkeypatch, error)
    assert "parts of the model had been written" in run("inspect", checkpoint).err


@pytest.mark.parametrize(
    ("package", "extra"), [("torch", "transformers"), ("transformers", "transformers"), ("huggingface_hub", "hub")]
)
def test_a_package_that_is_missing_is_told_with_the_line_that_installs_it(
    run: CommandLine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, package: str, extra: str
) -> None:
    raising(monkeypatch, ModuleNotFoundError(f"No module named '{package}.x'", name=f"{package}.x"))
    ran = run("inspect", checkpoint)
    assert ran.status == 2
    assert ran.err == f"tensorferry: this needs {package}, which is not installed: pip install 'tensorferry[{extra}]'\n"


def test_loading_without_transformers_is_told_with_the_line_that_installs_it(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    code = (
        "import sys; sys.modules['transformers'] = None;"
        "from tensorferry.cli.main import main; main(['load', sys.argv[1]])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(checkpoint)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "transformers" in done.stderr
    assert "pip install 'tensorferry[transformers]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_that_nobody_foresaw_is_told_in_words(
    run: CommandLine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raising(monkeypatch, KeyError("w\x1b[31m"))
    ran = run("inspect", checkpoint)
    assert ran.status == 1
    assert ran.err.startswith("tensorferry: an error that was not foreseen: KeyError: ")
    assert "\x1b" not in ran.err
    assert "TENSORFERRY_TRACEBACK=1" in ran.err


def test_where_an_unforeseen_error_came_from_can_be_asked_for(checkpoint: Path) -> None:
    code = (
        "import sys, tensorferry.checkpoint; tensorferry.checkpoint.open_checkpoint = None;"
        "from tensorferry.cli.main import main; main(['inspect', '.'])"
    )
    variables = {**os.environ, "TENSORFERRY_TRACEBACK": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_too_little_memory_is_told_in_words(
    run: CommandLine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raising(monkeypatch, MemoryError())
    ran = run("inspect", checkpoint)
    assert (ran.status, ran.err) == (1, "tensorferry: there is not enough memory for this\n")


def test_ctrl_c_is_status_130_and_a_word(run: CommandLine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, KeyboardInterrupt())
    ran = run("inspect", checkpoint)
    assert (ran.status, ran.out, ran.err) == (130, "", "tensorferry: interrupted\n")


def test_ctrl_c_ends_a_process_that_waits(checkpoint: Path) -> None:
    os.mkfifo(checkpoint / "sums")
    waiting = subprocess.Popen(
        command("verify", checkpoint, "--manifest", checkpoint / "sums"), stderr=subprocess.PIPE, text=True
    )
    # Opening the pipe to write to it returns when the command has opened it to read.
    with (checkpoint / "sums").open("w"):
        waiting.send_signal(signal.SIGINT)
        _, err = waiting.communicate()
    assert (waiting.returncode, err) == (130, "tensorferry: interrupted\n")


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "--json"], ["verify", "--quiet"]])
def test_a_reader_that_stops_is_no_error_to_speak_of(checkpoint: Path, arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ran = in_a_process(arguments[0], checkpoint, *arguments[1:], stdout=writing)
    os.close(writing)
    assert (ran.status, ran.err) == (141, "")


def test_an_output_that_is_full_is_an_error_in_words(checkpoint: Path) -> None:
    with Path("/dev/full").open("w") as full:
        ran = in_a_process("inspect", checkpoint, stdout=full)
    assert (ran.status, ran.err) == (1, "tensorferry: No space left on device\n")


@pytest.mark.parametrize("closed", [1, 2])
def test_a_process_without_an_output_works(checkpoint: Path, closed: int) -> None:
    line = f'exec "$@" {closed}>&-'
    done = subprocess.run(
        ["bash", "-c", line, "bash", *command("verify", checkpoint)], capture_output=True, check=False
    )
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr


def test_letters_that_an_output_does_not_have_are_escaped(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"重": ar(1)})
    ran = in_a_process("inspect", tmp_path, variables={"PYTHONIOENCODING": "latin-1"})
    assert ran.status == 0
    assert "\\u91cd" in ran.out


def test_what_the_library_warns_of_is_printed_once(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"w": ar(2)})
    write_safetensors(tmp_path / "other.safetensors", {"v": ar(2)})
    ran = in_a_process("inspect", tmp_path)
    assert ran.err == ""
