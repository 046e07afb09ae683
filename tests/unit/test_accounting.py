"""Where the time of a job went, from made-up events: parts that add up, and what is known when events are gone."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from inprocess.events.record import Event, Header, to_line
from inprocess.reports import program, writer
from inprocess.reports.accounting import OTHER, Accounting, Loss, account, merge, total
from inprocess.reports.incident import all_incidents
from inprocess.reports.page import _time
from inprocess.reports.reading import read
from inprocess.reports.summary import read_summary

from .test_reports import Written, record, restart


@pytest.fixture
def write(tmp_path: Path) -> Written:
    return Written(tmp_path)


def accounted(run_dir: Path) -> Accounting:
    trails, _ = read(str(run_dir))
    ((trail, found),) = all_incidents(trails)
    time = account(trail, found)
    assert time is not None
    return time


def raises(write: Written, number: int, at: float, message: str = "ValueError") -> None:
    told = record(0, "exception", message)
    write(0, at, "raised", iteration=number - 1, **told)
    restart(write, range(2), at, [told], number)


def parts(time: Accounting) -> float:
    lost = sum(seconds for phases in time.lost.values() for seconds in phases.values())
    return time.productive + time.starting + time.repeated + time.waiting + lost


def a_job(write: Written) -> None:
    """1 s to start; ValueError after 2 s, MemoryError after 3 more, then 5 s to the end."""
    write(0, 0.0, "call", "join", -1)
    for rank in range(2):
        write(rank, 1.0, "run", world_size=2, before=0)
    raises(write, 1, 3.0)
    raises(write, 2, 6.009, "MemoryError")
    write(0, 11.018, "left", "out", 2, how="completed", pings=7)


def test_parts_of_the_whole(write: Written, tmp_path: Path) -> None:
    a_job(write)
    time = accounted(tmp_path)
    assert time.seconds == pytest.approx(11.018) and time.starting == pytest.approx(1.0)
    assert {kind: sum(phases.values()) for kind, phases in time.lost.items()} == {
        "exception": pytest.approx(0.009),
        "oom": pytest.approx(0.009),
    }
    # all 4 steps of both iterations are done again: nothing was saved
    assert time.repeated == pytest.approx(2.0 + 3.0) and time.repeated_steps == 8
    assert time.kept_steps == 7 and time.restarts == {"exception": 1, "oom": 1}
    assert time.productive == pytest.approx(5.0) and parts(time) == pytest.approx(time.seconds)
    assert time.goodput == pytest.approx(5.0 / 11.018)


@pytest.mark.parametrize("seed", range(20))
def test_parts_add_up_for_any_restarts(write: Written, tmp_path: Path, seed: int) -> None:
    """Also where one begins before the one before is over, or the function is not called again."""
    rng = random.Random(seed)
    write(0, 0.0, "call", "join", -1)
    write(0, rng.uniform(0, 2), "run", world_size=2, before=0)
    at = 2.0
    for number in range(1, 8):
        at += rng.choice((0.001, 0.005, 0.5, 3.0))
        told = record(0, "exception", rng.choice(("ValueError", "MemoryError")))
        write(0, at, rng.choice(("raised", "no_progress")), iteration=number - 1, silent_for=rng.uniform(0, 4), **told)
        if rng.random() < 0.6:
            restart(write, range(2), at, [told], number)
        else:
            write(0, at + 0.004, "restart", "end round", number, restart=number, records=[told], pings=rng.randrange(4))
        if rng.random() < 0.3:
            write(0, at + rng.uniform(0, 1), "too_few", "initialize", number, patience=60.0)
    write(0, at + 2.0, "left", "out", 7, how="failed")
    time = accounted(tmp_path)
    assert parts(time) == pytest.approx(time.seconds)
    assert 0.0 <= time.goodput <= 1.0 and min(parts_of(time)) >= 0.0


def parts_of(time: Accounting) -> list[float]:
    return [time.productive, time.starting, time.repeated, time.waiting, *(loss.seconds for loss in time.losses)]


def test_waiting_for_replacements_is_not_blamed_on_the_fault(write: Written, tmp_path: Path) -> None:
    for rank in range(2):
        write(rank, 0.0, "run", world_size=2, before=0)
    write(1, 1.0, "died", role="monitor", how="killed by SIGKILL", signal=9)
    died = record(1, "terminated", "killed by SIGKILL")
    write(0, 1.001, "interrupted")
    write(0, 1.01, "restart", "end round", 1, restart=1, records=[died], pings=0)
    write(0, 1.02, "too_few", "initialize", 1, patience=60.0)
    joined = record(1, "joined", "it was waited for")
    write(0, 31.02, "interrupted", "initialize", 1)
    restart(write, range(2), 31.02, [joined], 2)
    write(0, 40.0, "left", "out", 2, how="completed")
    time = accounted(tmp_path)
    assert time.waiting == pytest.approx(30.0)
    assert {kind: sum(phases.values()) for kind, phases in time.lost.items()} == {
        "signal": pytest.approx(0.02),
        "request": pytest.approx(0.009),
    }
    assert parts(time) == pytest.approx(time.seconds)


def test_a_rank_enters_the_function_when_another_one_hangs_already(write: Written, tmp_path: Path) -> None:
    """The standstill ends with the next iteration, not with a rank that was late for this one."""
    write(1, 1.0, "run", world_size=2, before=0)
    write(0, 1.3, "run", world_size=2, before=0)
    hang = record(1, "soft_timeout", "no progress")
    write(1, 5.5, "no_progress", role="monitor", record=hang, silent_for=4.45)
    restart(write, range(2), 5.5, [hang])
    write(0, 8.0, "left", "out", 1, how="completed")
    time = accounted(tmp_path)
    assert time.losses[0].seconds == pytest.approx(4.45 + 0.009)
    assert time.productive + time.repeated == pytest.approx(7.0 - 4.459)


def test_phases_are_those_before_the_function_runs(write: Written, tmp_path: Path) -> None:
    """The first step is no loss, and of what no phase is known that has no name."""
    a_job(write)
    time = accounted(tmp_path)
    assert "first_step" not in time.lost["exception"] and time.losses[0].phases["first_step"] == pytest.approx(0.0019)


def test_a_part_without_a_name(write: Written, tmp_path: Path) -> None:
    """The job ends with nobody left to tell in which phase."""
    write(0, 1.0, "run", world_size=1, before=0)
    write(0, 12.0, "died", role="monitor", how="killed by SIGKILL", signal=9)
    write(0, 15.0, "dropped", count=1, why="x")
    assert accounted(tmp_path).lost == {"signal": {OTHER: pytest.approx(3.0)}}


def test_a_job_that_never_ran(write: Written, tmp_path: Path) -> None:
    write(0, 0.0, "call", "join", -1)
    trails, _ = read(str(tmp_path))
    ((trail, found),) = all_incidents(trails)
    assert account(trail, found) is None and total([]) is None


def test_several_jobs_together(write: Written, tmp_path: Path) -> None:
    a_job(write)
    one = accounted(tmp_path)
    both = total([one, one])
    assert both is not None and both.seconds == pytest.approx(2 * one.seconds)
    assert both.goodput == pytest.approx(one.goodput) and both.restarts == {"exception": 2, "oom": 2}


def test_what_the_oldest_events_said_is_kept_in_the_summary(write: Written, tmp_path: Path) -> None:
    a_job(write)
    writer.write(str(tmp_path))
    whole = accounted(tmp_path)
    assert read_summary(str(tmp_path)) == [whole]
    for path in (tmp_path / "events").iterdir():  # as when a file becomes .1 twice
        header, *lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(header + b"".join(line for line in lines if json.loads(line)["time"] > 4.0))
    assert accounted(tmp_path).seconds < whole.seconds
    for _ in range(2):
        writer.write(str(tmp_path))
        (kept,) = read_summary(str(tmp_path))
        assert kept == whole
    raises(write, 3, 12.0)
    writer.write(str(tmp_path))
    (kept,) = read_summary(str(tmp_path))
    assert [loss.number for loss in kept.losses] == [1, 2, 3]
    assert parts(kept) == pytest.approx(kept.seconds)


def forget(run_dir: Path, until: float, *ranks: int) -> None:
    """As when the files of these ranks become .1 twice."""
    for rank in ranks:
        (path,) = (run_dir / "events").glob(f"rank-{rank}-*")
        header, *lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(header + b"".join(line for line in lines if json.loads(line)["time"] > until))


def many(write: Written, numbers: range) -> None:
    for number in numbers:
        raises(write, number, 10.0 * number)
    write(0, 10.0 * numbers[-1] + 9.0, "first_step", iteration=numbers[-1])


def a_rank_that_dies_early(write: Written) -> None:
    """It is the first one to call; its file stays as it is."""
    write(2, 0.0, "call", "join", -1)
    for rank in range(3):
        write(rank, 1.0, "run", world_size=3, before=0)
    write(2, 10.005, "restart", "end round", 1, restart=1, records=[record(0, "exception")], pings=4)
    many(write, range(1, 9))


@pytest.mark.parametrize("further", [0, 1], ids=["nothing more", "one more incident"])
def test_the_file_of_a_rank_that_died_early_is_not_all_that_was_known(
    write: Written, tmp_path: Path, further: int
) -> None:
    a_rank_that_dies_early(write)
    whole = accounted(tmp_path)
    writer.write(str(tmp_path))
    forget(tmp_path, 55.0, 0, 1)
    if further:
        many(write, range(9, 10))
    writer.write(str(tmp_path))
    (kept,) = read_summary(str(tmp_path))
    assert kept.losses[:8] == whole.losses and [loss.number for loss in kept.losses] == [*range(1, 9 + further)]
    assert parts(kept) == pytest.approx(kept.seconds)


def test_incidents_keep_their_numbers_when_the_call_before_is_gone(tmp_path: Path, capsys: Any) -> None:
    """Restarts are counted anew in each call; the summary knows how many there were before."""
    header = to_line(Header("job", "rank", 0, 100, "host", 0.0, 1000.0))
    told = record(0, "exception", "ValueError")
    by_call: list[bytes] = []
    for call in range(2):
        found = [(0.0, 0, "run", {"world_size": 1, "before": 0})]
        for number in range(1, 4):
            found += [
                (10.0 * number, number - 1, "raised", told),
                (10.0 * number + 1, number, "restart", {"restart": number, "records": [told], "pings": 4}),
                (10.0 * number + 2, number, "run", {"world_size": 1, "before": 1}),
            ]
        at = 1.0 + 100.0 * call
        events = [Event(at + t, 1000.0 + at + t, call, i, 0, 0, "run", kind, more) for t, i, kind, more in found]
        by_call.append(b"".join(map(to_line, events)))
    path = tmp_path / "events" / "rank-0-host-100.jsonl"
    path.parent.mkdir()
    path.write_bytes(header + b"".join(by_call))
    writer.write(str(tmp_path))
    (before,) = read_summary(str(tmp_path))
    path.write_bytes(header + by_call[1])
    writer.write(str(tmp_path))
    assert read_summary(str(tmp_path)) == [before] and [loss.number for loss in before.losses] == [*range(1, 7)]
    assert program.main([str(tmp_path), "--incident", "6"]) == 0
    assert program.main([str(tmp_path), "--incident", "3"]) == 2


def test_a_summary_with_more_than_this_version_knows(write: Written, tmp_path: Path) -> None:
    a_job(write)
    writer.write(str(tmp_path))
    path = tmp_path / "incidents" / "summary.json"
    told = json.loads(path.read_text())
    told["jobs"][0] |= {"rack": 1}
    told["jobs"][0]["losses"][0] |= {"rack": 1}
    path.write_text(json.dumps(told))
    assert read_summary(str(tmp_path)) == [accounted(tmp_path)]


def test_an_incident_that_turns_out_to_be_none_is_not_kept(write: Written, tmp_path: Path) -> None:
    """A monitor said that its rank died; then the others completed."""
    many(write, range(1, 3))
    write(1, 29.5, "died", role="monitor", how="killed by SIGKILL", signal=9)
    writer.write(str(tmp_path))
    assert len(read_summary(str(tmp_path))[0].losses) == 3
    write(0, 31.0, "left", "out", 2, how="completed", pings=3)
    writer.write(str(tmp_path))
    assert read_summary(str(tmp_path)) == [accounted(tmp_path)] and len(accounted(tmp_path).losses) == 2


def test_the_command_knows_what_the_summary_remembers(write: Written, tmp_path: Path, capsys: Any) -> None:
    a_rank_that_dies_early(write)
    writer.write(str(tmp_path))
    forget(tmp_path, 55.0, 0, 1, 2)
    (kept,) = read_summary(str(tmp_path))
    assert program.main([str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.err == "" and "incidents 1-5: their events are gone" in said.out
    assert program.main([str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["accounting"] == kept.to_json() and told["problems"] == []


def test_the_command_says_of_which_incidents_nothing_is_known(write: Written, tmp_path: Path, capsys: Any) -> None:
    a_rank_that_dies_early(write)
    forget(tmp_path, 55.0, 0, 1)
    assert program.main([str(tmp_path)]) == 0
    assert "the events of incidents 2-5 are gone" in capsys.readouterr().err


def test_a_job_of_the_same_name_that_began_later_is_another_one() -> None:
    old, new = Accounting("a:1", 0.0, 1.0, 10.0), Accounting("a:1", 20.0, 21.0, 30.0)
    assert merge(old, new) == new


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[]",
        b"{}",
        b'{"format": "inprocess-summary", "version": 2, "jobs": []}',
        b'{"format": "inprocess-summary", "version": 1, "jobs": [{}]}',
        b'{"format": "inprocess-summary", "version": 1, "jobs": [{"job": "a", "begin": "x", "started": 0, "end": 1, '
        b'"losses": [], "last_steps": 0}]}',
        b"\xff",
    ],
)
def test_a_summary_that_is_none(write: Written, tmp_path: Path, damage: bytes) -> None:
    a_job(write)
    (tmp_path / "incidents").mkdir()
    (tmp_path / "incidents" / "summary.json").write_bytes(damage)
    assert read_summary(str(tmp_path)) == []
    writer.write(str(tmp_path))
    assert read_summary(str(tmp_path)) == [accounted(tmp_path)]


def test_what_is_printed(write: Written, tmp_path: Path, capsys: Any) -> None:
    a_job(write)
    assert program.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "goodput 45.4%" and lines[2] == "of 11.0 s:"
    assert lines[3].split() == ["productive", "5.00", "s", "45.4%"]
    assert lines[-2].split()[:3] == ["steps", "done", "again"] and lines[-2].endswith("8 steps")
    assert program.main([str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told) == ["incidents", "goodput", "accounting", "problems"]
    assert told["accounting"]["lost"]["oom"]["leave"] == pytest.approx(0.001)
    assert told["goodput"] == pytest.approx(told["accounting"]["productive"] / told["accounting"]["seconds"])


def test_the_page_of_all_incidents_has_it(write: Written, tmp_path: Path) -> None:
    a_job(write)
    writer.write(str(tmp_path))
    page = (tmp_path / "index.html").read_text()
    assert "Where the time went" in page and "lost: oom" in page and "45.4%" in page


def test_phases_that_took_next_to_nothing_are_one_row_for_each_kind() -> None:
    phases = {"abort": 0.4, "detect": 0.001, "leave": 0.002, "end_round": 0.003}
    losses = [Loss(1, "oom", 0.406, 0.0, 0.0, 9, 0, phases), Loss(2, "hang", 0.002, 0.0, 0.0, 9, 0, {"leave": 0.002})]
    table = _time(Accounting("job", 0.0, 1.0, 10.0, tuple(losses)))
    assert re.findall(r"lost: (\w+)</td><td>([\w, ]+)</td>", table) == [
        ("oom", "abort"),
        ("oom", "detect, leave, end_round"),
        ("hang", "leave"),
    ]
