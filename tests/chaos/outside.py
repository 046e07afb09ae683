"""Sends the signals of a job's schedule to its ranks and their monitors, through pidfds: to nobody else, ever."""

from __future__ import annotations

import heapq
import math
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from inprocess.monitor.pidfile import is_monitor
from inprocess.testing import leaks
from tests.chaos.schedule import Job, Signal, Strike
from tests.harness import Run

#: seconds that a new process may take until it takes part, on a busy machine
TO_JOIN = 4.0
#: after these a rank is on its way out by itself
_OUT = ("returned", "raised", "value", "exception")


class Outside:
    """`act` does what is due and answers when it wants to be called again (monotonic)."""

    def __init__(self, run: Run, job: Job) -> None:
        self._run = run
        strikes = enumerate(job.strikes)
        self._left = [(number, strike) for number, strike in strikes if isinstance(strike.fault, Signal)]
        #: number of the strike -> when it was sent (monotonic)
        self.sent: dict[int, float] = {}
        #: how many events of each process have been looked at
        self._read: Counter[int] = Counter()
        self._origin = 0.0
        #: when the job ends, after its beginning; who joins needs some time for it
        self._last_respawn = job.seconds - TO_JOIN
        run.respawn_until = -math.inf
        #: processes that stand still: (when to continue, pidfd)
        self._stopped: list[tuple[float, int]] = []

    def act(self) -> float:
        names = self._new_events()
        now = time.monotonic()
        while self._stopped and self._stopped[0][0] <= now:
            self._continue(heapq.heappop(self._stopped)[1])
        for entry in self._due(now, names):
            self._left.remove(entry)
            self._send(*entry)
        return self._next()

    def close(self) -> None:
        while self._stopped:
            self._continue(self._stopped.pop()[1])

    def _new_events(self) -> set[str]:
        names = set()
        for number, rank in enumerate(self._run.ranks):
            fresh = rank.events[self._read[number] :]
            self._read[number] += len(fresh)
            names |= {f"phase {event['name']}" if event["event"] == "phase" else event["event"] for event in fresh}
            if not self._origin:
                self._origin = next((event["t0"] for event in fresh if event["event"] == "roster"), 0.0)
                self._run.respawn_until = self._origin + self._last_respawn if self._origin else -math.inf
        return names

    def _due(self, now: float, names: set[str]) -> list[tuple[int, Strike]]:
        if not self._origin:
            return []
        due = [entry for entry in self._left if self._origin + entry[1].at <= now]
        return [entry for entry in due if _signal(entry[1]).event in {"", *names}]

    def _next(self) -> float:
        moments = [self._origin + strike.at for _, strike in self._left if self._origin and not _signal(strike).event]
        return min([*moments, *(when for when, _ in self._stopped)], default=math.inf)

    def _send(self, number: int, strike: Strike) -> None:
        fault, rank = _signal(strike), self._run.ranks[strike.rank]
        if rank.ended or any(event["event"] in _OUT for event in rank.events):
            return
        targets = {"training": [self._training], "monitor": [self._monitor], "host": [self._monitor, self._training]}
        pidfds = [pidfd for find in targets[fault.target] if (pidfd := find(rank)) is not None]
        if pidfds:
            self.sent[number] = time.monotonic()
        for pidfd in pidfds:
            self._signal(pidfd, fault)

    def _signal(self, pidfd: int, fault: Signal) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, fault.signum)
        if fault.signum == signal.SIGSTOP:
            heapq.heappush(self._stopped, (time.monotonic() + fault.seconds, pidfd))
        else:
            os.close(pidfd)

    @staticmethod
    def _continue(pidfd: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        os.close(pidfd)

    @staticmethod
    def _training(rank: Any) -> int | None:
        return os.dup(rank.pidfd)

    @staticmethod
    def _monitor(rank: Any) -> int | None:
        """Among the children of a rank; the others are those that its function has forked."""
        for pid in leaks.children_of(rank.process.pid):
            with suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                # still a child, so the number was not given to another
                if pid in leaks.children_of(rank.process.pid) and is_monitor(pid):
                    return pidfd
                os.close(pidfd)
        return None


def _signal(strike: Strike) -> Signal:
    assert isinstance(strike.fault, Signal)
    return strike.fault
