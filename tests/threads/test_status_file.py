"""The live file of a monitor: what it says, who answers for a rank, and that nobody waits for its disk."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inprocess.events import status_file, status_files
from inprocess.events.status_file import StatusFile
from inprocess.monitor.board import ASKED, LENGTH, STACKS_BYTES, Board, Snapshot
from inprocess.monitor.configuration import MonitorConfig
from inprocess.monitor.events import StacksWanted
from inprocess.progress_watchdog import ProgressWatchdog
from inprocess.protocol.membership import Membership
from inprocess.protocol.phases import Phase
from inprocess.reports import dump
from inprocess.reports.live_reading import RankNow, read
from inprocess.system import clock
from inprocess.system.private_folder import Folder

#: a ceiling, not a duration (seconds)
SOON = 20.0
ASLEEP = "import signal; signal.pause()"


def until(look: Callable[[], Any]) -> Any:
    end = clock.monotonic() + SOON
    while not (found := look()):
        assert clock.monotonic() < end
        threading.Event().wait(0.01)
    return found


class Kept:
    """A rank that is a process of its own, its board, and the live file that its monitor would write."""

    def __init__(self, run_dir: Path, member: int = 0) -> None:
        self.run_dir, self.board = str(run_dir), Board.create()
        self.process = subprocess.Popen([sys.executable, "-c", ASLEEP])
        self.pidfd = os.pidfd_open(self.process.pid)
        config = MonitorConfig(
            member=member,
            roster=(0, 1),
            store="",
            rank=member,
            job="job",
            run_dir=str(run_dir),
            training_pid=self.process.pid,
            progress_watchdog_interval=0.05,
        )
        self.link = SimpleNamespace(membership=Membership(member, (0, 1)), heartbeat_at=None)
        self.wanted: list[StacksWanted] = []
        self.live = StatusFile(config, self.board, self.link, self.pidfd, self.wanted.append)  # type: ignore[arg-type]

    def start(self) -> RankNow:
        self.live.start()
        return self.rank()

    def rank(self) -> RankNow:
        """Once there is a file."""
        folder = Path(self.run_dir, status_files.FOLDER)
        until(lambda: folder.is_dir() and list(folder.glob("*.json")))
        (found,), problems = read(self.run_dir)
        assert problems == []
        return found

    def leave(self) -> None:
        """Its file is renewed no more: from now on none is half written."""
        self.live.leave()
        self.live._thread.join(SOON)

    def close(self) -> None:
        self.live.leave()
        self.process.kill()
        self.process.wait()
        os.close(self.pidfd)
        if self.live._thread.ident is not None:
            self.live._thread.join(SOON)
        self.board.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_file, "LOOK_S", 0.01)
    monkeypatch.setattr(status_file, "ANSWER_S", 0.1)
    monkeypatch.setattr(status_file, "OUTSIDE_S", 0.1)
    monkeypatch.setattr(status_files, "INTERVAL_S", 0.01)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    rank = Kept(tmp_path)
    yield rank
    rank.close()


def test_what_it_says(kept: Kept) -> None:
    first = kept.start().live
    assert (first["state"], first["phase"], first["role"], first["iteration"]) == ("running", "join", "unknown", -1)
    assert (first["world_size"], first["reserves"], first["heartbeat_age"]) == (None, None, None)
    kept.board.begin(3)
    kept.board.place(1, False, active=2, reserves=1)
    kept.board.enter(Phase.RUN)
    kept.board.steps = lambda: 7
    kept.link.heartbeat_at = clock.monotonic()
    kept.board.show_steps()
    told = until(lambda: live if (live := kept.rank().live)["steps"] else None)
    assert (told["rank"], told["role"], told["phase"], told["iteration"]) == (1, "active", "run", 3)
    assert (told["steps"], told["world_size"], told["reserves"]) == (7, 2, 1)
    assert 0 <= told["heartbeat_age"] < SOON and 0 <= told["progress_age"] < SOON
    assert (told["pid"], told["monitor_pid"]) == (kept.process.pid, os.getpid())
    assert 1 << 20 < told["memory_bytes"] < 1 << 28


def test_it_does_not_mix_two_iterations(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = kept.board.snapshot

    def copied_just_before_it_goes_on() -> Snapshot:
        found = copy()
        kept.board.begin(3)
        kept.board.place(1, False, active=2, reserves=1)
        kept.board.enter(Phase.RUN)
        kept.board.steps = lambda: 7
        kept.board.show_steps()
        return found

    monkeypatch.setattr(kept.board, "snapshot", copied_just_before_it_goes_on)
    for iteration, phase, steps, world_size in ((-1, "join", 0, None), (3, "run", 7, 2)):
        told = kept.live._status()
        assert (told["iteration"], told["phase"], told["steps"]) == (iteration, phase, steps)
        assert told["world_size"] == world_size


def test_files_are_private(kept: Kept) -> None:
    kept.start()
    folder = Path(kept.run_dir, status_files.FOLDER)
    modes = {stat.S_IMODE(each.stat().st_mode) for each in (folder, folder / "requests")}
    (file,) = folder.glob("*.json")
    assert modes == {0o700} and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.name == f"monitor-0-{os.uname().nodename}-{os.getpid()}.json"


@pytest.mark.parametrize(("how", "state"), [("leaves", "left"), ("dies", "dead"), ("leaves and dies", "left")])
def test_the_last_word(kept: Kept, how: str, state: str) -> None:
    kept.start()
    if "leaves" in how:
        kept.board.leave()
    if "dies" in how:
        kept.process.kill()
        kept.process.wait()
    until(lambda: kept.rank().live["state"] == state)
    until(kept.live.leave)
    assert kept.rank().live["state"] == state and not kept.rank().is_stale


def test_without_a_run_directory_there_is_no_thread(kept: Kept) -> None:
    config = MonitorConfig(member=0, roster=(0,), store="")
    live = StatusFile(config, kept.board, kept.link, kept.pidfd, kept.wanted.append)  # type: ignore[arg-type]
    live.start()
    live.leave()
    assert live._thread.ident is None


def test_a_disk_that_hangs_keeps_one_thread(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, asked = threading.Event(), threading.Event()
    replace = Folder.replace

    def hang(folder: Folder, name: str, data: bytes) -> None:
        asked.set()
        assert answers.wait(SOON)
        replace(folder, name, data)

    kept.start()
    monkeypatch.setattr(Folder, "replace", hang)
    assert asked.wait(SOON)
    begin = clock.monotonic()
    assert not kept.live.leave()
    assert clock.monotonic() - begin < status_file.LAST_S + 1.0 and kept.live._thread.is_alive()
    answers.set()


def test_a_disk_that_is_full_is_told_of_once(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[str] = []

    def fail(_: Folder, name: str, data: bytes) -> None:
        tries.append(name)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Folder, "replace", fail)
    kept.live.start()
    until(lambda: len(tries) > 5)
    kept.live.leave()
    assert len([line for line in caplog.messages if "No space left" in line]) == 1


# --- stacks ------------------------------------------------------------------------------------------------------


def ask(kept: Kept, timeout: float = SOON) -> dict[str, Any]:
    """The answer of its rank."""
    (answer,) = dump.ask(kept.run_dir, [kept.rank()], timeout).values()
    return answer


def left_over(kept: Kept) -> list[str]:
    folder = Path(kept.run_dir, status_files.FOLDER)
    return [str(path) for path in folder.rglob("*") if path.suffix != ".json" and path.name != "requests"]


def test_the_rank_answers(kept: Kept) -> None:
    """The watchdog is this process's, so the stacks are as well."""
    kept.start()
    watchdog = ProgressWatchdog(kept.board, 0.02)
    watchdog.start()
    try:
        answer = ask(kept)
    finally:
        watchdog.stop()
    assert answer["why"] == "" and answer["from"] == "inside" and kept.wanted == []
    (main,) = (thread for thread in answer["threads"] if thread["main"])
    assert any("in test_the_rank_answers" in frame for frame in main["frames"])
    assert not [thread for thread in answer["threads"] if thread["name"].startswith("inprocess-")]
    kept.leave()
    assert left_over(kept) == []


