"""From made-up events to verdicts and reports; what real faults leave is in ``tests/ranks/test_reports.py``."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.events.record import Event, Header, to_line
from inprocess.live import workers
from inprocess.reports import program, writer
from inprocess.reports.accounting import account
from inprocess.reports.incident import PHASES, all_incidents
from inprocess.reports.reading import read
from inprocess.system.private_folder import Folder

TORCH = "/x/site-packages/torch/distributed/distributed_c10d.py:2810 in all_reduce"
LOADER = "/x/site-packages/torch/utils/data/dataloader.py:1120 in _try_get_data"
KEPT = f"{inspect.getfile(workers)}:240 in {workers.Crew.wait.__name__}"


class Written:
    """Writes a run directory: each line at a time of its own."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        (run_dir / "events").mkdir(parents=True, exist_ok=True)

    def __call__(
        self, who: int, at: float, kind: str, /, phase: str = "run", iteration: int = 0, role: str = "rank", **more: Any
    ) -> None:
        job = more.pop("job", "job")
        path = self.run_dir / "events" / f"{role}-{who}-{job}.jsonl"
        if not path.exists():
            path.write_bytes(to_line(Header(job, role, who, 100 + who, "host", 0.0, 1000.0)))
        with path.open("ab") as file:
            file.write(to_line(Event(at, 1000.0 + at, 0, iteration, who, who, phase, kind, more)))


@pytest.fixture
def write(tmp_path: Path) -> Written:
    return Written(tmp_path)


def record(rank: int, kind: str, message: str = "", where: str = "") -> dict[str, Any]:
    return InterruptionRecord(rank, Interruption(kind), rank, message, where).to_dict()


def stacks(*frames: str, **more: Any) -> dict[str, Any]:
    return {"threads": [{"name": "MainThread", "main": True, "frames": list(frames)}], **more}


def restart(write: Written, ranks: range, at: float, records: list[Any], number: int = 1, **more: Any) -> None:
    """The rest of the restart: one millisecond for each phase."""
    for rank in ranks:
        for step, phase in enumerate(("abort", "finalize", "end round")):
            write(rank, at + 1e-3 * (step + 2), "phase", phase, number - 1, after="ok")
        write(rank, at + 5e-3, "restart", "end round", number, restart=number, records=records, pings=4, **more)
        for step, phase in enumerate(("assign ranks", "start round", "initialize", "run")):
            write(rank, at + 1e-3 * (step + 5) + 1e-4, "phase", phase, number, after="ok")
        write(rank, at + 9e-3, "run", "run", number, world_size=len(ranks), before=len(ranks))
        write(rank, at + 10e-3, "first_step", "run", number)


def the_one(run_dir: Path) -> Any:
    trails, problems = read(str(run_dir))
    assert problems == []
    ((_, found),) = all_incidents(trails)
    (incident,) = found
    return incident


# --- verdicts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("ValueError: loss is nan", "exception"),
        ("MemoryError", "oom"),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "oom"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", "oom"),
        ("RuntimeError: DataLoader worker (pid(s) 71) exited unexpectedly", "input"),
        ("RuntimeError: DataLoader timed out after 5 seconds", "input"),
        ("AcceleratorError: CUDA error: uncorrectable ECC error encountered", "gpu"),
        ("RuntimeError: Detected mismatch between collectives on ranks", "collective"),
    ],
)
def test_what_an_exception_says(write: Written, tmp_path: Path, message: str, kind: str) -> None:
    told = record(1, "exception", message, "/home/me/train.py:41 in step")
    echo = record(0, "exception", "RuntimeError: Connection closed by peer [127.0.0.1]:4711")
    write(0, 0.9, "raised", **echo)
    write(1, 1.0, "raised", **told)
    restart(write, range(2), 1.0, [echo, told])
    found = the_one(tmp_path).verdict
    assert (found.initial_rank, found.kind, found.where, found.also) == (1, kind, "train.py:41 step", ())


