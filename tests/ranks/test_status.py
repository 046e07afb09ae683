"""How real ranks are, and where, while they train, hang, stand still or wait for each other. It disturbs nobody."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inprocess.reports import status
from inprocess.system import clock
from inprocess.testing.run import Run
from tests.harness import At, Kill, Raise
from tests.harness.launch import PATIENT

from . import targets

#: a ceiling, not a duration (seconds)
SOON = 20.0
#: in the function's file, of the rank that the others wait for
LINE = "targets.py:"


def until(look: Callable[[], Any]) -> Any:
    """What it answers, once that is something."""
    end = clock.monotonic() + SOON
    while not (found := look()):
        assert clock.monotonic() < end
        threading.Event().wait(0.05)
    return found


class Watched:
    """Three ranks of which number 1 is somewhere, and the others wait for it."""

    def __init__(self, launch: Callable[..., Run], folder: Path, capsys: Any, place: str) -> None:
        self.run_dir, self._capsys, self._flag = str(folder / "run"), capsys, folder / "go on"
        args = {"flag": str(self._flag), "place": place}
        # a rank kills a monitor that takes longer to end, and its last file with it
        options = PATIENT | {"run_dir": self.run_dir, "termination_grace_time": 5}
        self.run = launch(targets.run_watched, 3, args=args, wrapper=options)
        self.run.wait_event("at", count=1 if place == "join" else 3)

    def ranks(self) -> list[dict[str, Any]]:
        told: dict[str, Any] = json.loads(self.out("--json") or '{"ranks": []}')
        return told["ranks"]

    def out(self, *arguments: str, code: int | None = None) -> str:
        self._capsys.readouterr()
        ended = status.main([self.run_dir, *arguments])
        assert code in (None, ended)
        return str(self._capsys.readouterr().out)

    def undisturbed(self) -> None:
        """It goes on; everybody returns from the first iteration."""
        self._flag.touch()
        ranks = self.run.wait()
        assert [rank.value for rank in ranks] == [[0, number, 3] for number in range(3)], ranks.exceptions
        found = self.ranks()
        assert [(rank["state"], rank["stale"]) for rank in found] == [("left", False)] * 3
        assert [rank["pid"] for rank in found] == [rank.pid for rank in ranks]
        assert os.listdir(os.path.join(self.run_dir, "live", "requests")) == []
        assert not [name for name in os.listdir(os.path.join(self.run_dir, "live")) if name.startswith("dump")]


@pytest.mark.parametrize("place", ["sleep", "atomic"])
def test_where_a_rank_is(launch, tmp_path, capsys, place):
    watched = Watched(launch, tmp_path, capsys, place)
    found = until(lambda: [each for each in [watched.ranks()] if [rank["steps"] for rank in each] == [3] * 3])[0]
    for number, rank in enumerate(found):
        assert (rank["initial_rank"], rank["rank"], rank["role"]) == (number, number, "active")
        assert (rank["phase"], rank["iteration"], rank["state"]) == ("run", 0, "running")
        assert (rank["world_size"], rank["reserves"], rank["call"]) == (3, 0, 0)
        assert rank["memory_bytes"] > 1 << 20 and rank["heartbeat_age"] < 10 and not rank["stale"]
    assert until(lambda: ("atomic" in watched.out()) == (place == "atomic"))
    text = watched.out("--dump", code=0)
    assert "\nrank 1, innermost line first:\n" in text and "\nranks 0, 2, which wait for others, " in text
    assert f"{LINE}" in text and " in wait_for_flag" in text and "does not answer" not in text
    watched.undisturbed()


def test_before_the_function_begins(launch, tmp_path, capsys):
    watched = Watched(launch, tmp_path, capsys, "join")
    until(lambda: [rank["phase"] for rank in watched.ranks()] == ["join"] * 2)

    def waiting() -> list[int]:
        """The ranks that wait for the others: the phase begins some lines before."""
        answers = json.loads(watched.out("--dump", "--json", code=0))["ranks"]
        places = {each["initial_rank"]: thread["frames"][0] for each in answers for thread in each["threads"][:1]}
        return [rank for rank, place in places.items() if "mailbox.py" in place]

    until(lambda: waiting() == [0, 2])
    watched.undisturbed()


def test_of_a_rank_that_holds_the_interpreter_lock(launch, tmp_path, capsys):
    watched = Watched(launch, tmp_path, capsys, "gil")
    text = watched.out("--dump", code=0)
    assert "rank 1 (" in text and "does not answer" in text and "from outside" in text and "rank 0 (" not in text
    assert "\nrank 1, innermost line first:\n" in text and " in strike" in text and "\nranks 0, 2" in text
    watched.undisturbed()


def test_of_a_rank_that_is_stopped(launch, tmp_path, capsys):
    """It is not signalled: two requests at once are answered alike, and it goes on as if nothing had been."""
    watched = Watched(launch, tmp_path, capsys, "stop")
    until(lambda: "stopped" in watched.out())
    codes: list[int] = []
    other = threading.Thread(target=lambda: codes.append(status.main([watched.run_dir, "--dump", "--json"])))
    other.start()
    text = watched.out("--dump", code=1)
    other.join()
    assert codes == [1] and "/proc says: T (stopped)" in text and "from outside" not in text
    watched.run.kill(1, signal.SIGCONT)
    watched.undisturbed()


def test_while_ranks_restart_and_die(launch, tmp_path, capsys):
    """Requests all the time change nothing: as many restarts, and the same ranks, as without."""
    faults = {At(1, number, step=1): Raise() for number in range(6)} | {At(2, 6, step=1): Kill()}
    options = PATIENT | {"run_dir": str(tmp_path), "progress_watchdog_interval": 0.02, "termination_grace_time": 5}
    run = launch(targets.run_train, 3, faults=faults, wrapper=options)
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            status.main([str(tmp_path), "--dump", "--json", "--timeout", "2"])

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        ranks = run.wait()
    finally:
        over.set()
        asking.join()
    assert [ranks[number].value for number in (0, 1)] == [[7, 0, 2], [7, 1, 2]], ranks.exceptions
    capsys.readouterr()
    status.main([str(tmp_path), "--json"])
    assert [rank["state"] for rank in json.loads(capsys.readouterr().out)["ranks"]] == ["left", "left", "dead"]
