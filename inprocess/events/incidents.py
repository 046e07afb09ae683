"""Has the report of an incident written, by a program of its own that nobody waits for (`inprocess.reports.writer`).

It runs when the restart is over, at the lowest priority, so neither the training nor the monitor is kept. The first
member of the roster has it run; the next two look whether that has happened, for its host may be the one that is lost.
Where a disk does not answer the program stays, and no second one is started beside it.

A monitor that ends becomes that program: so none is left when the last process of the job has gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

from inprocess.system.logs import get_logger

__all__ = ["IncidentReports"]

log = get_logger("inprocess.monitor")
#: how long after the decision the first one writes, so that the restart is over, and the others look for it (seconds)
FIRST_S, NEXT_S = 1.0, 3.0
#: members that look, the first one included
WRITERS = 3
#: how soon a program that could not be started is tried again (seconds)
RETRY_S = 1.0
CODE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from inprocess.reports.writer import main
sys.exit(main(json.loads(sys.argv[2])))
"""


class IncidentReports:
    """Of one call, in the main thread of its monitor. Without a run directory it does nothing.

    Args:
        run_dir: where the events are.
        job: as in the header of the events.
        call: calls of wrapped functions in the training process before this one.
    """

    def __init__(self, run_dir: str | None, job: str, call: int) -> None:
        self._run_dir, self._job, self._call = run_dir, job, call
        self._process: subprocess.Popen[bytes] | None = None
        # of the latest incident: iteration, and which member this one was in the roster
        self._latest: tuple[int, int] | None = None
        # `write` is to be called; and in how many seconds after that once more, for what happened meanwhile
        self._is_due = False
        self._following: float | None = None

    def happened(self, iteration: int, turn: int) -> float | None:
        """An iteration was interrupted; returns in how many seconds to call `write`.

        None: others do that, or it is to be called already. One program writes all incidents that there are, so as many
        restarts as there may be set one timer.
        """
        if self._run_dir is None:
            return None
        self._latest = (iteration, turn)
        seconds = FIRST_S + turn * NEXT_S if turn < WRITERS else None
        if not self._is_due:
            self._is_due = seconds is not None
            return seconds
        self._following = self._following if seconds is None else seconds
        return None

    def write(self) -> float | None:
        """Start the program; returns in how many seconds to call this again: where one runs still, or something has
        happened since this was to be called; None: that is all."""
        if self._running() is not None:
            return RETRY_S
        self._start(self._command())
        following, self._following = self._following, None
        self._is_due = following is not None
        return following

    def last(self, completed: bool) -> list[str] | None:
        """The monitor ends: the program that it becomes, None: there is nothing to do.

        What came last, perhaps the end of the job, is added, or looked for if others may do it. A program that runs
        ends as soon as it has written what it is writing.
        """
        if self._latest is None:
            return None
        turn = self._latest[1]
        writes = turn < (1 if completed else WRITERS)
        before = self._running()
        if before is not None:
            before.send_signal(signal.SIGTERM)
        elif not writes:
            return None
        pid = None if before is None else before.pid
        return self._command(after=turn * NEXT_S, before=pid, last=True, writes=writes)

    def start(self, command: list[str]) -> None:
        """What `last` answered, by a program of its own: for a monitor that cannot end. Not beside one that runs."""
        if self._running() is None:
            self._start(command)

    def _running(self) -> subprocess.Popen[bytes] | None:
        return self._process if self._process is not None and self._process.poll() is None else None

    def _command(self, **more: Any) -> list[str]:
        assert self._latest is not None
        iteration, turn = self._latest
        unless = None if turn == 0 else [self._job, self._call, iteration]
        told = {"run_dir": self._run_dir, "unless": unless, "after": 0.0, "before": None, "last": False, "writes": True}
        told |= more
        return [sys.executable, "-S", "-W", "ignore", "-c", CODE, json.dumps(sys.path), json.dumps(told)]

    def _start(self, command: list[str]) -> None:
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)
        except OSError as error:
            log.warning("run_dir=%r: no report of the incident was written: %s", self._run_dir, error)