def test_nobody_answers(kept: Kept) -> None:
    kept.start()
    answer = ask(kept)
    assert "does not answer" in answer["why"] and answer["threads"] == [] and len(kept.wanted) == 1
    assert answer["process"]["state"] in ("R", "S")  # this process, which looks for the answer now and then


def test_it_is_taken_from_outside(kept: Kept) -> None:
    kept.start()
    outside = [{"name": "0x1", "main": True, "frames": ["train.py:7 in step"]}]
    kept.live._post = lambda wanted: wanted.answer(outside)
    answer = ask(kept)
    assert (answer["threads"], answer["from"]) == (outside, "outside")


@pytest.mark.parametrize("text", [b"", b"{", b'{"threads": 1}', b"[]", b"\xff" * 100, b'{"threads": [{"frames": 1}]}'])
def test_what_is_no_answer(kept: Kept, text: bytes) -> None:
    """The function may write to that memory, too."""
    kept.start()
    stop = threading.Event()

    def write() -> None:
        while not stop.wait(0.001):
            kept.board.answer_stacks(lambda: text)

    writing = threading.Thread(target=write)
    writing.start()
    try:
        assert ask(kept)["threads"] == []
    finally:
        stop.set()
        writing.join()


@pytest.mark.parametrize(("how", "why"), [("dies", "the rank has ended"), ("leaves", "the rank has left the call")])
def test_it_goes_meanwhile(kept: Kept, monkeypatch: pytest.MonkeyPatch, how: str, why: str) -> None:
    monkeypatch.setattr(status_file, "ANSWER_S", SOON)
    kept.start()
    os.kill(kept.process.pid, signal.SIGSTOP)
    found: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: found.append(ask(kept)))
    asking.start()
    until(lambda: kept.board.slots[ASKED])  # it has been asked
    if how == "dies":
        kept.process.kill()
    else:
        kept.board.leave()
        assert kept.live.leave()  # its monitor goes as well, and does not wait for an answer
        assert kept.rank().live["state"] == "left"
    asking.join()
    assert found[0]["why"] == why