@pytest.mark.parametrize(
    ("through", "kind"), [("/torch/utils/data/dataloader.py:9 in __next__", "input"), ("/x.py:1", "exception")]
)
def test_a_connection_to_a_process_of_its_own(write: Written, tmp_path: Path, through: str, kind: str) -> None:
    place = "/lib/multiprocessing/connection.py:395 in _recv"
    told = record(1, "exception", "ConnectionResetError: [Errno 104] Connection reset by peer", place)
    echo = record(0, "exception", "RuntimeError: Connection closed by peer [127.0.0.1]:4711")
    write(0, 0.9, "raised", **echo)
    write(1, 1.0, "raised", **told, lines=["/home/me/train.py:41 in step", through, place])
    restart(write, range(2), 1.0, [echo, told])
    found = the_one(tmp_path).verdict
    assert (found.initial_rank, found.kind, found.also) == (1, kind, ())


CLOSED = "RuntimeError: Connection closed by peer [127.0.0.1]:4711"


@pytest.mark.parametrize(
    ("words", "rank", "kind", "confidence"),
    [
        # it had returned, and taken its connections with it
        ((2, "phase", "wait for the outcome"), 2, "collective", 0.7),
        # its own events are missing, those of the others are not
        ((2, "phase", "run"), 2, "exception", 0.4),
        ((2, "interrupted", "run"), None, "exception", 0.2),
    ],
)
def test_who_only_saw_another_one_fail_is_not_named(
    write: Written, tmp_path: Path, words: Any, rank: int | None, kind: str, confidence: float
) -> None:
    write(words[0], 0.9, words[1], words[2])
    echoes = [record(each, "exception", CLOSED) for each in (0, 1)]
    for each, echo in enumerate(echoes):
        write(each, 1.0, "raised", **echo)
    restart(write, range(2), 1.0, echoes)
    found = the_one(tmp_path).verdict
    assert (found.initial_rank, found.kind, found.confidence) == (rank, kind, confidence)
    assert ("no event names the rank that failed" in found.against) == (rank is None)


@pytest.mark.parametrize(("silent", "rank"), [((0,), 0), ((), None), ((0, 1), None)])
def test_the_store_is_lost(write: Written, tmp_path: Path, silent: tuple[int, ...], rank: int | None) -> None:
    """With its host, where one rank says nothing more. That the others saw connections close is no exception."""
    for each in range(3):
        write(each, 0.5, "phase", after="ok")
    for each in {0, 1, 2} - {*silent}:
        write(each, 1.0, "raised", **record(each, "exception", CLOSED))
        write(each, 1.1, "store_lost", role="monitor", text="it does not answer")
        write(each, 1.2, "left", "out", how="failed", why="StoreLost")
    incident = the_one(tmp_path)
    assert (incident.verdict.initial_rank, incident.verdict.kind) == (rank, "store_lost")
    assert incident.decision == "the job ended"


def test_events_that_end_before_the_job(write: Written, tmp_path: Path) -> None:
    """A disk that is full: nobody says that the job has ended."""
    write(0, 0.5, "phase", after="ok")
    write(1, 1.0, "died", role="monitor", how="killed by SIGKILL", signal=9, oom_kills=0)
    assert the_one(tmp_path).decision.startswith("the events end here")
    write(0, 1.1, "left", "out", how="failed", why="RestartAbort")
    assert the_one(tmp_path).decision == "the job ended"


@pytest.mark.parametrize(
    ("died", "kind", "confidence"),
    [
        ({"how": "killed by SIGKILL", "signal": 9, "oom_kills": 0}, "signal", 0.95),
        ({"how": "killed by SIGKILL", "signal": 9, "oom_kills": 1}, "oom", 0.95),
        ({"how": "killed by SIGSEGV", "signal": 11, "oom_kills": 1}, "signal", 0.95),
        ({"how": "killed by SIGTERM", "signal": 15, "oom_kills": 0}, "preemption", 0.8),
        ({"how": "the training process exited with code 3", "exit_code": 3, "oom_kills": 0}, "exit", 0.95),
        ({"how": "the training process ended"}, "signal", 0.5),
    ],
)
def test_how_a_process_died(write: Written, tmp_path: Path, died: Any, kind: str, confidence: float) -> None:
    write(1, 1.0, "died", role="monitor", **died)
    restart(write, range(1), 1.0, [record(1, "terminated", died["how"])])
    found = the_one(tmp_path).verdict
    assert (found.initial_rank, found.kind, found.confidence) == (1, kind, confidence)
    assert "no stack of rank 1" in found.against


