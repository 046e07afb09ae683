"""From made-up events to a trace and a picture; those of real faults are in ``tests/ranks/test_timeline.py``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from inprocess.reports.drawing import ABORT, STATES, svg
from inprocess.reports.incident import all_incidents
from inprocess.reports.reading import read
from inprocess.reports.slices import lanes, sizes
from inprocess.reports.timeline import main
from tests.harness.tracks import Track, read_tracks, share_covered

from .test_reports import Written, record, restart

HOSTILE = "\x00\x1b[31m</svg><script>alert(1)</script>\"'&]]>\ud800\uffff\n" + "x" * 9000


@pytest.fixture
def write(tmp_path: Path) -> Written:
    return Written(tmp_path)


def begin(write: Written, ranks: range, at: float = 0.0, **more: Any) -> None:
    for rank in ranks:
        write(rank, at, "phase", "join", -1, after="", **more)
        write(rank, at + 0.1, "phase", "run", 0, after="ok", **more)
        write(rank, at + 0.1, "run", "run", 0, world_size=len(ranks), before=0, **more)
        write(rank, at + 0.2, "first_step", **more)


def one_fault(write: Written, message: str = "ValueError") -> None:
    """Rank 1 of two raises, both go on and end."""
    told = record(1, "exception", message)
    begin(write, range(2))
    write(1, 1.0, "raised", **told)
    for rank in range(2):
        write(rank, 1.0005, "interrupted", cause=told)
        write(rank, 1.0025, "aborted", "abort")
    restart(write, range(2), 1.0, [told])
    for rank in range(2):
        write(rank, 2.0, "phase", "leave", 1, after="ok")
        write(rank, 2.1, "left", "out", 1, how="completed")


def trace_of(run_dir: Path) -> dict[str, Track]:
    path = run_dir / "trace.pftrace"
    assert main([str(run_dir), "-o", str(path)]) == 0
    return read_tracks(path)


def drawn(run_dir: Path) -> str:
    path = run_dir / "timeline.svg"
    assert main([str(run_dir), "-o", str(path)]) == 0
    text = path.read_text()
    root = ElementTree.fromstring(text)
    assert root.get("role") == "img" and root[0].tag.endswith("title")
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags <= {"svg", "title", "rect", "path", "text", "g"}
    names = {name for element in root.iter() for name in element.attrib}
    assert not {name for name in names if name.startswith("on") or "href" in name or name == "id"}
    return text


def ms(at: int) -> float:
    return round(at / 1e6 - 1_000_000, 3)


# --- a trace ------------------------------------------------------------------------------------------------------


def test_phases_and_what_is_inside_them(write: Written, tmp_path: Path) -> None:
    one_fault(write)
    track = trace_of(tmp_path)["rank 1 (host, pid 101)"]
    found = sorted(((ms(b), ms(e), name, depth) for b, e, name, depth in track.slices), key=lambda s: (s[0], s[3]))
    assert found == [
        (0.0, 100.0, "start", 0),
        (0.0, 100.0, "join", 1),
        (100.0, 1005.1, "iteration 0", 0),
        (100.0, 1002.0, "run", 1),
        (100.0, 200.0, "first step", 2),
        (200.0, 1000.5, "steps", 2),
        (1000.5, 1002.0, "aborting", 2),
        (1002.0, 1003.0, "abort", 1),
        (1002.0, 1002.5, "aborting", 2),
        (1003.0, 1004.0, "finalize", 1),
        (1004.0, 1005.1, "end round", 1),
        (1005.1, 2100.0, "iteration 1", 0),
        (1005.1, 1006.1, "assign ranks", 1),
        (1006.1, 1007.1, "start round", 1),
        (1007.1, 1008.1, "initialize", 1),
        (1008.1, 2000.0, "run", 1),
        (1008.1, 1010.0, "first step", 2),
        (1010.0, 2000.0, "steps", 2),
        (2000.0, 2100.0, "leave", 1),
    ]
    assert share_covered(track, *track.at("fault: exception"), track.at("first step")[-1]) == 1.0


def test_flows_lead_from_the_fault_to_each_rank(write: Written, tmp_path: Path) -> None:
    one_fault(write)
    tracks = trace_of(tmp_path)
    fault = next(e for _, name, e in tracks["rank 1 (host, pid 101)"].instants if name == "fault: exception")
    ends = [
        list(event.terminating_flow_ids)
        for rank in range(2)
        for _, name, event in tracks[f"rank {rank} (host, pid {100 + rank})"].instants
        if name == "interrupted"
    ]
    assert len(fault.flow_ids) == 2
    assert sorted(fault.flow_ids) == sorted(flow for each in ends for flow in each)
    assert [len(each) for each in ends] == [1, 1]
    assert "restart 1: rank 1: exception" in [name for _, _, name, _ in tracks["restarts"].slices]


def test_a_death_seen_after_its_consequences(write: Written, tmp_path: Path) -> None:
    """No flow leads back in time."""
    begin(write, range(2))
    write(0, 1.0, "interrupted")
    write(1, 1.01, "died", role="monitor", how="killed by SIGKILL", signal=9)
    restart(write, range(1), 1.01, [record(1, "terminated", "killed by SIGKILL")])
    tracks = trace_of(tmp_path)
    track = tracks["rank 1 (host, pid 101)"]
    assert list(map(ms, track.at("fault: signal"))) == [1000.0]
    assert [name for _, end, name, depth in track.slices if depth == 1 and ms(end) == 1010.0] == ["run"]
    assert [(ms(at), size) for at, size in tracks["world size"].counted] == [(100.0, 2), (1019.0, 1)]


def test_texts_are_annotations(write: Written, tmp_path: Path) -> None:
    one_fault(write)
    write(
        0, 1.5, "store_lost", role="monitor", text="no answer", kind="a name of ours", at=1, big=2**70, deep=[{"a": 1}]
    )
    tracks = trace_of(tmp_path)
    (event,) = (event for track in tracks.values() for _, name, event in track.instants if name == "store lost")
    told = {each.name: each.string_value or each.int_value for each in event.debug_annotations}
    assert told == {"text": "no answer", "kind": "a name of ours", "at": 1, "big": str(2**70), "deep": '[{"a": 1}]'}


def test_without_the_package(write: Written, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    one_fault(write)
    for name in list(sys.modules):
        if name.partition(".")[0] == "perfetto":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "perfetto", None)
    assert main([str(tmp_path), "-o", str(tmp_path / "x.pftrace")]) == 2
    said = capsys.readouterr().err
    assert 'pip install "inprocess[timeline]"' in said and said.count("\n") == 1
    assert not (tmp_path / "x.pftrace").exists()
    drawn(tmp_path)


# --- both ---------------------------------------------------------------------------------------------------------


def test_texts_of_others_do_no_harm(write: Written, tmp_path: Path) -> None:
    one_fault(write, HOSTILE)
    write(0, 1.2, "raised", iteration=1, message=HOSTILE, **{HOSTILE[:40]: HOSTILE})
    write(0, 1.3, HOSTILE[:50], iteration=1)
    write(0, 1.4, "phase", HOSTILE[:50], 1, after=HOSTILE)
    write(0, 1.5, "run", iteration=1, world_size=[HOSTILE])
    write(0, 1.6, "run", iteration=1, world_size=-5)
    text = drawn(tmp_path)
    assert "<script" not in text and text.count("</svg>") == 1 and "\x1b" not in text
    trace_of(tmp_path)


@pytest.mark.parametrize("at", [-1e9, 1e12, 1e300])
def test_times_that_cannot_be(write: Written, tmp_path: Path, at: float) -> None:
    one_fault(write)
    write(0, at, "phase", "run", 1, after="ok")
    write(0, 1.5, "no_progress", role="monitor", silent_for=at, record=record(0, "soft_timeout"))
    drawn(tmp_path)
    trace_of(tmp_path)


@pytest.mark.parametrize("name", ["events", "events-2"])
def test_a_directory_without_events(tmp_path: Path, capsys: Any, name: str) -> None:
    (tmp_path / name).mkdir()
    for suffix in ("svg", "pftrace"):
        code = main([str(tmp_path), "-o", str(tmp_path / f"x.{suffix}")])
        assert code == (0 if name == "events" else 2)
    assert ("no folder 'events'" in capsys.readouterr().err) == (name != "events")
    assert "no events" in svg([])


def test_what_cannot_be_written(write: Written, tmp_path: Path, capsys: Any) -> None:
    one_fault(write)
    assert main([str(tmp_path), "-o", str(tmp_path / "none" / "x.svg")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_no_incidents_and_half_a_line(write: Written, tmp_path: Path, capsys: Any) -> None:
    begin(write, range(2))
    with (tmp_path / "events" / "rank-1-job.jsonl").open("ab") as file:
        file.write(b'{"time":1.0,"wall')
    assert "2 ranks, 0 restarts" in drawn(tmp_path)
    assert "is left out" in capsys.readouterr().err
    assert trace_of(tmp_path)["restarts"].slices == []


def test_a_job_that_still_runs(write: Written, tmp_path: Path) -> None:
    """Each phase that has not ended reaches to the last event of the job, and nobody is gone."""
    begin(write, range(2))
    write(0, 9.0, "recovered", step=3)
    trails, _ = read(str(tmp_path))
    found = lanes(trails[0])
    assert [(lane.ended, lane.end - 1000) for lane in found] == [("", 9.0), ("", 9.0)]
    assert [size for _, size in sizes(trails[0], found)] == [2]
    assert ">gone<" not in drawn(tmp_path)


def test_a_rank_that_says_nothing_of_its_end(write: Written, tmp_path: Path) -> None:
    """The others went on without it, or another process took its place."""
    begin(write, range(3))
    restart(write, range(2), 5.0, [record(2, "unresponsive")])
    for rank in range(2):
        write(rank, 6.0, "left", "out", 1, how="completed")
    trails, _ = read(str(tmp_path))
    assert [(lane.rank, lane.ended, round(lane.end - 1000, 4)) for lane in lanes(trails[0])] == [
        (0, "completed", 6.0),
        (1, "completed", 6.0),
        (2, "gone", 5.009),
    ]
    assert ">gone<" in drawn(tmp_path)


def test_two_jobs_have_tracks_of_their_own(write: Written, tmp_path: Path) -> None:
    for job, at in (("one", 0.0), ("two", 50.0)):
        begin(write, range(2), at, job=job)
    assert {"job one", "job two"} <= set(trace_of(tmp_path))
    drawn(tmp_path)


# --- the picture --------------------------------------------------------------------------------------------------


def test_many_ranks_and_restarts(write: Written, tmp_path: Path) -> None:
    """Neither makes it too high or too large; each restart can be seen."""
    told = record(1, "exception", "ValueError")
    begin(write, range(70))
    for number in range(1, 31):
        write(1, 10.0 * number, "raised", iteration=number - 1, **told)
        restart(write, range(2), 10.0 * number, [told], number)
    for rank in range(70):
        write(rank, 1000.0, "left", "out", 30, how="completed")
    text = drawn(tmp_path)
    assert "70 ranks, 30 restarts in 1,000 s" in text
    assert ">0-1<" in text and text.count("<g>") == 30
    assert float(text.partition('height="')[2].partition('"')[0]) < 800
    assert len(text) < 60_000


def test_a_restart_is_seen_however_short(write: Written, tmp_path: Path) -> None:
    one_fault(write)
    write(0, 9e7, "left", "out", 1, how="completed")
    trails, _ = read(str(tmp_path))
    text = svg(list(all_incidents(trails)))
    assert f'h1v44h-1z" fill="{STATES[ABORT][0]}"' in text  # one column of both ranks