def test_the_monitor_goes_while_it_asks(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_file, "ANSWER_S", SOON)
    kept.start()
    found: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: found.append(ask(kept)))
    asking.start()
    until(lambda: kept.board.slots[ASKED])
    assert kept.live.leave()
    asking.join()
    assert found[0]["why"] == "its monitor has ended"


def test_a_rank_that_has_left_is_not_asked(kept: Kept) -> None:
    kept.start()
    running = kept.rank()
    kept.board.leave()
    (answer,) = dump.ask(kept.run_dir, [running], SOON).values()
    assert answer["why"] == "the rank has left the call" and not kept.board.slots[ASKED]


def test_two_requests_at_once_and_one_after_another(kept: Kept) -> None:
    kept.start()
    watchdog = ProgressWatchdog(kept.board, 0.02)
    watchdog.start()
    found: list[dict[str, Any]] = []
    asking = [threading.Thread(target=lambda: found.append(ask(kept))) for _ in range(5)]
    try:
        for each in asking:
            each.start()
        for each in asking:
            each.join()
        found.append(ask(kept))
    finally:
        watchdog.stop()
    assert len(found) == 6 and all(answer["threads"] for answer in found)
    kept.leave()
    assert left_over(kept) == []


def test_the_monitor_is_gone(kept: Kept) -> None:
    rank = kept.start()
    kept.leave()
    os.kill(kept.process.pid, signal.SIGSTOP)
    os.waitpid(kept.process.pid, os.WUNTRACED)
    (answer,) = dump.ask(kept.run_dir, [rank], 0.05).values()
    assert answer["why"] == "no answer within 0.05 s" and answer["process"]["state"] == "T"
    assert left_over(kept) == []