@pytest.mark.parametrize(
    ("state", "answers", "frames", "kind"),
    [
        ("T", False, (), "stopped"),
        ("R", False, (), "gil_hang"),
        ("S", True, ("/home/me/train.py:3 in step",), "hang"),
        ("S", True, (LOADER, "/home/me/train.py:3 in step"), "input"),
        ("S", True, (KEPT, "/home/me/train.py:3 in step"), "input"),
    ],
)
def test_a_rank_that_does_not_answer(
    write: Written, tmp_path: Path, state: str, answers: bool, frames: tuple[str, ...], kind: str
) -> None:
    told = record(1, "hard_timeout", "no progress")
    write(1, 10.0, "no_progress", role="monitor", record=record(1, "soft_timeout", "no progress"), silent_for=9.0)
    write(1, 10.0, "process", role="monitor", state=state)
    if answers:
        write(1, 10.1, "interrupted")
        write(1, 10.1, "stacks", **stacks(*frames))
    write(1, 15.0, "killed", role="monitor", record=told)
    write(0, 10.1, "stacks", **stacks(TORCH))
    restart(write, range(1), 15.0, [told])
    incident = the_one(tmp_path)
    assert (incident.verdict.initial_rank, incident.verdict.kind) == (1, kind)
    assert incident.verdict.waiting == (0,)
    assert incident.at == pytest.approx(1001.0)  # when it made progress last


@pytest.mark.parametrize(("told", "waiting"), [({"left_collective": True}, (0,)), ({"left_collective": False}, ())])
def test_a_rank_whose_collective_has_just_raised(
    write: Written, tmp_path: Path, told: dict[str, bool], waiting: tuple[int, ...]
) -> None:
    """It waited for the one that died, though its frames are elsewhere by the time at which it hears of that."""
    died = record(1, "terminated", "killed by SIGKILL")
    frames = ("/lib/python3.11/contextlib.py:158 in __exit__", "/home/me/train.py:81 in step")
    write(0, 10.0, "stacks", **stacks(*frames), **told)
    restart(write, range(1), 10.0, [died])
    found = the_one(tmp_path).verdict
    assert (found.initial_rank, found.kind, found.waiting) == (1, "signal", waiting)


def test_all_wait_and_one_of_them_elsewhere(write: Written, tmp_path: Path) -> None:
    places = {0: "train.py:8 in step", 1: "train.py:8 in step", 2: "train.py:9 in step"}
    told = [record(rank, "soft_timeout", "waited", where) for rank, where in places.items()]
    for rank, where in places.items():
        write(rank, 10.0, "stacks", **stacks(TORCH, where, where=where, waits=True))
    restart(write, range(3), 10.0, [record(0, "soft_timeout", "no progress")], stuck=told)
    found = the_one(tmp_path).verdict
    assert (found.initial_rank, found.kind, found.where) == (2, "collective", "train.py:9 step")
    assert found.waiting == (0, 1)


def test_a_standstill_that_an_error_explains(write: Written, tmp_path: Path) -> None:
    """The rank that handled it waits elsewhere than the others, which is no mismatch."""
    places = {0: "train.py:8 in step", 1: "train.py:20 in train"}
    for rank, where in places.items():
        write(rank, 10.0, "stacks", **stacks(TORCH, where, where=where, waits=True))
    error = record(1, "exception", "ValueError: nan", "/home/me/train.py:9 in step")
    restart(write, range(2), 10.0, [record(0, "soft_timeout", "no progress"), error])
    found = the_one(tmp_path).verdict
    assert (found.initial_rank, found.kind, found.where) == (1, "exception", "train.py:9 step")
    assert found.waiting == (0,)


def test_nobody_is_named_where_nothing_tells(write: Written, tmp_path: Path) -> None:
    restart(write, range(2), 1.0, [])
    found = the_one(tmp_path).verdict
    assert found.initial_rank is None and found.confidence <= 0.1


