"""How a load tells of itself: when, where, and in which letters."""

from __future__ import annotations

import io
import threading

import pytest

from tensorferry.progress import SILENT, Bar, Lines, for_stream


class Clock:
    """Seconds that pass only when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    """A pipe whose reader is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(text)


def lines_of(moves: list[tuple[float, int]], total: int) -> list[str]:
    """Tell of `moves`, (seconds to wait, bytes), and return what was written."""
    stream, clock = io.StringIO(), Clock()
    lines = Lines(stream, clock=clock)
    lines.start(total, "weights")
    for seconds, nbytes in moves:
        clock.now += seconds
        lines.advance(nbytes)
    lines.finish()
    return stream.getvalue().splitlines()


def test_a_quick_load_is_one_line_at_its_end() -> None:
    assert lines_of([(0.5, 1 << 20)] * 4, 4 << 20) == ["weights: 100% (4.0 MiB of 4.0 MiB) after 2.0 s"]


def test_a_line_comes_after_ten_seconds_when_a_tenth_has_come_too() -> None:
    assert lines_of([(9, 25), (1, 0), (1, 5)], 100) == [
        "weights: 25% (25 B of 100 B) after 10.0 s",
        "weights: 30% (30 B of 100 B) after 11.0 s",
    ]


def test_no_line_comes_while_less_than_a_tenth_has_come() -> None:
    assert lines_of([(60, 3), (60, 3), (60, 3)], 100) == ["weights: 9% (9 B of 100 B) after 180.0 s"]


def test_a_load_of_many_hours_is_ten_lines() -> None:
    assert len(lines_of([(60, 1)] * 1000, 1000)) == 10


def test_a_load_of_nothing_is_complete() -> None:
    assert lines_of([], 0) == ["weights: 100% (0 B of 0 B) after 0.0 s"]


def test_a_load_that_fails_says_how_far_it_came() -> None:
    assert lines_of([(1, 40)], 100) == ["weights: 40% (40 B of 100 B) after 1.0 s"]


def test_each_phase_is_told_of_from_its_own_beginning() -> None:
    stream, clock = io.StringIO(), Clock()
    lines = Lines(stream, clock=clock)
    for what in ("verifying", "weights"):
        lines.start(8, what)
        clock.now += 2
        lines.advance(8)
        lines.finish()
    assert stream.getvalue().splitlines() == [
        "verifying: 100% (8 B of 8 B) after 2.0 s",
        "weights: 100% (8 B of 8 B) after 2.0 s",
    ]


def test_finishing_twice_or_without_a_start_says_nothing_more() -> None:
    stream = io.StringIO()
    lines = Lines(stream, clock=Clock())
    lines.finish()
    lines.start(1, "weights")
    lines.finish()
    lines.finish()
    assert len(stream.getvalue().splitlines()) == 1


def test_lines_are_ascii_whatever_is_loaded() -> None:
    stream = io.StringIO()
    lines = Lines(stream, clock=Clock())
    lines.start(1, "modèle\x1b[31m\r\n")
    lines.finish()
    assert stream.getvalue() == "mod\\xe8le\\x1b[31m\\r\\n: 0% (0 B of 1 B) after 0.0 s\n"


def test_bytes_of_several_threads_add_up() -> None:
    stream = io.StringIO()
    lines = Lines(stream, clock=Clock())
    lines.start(4000, "weights")

    def advance() -> None:
        for _ in range(1000):
            lines.advance(1)

    threads = [threading.Thread(target=advance) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines.finish()
    assert stream.getvalue() == "weights: 100% (3.9 KiB of 3.9 KiB) after 0.0 s\n"


@pytest.mark.parametrize("stream", [Broken(), io.StringIO()])
def test_a_stream_that_takes_nothing_more_does_not_end_the_load(stream: io.StringIO) -> None:
    if not isinstance(stream, Broken):
        stream.close()
    lines = Lines(stream, clock=Clock())
    lines.start(1, "weights")
    lines.advance(1)
    lines.finish()


def test_a_terminal_gets_a_bar_in_bytes() -> None:
    stream = Terminal()
    bar = for_stream(stream)
    assert isinstance(bar, Bar)
    bar.start(4 << 20, "weights")
    bar.advance(4 << 20)
    bar.finish()
    bar.finish()
    assert "weights" in stream.getvalue()
    assert "4.2/4.2 MB" in stream.getvalue() or "4.0/4.0 MiB" in stream.getvalue()


def test_a_bar_takes_no_markup_and_no_escapes_from_what_is_loaded() -> None:
    stream = Terminal()
    bar = Bar(stream)
    bar.start(1, "[red]a\x1b]0;owned\x07")
    bar.finish()
    assert "[red]a\\x1b]0;owned\\x07" in stream.getvalue()


def test_a_bar_can_be_advanced_after_its_end() -> None:
    bar = Bar(Terminal())
    bar.start(1, "weights")
    bar.finish()
    bar.advance(1)


def test_a_pipe_gets_lines() -> None:
    assert isinstance(for_stream(io.StringIO()), Lines)


def test_only_rank_0_tells_anything() -> None:
    assert isinstance(for_stream(io.StringIO(), rank=0), Lines)
    assert [for_stream(io.StringIO(), rank=rank) for rank in (1, 2, 3)] == [SILENT] * 3


def test_the_rank_is_the_one_that_torchrun_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert for_stream(io.StringIO()) is SILENT
    monkeypatch.setenv("RANK", "0")
    assert isinstance(for_stream(io.StringIO()), Lines)
    monkeypatch.setenv("RANK", "first")
    assert isinstance(for_stream(io.StringIO()), Lines)


def test_a_process_without_standard_error_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert for_stream() is SILENT


def test_silence_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    SILENT.start(1, "weights")
    SILENT.advance(1)
    SILENT.finish()
    assert capfd.readouterr() == ("", "")
