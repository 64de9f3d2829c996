"""What a report says, and that what it says of names out of files is harmless."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from types import MappingProxyType

import pytest

from tensorferry.report import Report

HOSTILE = "w\x1b[2J\r\n\x07\u202e<script>alert('&')</script>"

REPORT = Report(
    source="llama",
    format="safetensors",
    files=("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    selection="model.safetensors.index.json names 2 files",
    ignored_files={"training_args.bin": "training state"},
    parameters=1234,
    entries=1236,
    bytes_needed=3 << 20,
    bytes_read=(3 << 20) + 512,
    reads=7,
    direct_bytes=2 << 20,
    staging_peak=1 << 20,
    executor="ThreadedExecutor",
    fingerprint="f" * 64,
)


def test_the_text_begins_with_what_was_loaded_read_and_checked() -> None:
    assert str(REPORT).splitlines() == [
        "loaded 1,234 parameters from llama (safetensors, 2 files)",
        "  files: model.safetensors.index.json names 2 files",
        "  read 3.0 MiB in 7 reads for 3.0 MiB needed; 2.0 MiB straight into parameters, at most 1.0 MiB staged",
        "  contents not verified",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"casts": {"F32 -> BF16": 290}}, "cast 290 tensors F32 -> BF16"),
        ({"casts": {"F32 -> BF16": 1}}, "cast 1 tensor F32 -> BF16"),
        ({"ties": {"lm_head.weight": "embed.weight"}}, "tied: lm_head.weight = embed.weight"),
        ({"devices": {"cpu": 3, "cuda:0": 1231}}, "on cpu: 3 tensors"),
        ({"devices": {"cpu": 3, "cuda:0": 1231}}, "on cuda:0: 1,231 tensors"),
        ({"bytes_compared": 2048}, "read 2.0 KiB before, to compare tied tensors"),
        ({"computed": ("rotary.inv_freq",)}, "computed by the model: rotary.inv_freq"),
        ({"streamed": {"h.0.a": "A = -exp(A_log)"}}, "streamed (A = -exp(A_log)): h.0.a"),
        ({"unexpected": ("more",)}, "unexpected, not used: more"),
        ({"missing": ("less",)}, "missing, allowed: less"),
        ({"losses": {"h.0.w": (3, 1), "h.1.w": (1, 0)}}, "values lost in a cast: h.{0,1}.w"),
        ({"warnings": ("careful",)}, "warning: careful"),
        ({"verified": "sha256 of 2 of 2 files verified"}, "sha256 of 2 of 2 files verified"),
        ({"seconds": {"plan": 0.25, "load": 1.5}}, "plan 0.25 s, load 1.50 s"),
    ],
)
def test_the_text_has_a_line_for(changes: dict[str, object], line: str) -> None:
    assert f"  {line}" in str(replace(REPORT, **changes)).splitlines()  # type: ignore[arg-type]


def test_one_is_not_many() -> None:
    text = str(replace(REPORT, parameters=1, reads=1, files=("model.safetensors",)))
    assert text.startswith("loaded 1 parameter from llama (safetensors, 1 file)\n")
    assert " in 1 read for " in text


def test_dropped_entries_are_told_by_reason_with_their_layers_folded() -> None:
    dropped = {f"h.{n}.expert.w": "expert of another rank" for n in range(32)} | {"mtp.w": "draft layer"}
    text = str(replace(REPORT, dropped=dropped))
    assert "  dropped (expert of another rank): h.{0..31}.expert.w\n  dropped (draft layer): mtp.w\n" in text


def test_a_long_list_is_cut_and_says_how_much_is_left() -> None:
    assert "unexpected, not used: a, b, c, d and 2 more" in str(replace(REPORT, unexpected=tuple("abcdef")))


def test_many_warnings_are_cut_and_it_is_said_how_many() -> None:
    lines = str(replace(REPORT, warnings=("careful",) * 25)).splitlines()
    assert sum("warning: careful" in line for line in lines) == 20
    assert "  … and 5 more warnings" in lines


def test_names_out_of_files_are_escaped_in_the_text() -> None:
    report = replace(REPORT, source=HOSTILE, unexpected=(HOSTILE,), warnings=(HOSTILE,), dropped={HOSTILE: HOSTILE})
    text = str(report)
    assert all(line.isprintable() for line in text.splitlines())
    assert len(text.splitlines()) == len(str(REPORT).splitlines()) + 3


KEYS = {
    "source", "format", "files", "selection", "ignored_files", "parameters", "entries", "bytes_needed", "bytes_read",
    "reads", "direct_bytes", "copied_bytes", "mapped_bytes", "ways", "storage_kind", "staging_peak", "executor",
    "fingerprint",
    "unexpected", "missing", "dropped", "ties", "computed",
    "streamed", "post_processed", "devices", "casts", "losses", "warnings", "verified", "seconds",
    "bytes_compared",
}  # fmt: skip


def test_json_has_these_keys_and_no_others() -> None:
    assert set(json.loads(REPORT.to_json())) == KEYS


def test_json_says_what_the_report_says() -> None:
    data = json.loads(replace(REPORT, losses={"w": (3, 1)}, ties={"a": "b"}).to_json())
    assert data["files"] == list(REPORT.files)
    assert data["losses"] == {"w": [3, 1]}
    assert data["ties"] == {"a": "b"}
    assert (data["bytes_read"], data["parameters"]) == (3146240, 1234)


def test_json_takes_mappings_of_any_kind() -> None:
    report = replace(REPORT, dropped=MappingProxyType({"w": "why"}))
    assert json.loads(report.to_json())["dropped"] == {"w": "why"}


class Page(HTMLParser):
    """Collects the tags and the text of a page, and refuses tags that are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_says_what_the_report_says() -> None:
    report = replace(REPORT, seconds={"plan": 0.5, "load": 1.5}, casts={"F32 -> BF16": 290}, warnings=("careful",))
    text = Page(report.to_html()).text
    for part in ("llama", "1,234", "3.0 MiB", "2.00 seconds", "plan 0.50 s", "290 tensors F32 -> BF16", "careful"):
        assert part in text
    assert "training_args.bin" in text
    assert "contents not verified" in text


