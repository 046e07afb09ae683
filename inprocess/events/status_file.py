"""How the rank is now, as a small file in the run directory, and its stacks where somebody asks for them.

One daemon thread of the monitor does all of it, and nobody waits for that: a disk that hangs keeps this thread alone.
Everything that it tells comes from the board, the job and ``/proc``. The rank itself does nothing for it, except its
stacks: these its watchdog takes. Where no answer comes, the main thread of the monitor takes them from outside, since
it alone knows that the rank has not left the call. ``events/status_files`` has the format.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from inprocess.events import status_files
from inprocess.events.files import file_name
from inprocess.events.record import Header
from inprocess.monitor import pidfile
from inprocess.monitor.board import STACKS_BYTES, Board
from inprocess.monitor.configuration import MonitorConfig
from inprocess.monitor.events import StacksWanted
from inprocess.monitor.roles import JobView
from inprocess.protocol.phases import Phase
from inprocess.system import clock, descriptors, private_folder, procfs, strict_json
from inprocess.system.logs import get_logger

__all__ = ["StatusFile"]

log = get_logger("inprocess.monitor")
#: how often it looks for requests, and for the answer of its rank (seconds)
LOOK_S, LOOK_AGAIN_S = 0.5, 0.05
#: so many files of all ranks are renewed in a second, as a shared disk has to bear them all; in a job with more ranks
#: than twice as many each is renewed less often
RENEWALS_PER_S = 512
#: how long the last file is waited for at the end (seconds)
LAST_S = 0.2
#: how much longer than its watchdog's interval a rank may take to answer (seconds)
ANSWER_S = 2.0
#: how long the main thread may take for stacks from outside (seconds)
OUTSIDE_S = 1.0
#: how often the first rank of the roster removes what nobody needs, and from which age on it does (seconds): any file,
#: and requests, whose program must be gone
TIDY_S, OLD_S, REQUEST_S = 3600.0, 86_400.0, 900.0
#: of the files for one initial rank so many are kept; the others go if they were not renewed for so long (seconds), and
#: so many intervals
KEPT, GONE_S, GONE_AFTER = 3, 60.0, 5
MAX_REASONS = 5
#: what monitors and their readers write; nothing else is ever removed
_REQUEST = re.compile(r"[A-Za-z0-9-]{1,100}")
_SLOT = re.compile(r"monitor-(\d+)-.*\.json")
_BESIDE = re.compile(rf"{_SLOT.pattern}\.\d+")
_DUMP = re.compile(status_files.DUMP + _REQUEST.pattern)
_ANSWER = re.compile(rf"{_SLOT.pattern}(\.\d+)?")


class StatusFile:
    """Of one monitor. Without a run directory it does nothing.

    Args:
        config: of the monitor.
        board: of its rank.
        job: what is known of it.
        training: pidfd of the training process.
        post: gives the monitor's main thread an event.
    """

    def __init__(
        self, config: MonitorConfig, board: Board, job: JobView, training: int, post: Callable[[StacksWanted], None]
    ) -> None:
        self._config, self._board, self._job, self._training, self._post = config, board, job, training, post
        self._run_dir = config.run_dir or ""
        self._requests = os.path.join(self._run_dir, status_files.FOLDER, status_files.REQUESTS)
        self._host = socket.gethostname()
        self._name = file_name(Header(config.job, "monitor", config.rank, os.getpid(), self._host), ending="json")
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="inprocess-live", daemon=True)
        #: requests that were answered and are still there, and when the folder of requests was changed
        self._answered: frozenset[str] = frozenset()
        self._changed = 0
        #: by the clock of the disk: when this file was last renewed
        self._disk_time = 0.0
        self._told: set[str] = set()

    def start(self) -> None:
        """From now on the file is there."""
        if self._config.run_dir is not None:
            self._thread.start()

    def leave(self) -> bool:
        """Write it for the last time. False: the disk does not answer at once, and the thread stays."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(LAST_S)
        return not self._thread.is_alive()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        renew_at = tidy_at = 0.0
        while True:
            is_last, now = self._ending.is_set(), clock.monotonic()
            if is_last or now >= renew_at:
                renew_at = now + self._interval
                self._try(self._renew)
            self._try(self._look_for_requests)
            if is_last:
                return
            if now >= tidy_at and self._is_first:
                tidy_at = now + TIDY_S
                self._try(self._tidy)
            self._ending.wait(LOOK_S)

    def _try(self, action: Callable[[], None]) -> None:
        """Each reason is logged once: the disk may be full for hours."""
        try:
            action()
        except Exception as error:
            reason = (error.strerror if isinstance(error, OSError) else "") or repr(error)
            if reason not in self._told and len(self._told) < MAX_REASONS:
                self._told.add(reason)
                log.warning("run_dir=%r: the live file cannot be written: %s", self._config.run_dir, reason)

    @property
    def _interval(self) -> float:
        return max(status_files.INTERVAL_S, len(self._job.membership.roster) / RENEWALS_PER_S)

    @property
    def _is_first(self) -> bool:
        membership = self._job.membership
        return membership.roster[:1] == (membership.member,)

    def _renew(self) -> None:
        with self._folder() as folder:
            folder.below(status_files.REQUESTS).close()  # this user's own, whoever may ask one day
            folder.replace(self._name, json.dumps(self._status(), separators=(",", ":")).encode() + b"\n")
            self._disk_time = folder.stat(self._name).st_mtime

    def _folder(self) -> private_folder.Folder:
        return private_folder.own(self._run_dir, status_files.FOLDER)

    def _status(self) -> dict[str, Any]:
        config, seen, now = self._config, self._board.snapshot(), clock.monotonic()
        beat_at = self._job.heartbeat_at
        is_placed = seen.active + seen.reserves > 0
        state = self._state(seen.left)
        fields = [] if state == "dead" else pidfile.stat_fields(config.training_pid)
        pings = seen.ping and seen.phase is Phase.RUN and not seen.reserve  # as for `soft_timeout`
        progress = seen.ping if pings else seen.progress
        return {
            "format": status_files.FORMAT,
            "version": status_files.VERSION,
            "job": config.job[: status_files.MAX_TEXT],
            "host": self._host[: status_files.MAX_TEXT],
            "pid": config.training_pid,
            "monitor_pid": os.getpid(),
            "initial_rank": config.rank,
            "rank": seen.rank,
            "role": "unknown" if not is_placed else "reserve" if seen.reserve else "active",
            "call": config.call,
            "iteration": seen.iteration,
            "phase": seen.phase.value,
            "state": state,
            "steps": seen.steps,
            "progress_age": max(0.0, now - progress / 1e9) if progress else None,
            "heartbeat_age": None if beat_at is None else max(0.0, now - beat_at),
            "world_size": seen.active if is_placed else None,
            "reserves": seen.reserves if is_placed else None,
            "memory_bytes": int(fields[21]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 21 else None,
            "time": now,
            "wall_time": clock.wall(),
            # beside the fields that readers rely on
            "process_state": fields[0] if fields else "",
            "atomic": seen.atomic,
            "interval": self._interval,
        }

    def _state(self, left: bool) -> str:
        return "left" if left else "dead" if descriptors.await_readable(self._training, 0) else "running"

    # --- stacks -----------------------------------------------------------------------------------------------------

    def _look_for_requests(self) -> None:
        """One `stat` where nobody asks. While there is a request all are listed: the next one may be of the same
        moment, as far as the disk's clock tells."""
        try:
            changed = os.stat(self._requests).st_mtime_ns
        except FileNotFoundError:
            return
        if changed == self._changed and not self._answered:
            return
        self._changed = changed
        with self._folder() as folder, folder.below(status_files.REQUESTS) as requests:
            found = frozenset(requests.names(_REQUEST))
            # one whose program was killed may lie there for long; a monitor that is new does not answer it
            recent = {name for name, age in self._aged(requests, found) if age < REQUEST_S}
        new = sorted((found - self._answered) & recent)
        self._answered = found
        if new:
            self._answer(new)

    def _answer(self, names: Sequence[str]) -> None:
        config = self._config
        told = {
            "format": status_files.DUMP_FORMAT,
            "version": status_files.VERSION,
            "job": config.job[: status_files.MAX_TEXT],
            "host": self._host[: status_files.MAX_TEXT],
            "pid": config.training_pid,
            "initial_rank": config.rank,
            **self._take(),
        }
        with self._folder() as folder, folder.below(status_files.REQUESTS) as requests:
            for name, _ in self._aged(requests, names):  # nobody waits for the others any more
                with folder.below(status_files.DUMP + name) as answers:
                    answers.replace(self._name, json.dumps(told).encode())

    def _take(self) -> dict[str, Any]:
        """The stacks, or why there are none."""
        seconds = self._config.progress_watchdog_interval + ANSWER_S
        until, number = clock.monotonic() + seconds, 0
        while clock.monotonic() < until:
            if why := self._over():
                return {"why": why}
            number = number or self._board.ask_stacks()
            if (found := _parsed(self._board.stacks(number))) is not None:
                return {"why": "", "from": "inside", **found}
            self._ending.wait(LOOK_AGAIN_S)
        process = procfs.state_of(self._config.training_pid)
        answer: queue.SimpleQueue[list[dict[str, Any]]] = queue.SimpleQueue()
        self._post(StacksWanted(answer.put))
        threads: list[dict[str, Any]] = []
        with contextlib.suppress(queue.Empty):
            threads = answer.get(timeout=OUTSIDE_S)
        why = f"its interpreter does not answer within {seconds:g} s"
        return {"why": why, "from": "outside", "threads": threads, "process": process}

    def _over(self) -> str:
        """Why nobody will answer any more, if that is so."""
        if (state := self._state(self._board.snapshot().left)) != "running":
            return f"the rank has {'left the call' if state == 'left' else 'ended'}"
        return "its monitor has ended" if self._ending.is_set() else ""

    # --- what others have left --------------------------------------------------------------------------------------

    def _tidy(self) -> None:
        with self._folder() as folder, folder.below(status_files.REQUESTS) as requests:
            slots: dict[str, list[tuple[float, str]]] = {}
            for name, age in self._aged(folder, folder.names(_SLOT)):
                slots.setdefault(name.split("-")[1], []).append((age, name))
            gone = [
                name
                for found in slots.values()
                for number, (age, name) in enumerate(sorted(found))
                if age > OLD_S or (number >= KEPT and age > max(GONE_S, GONE_AFTER * self._interval))
            ]
            # the writers of these were killed
            gone += [name for name, age in self._aged(folder, folder.names(_BESIDE)) if age > OLD_S]
            _remove(folder, gone)
            for name, age in self._aged(folder, folder.names(_DUMP)):
                if age > OLD_S:
                    with contextlib.suppress(OSError):
                        folder.remove_below(name, _ANSWER)
            _remove(requests, [name for name, age in self._aged(requests, requests.names(_REQUEST)) if age > REQUEST_S])

    def _aged(self, folder: private_folder.Folder, names: Iterable[str]) -> Iterator[tuple[str, float]]:
        """Those that are there, each with its age (seconds)."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                yield name, self._disk_time - folder.stat(name).st_mtime


def _parsed(text: bytes | None) -> dict[str, Any] | None:
    """What the rank has answered; nothing where it is just being written, or is something else."""
    if text is None:
        return None
    try:
        found = strict_json.parse(text, STACKS_BYTES)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("threads"), list):
        return None
    return {name: found.get(name) for name in ("where", "waits", "threads")}


def _remove(folder: private_folder.Folder, names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            folder.remove(name)