def test_an_old_request_and_an_odd_name(kept: Kept) -> None:
    """A monitor that is new answers none whose program is gone for long; nothing outside the folder is written."""
    folder = Path(kept.run_dir, status_files.FOLDER, status_files.REQUESTS)
    folder.mkdir(parents=True)
    for name in ("old", ".hidden", "a b"):
        (folder / name).touch()
    os.utime(folder / "old", (1, 1))
    kept.start()
    until(lambda: not (folder / "old").exists())  # this is the first rank
    assert ask(kept, 0.05) and not [path for path in left_over(kept) if "dump" in path]


def test_the_answer_has_a_bound(kept: Kept) -> None:
    number = kept.board.ask_stacks()
    kept.board.answer_stacks(lambda: b"x" * (2 * STACKS_BYTES))
    assert kept.board.stacks(number) == b"x" * STACKS_BYTES
    kept.board.slots[LENGTH] = -5
    assert kept.board.stacks(number) == b"" and kept.board.stacks(number + 1) is None


# --- what others have left ---------------------------------------------------------------------------------------


def made(folder: Path, name: str, age: float) -> Path:
    path = folder / name
    path.touch()
    at = clock.wall() - age
    os.utime(path, (at, at))
    return path


def test_old_files_go(kept: Kept) -> None:
    folder = Path(kept.run_dir, status_files.FOLDER)
    folder.mkdir(0o700)
    day = status_file.OLD_S + 60
    gone = [
        made(folder, "monitor-0-a-1.json", day),
        made(folder, "monitor-7-a-2.json", day),
        made(folder, "monitor-7-a-2.json.2", day),
        *(made(folder, f"monitor-3-a-{number}.json", 1000 + number) for number in range(3, 20)),
    ]
    stays = [made(folder, f"monitor-3-a-{number}.json", 100 + number) for number in range(3)]
    stays += [made(folder, f"monitor-4-a-{number}.json", number) for number in range(9)]
    stays += [made(folder, "notes.txt", day)]
    kept.live.start()
    until(lambda: not any(path.exists() for path in gone))
    assert all(path.exists() for path in stays)


@pytest.mark.parametrize("name", ["live", "live/requests", "live/dump-1"])
def test_nothing_goes_behind_a_link(
    kept: Kept, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user, who may write to the run directory, has put it there. It is told of once."""
    victim = tmp_path / "victim"
    victim.mkdir(0o700)
    names = ("monitor-0-a-1.json", "monitor-7-a-2.json.2", "precious")
    for each in (*names, "dump-2", "requests"):
        made(victim, each, status_file.OLD_S + 60)
    link = Path(kept.run_dir, name)
    link.parent.mkdir(0o700, parents=True, exist_ok=True)
    link.symlink_to(victim)
    os.utime(link, (1, 1), follow_symlinks=False)
    monkeypatch.setattr(status_file, "TIDY_S", 0.0)
    monkeypatch.setattr(status_file, "LOOK_S", 0.01)
    rounds = []
    monkeypatch.setattr(kept.live, "_tidy", lambda tidy=kept.live._tidy: rounds.append(1) or tidy())
    kept.live.start()
    until(lambda: len(rounds) > 5)
    kept.live.leave()
    assert sorted(os.listdir(victim)) == sorted((*names, "dump-2", "requests"))
    told = [line for line in caplog.messages if f"{link} is a link" in line]
    assert len(told) == (name != "live/dump-1")


def test_only_the_first_rank_tidies(tmp_path: Path) -> None:
    kept = Kept(tmp_path, member=1)
    folder = Path(kept.run_dir, status_files.FOLDER)
    folder.mkdir(0o700)
    old = made(folder, "monitor-0-a-1.json.1", status_file.OLD_S + 60)
    try:
        kept.live.start()
        first = kept.rank().live["time"]
        until(lambda: kept.rank().live["time"] > first + 0.1)  # it has had time to
        assert old.exists()
    finally:
        kept.close()
