"""Starts ranks and waits for them under one deadline: on their pipes and their ends, never by sleeping.

At the deadline every rank dumps its stacks and dies (SIGABRT, with faulthandler), and the story of all is told.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

from inprocess.testing.coordinates import At
from inprocess.testing.faults import Fault

from . import coverage, invariants, leaks
from .network import Network
from .outcome import Deadline, RankProcess, RankResult, Ranks, text_of
from .ports import ReservedPort
from .process import inherited_variables, left_by, new_mark, own_variables, reap
from .rank import Context, Spec, rank_main
from .server import start_server
from .story import tell

#: what `Run.wait` calls meanwhile
Act = Callable[[], float]
#: how long processes that a program has started may outlive it (seconds)
LEAVING = 5.0


class Run:
    """Ranks that were started together. `wait` ends the run; `close` kills whatever is left of it.

    ``respawn``: for each of the first so many ranks that die or fail, another one is started in its place; it stands
    behind those that were there.
    """

    def __init__(
        self,
        target: Callable[[Any], Any],
        world_size: int,
        *,
        args: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
        faults: Mapping[At, Fault] | None = None,
        wrapper: Any = None,
        place: Callable[[int], None] | None = None,
        respawn: int = 0,
        context: type[Context] = Context,
        as_program: bool = False,
        network: Network | None = None,
    ) -> None:
        start_server()
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        (self._folder / "tmp").mkdir()
        self._port = ReservedPort()
        self._answered: set[tuple[int, int, int]] = set()
        #: pids that were killed together
        self._killed: set[int] = set()
        self._network, self._as_program = network, as_program
        self._faults = dict(faults or {})
        #: what could not be done for a fault
        self._undone: list[str] = []
        #: what is to be done later: when (monotonic), and what
        self._later: list[tuple[float, Callable[[], object]]] = []
        self._closed = False
        self._respawns = respawn
        #: nobody is replaced after that (monotonic): the job is about to end
        self.respawn_until = math.inf
        self.ranks: list[RankProcess] = []
        self._template = Spec(
            rank=0,
            target=target,
            environment={},
            log="",
            faults={},
            wrapper={} if wrapper is None else wrapper,
            args={"world_size": world_size} | dict(args or {}),
            place=place if network is None else network.place(range(world_size)),
            as_program=as_program,
            context=context,
            mark=new_mark(),
        )
        try:
            self._start_all(world_size, env or {})
        except BaseException:  # Ctrl-C while the server imports torch: nobody has this object to close it
            self.close()
            raise

    def _start_all(self, world_size: int, env: Mapping[str, str | None]) -> None:
        for rank in range(world_size):
            self._template = replace(
                self._template,
                rank=rank,
                environment=self._environment(rank, world_size, env),
                log=str(self._folder / f"rank{rank}.log"),
                faults={at: fault for at, fault in self._faults.items() if at.rank == rank},
            )
            self.ranks.append(self._start(self._template))

    def start_another(
        self,
        rank: int,
        *,
        faults: Mapping[At, Fault] | None = None,
        env: Mapping[str, str] | None = None,
        wrapper: Any = None,
        place: Callable[[int], None] | None = None,
    ) -> None:
        """Start one process more, with this RANK and what a launcher says to one that replaces another."""
        spec = self._template
        environment = dict(spec.environment) | {"RANK": str(rank), "LOCAL_RANK": str(rank), "INPROCESS_RESTART": "1"}
        self.ranks.append(
            self._start(
                replace(
                    spec,
                    rank=rank,
                    environment=environment | dict(env or {}),
                    log=str(self._folder / f"rank{rank}.{len(self.ranks)}.log"),
                    faults=dict(faults or {}),
                    wrapper=spec.wrapper if wrapper is None else wrapper,
                    place=spec.place if place is None else place,
                )
            )
        )

    def _respawn(self, rank: RankProcess) -> None:
        rank.process.join()
        if (
            self._respawns
            and time.monotonic() < self.respawn_until
            and (rank.process.exitcode or rank.find("exception"))
        ):
            self._respawns -= 1
            struck = {event["at"] for each in self.ranks for event in each.events if event["event"] == "fault"}
            left = {at: fault for at, fault in self._faults.items() if at.rank == rank.rank and repr(at) not in struck}
            self.start_another(rank.rank, faults=left if self._as_program else None)
            self.ranks[-1].is_replacement = True

    @property
    def port(self) -> int:
        return self._port.number

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self.ranks]

    def _environment(self, rank: int, world_size: int, more: Mapping[str, str | None]) -> dict[str, str]:
        environment: dict[str, str | None] = {
            **inherited_variables(),
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port.number),
            "OMP_NUM_THREADS": "1",
            **own_variables(str(self._folder)),
        }
        if self._as_program:  # torch's C++ code tells of every connection that ends, with its stack
            environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            environment["LOCAL_WORLD_SIZE"] = str(world_size)
        environment |= {**coverage.variables(), **({} if self._network is None else self._network.variables())}
        environment |= {name: text and text.replace("{rank}", str(rank)) for name, text in more.items()}
        return {name: text for name, text in environment.items() if text is not None}

    def _start(self, spec: Spec) -> RankProcess:
        temporary = self._temporary(len(self.ranks))
        temporary.mkdir()
        spec = replace(spec, environment={**spec.environment, "TMPDIR": str(temporary)})
        context = multiprocessing.get_context("forkserver")
        events, write_end = context.Pipe(duplex=False)
        read_end, control = context.Pipe(duplex=False)
        process = context.Process(target=rank_main, args=(spec, write_end, read_end), daemon=False)
        process.start()
        write_end.close()
        read_end.close()
        assert process.pid is not None
        return RankProcess(spec.rank, process, events, control, os.pidfd_open(process.pid), Path(spec.log))

    def wait(
        self,
        deadline: float = 30.0,
        *,
        check: bool = True,
        act: Act = lambda: math.inf,
        fenced: Collection[int] = (),
    ) -> Ranks:
        """Wait until every rank has ended and nothing of the run is left; check leftovers and invariants.

        Args:
            deadline: seconds.
            check: whether problems are errors; the results have them in any case.
            act: called again and again meanwhile; returns when it wants to be called at the latest (monotonic).
            fenced: see `invariants.broken`.

        Raises:
            Deadline: not done after `deadline` seconds; the text has every rank's events, stacks and log.
            AssertionError: something was left behind, an exit code is wrong, or an invariant does not hold.
        """
        end = time.monotonic() + deadline
        self._pump(self._is_over, end, act)
        ended = time.monotonic()
        remaining = reap(self._left, min(end, ended + LEAVING) if self._as_program else end)
        lingered = time.monotonic() - ended
        for rank in self.ranks:
            rank.process.join()
        files = [path.relative_to(self._folder) for folder in self._to_be_empty() for path in sorted(folder.rglob("*"))]
        results = Ranks(rank.result() for rank in self.ranks)
        results.story = self.story(results)
        if not self._as_program:
            print(results.story)  # pytest shows it where the test fails
        self.close()
        problems = [f"still running: {line}" for line in remaining]
        problems += self._undone
        problems += [f"file left in the temporary directory: {name}" for name in files]
        results.problems, results.lingered = problems + _problems(results, fenced, self._as_program), lingered
        if check and results.problems:
            raise AssertionError("\n".join(results.problems))
        return results

    def _temporary(self, number: int) -> Path:
        """Where the n-th process makes its temporary files."""
        return self._folder / "tmp" / str(number)

    def _to_be_empty(self) -> list[Path]:
        """Of the temporary folders; a program that was killed could not clean up its own."""
        return [
            self._temporary(number)
            for number, rank in enumerate(self.ranks)
            if not (self._as_program and (rank.process.exitcode or 0) < 0)
        ]

    def _is_over(self) -> bool:
        """Whether all ranks have ended. A replacement that has come too late to be let in is ended, as a launcher
        does."""
        running = [rank for rank in self.ranks if not rank.ended]
        if running and self._as_program and len(running) < len(self.ranks):
            late = [rank for rank in running if rank.is_replacement and not rank.find("enter")]
            if len(late) == len(running) and any(rank.process.exitcode == 0 for rank in self.ranks if rank.ended):
                for rank in late:
                    rank.came_late = True
                    rank.signal(signal.SIGKILL)
        return not running

    def _left(self) -> list[int]:
        """Processes that ranks have started. Others below this process are none of the run's."""
        return left_by([rank.process.pid for rank in self.ranks if not rank.ended], self._template.mark)

    def wait_event(self, name: str, *, count: int = 1, deadline: float = 20.0, **fields: Any) -> None:
        """Wait until `count` ranks have reported that event."""

        def seen() -> bool:
            return sum(self._has(rank, name, fields) for rank in self.ranks) >= count

        self._pump(seen, time.monotonic() + deadline)

    @staticmethod
    def _has(rank: RankProcess, name: str, fields: Mapping[str, Any]) -> bool:
        return any(
            event["event"] == name and all(event.get(key) == value for key, value in fields.items())
            for event in rank.events
        )

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        self.ranks[rank].signal(signum)

    def _pump(self, until: Callable[[], bool], end: float, act: Act = lambda: math.inf) -> None:
        while not until():
            waitables: list[Any] = [rank.pipe for rank in self.ranks if not rank.at_end]
            waitables += [rank.process.sentinel for rank in self.ranks if not rank.ended]
            left = min([end, act(), *(at for at, _ in self._later)]) - time.monotonic()
            ready = connection.wait(waitables, max(left, 0.0)) if waitables else []
            if not waitables or time.monotonic() > end:
                raise self._abort()
            for rank in list(self.ranks):
                if rank.pipe in ready:
                    rank.read()
                if rank.process.sentinel in ready:
                    rank.note_end()
                    self._respawn(rank)
            self._serve()
            self._kill_together()

    def _kill_together(self) -> None:
        """Those that wait for it (`KillTogether`): all stand still before the first one dies."""
        events = [event for rank in self.ranks for event in rank.events if event["event"] == "together"]
        waiting = [event for event in events if self._killed.isdisjoint(event["pids"])]
        if waiting and len(waiting) >= waiting[0]["count"]:
            self._kill_all([pid for event in waiting for pid in event["pids"]])

    def _kill_all(self, pids: Sequence[int]) -> None:
        self._killed.update(pids)
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)

    def _serve(self) -> None:
        """Do what ranks ask for, and what is due."""
        now = time.monotonic()
        due = [what for at, what in self._later if at <= now]
        self._later = [(at, what) for at, what in self._later if at > now]
        for what in due:
            what()
        for rank in self.ranks:
            for index, event in enumerate(rank.events):
                asked = event["event"] in ("wait_for", "host_lost", "store_lost", "network_cut")
                if asked and (rank.rank, rank.process.pid, index) not in self._answered and self._do(rank, event):
                    self._answered.add((rank.rank, rank.process.pid, index))
                    with suppress(BrokenPipeError):
                        os.write(rank.control.fileno(), bytes([event["number"]]))

    def _do(self, rank: RankProcess, event: Mapping[str, Any]) -> bool:
        """Whether it is done."""
        match event["event"]:
            case "wait_for":
                return bool(self._others_with(rank, event["awaited"]) >= event["count"])
            case "host_lost":
                gone = [other for other in self.ranks if other is rank or other.rank in event["ranks"]]
                pids = [other.process.pid for other in gone if not other.ended]
                self._kill_all([*pids, *(below for pid in pids for below in leaks.descendants_of(pid))])
            case "store_lost":
                serving = [] if event["port"] is None else self._listeners(event["port"])
                self._kill_all(serving)
                self._undone += [] if serving else ["StoreLoss(): no process of this run serves the store"]
            case "network_cut":
                assert self._network is not None
                switch, host = self._network.switch, rank.rank
                switch.unplug(host)
                if event["seconds"] is not None:
                    self._later.append((time.monotonic() + event["seconds"], lambda: switch.plug_in(host)))
        return True

    def _listeners(self, port: int) -> list[int]:
        """Processes of this run that serve at this port."""
        import psutil  # noqa: PLC0415  # nothing else here needs it

        found = []
        for pid in (*(rank.process.pid for rank in self.ranks if not rank.ended), *self._left()):
            with suppress(psutil.NoSuchProcess):
                sockets = psutil.Process(pid).net_connections("tcp")
                if any(each.status == psutil.CONN_LISTEN and each.laddr[1] == port for each in sockets):
                    found.append(pid)
        return found

    def _others_with(self, rank: RankProcess, name: str) -> int:
        return sum(other is not rank and self._has(other, name, {}) for other in self.ranks)

    def _abort(self) -> Deadline:
        """Every rank that still runs dumps its stacks and dies; then the story."""
        running = [str(rank.rank) for rank in self.ranks if not rank.ended]
        # one that was stopped finds both when it is woken, and does not run on in between
        for signum in (signal.SIGABRT, signal.SIGCONT):
            for rank in self.ranks:
                rank.signal(signum)
        for rank in self.ranks:
            rank.process.join(5)
            rank.signal(signal.SIGKILL)
            rank.process.join()
            rank.drain()
        below = [leaks.command_of(pid) for pid in self._left()]
        results = Ranks(rank.result() for rank in self.ranks)
        story = self.story(results)
        self.close()
        # of a program these are the monitors of its ranks
        left = ["--- processes left", *below] if below and not self._as_program else []
        return Deadline(
            f"the deadline has passed; these ranks still ran: {', '.join(running) or 'none'}",
            "\n".join([story, *left]),
            results,
        )

    def story(self, results: Sequence[RankResult]) -> str:
        """For people."""
        monitors = {path.name: text_of(path) for path in sorted(self._folder.glob("monitor*.log"))}
        return tell(results, monitors, whole=not self._as_program)

    def close(self) -> None:
        """Kill what is left, reap it, give everything back. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for rank in self.ranks:
            rank.signal(signal.SIGKILL)
            rank.close()
            rank.ended = True
        reap(self._left, time.monotonic())
        self._port.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _problems(results: Ranks, fenced: Collection[int], as_program: bool) -> list[str]:
    problems = [f"rank {result.rank} left behind: {line}" for result in results for line in result.leftovers]
    problems += [
        f"rank {result.rank} exited with {result.exitcode} after it was done"
        for result in results
        if result.done and result.exitcode != 0 and not (as_program and result.exception)
    ]
    return problems + invariants.broken(results, fenced)
