"""The values of metrics from what is known of a job, and what they are read from; without Prometheus' library."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from inprocess.reports import metrics, sources, writer
from inprocess.reports.accounting import Accounting, Loss
from inprocess.reports.incident import PHASES
from inprocess.reports.metrics import BUCKETS, METRICS, Counters, Family, Histogram, families
from inprocess.reports.sources import Sources, status_files
from inprocess.reports.verdict import CLASSES
from inprocess.system.listening import connect_address, listen_address

from .test_accounting import a_job
from .test_reports import Written

DOCS = Path(__file__).parents[2] / "docs"
NO_PHASES = dict.fromkeys(PHASES)


def live(rank: int, **more: Any) -> dict[str, Any]:
    """What the monitor of a rank writes."""
    told = {"format": "inprocess-live", "version": 1, "job": "job", "host": f"node{rank}", "pid": 70 + rank}
    told |= {"monitor_pid": 90 + rank, "initial_rank": rank, "rank": rank, "role": "active", "call": 0, "iteration": 2}
    told |= {"phase": "run", "state": "running", "steps": 40 + rank, "progress_age": 0.5, "heartbeat_age": 0.25}
    told |= {"world_size": 2, "reserves": 1, "memory_bytes": 1 << 20, "time": 5.0, "wall_time": 1100.0}
    return told | more


def loss(number: int, kind: str, seconds: float, **more: Any) -> Loss:
    told: dict[str, Any] = {"waiting": 0.0, "repeated": 0.0, "steps": 0, "repeated_steps": 0, "phases": NO_PHASES}
    return Loss(number, kind, seconds, **(told | more))


def a_time(*losses: Loss, end: float = 1050.0) -> Accounting:
    return Accounting("job", 1000.0, 1002.0, end, losses)


def values(jobs: list[Accounting], ranks: list[dict[str, Any]], now: float = 1101.0) -> dict[str, Any]:
    """Name -> value of the only sample, or the values by label."""
    found = {family.name: dict(family.samples) for family in families(jobs, ranks, now, "1.2")}
    return {name: samples[()] if list(samples) == [()] else samples for name, samples in found.items()}


def counted(samples: dict[Any, float]) -> dict[Any, float]:
    """Without those that are there from the first answer on."""
    return {labels: value for labels, value in samples.items() if value}


# --- values -------------------------------------------------------------------------------------------------------


def test_what_is_not_known_has_no_value() -> None:
    found = values([], [])
    zeros = {"inprocess_restarts_total", "inprocess_lost_seconds_total", "inprocess_restart_phase_seconds"}
    assert {name for name, samples in found.items() if samples} == {"inprocess_build_info", *zeros}
    assert set(found["inprocess_restarts_total"]) == {(kind,) for kind in CLASSES}
    assert found["inprocess_build_info"] == {("1.2",): 1.0}


def test_time() -> None:
    phases = NO_PHASES | {"detect": 3.0, "abort": 0.02, "leave": 0.03}
    one = loss(1, "hang", 3.05, repeated=2.0, steps=5, repeated_steps=2, phases=phases)
    found = values([a_time(one, loss(2, "hang", 1.0), loss(3, "oom", 4.0, waiting=7.0))], [])
    assert counted(found["inprocess_restarts_total"]) == {("hang",): 2.0, ("oom",): 1.0}
    lost = {("hang",): pytest.approx(4.05), ("oom",): pytest.approx(4.0)}
    assert counted(found["inprocess_lost_seconds_total"]) == lost
    assert (found["inprocess_repeated_seconds_total"], found["inprocess_repeated_steps_total"]) == (2.0, 2.0)
    assert (found["inprocess_waiting_seconds_total"], found["inprocess_start_seconds_total"]) == (7.0, 2.0)
    productive = 50.0 - 2.0 - 4.05 - 4.0 - 2.0 - 7.0
    assert found["inprocess_productive_seconds_total"] == pytest.approx(productive)
    assert found["inprocess_goodput_ratio"] == pytest.approx(productive / 50.0)
    lengths = {
        phase: each.sum for (phase,), each in found["inprocess_restart_phase_seconds"].items() if each.counts[-1]
    }
    assert lengths == {"detect": 3.0, "abort": 0.02, "leave": 0.03}
    assert found["inprocess_restart_seconds"].counts[-1] == 0, "none of them is whole"


def test_the_length_of_a_restart_is_without_the_time_to_notice_and_the_first_step() -> None:
    phases = dict.fromkeys(PHASES, 0.01) | {"standstill": 60.0, "first_step": 9.0}
    found = values([a_time(loss(1, "hang", 60.07, phases=phases))], [])["inprocess_restart_seconds"]
    assert found.sum == pytest.approx(0.08) and found.counts[-1] == 1
    assert next(limit for limit, count in zip((*BUCKETS, math.inf), found.counts, strict=True) if count) == 0.1


def test_a_job_that_runs_is_productive_until_its_last_progress() -> None:
    """1050 is the last event; at 1100 somebody last made progress 0.5 s before."""
    found = values([a_time()], [live(0, progress_age=20.0), live(1)])
    assert found["inprocess_productive_seconds_total"] == pytest.approx(48.0 + 49.5)
    assert found["inprocess_goodput_ratio"] == pytest.approx((48.0 + 49.5) / 100.0)


@pytest.mark.parametrize(
    ("more", "productive"),
    [
        ({"phase": "end round"}, 0.0),
        ({"role": "reserve"}, 0.0),
        ({"state": "dead"}, 0.0),
        ({"state": "left", "phase": "out"}, 50.0),
        ({"progress_age": 60.0}, 0.0),
        ({"progress_age": None}, 50.0),
        ({"job": "another"}, 0.0),
    ],
)
def test_what_is_productive_by_the_way(more: dict[str, Any], productive: float) -> None:
    found = values([a_time()], [live(0, **more)])
    assert found["inprocess_productive_seconds_total"] == pytest.approx(48.0 + productive)


def test_ranks() -> None:
    ranks = [live(0), live(1, state="dead"), live(2, wall_time=1080.0, world_size=9), live(3, heartbeat_age=None)]
    found = values([], ranks)
    up = {("0", "node0"): 1.0, ("1", "node1"): 0.0, ("2", "node2"): 0.0, ("3", "node3"): 1.0}
    assert found["inprocess_rank_up"] == up
    assert found["inprocess_progress_age_seconds"] == {("0",): 1.5, ("2",): 21.5, ("3",): 1.5}
    assert found["inprocess_heartbeat_age_seconds"] == {("0",): 1.25, ("2",): 21.25}
    assert found["inprocess_step"]["1",] == 41.0 and found["inprocess_memory_bytes"]["0",] == float(1 << 20)
    assert (found["inprocess_world_size"], found["inprocess_reserves"]) == (2.0, 1.0)


def test_a_rank_whose_process_was_replaced() -> None:
    found = values([], [live(0, pid=71, state="dead", wall_time=1090.0), live(0, pid=99, host="other")])
    assert found["inprocess_rank_up"] == {("0", "other"): 1.0}


def test_when_all_have_left_nobody_runs() -> None:
    found = values([], [live(0, state="left"), live(1, state="dead")])
    assert (found["inprocess_world_size"], found["inprocess_reserves"]) == (0.0, 0.0)


def test_a_clock_that_is_ahead() -> None:
    assert values([], [live(0)], now=1000.0)["inprocess_progress_age_seconds"] == {("0",): 0.5}


# --- counters -----------------------------------------------------------------------------------------------------


def test_counters_do_not_go_backwards_and_goodput_may() -> None:
    counters = Counters()
    running = [live(0, progress_age=None)]
    phases = NO_PHASES | {"abort": 0.2}
    steps: list[tuple[list[Accounting], list[dict[str, Any]]]] = [
        ([a_time()], running),
        ([a_time(loss(1, "exception", 1.0, repeated=30.0, phases=phases), end=1101.0)], running),
        ([a_time(loss(1, "signal", 0.5, phases=NO_PHASES | {"abort": 0.1}), end=1101.0)], []),
        ([], []),
    ]
    seen: list[dict[str, Any]] = []
    for jobs, ranks in steps:
        kept = counters.kept(families(counters.settled(jobs), ranks, 1101.0, "1"))
        seen.append({family.name: dict(family.samples) for family in kept})
    for name, (kind, _, _) in METRICS.items():
        for before, after in itertools.pairwise(seen):
            for labels, value in before[name].items():
                if kind == "counter":
                    assert after[name][labels] >= value, name
                elif kind == "histogram":
                    assert all(b >= a for a, b in zip(value.counts, after[name][labels].counts, strict=True)), name
    assert counted(seen[2]["inprocess_restarts_total"]) == {("exception",): 1.0}, (
        "counted once, although the class changed"
    )
    assert seen[1]["inprocess_goodput_ratio"][()] < seen[0]["inprocess_goodput_ratio"][()]


def test_buckets_stay_cumulative_where_a_length_is_corrected() -> None:
    shorter, longer = Histogram.of([0.004, 2.0]), Histogram.of([0.2, 2.0])
    both = longer.at_least(shorter)
    assert list(both.counts) == sorted(both.counts) and both.counts[-1] == 2
    assert both == shorter.at_least(longer) and both.sum == pytest.approx(2.2)


@pytest.mark.parametrize("value", [0.0, 0.001, 0.0011, 300.0, 301.0])
def test_a_value_is_in_each_bucket_that_is_at_least_as_large(value: float) -> None:
    counts = Histogram.of([value]).counts
    assert counts == tuple(int(value <= limit) for limit in (*BUCKETS, math.inf))


# --- what is read -------------------------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path: Path) -> Written:
    return Written(tmp_path)


def put(run_dir: Path, *ranks: dict[str, Any]) -> None:
    (run_dir / "live").mkdir(exist_ok=True)
    for rank in ranks:
        (run_dir / "live" / f"rank-{rank['initial_rank']}.json").write_text(json.dumps(rank))


def test_live_files(tmp_path: Path) -> None:
    assert status_files(str(tmp_path)) == []
    put(tmp_path, live(0), live(1))
    (tmp_path / "live" / "half.json").write_text('{"format": "inprocess-')
    (tmp_path / "live" / "rank-1.json.77").write_text(json.dumps(live(7)))
    os.mkfifo(tmp_path / "live" / "pipe.json")
    (tmp_path / "live" / "link.json").symlink_to(tmp_path / "live" / "rank-0.json")
    assert status_files(str(tmp_path)) == [live(0), live(1)]


def test_before_the_first_incident_the_first_rank_says_when_the_job_began(write: Written, tmp_path: Path) -> None:
    found = Sources(str(tmp_path))
    assert found.read() == ([], [])
    write(0, 0.0, "call", "join", -1)
    assert found.read() == ([], [])
    write(0, 3.0, "run", world_size=1, before=0)
    assert found.read()[0] == [Accounting("job", 1000.0, 1003.0, 1003.0)]


def test_a_beginning_is_read_once(write: Written, tmp_path: Path, monkeypatch: Any) -> None:
    write(0, 3.0, "run", world_size=1, before=0)
    put(tmp_path, live(0))
    found = Sources(str(tmp_path))
    first = found.read()
    monkeypatch.setattr(sources, "beginnings", None)  # what is called now fails
    assert found.read() == first


def test_the_summary_is_read_where_it_has_changed(write: Written, tmp_path: Path, monkeypatch: Any) -> None:
    a_job(write)
    writer.write(str(tmp_path))
    found = Sources(str(tmp_path))
    (time,), _ = found.read()
    assert time.restarts == {"exception": 1, "oom": 1}
    with monkeypatch.context() as patch:
        patch.setattr(sources, "read_summary", None)
        assert found.read() == ([time], [])
    path = tmp_path / "incidents" / "summary.json"
    path.unlink()
    assert found.read() == ([time], []), "what was known stays"
    path.write_text("half of it")
    assert found.read() == ([time], [])


# --- names --------------------------------------------------------------------------------------------------------


def test_names_follow_prometheus_rules() -> None:
    for name, (kind, labels, about) in METRICS.items():
        assert re.fullmatch(r"inprocess_[a-z_]+", name) and about.endswith(".")
        assert name.endswith("_total") == (kind == "counter")
        assert not {"le", "quantile", "job", "instance"} & {*labels}
        assert Family(name, {}).kind == kind
    assert {name for name in METRICS if "age" in name or "time" in name} == {
        "inprocess_progress_age_seconds",
        "inprocess_heartbeat_age_seconds",
    }


def test_the_documentation_has_all_of_them() -> None:
    rows = re.findall(r"^\| `(inprocess_\w+)(?:\{([\w,]+)\})?` \| (\w+) \|", (DOCS / "metrics.md").read_text(), re.M)
    told = {name: (kind, tuple(labels.split(",")) if labels else ()) for name, labels, kind in rows}
    assert told == {name: (kind, labels) for name, (kind, labels, _) in METRICS.items()}


def test_metrics_need_no_library_of_prometheus() -> None:
    for module in (metrics, sources):
        assert module.__file__ is not None and "prometheus_client" not in Path(module.__file__).read_text()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9464", ("127.0.0.1", 9464)),
        ("0", ("127.0.0.1", 0)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("node7:9464", ("node7", 9464)),
        ("[::1]:9464", ("::1", 9464)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert listen_address(text) == address


@pytest.mark.parametrize("text", ["", "x", "65536", "-1", "1.5", ":9464", "::1:9464", "a b:1", "host:", "\u0661"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"pass|put"):
        listen_address(text)


@pytest.mark.parametrize("text", ["", "9464", "h:0", "h:65536", "h:99999", "::1:9464", ":1", "h:\u0661", "h:\u00b2"])
def test_what_is_no_address_to_connect_to(text: str) -> None:
    with pytest.raises(ValueError, match=r"pass|put"):
        connect_address(text)


def test_addresses_to_connect_to() -> None:
    assert [connect_address(text) for text in ("[::1]:1", "node7:65535")] == [("::1", 1), ("node7", 65535)]
