import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="page cache and counters are asked of Linux")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a way to import modules of the harness, which is no part of the package."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: import_module(f"benchmarks.peers.{name}")


def record(contestant: str, seconds: float, *, number: int = 0, **more: Any) -> dict[str, Any]:
    usual = {"work": "full", "cache": "cold", "cpu": 1.0, "needed": 100, "disk": 110, "anonymous": 160}
    return {
        **usual, "round": number, "contestant": contestant, "seconds": seconds, "peak": 300, "cached": 0, **more,
    }  # fmt: skip


def test_two_contestants_load_the_same_and_are_written_down(tmp_path: Path) -> None:
    fs = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True).stdout.strip()
    caches = "warm" if fs in ("tmpfs", "ramfs", "overlayfs") else "cold,warm"
    pythons = [f"--python={name}={sys.executable}" for name in ("tensorferry", "libraries")]
    call = [sys.executable, "-m", "benchmarks.peers", "--size=toy", "--rounds=1", "--works=tp", f"--caches={caches}"]
    chosen = ["--only", "tensorferry", "safetensors mmap", f"--cache={tmp_path}", f"--results={tmp_path / 'results'}"]
    done = subprocess.run([*call, *chosen, *pythons], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / "results" / "peers.json").read_text())
    loads = [r for r in run["records"] if r["contestant"] in ("tensorferry", "safetensors mmap")]
    assert len(loads) == 2 * len(caches.split(","))
    assert {r["needed"] for r in loads} == {run["bytes"]["tp"]}
    assert "tp, warm, into given memory: no peer faster" in (tmp_path / "results" / "peers.md").read_text()
    assert ElementTree.parse(tmp_path / "results" / "peers.svg").getroot().tag.endswith("svg")


def test_a_ratio_is_of_the_same_round_and_the_median_of_rounds(peers: Any) -> None:
    slow_rounds = [record("a", s, number=n) for n, s in enumerate((2, 30, 4))]
    beside = [record("b", s, number=n) for n, s in enumerate((1, 20, 4))]
    ratio = peers("summary").Run(slow_rounds + beside).ratio(("full", "cold", "a"), ("full", "cold", "b"))
    assert (ratio.value, ratio.least, ratio.most) == (1.5, 1.0, 2.0)


def test_memory_beyond_the_parameters_is_what_was_there_less_what_is_needed(peers: Any) -> None:
    fresh = peers("summary").Run([record("a", 1)]).row("full", "cold", "a")
    used = peers("summary").Run([record("a", 1, work="reload")]).row("reload", "cold", "a")
    assert (fresh.extra, used.extra) == (60, 160)


def test_goals_compare_loads_into_given_memory_with_such_loads_only(peers: Any) -> None:
    times = {"tensorferry": 2.0, "tensorferry, on meta": 1.5, "torch DCP": 2.5, "runai streamer, own memory": 1.0}
    run = peers("summary").Run([record(name, s) for name, s in times.items()])
    found = {o.goal: o for o in peers("goals").outcomes(run, peers("contestant").all_contestants())}
    assert found["full, cold, into given memory: no peer faster"].met is True
    assert found["full, cold, on meta: no peer faster"].met is False
    assert found["full, cold, on meta: no peer faster"].found.startswith("1.50 ")


def test_goals_that_a_run_does_not_measure_are_neither_met_nor_missed(peers: Any) -> None:
    outcomes = peers("goals").outcomes(peers("summary").Run([]), peers("contestant").all_contestants())
    assert {(o.found, o.met) for o in outcomes} == {("not measured", None)}


def test_the_bound_of_memory_holds_for_every_load_not_for_the_median(peers: Any) -> None:
    small, large = record("tensorferry", 1), record("tensorferry", 1, number=1, anonymous=(400 << 20) + 100)
    run = peers("summary").Run([small, small, large])
    found = [o for o in peers("goals").outcomes(run, {}) if o.goal.startswith("memory beside")]
    assert [(o.met, o.found) for o in found] == [(False, "400 MiB (full, cold, tensorferry)")]


def test_a_rank_takes_rows_of_some_tensors_columns_of_others_and_norms_whole(peers: Any) -> None:
    works = peers("works")
    parts = works.part_of(works.WORKS["tp"], "toy")
    assert parts["model.layers.0.mlp.up_proj.weight"] == (0, 128, 128)
    assert parts["model.layers.0.mlp.down_proj.weight"] == (1, 128, 128)
    assert parts["model.norm.weight"] is None


def test_a_rank_of_expert_parallelism_needs_its_experts_and_all_that_is_none(peers: Any) -> None:
    works = peers("works")
    parts = works.part_of(works.WORKS["ep"], "toy")
    experts = {name.split(".experts.")[1].split(".")[0] for name in parts if ".experts." in name}
    assert experts == {"4", "5", "6", "7"}
    assert "model.layers.1.block_sparse_moe.gate.weight" in parts