def test_records_of_a_newer_version(write: Written, tmp_path: Path, capsys: Any) -> None:
    """What they say beyond this one is left out; a kind that this one does not know is told of."""
    newer = record(1, "terminated", "killed by SIGKILL") | {"rack": "r7"}
    write(1, 1.0, "killed", role="monitor", record=newer, at_once=True)
    restart(write, range(1), 1.0, [newer, record(2, "terminated") | {"interruption": "evaporated"}])
    found = the_one(tmp_path).verdict
    assert (found.initial_rank, found.kind) == (1, "signal")
    assert program.main([str(tmp_path), "--json"]) == 0
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem.startswith("incidents 1: 1 record is left out") and "evaporated" in problem


# --- incidents ----------------------------------------------------------------------------------------------------


def test_phases_and_steps(write: Written, tmp_path: Path) -> None:
    told = record(1, "exception", "ValueError")
    for rank in range(2):
        write(rank, 0.0, "run", world_size=2, before=0)
    write(1, 1.0, "raised", **told)
    for rank in range(2):
        write(rank, 1.001, "interrupted")
        write(rank, 1.002, "aborted")
    restart(write, range(2), 1.001, [told])
    incident = the_one(tmp_path)
    phases = {name: round(seconds * 1e3, 1) for name, seconds in incident.phases.items()}
    assert list(phases) == list(PHASES)
    assert phases == {
        "standstill": 0.0,
        "detect": 1.0,
        "abort": 1.0,
        "leave": 2.0,
        "finalize": 1.0,
        "end_round": 1.1,
        "assign": 1.0,
        "start_round": 1.0,
        "initialize": 1.0,
        "first_step": 1.9,
    }
    assert incident.took == pytest.approx(sum(phases.values()) / 1e3 - 0.0019)
    assert (incident.before, incident.after, incident.steps_lost) == (2, 2, 4)


def test_the_phases_add_up_to_what_the_first_rank_logs(write: Written, tmp_path: Path) -> None:
    """Where another one was the last to leave, and entered later."""
    told = record(1, "exception", "ValueError")
    for rank in range(2):
        write(rank, 0.0, "run", world_size=2, before=0)
    write(1, 1.0, "raised", **told)
    for rank in range(2):
        write(rank, 1.001, "interrupted")
    restart(write, range(2), 1.001, [told])
    for rank in range(2):
        write(rank, 1.02 + rank, "run", iteration=1, world_size=2, before=2, took=0.021 + rank, silent=0.0)
    incident = the_one(tmp_path)
    assert incident.took == pytest.approx(0.021, abs=1e-6)
    assert sum(incident.phases[name] or 0.0 for name in PHASES[1:-1]) == pytest.approx(incident.took)


def test_steps_that_a_live_state_kept(write: Written, tmp_path: Path) -> None:
    told = record(1, "exception", "ValueError")
    write(1, 1.0, "raised", **told)
    restart(write, range(2), 1.0, [told])
    write(0, 1.02, "recovered", iteration=1, step=3)
    assert the_one(tmp_path).steps_lost == 1