def test_the_page_runs_nothing_and_refers_to_nothing() -> None:
    page = Page(REPORT.to_html())
    assert not {"script", "link", "img", "iframe", "form"} & set(page.tags)
    assert not {"src", "href", "onload", "onerror"} & set(page.attributes)
    assert "url(" not in REPORT.to_html()


def test_names_out_of_files_stay_text_on_the_page() -> None:
    everywhere = replace(
        REPORT, source=HOSTILE, format=HOSTILE, files=(HOSTILE,), selection=HOSTILE, ignored_files={HOSTILE: HOSTILE},
        executor=HOSTILE, fingerprint=HOSTILE, unexpected=(HOSTILE,), missing=(HOSTILE,), dropped={HOSTILE: HOSTILE},
        ties={HOSTILE: HOSTILE}, computed=(HOSTILE,), streamed={HOSTILE: HOSTILE}, post_processed=(HOSTILE,),
        casts={HOSTILE: 1}, losses={HOSTILE: (1, 2)}, warnings=(HOSTILE,), verified=HOSTILE, seconds={HOSTILE: 1.0},
    )  # fmt: skip
    html = everywhere.to_html()
    assert "<script" not in html
    assert "script" not in Page(html).tags
    assert all(line.isprintable() for line in html.splitlines())
    assert "w\\x1b[2J\\r\\n\\x07\\u202e<script>alert('&')</script>" in Page(html).text


def test_a_long_list_is_folded_away_on_the_page() -> None:
    page = Page(replace(REPORT, unexpected=tuple("abcdefghijkl")).to_html())
    assert page.tags.count("details") == 1
    assert "4 more" in page.text
    assert "l" in page.text


def test_a_report_without_timings_has_no_bar() -> None:
    assert "seconds" not in Page(REPORT.to_html()).text