def test_steps_of_which_nobody_says_anything(
    write: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk was full when the ranks would have said it."""
    write(0, 0.0, "run", world_size=2, before=0)
    write(1, 1.0, "raised", **record(1, "exception", "ValueError"))
    write(0, 1.1, "interrupted")
    incident = the_one(tmp_path)
    assert incident.steps_lost is None and incident.to_json()["steps_lost"] is None
    assert program.main([str(tmp_path)]) == 0
    assert "? steps lost" in capsys.readouterr().out
    assert writer.write(str(tmp_path)) is False
    page = (tmp_path / "incidents/0001/incident.html").read_text()
    assert "<b>steps lost</b>?<" in page and "<b>steps lost</b>0 + ?<" in (tmp_path / "index.html").read_text()


def test_goodput_is_what_restarts_and_repeated_steps_leave(write: Written, tmp_path: Path) -> None:
    told = record(0, "exception", "ValueError")
    write(0, 0.0, "call", "join", -1)
    write(0, 1.0, "run", world_size=1, before=0)
    write(0, 3.0, "raised", **told)
    restart(write, range(1), 3.0, [told])
    write(0, 3.02, "recovered", iteration=1, step=2)
    write(0, 10.009, "left", "out", 1, how="completed")
    trails, _ = read(str(tmp_path))
    ((trail, found),) = all_incidents(trails)
    # 1 s to start, 9 ms for the restart, and half of the 2 s before it
    time = account(trail, found)
    assert time is not None and time.goodput == pytest.approx(1 - (1 + 0.009 + 1) / 10.009)


def test_the_job_is_launched_again(write: Written, tmp_path: Path) -> None:
    for at in (1.0, 700.0):
        write(0, at, "raised", **record(0, "exception", "ValueError"))
        restart(write, range(1), at, [record(0, "exception", "ValueError")])
    trails, _ = read(str(tmp_path))
    ((_, found),) = all_incidents(trails)
    assert [incident.number for incident in found] == [1, 2]


# --- directories --------------------------------------------------------------------------------------------------


def a_fault(write: Written, job: str = "job", at: float = 1.0) -> None:
    write(1, at, "raised", job=job, **record(1, "exception", "ValueError: \x1b[31m<script>\ud800"))
    for rank in range(2):
        write(rank, at + 0.01, "restart", "end round", 1, job=job, restart=1, records=[], pings=1)


HEADER = to_line(Header("job", "rank", 9, 109, "host", 0.0, 1000.0))


def damaged(run_dir: Path, name: str, data: bytes) -> list[str]:
    (run_dir / "events" / name).write_bytes(data)
    trails, problems = read(str(run_dir))
    assert [trail.job for trail in trails] == ["job"]  # the rest is read
    return problems


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"time":1.0,"wall_ti', "line 1 is left out"),
        (b"\xff\xfe\x00", "line 1 is left out"),
        (b'{"format":"inprocess-events","version":99}\n', "inprocess-events 99"),
        (b"[1]\n{}\n", "2 lines are left out in all"),
        (to_line(Event(1.0, 1.0, 0, 0, 0, 0, "run", "run", {})), "no header comes before it"),
        (b"x" * 1_000_000, "are more than"),
        (HEADER + to_line(Event(1e20, 1e20, 0, 0, 0, 0, "run", "run", {})), "which is no time"),
        (HEADER + to_line(Event(1.0, -1e20, 0, 0, 0, 0, "run", "run", {})), "which is no time"),
    ],
)
def test_files_that_cannot_be_read(write: Written, tmp_path: Path, data: bytes, words: str) -> None:
    a_fault(write)
    problems = damaged(tmp_path, "rank-9-x.jsonl", data)
    assert any(words in problem and "rank-9-x.jsonl" in problem for problem in problems), problems


def test_files_of_a_full_disk_are_empty(write: Written, tmp_path: Path) -> None:
    """Where all are, there is no incident, and a report that said nothing of it would say that there was none."""
    a_fault(write)
    path = tmp_path / "events" / "rank-0-job.jsonl"
    relayed = path.with_name("relayed-0-job.jsonl")
    relayed.write_bytes(path.read_bytes())
    os.truncate(path, 0)
    assert read(str(tmp_path))[1] == []  # it may have been made just now
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 60.0))
    ((trail,), (problem,)) = read(str(tmp_path))
    assert problem == "rank-0-job.jsonl: it is empty, as where the disk was full"
    assert {entry.rank for entry in trail.entries} == {0, 1}  # rank 0's came through the store


def test_a_file_that_is_set_aside_while_the_directory_is_read(
    write: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_fault(write)
    own = tmp_path / "events" / "rank-0-job.jsonl"
    own.with_name("relayed-0-job.jsonl").write_bytes(own.read_bytes())

    def gone(folder: Folder, name: str) -> os.stat_result:
        raise FileNotFoundError(name)

    monkeypatch.setattr(Folder, "stat", gone)
    ((trail,), problems) = read(str(tmp_path))
    assert len(trail.entries) == 3 and problems == []


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/passwd", path)])
def test_what_is_no_file_is_named(write: Written, tmp_path: Path, make: Callable[[str], None]) -> None:
    a_fault(write)
    make(str(tmp_path / "events" / "rank-9-x.jsonl"))
    trails, (problem,) = read(str(tmp_path))
    assert problem.startswith("rank-9-x.jsonl: ") and trails


def test_two_jobs_share_a_directory(write: Written, tmp_path: Path) -> None:
    a_fault(write, "one")
    a_fault(write, "two", 9.0)
    trails, problems = read(str(tmp_path))
    assert problems == ["2 jobs share this directory: one, two; their incidents follow each other"]
    assert [incident.number for _, found in all_incidents(trails) for incident in found] == [1, 2]


def test_what_came_through_the_store_says_less_of_what_was_agreed_on(write: Written, tmp_path: Path) -> None:
    """A restart of a rank on another host, without the records, comes first."""
    for rank in range(2):
        write(rank, 1.0, "interrupted")
        write(rank, 1.0, "stacks", **stacks("train.py:7 in step", "train.py:1 in <module>", where="train.py:7 in step"))
    write(1, 1.0049, "restart", "end round", 1, restart=1, pings=4)
    stuck = [record(1, "soft_timeout", "no progress", "train.py:7 in step")]
    restart(write, range(1), 1.0, [record(1, "soft_timeout")], stuck=stuck)
    incident = the_one(tmp_path)
    assert (incident.verdict.initial_rank, incident.verdict.kind) == (1, "hang")


def test_nothing_counts_twice_that_came_through_the_store(write: Written, tmp_path: Path) -> None:
    a_fault(write)
    below = tmp_path / "events"
    own = below / "rank-0-job.jsonl"
    for ending in (".jsonl", ".jsonl.1"):  # the rank has no second file of its own
        (below / f"relayed-0-job{ending}").write_bytes(own.read_bytes())
    ((trail,), _) = read(str(tmp_path))
    both = len(trail.entries)
    own.unlink()
    (below / "relayed-0-job.jsonl.1").unlink()
    ((trail,), problems) = read(str(tmp_path))
    assert problems == []
    assert len(trail.entries) == both == 3


@pytest.mark.parametrize(("wall", "at"), [(1300.0, 1310.0), (1030.0, 1010.0)], ids=["another machine", "clock was set"])
def test_the_name_of_a_host_comes_back_with_another_clock(tmp_path: Path, wall: float, at: float) -> None:
    """A pod that is replaced keeps its name, on a machine that was started at another time."""
    (tmp_path / "events").mkdir()
    for pid, time in ((7, 1000.0), (8, wall)):
        line = to_line(Event(20.0, time + 10.0, 0, 0, 0, 0, "run", "run", {}))
        header = to_line(Header("job", "rank", 0, pid, "train-0", 10.0, time))
        (tmp_path / "events" / f"rank-0-train-0-{pid}.jsonl").write_bytes(header + line)
    ((trail,), _) = read(str(tmp_path))
    assert [entry.at for entry in trail.entries] == [1010.0, at]


@pytest.mark.parametrize(("name", "words"), [("none", "is no directory"), (".", "no folder 'events' in it")])
def test_no_run_directory(tmp_path: Path, capsys: Any, name: str, words: str) -> None:
    assert program.main([str(tmp_path / name)]) == 2
    assert words in capsys.readouterr().err


def test_for_people_and_for_programs(write: Written, tmp_path: Path, capsys: Any) -> None:
    """Text of the user's reaches no terminal as it is."""
    a_fault(write)
    for arguments in ([], ["--incident", "1"]):
        assert program.main([str(tmp_path), *arguments]) == 0
        text = capsys.readouterr().out
        assert "rank 1: exception" in text and "\x1b" not in text
    assert program.main([str(tmp_path), "--incident", "7"]) == 2
    assert "no incident 7" in capsys.readouterr().err
    assert program.main([str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["incidents"][0]["verdict"]["class"] == "exception"


def test_a_directory_without_incidents(write: Written, tmp_path: Path, capsys: Any) -> None:
    write(0, 0.0, "run", world_size=1, before=0)
    write(0, 5.0, "left", "out", how="completed")
    assert program.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no incidents\ngoodput 100.0%\n"
