"""The monitor process, for real: it protects a process that is not this one, over a store that this one serves.

`Rank` is a small training process without torch that does what it is told; the test plays every other member, and
the protocol part of the rank itself, with the same verbs the library uses.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.exception import StoreLost
from inprocess.monitor.board import ENDING, Board
from inprocess.monitor.configuration import MonitorConfig
from inprocess.monitor.events import Event, Spoken
from inprocess.monitor.link import Link
from inprocess.monitor.pidfile import is_monitor
from inprocess.monitor.process import MonitorProcess
from inprocess.protocol import verbs
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import Arrival, ArrivalKind, Outcome
from inprocess.protocol.ops import Verb
from inprocess.protocol.verbs import watching
from inprocess.stores import connecting, driver
from inprocess.stores.serving import serve
from inprocess.stores.spec import StoreSpec
from inprocess.system import clock
from tests.harness.streams import full

#: a ceiling, not a duration (seconds)
SOON = 30.0
#: a training process: runs the lines it is sent and answers each with the value of `answer`
PROGRAM = """
import ctypes, json, os, signal, sys, time
from inprocess.monitor import process as monitor_process, starting
from inprocess.monitor.board import PING, Board
from inprocess.monitor_process import MonitorConfig, MonitorProcess
from inprocess.protocol.membership import Membership
from inprocess.protocol.phases import Phase
board = Board.create()
board.hold()
board.place(0, False)
board.unprotect()  # until it enters an iteration: on a busy machine that takes its time
monitor = MonitorProcess(MonitorConfig.from_json(sys.argv[1]), board)
for line in sys.stdin:
    answer = None
    try:
        exec(line)
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
"""


class Rank:
    """A training process of a test; ``config`` as for MonitorConfig."""

    def __init__(self, stderr: int | None = None, **config: Any) -> None:
        settings = {"monitor_process_interval": 0.05, "heartbeat_interval": 0.05, "rendezvous": "never"}
        self.config = MonitorConfig(**{**settings, **config})
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, self.config.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])},
        )
        #: pidfds of monitors
        self.monitors: dict[int, int] = {}

    def tell(self, line: str) -> None:
        """Have it run a line of Python and do not wait for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def do(self, line: str) -> Any:
        """Have it run a line of Python; answers what the line assigns to ``answer``."""
        self.tell(line)
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def start(self, joined: bool = True) -> int:
        """Start its monitor; answers the pid."""
        pid = self.do("monitor.start(); answer = monitor.pid")
        assert isinstance(pid, int), pid
        self.monitors[pid] = os.pidfd_open(pid)
        if joined:
            assert self.do(f"monitor._await('joined', {SOON})") is None
        return pid

    def enter(self, iteration: int = 0) -> None:
        """It is in the function of an iteration."""
        self.do(f"board.begin({iteration}); board.enter(Phase.RUN)")

    def ended(self) -> int:
        """Wait for the end of the training process; answers its exit code (negative: the signal)."""
        return self.process.wait(SOON)

    def monitor_ended(self, pid: int) -> None:
        """Wait for the end of a monitor."""
        wait_readable(self.monitors[pid])

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        for pid, pidfd in self.monitors.items():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            wait_readable(pidfd)
            os.close(pidfd)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)  # this process is the subreaper


def wait_readable(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(SOON * 1e3), "it is still there"


class Base:
    """The base store, served by the test, and the members that the test plays."""

    def __init__(self, prefix: str = "call", port: int = 0) -> None:
        self.server = serve("127.0.0.1", port)
        self.spec = StoreSpec(port=self.server.port, prefix=prefix)
        self.connection = connecting.connect(self.spec, SOON)

    def do(self, verb: Verb[Any]) -> Any:
        return driver.execute(verb, self.connection)

    def join(self, *members: int) -> None:
        for member in members:
            self.do(verbs.join(Membership.founder(member, members, len(members)), f"test {member}"))

    def begin(self, *members: int) -> None:
        """All members join and iteration 0 starts."""
        self.join(*members)
        size = len(members)
        for rank, member in enumerate(members):
            membership = Membership(member, members, iteration=0)
            self.do(verbs.start_round(membership, Arrival(ArrivalKind.RANK, rank, size, size, rank, "test")))

    def end(self, member: int, roster: tuple[int, ...], iteration: int = 0) -> None:
        membership = Membership(member, roster, iteration=iteration)
        self.do(verbs.end_round(membership, Arrival(ArrivalKind.ALIVE, roster.index(member), len(roster), by="test")))

    def outcome(self, iteration: int = 0) -> Outcome:
        self.connection.wait([f"{iteration}/outcome"], timedelta(seconds=SOON))  # no timer ends a wait in C
        found: Outcome = self.do(verbs.await_outcome(iteration))
        return found


@pytest.fixture
def base() -> Iterator[Base]:
    base = Base()
    yield base
    base.connection = base.server = None  # pytest keeps the object a little longer


@pytest.fixture
def rank(base: Base) -> Iterator[Callable[..., Rank]]:
    """Make a Rank that uses the test's store; all are gone afterwards."""
    ranks: list[Rank] = []

    def make(member: int = 0, members: int = 2, **config: Any) -> Rank:
        settings = {"store": base.spec.to_json(), "roster": tuple(range(members)), "rank": member, **config}
        ranks.append(Rank(member=member, **settings))
        return ranks[-1]

    yield make
    for made in ranks:
        made.close()


Make = Callable[..., Rank]

# --- death ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("os._exit(7)", "the training process exited with code 7"),
    ],
)
def test_a_dead_rank_is_spoken_for_and_its_monitor_goes(base: Base, rank: Make, end: str, message: str) -> None:
    victim = rank()
    monitor = victim.start()
    base.begin(0, 1)
    victim.enter()
    victim.tell(end)
    outcome = base.outcome()
    assert outcome.cause is not None and not outcome.completed
    assert (outcome.cause.interruption, outcome.cause.message) == (Interruption.TERMINATED, message)
    base.end(1, (0, 1))
    decision = base.do(verbs.await_next(0))
    assert (decision.removed, decision.terminated) == ((0,), (0,))
    victim.monitor_ended(monitor)


#: ends a thread alone, and leaves the process: the number of the system call
EXIT_THREAD = {"x86_64": 60, "aarch64": 93}.get(platform.machine())


@pytest.mark.skipif(EXIT_THREAD is None, reason="the number of the system call is not known here")
def test_a_dying_rank_interrupts_the_others_but_is_not_dead_before_its_process_is(base: Base, rank: Make) -> None:
    victim = rank()
    monitor = victim.start()
    base.begin(0, 1)
    victim.enter()
    victim.tell(f"import threading; threading.Thread(target=time.sleep, args=[{2 * SOON}]).start()")
    victim.answer()
    victim.tell(f"ctypes.CDLL(None).syscall({EXIT_THREAD}, 9)")  # as one with a thread that hangs in a driver
    outcome = base.outcome()
    assert outcome.cause is not None and outcome.cause.message == "the training process exited with code 9"
    base.end(1, (0, 1))
    assert base.do(verbs.missing(0, "end", (0, 1))) == [0], "the others go on, and it has not ended"
    victim.process.kill()
    decision = base.do(verbs.await_next(0))
    assert (decision.removed, decision.record_count) == ((0,), 1)
    victim.monitor_ended(monitor)


def test_who_will_die_is_spoken_for_afterwards_and_over_a_new_connection_where_need_be(base: Base) -> None:
    said: list[Event] = []
    missing: list[list[int]] = []
    tries: list[object] = []
    board = Board.create()
    link = Link(MonitorConfig(member=0, roster=(0, 1), store=base.spec.to_json()), board, said.append)
    base.begin(0, 1)
    base.end(1, (0, 1))

    def with_store(action: Callable[[Any], Any]) -> Any:
        tries.append(action)
        if len(tries) == 1:
            raise StoreLost("this connection alone")
        return action(connecting.connect(base.spec, SOON))

    class Death(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            missing.append(driver.execute(verbs.missing(0, "end", (0, 1)), connecting.connect(base.spec, SOON)))
            return True

    link.with_store = with_store
    link.foretell(0, InterruptionRecord(0, Interruption.TERMINATED, initial_rank=0), Death())
    assert base.do(verbs.await_next(0)).removed == (0,)
    for thread in threading.enumerate():
        if thread.name == "inprocess-speak_out":
            thread.join(SOON)
    assert (missing, said) == ([[0]], [Spoken(0)])
    board.close()


def test_a_rank_that_dies_before_it_has_joined_is_spoken_for(base: Base, rank: Make) -> None:
    victim = rank()
    monitor = victim.start(joined=False)  # torch is not even imported there
    victim.process.kill()
    base.do(verbs.join(Membership.founder(1, (0, 1), 2), "test 1"))
    assert base.do(verbs.await_next(-1)).removed == (0,)
    victim.monitor_ended(monitor)


@pytest.mark.parametrize("entered", [False, True])
def test_a_reserve_that_dies_does_not_interrupt(base: Base, rank: Make, entered: bool) -> None:
    """Nor while it is dying: where its board says that it is one."""
    victim = rank()
    victim.start()
    base.join(0, 1)
    base.do(verbs.start_round(Membership(0, (0, 1), 0), Arrival(ArrivalKind.RANK, 1, 2, 1, None, "test")))
    base.do(verbs.start_round(Membership(1, (0, 1), 0), Arrival(ArrivalKind.RANK, 0, 2, 1, 0, "test")))
    if entered:
        victim.enter()
        victim.do("board.place(1, True)")
    victim.process.kill()
    base.do(awaiting("0/end/0"))
    base.do(verbs.finish(0, 1, (0, 1)))
    assert base.outcome().completed


def awaiting(key: str) -> Verb[Any]:
    from inprocess.protocol.ops import Wait

    return (yield Wait(key))


# --- hangs ---------------------------------------------------------------------------------------------------------


def test_no_progress_interrupts_everybody_and_kills_nobody(base: Base, rank: Make) -> None:
    slow = rank(soft_timeout=0.2, hard_timeout=60.0)
    slow.start()
    base.begin(0, 1)
    slow.enter()
    outcome = base.outcome()
    assert outcome.cause is not None and outcome.cause.interruption is Interruption.SOFT_TIMEOUT
    assert slow.do("board.answer(0); answer = 'alive'") == "alive"


def test_no_ping_interrupts_while_the_main_thread_runs(base: Base, rank: Make) -> None:
    slow = rank(soft_timeout=0.4, hard_timeout=60.0)
    slow.start()
    base.begin(0, 1)
    slow.do(
        "from inprocess.progress_watchdog import ProgressWatchdog; dog = ProgressWatchdog(board, 0.02); dog.start()"
    )
    slow.do("board.begin(0); board.enter(Phase.RUN); board.slots[PING] = time.monotonic_ns()")
    slow.tell("while True: pass")
    outcome = base.outcome()
    assert outcome.cause is not None and outcome.cause.message.startswith("no ping()")


HANGS = {
    "holds the GIL": "ctypes.PyDLL(None).pause()",
    "is stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "sleeps": "time.sleep(3600)",
}


@pytest.mark.parametrize("how", HANGS)
def test_a_rank_that_does_not_answer_is_killed(base: Base, rank: Make, how: str) -> None:
    stuck = rank(soft_timeout=0.2, hard_timeout=0.6)
    stuck.start()
    base.begin(0, 1)
    stuck.enter()
    stuck.tell(HANGS[how])
    assert stuck.ended() == -signal.SIGTERM
    base.end(1, (0, 1))
    kinds = [record.interruption for record in base.do(verbs.await_next(0)).records]
    assert kinds == [Interruption.SOFT_TIMEOUT, Interruption.HARD_TIMEOUT]


def test_one_that_ignores_sigterm_gets_sigkill(base: Base, rank: Make) -> None:
    stuck = rank(soft_timeout=0.2, hard_timeout=0.4, termination_grace_time=0.2)
    stuck.do("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    stuck.start()
    base.begin(0, 1)
    stuck.enter()
    stuck.tell("time.sleep(3600)")
    assert stuck.ended() == -signal.SIGKILL


def test_one_that_leaves_the_call_when_sigterm_comes_is_not_killed(base: Base, rank: Make) -> None:
    """A handler of the program's raises SystemExit, say, and what follows takes longer than a moment."""
    stuck = rank(soft_timeout=0.2, hard_timeout=0.4, termination_grace_time=SOON)
    pid = stuck.start()
    base.begin(0, 1)
    stuck.do("def leave(*_): monitor.bye('failed', 'SystemExit: 7')")
    stuck.do("signal.signal(signal.SIGTERM, leave)")
    stuck.enter()
    stuck.tell("signal.pause()")
    base.end(1, (0, 1))
    assert stuck.answer() is None  # it has heeded the signal
    stuck.monitor_ended(pid)
    assert stuck.do(f"answer = board.slots[{ENDING}]") == 1  # whoever else notes SIGTERM can tell whose it is
    reasons = [record.message for record in base.do(verbs.await_next(0)).records]
    assert "left the call: SystemExit: 7" in reasons


def test_one_that_leaves_may_take_longer_than_the_grace(base: Base, rank: Make) -> None:
    """In its `terminate`, say: the others have gone on."""
    stuck = rank(soft_timeout=0.2, hard_timeout=0.4, termination_grace_time=0.3)
    stuck.start()
    base.begin(0, 1)
    stuck.do("def leave(*_): board.enter(Phase.LEAVE); board.unprotect(); time.sleep(1.5)")
    stuck.do("signal.signal(signal.SIGTERM, leave)")
    stuck.enter()
    stuck.tell("signal.pause()")
    assert stuck.answer() is None
    assert stuck.do(f"answer = board.slots[{ENDING}]") == 0


def test_a_monitor_that_stands_still_for_moments_is_left_alone() -> None:
    """A new one would take about as long to begin, and a short lease would be over by then."""
    for heartbeat_timeout, seconds in ((2.5, 3.0), (30.0, 10.0)):
        config = MonitorConfig(member=0, roster=(0,), store="", heartbeat_timeout=heartbeat_timeout)
        board = Board.create()
        assert MonitorProcess(config, board).silence == seconds
        board.close()


def test_one_that_makes_progress_but_swallows_the_interruption_is_killed(base: Base, rank: Make) -> None:
    stuck = rank(soft_timeout=30.0, hard_timeout=30.5)
    stuck.start()
    base.begin(0, 1)
    stuck.enter()
    stuck.do(f"board.section({0.3})")  # hard timeout: 0.8
    stuck.tell("while True: board.stamp()")
    record = watching.lost_record(1, 1.0)
    base.do(verbs.interrupt(0, record))
    assert stuck.ended() == -signal.SIGTERM


def serving(rank: Make) -> tuple[Rank, int, int]:
    """A rank of two whose monitor serves the store: the rank, its monitor and the port."""
    host = rank(members=2, store=StoreSpec(prefix="c").to_json(), serve_port=0)
    monitor = host.start()
    return host, monitor, host.do("answer = monitor.wait_serving(30)")


def complete_call(port: int) -> Any:
    """The test plays both members of a call that completes; answers its connection."""
    connection = connecting.connect(StoreSpec(port=port, prefix="c"), SOON)
    for member in (0, 1):
        driver.execute(verbs.join(Membership.founder(member, (0, 1), 2), f"test {member}"), connection)
    driver.execute(verbs.finish(0, 1, (0, 1)), connection)
    return connection


# --- the store and the others ---------------------------------------------------------------------------------------


def test_a_member_without_heartbeats_is_declared_dead(base: Base, rank: Make) -> None:
    watcher = rank(heartbeat_timeout=0.5)
    watcher.start()
    base.begin(0, 1)
    watcher.enter()
    base.do(verbs.beat(1))
    outcome = base.outcome()
    assert outcome.cause is not None and outcome.cause.interruption is Interruption.UNRESPONSIVE
    assert outcome.cause.rank == 1
    base.end(0, (0, 1))
    assert base.do(verbs.await_next(0)).removed == (1,)


def test_a_rank_that_cannot_be_heard_is_killed_before_the_others_go_on(rank: Make) -> None:
    _, host_monitor, port = serving(rank)
    cut_off = rank(member=1, store=StoreSpec(port=port, prefix="c").to_json(), heartbeat_timeout=1.0)
    cut_off.start()
    cut_off.do("from inprocess.monitor.board import LEASE")
    while not cut_off.do("answer = board.slots[LEASE]"):
        pass
    os.kill(host_monitor, signal.SIGSTOP)
    assert cut_off.ended() == -signal.SIGKILL


def test_a_lost_store_is_logged_and_the_rank_may_leave_by_itself(rank: Make, tmp_path: Path) -> None:
    log = tmp_path / "log"
    _, host_monitor, port = serving(rank)
    other = rank(member=1, store=StoreSpec(port=port, prefix="c").to_json(), iteration=0, logfile=str(log))
    monitor = other.start()
    os.kill(host_monitor, signal.SIGKILL)
    while "store lost: the store failed" not in log.read_text():
        pass
    assert other.do("monitor.bye('failed')") is None
    other.monitor_ended(monitor)


def test_a_rank_that_does_not_leave_without_a_store_is_killed(rank: Make) -> None:
    _, host_monitor, port = serving(rank)
    other = rank(
        member=1,
        store=StoreSpec(port=port, prefix="c").to_json(),
        **{"iteration": 0, "soft_timeout": 0.2, "hard_timeout": 0.4},
    )
    monitor = other.start()
    other.enter()
    other.tell("while True: board.stamp()")
    os.kill(host_monitor, signal.SIGKILL)
    assert other.ended() == -signal.SIGTERM
    other.monitor_ended(monitor)


def test_a_port_that_is_taken_is_an_error_that_names_it(base: Base, rank: Make) -> None:
    host = rank(serve_port=base.server.port)
    monitor = host.start(joined=False)
    text = host.do("answer = monitor.wait_serving(30)")
    assert text.startswith(f"OptionError: MASTER_PORT={base.server.port}")
    host.monitor_ended(monitor)


# --- the iterations' own stores -------------------------------------------------------------------------------------


def test_each_iteration_has_a_store_and_loses_it_with_the_next(base: Base, rank: Make) -> None:
    """Not with the interruption: a rank that is still connecting then would try for as long as its own timeout."""
    host = rank(rendezvous="always", rendezvous_host="127.0.0.1")
    host.start()
    base.begin(0, 1)
    address = base.do(verbs.await_rendezvous(0))
    host_part, _, port = address.rpartition(":")
    own = connecting.connect_to(host_part, int(port), SOON)
    ended: list[str] = []
    waiting = threading.Thread(target=lambda connection: ended.append(wait_in(connection)), args=(own,))
    waiting.start()
    base.do(verbs.interrupt(0, watching.lost_record(1, 1.0)))
    assert base.do(verbs.await_rendezvous(1)) not in (address, "-")
    late = connecting.connect_to(host_part, int(port), SOON)
    base.end(0, (0, 1))
    base.end(1, (0, 1))
    waiting.join(SOON)
    assert ended and ended[0].startswith("StoreLost")
    del own, late


def wait_in(connection: Any) -> str:
    try:
        driver.execute(awaiting("never"), connection)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "released by nothing"


def test_the_smallest_live_member_serves_where_nobody_is_the_host(base: Base, rank: Make) -> None:
    first, second = rank(0, rendezvous="smallest"), rank(1, rendezvous="smallest")
    first.start()
    second.start()
    base.begin(0, 1)
    assert base.do(verbs.await_rendezvous(0)) != "-"
    first.process.kill()
    base.outcome()
    base.end(1, (0, 1))
    base.do(verbs.await_next(0))
    assert base.do(verbs.await_rendezvous(1)) != "-"


def test_one_that_is_far_behind_goes_on_where_the_others_are(base: Base, rank: Make) -> None:
    """The verdicts that it would walk along are deleted."""
    late = rank(members=3, rendezvous="smallest", iteration=2)
    base.do(verbs.forget(20, Membership(0, (0, 1), iteration=20, known=frozenset((0, 1, 2)))))
    late.start()
    base.connection.wait(["20/rendezvous"], timedelta(seconds=SOON))  # no timer ends a wait in C


def test_one_that_is_far_behind_and_was_given_up_ends_its_rank(base: Base, rank: Make) -> None:
    late = rank(iteration=2, soft_timeout=0.2, hard_timeout=0.4)
    late.do("board.begin(2); board.enter(Phase.RUN); board.unprotect()")
    base.do(verbs.forget(20, Membership(1, (1,), iteration=20, known=frozenset((0, 1)))))
    late.start(joined=False)
    assert late.ended() in (-signal.SIGTERM, -signal.SIGKILL)


# --- goodbye --------------------------------------------------------------------------------------------------------


def test_after_the_call_the_monitor_goes_with_its_rank(base: Base, rank: Make) -> None:
    done = rank()
    before = done.do("answer = sorted(os.listdir('/proc/self/fd'))")
    monitor = done.start()
    base.begin(0, 1)
    base.do(verbs.finish(0, 1, (0, 1)))
    assert done.do("monitor.bye('completed'); answer = [monitor.pid, monitor_process._lingering]") == [None, {}]
    done.monitor_ended(monitor)
    assert done.do("answer = sorted(os.listdir('/proc/self/fd'))") == before


def test_a_rank_that_failed_is_spoken_for_with_its_reason(base: Base, rank: Make) -> None:
    failed = rank()
    monitor = failed.start()
    base.begin(0, 1)
    failed.do("monitor.bye('failed', why='disk full')")
    cause = base.outcome().cause
    assert cause is not None and cause.message == "left the call: disk full"
    base.end(1, (0, 1))
    failed.monitor_ended(monitor)


def test_a_rank_that_failed_before_its_monitor_saw_the_job_is_spoken_for(base: Base, rank: Make) -> None:
    """However long that monitor takes to import torch: the others would wait for its first heartbeat."""
    failed = rank(termination_grace_time=0.001)
    base.begin(0, 1)
    monitor = failed.start(joined=False)
    failed.do("import dataclasses; monitor.config = dataclasses.replace(monitor.config, termination_grace_time=30)")
    failed.do("monitor.bye('failed', why='disk full')")
    cause = base.outcome().cause
    assert cause is not None and cause.message == "left the call: disk full"
    base.end(1, (0, 1))
    failed.monitor_ended(monitor)


def test_where_the_job_cannot_be_read_the_host_need_not_wait_for_it(base: Base, rank: Make) -> None:
    """Its monitor did not know yet whether it was a founder's."""
    base.do(verbs.join(Membership.founder(0, (0, 1), 2), "me"))
    base.connection.set("-1/end/1", "no entry")
    base.connection.set("-1/next", "no verdict")
    failed = rank(identified=False, me="me")
    monitor = failed.start(joined=False)
    failed.do("monitor.bye('failed', why='no verdict')")
    base.do(awaiting("gone/0"))
    failed.monitor_ended(monitor)


def test_the_host_s_monitor_stays_until_nobody_needs_the_store(rank: Make) -> None:
    host, monitor, port = serving(rank)
    connection = complete_call(port)
    answer = host.do("monitor.bye('completed'); answer = list(monitor_process._lingering)")
    assert answer == [monitor]
    driver.execute(verbs.gone(1, 2), connection)
    host.monitor_ended(monitor)
    assert host.do("monitor_process.reap_lingering(); answer = list(monitor_process._lingering)") == []
    del connection


def test_the_store_s_host_may_have_many_descriptors(base: Base, rank: Make) -> None:
    host = rank(members=1, store=StoreSpec(prefix="c").to_json(), serve_port=0)
    host.do("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(7)[1]))")
    monitor = host.start()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert resource.prlimit(monitor, resource.RLIMIT_NOFILE) == (hard, hard)


def test_the_host_of_the_next_call_waits_for_the_port(rank: Make) -> None:
    host, first, port = serving(rank)
    connection = complete_call(port)
    host.do("monitor.bye('completed')")
    host.do(f"monitor_process._lingering[{first}] = {port}")
    host.do(f"import dataclasses; config = dataclasses.replace(monitor.config, serve_port={port})")
    host.do("monitor = MonitorProcess(config, board)")
    second = host.start(joined=False)
    driver.execute(verbs.gone(1, 2), connection)
    assert host.do("answer = monitor.wait_serving(30)") == port
    host.monitor_ended(first)
    os.kill(second, 0)
    del connection


@pytest.mark.parametrize("heartbeat_interval", [0.05, 600.0])
def test_a_standby_is_found_though_it_met_the_store_of_the_call_before(
    base: Base, rank: Make, heartbeat_interval: float
) -> None:
    """It notices with its next heartbeat, or when iteration 0 has begun in the right store."""
    port, key = base.server.port, "standby/1"
    early = rank(member=1, store_host=0, standby_stores=1, heartbeat_interval=heartbeat_interval)
    early.start()
    first = base.connection.get(key)
    assert first
    base.connection = base.server = None  # the call before had never begun
    right = Base(port=port)
    right.begin(0, 1)
    right.connection.wait([key], timedelta(seconds=SOON))
    assert right.connection.get(key) == first


# --- the monitor itself ---------------------------------------------------------------------------------------------


def test_a_killed_monitor_is_replaced_and_the_new_one_protects(base: Base, rank: Make) -> None:
    kept = rank()
    first = kept.start()
    base.begin(0, 1)
    kept.enter()
    os.kill(first, signal.SIGKILL)
    kept.monitor_ended(first)
    second = kept.do("answer = (monitor.replace(Membership(0, (0, 1), 0)), monitor.pid)")[1]
    kept.monitors[second] = os.pidfd_open(second)
    assert kept.do("monitor._await('joined', 30)") is None
    kept.process.kill()
    assert base.outcome().cause is not None


def test_too_many_deaths_are_an_error(rank: Make) -> None:
    kept = rank()
    kept.do("monitor_process.REPLACEMENTS = 0")
    monitor = kept.start()
    os.kill(monitor, signal.SIGKILL)
    kept.monitor_ended(monitor)  # one that lives is not replaced
    assert "died 1 times" in kept.do("monitor.replace(Membership(0, (0, 1), 0))")


def test_no_descriptor_is_left_to_start_it(rank: Make) -> None:
    """Not even for the first that it takes."""
    answer = rank().do("import resource; resource.setrlimit(7, (3, resource.getrlimit(7)[1])); monitor.start()")
    assert answer.startswith("RestartError: cannot start the monitor process with "), answer


def test_signals_to_the_whole_job_do_not_end_it(base: Base, rank: Make) -> None:
    kept = rank()
    monitor = kept.start()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(monitor, signum)
    base.begin(0, 1)
    kept.process.kill()
    assert base.outcome().cause is not None
    assert os.getsid(monitor) == monitor


def test_it_inherits_nothing_but_what_it_needs(rank: Make) -> None:
    kept = rank()
    kept.do("extra = os.open('/etc/hostname', os.O_RDONLY); os.set_inheritable(extra, True)")
    monitor = kept.start()
    found = set()
    for entry in Path(f"/proc/{monitor}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it works on, and has closed it
            found.add(os.readlink(entry))
    inherited = {"/dev/null", "/memfd:inprocess-board (deleted)", "/memfd:inprocess-config (deleted)"}
    inherited.add(os.readlink(f"/proc/{monitor}/fd/2"))  # standard error, for what it cannot tell otherwise
    # the rest has no name: its own sockets and events, the socket to the rank, and the rank's pidfd
    anonymous = re.compile(r"(socket|pipe|pidfd|anon_inode):.*|/proc/.*")
    assert {target for target in found if not anonymous.fullmatch(target)} | inherited == inherited
    assert os.readlink(f"/proc/{monitor}/cwd") == "/"


def test_other_users_see_no_secret_in_its_command_line(rank: Make, base: Base) -> None:
    """Options, addresses and the prefix of the keys travel in memory that has no name; only numbers are arguments."""
    kept = rank(logfile="/dev/null")
    monitor = kept.start()
    words = Path(f"/proc/{monitor}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    program = words.index(b"-c") + 1
    assert all(re.fullmatch(rb"-?\d+", word) for word in words[program + 1 :])
    assert base.spec.prefix.encode() + b"/" not in words[program] and b"dev/null" not in b" ".join(words)
    assert Path(f"/proc/{monitor}/environ").stat().st_mode & 0o077 == 0


def test_a_line_that_is_none_does_not_end_it(base: Base, rank: Make) -> None:
    """Children that the user forks hold the socket too."""
    kept = rank()
    kept.start()
    base.begin(0, 1)
    kept.enter()
    # one is too long, and all fit into the buffer: a message for which there is no room is dropped
    junk = [b"{", b"[]", b"null", b'{"bye":', b"\xff", b"[" * 5000, b"x" * 70_000, b'{"a":1,"a":2}']
    kept.do(f"[monitor._ends.control.send(line + bytes([10])) for line in {junk!r}]")
    kept.do("monitor.bye('failed', why='a\\x1b[31m')")
    cause = base.outcome().cause
    assert cause is not None and cause.message == r"left the call: a\x1b[31m"


def test_a_light_import_that_fails_too_late_becomes_a_new_program(base: Base, rank: Make) -> None:
    kept = rank()
    broken = "import inprocess.system.light_torch as light; light._CLASSES = ('NoSuchStore',)"
    program = "from inprocess.monitor.program"
    kept.do(f"old, new = {program!r}, {broken!r} + chr(10) + {program!r}")
    kept.do("starting.CODE = starting.CODE.replace(old, new)")
    monitor = kept.start()  # waits until it has joined
    assert json.loads(read_memory(monitor, "inprocess-config"))["full_torch"] is True
    base.begin(0, 1)
    kept.process.kill()
    assert base.outcome().cause is not None


AHEAD = "starting.prepare(30); answer = starting._waiting[0].process.pid"


def opened(pid: int) -> list[str]:
    """What descriptors a monitor holds, by kind."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(entry).partition("[")[0])
    return sorted(found)


def test_a_program_that_was_started_ahead(base: Base, rank: Make) -> None:
    """It is the next monitor, and like any other. Each of its threads has a connection of its own, and only the one
    with the heartbeats says that it has joined: the others may come later."""
    other, kept = rank(1), rank()
    ahead = kept.do(AHEAD)
    assert is_monitor(ahead)
    pids = [kept.start(joined=False), other.start(joined=False)]
    assert pids[0] == ahead
    for each in (kept, other):
        assert each.do(f"monitor._await('joined', {SOON})") is None
    deadline = clock.monotonic() + SOON
    while opened(ahead) != opened(pids[1]) and clock.monotonic() < deadline:
        time.sleep(0.005)
    assert opened(ahead) == opened(pids[1])
    base.begin(0, 1)
    kept.enter()
    kept.process.kill()
    assert base.outcome().cause is not None
    base.end(1, (0, 1))
    kept.monitor_ended(ahead)


@pytest.mark.parametrize(
    "why",
    [
        "import dataclasses; monitor.config = dataclasses.replace(monitor.config, full_torch=True)",
        "os.environ['USE_LIBUV'] = '0'",
        "starting._waiting[0]._owner += 1",
        "starting._waiting[0].process.kill(); starting._waiting[0].process.wait()",
        "starting._waiting[0].control.recv(5)",
    ],
    ids=["all of torch", "another store", "a fork", "killed", "not ready"],
)
def test_a_program_ahead_that_does_not_fit(rank: Make, why: str) -> None:
    kept = rank()
    ahead = kept.do(AHEAD)
    assert kept.do(why) is None
    assert kept.start(joined=False) != ahead
    assert not os.path.exists(f"/proc/{ahead}")


def test_a_program_ahead_ends_with_its_process(rank: Make) -> None:
    kept = rank()
    ahead = os.pidfd_open(kept.do(AHEAD))
    kept.process.kill()
    wait_readable(ahead)
    os.close(ahead)


@pytest.mark.parametrize(("signum", "full"), [(signal.SIGKILL, False), (signal.SIGSEGV, True)])
def test_only_a_crash_asks_for_all_of_torch(rank: Make, signum: signal.Signals, full: bool) -> None:
    """Importing all of it takes several times as long, without heartbeats: too long after a mere kill."""
    kept = rank()
    first = kept.start(joined=False)
    os.kill(first, signum)
    kept.monitor_ended(first)
    second = kept.do("answer = (monitor.replace(Membership(0, (0, 1), 0)), monitor.pid)")[1]
    kept.monitors[second] = os.pidfd_open(second)
    assert json.loads(read_memory(second, "inprocess-config"))["full_torch"] is full


def read_memory(pid: int, name: str) -> str:
    """What a memfd of another process holds."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed just now
            if name in os.readlink(entry):
                return entry.read_text()
    raise AssertionError(f"no {name}")


# --- log and pid file -----------------------------------------------------------------------------------------------


def test_log_and_pid_file_are_private_and_the_pid_file_is_removed(base: Base, rank: Make, tmp_path: Path) -> None:
    """Whatever the umask is."""
    log, pidfile = tmp_path / "log", tmp_path / "pid"
    kept = rank(logfile=str(log), pidfile=str(pidfile))
    kept.do("os.umask(0)")
    monitor = kept.start()
    assert int(pidfile.read_text()) == monitor
    assert (log.stat().st_mode & 0o777, pidfile.stat().st_mode & 0o777) == (0o600, 0o600)
    base.begin(0, 1)
    base.do(verbs.finish(0, 1, (0, 1)))
    kept.do("monitor.bye('completed')")
    assert not pidfile.exists()
    assert "torch imported (light)" in log.read_text()


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_standard_error_that_nobody_reads_does_not_keep_it_from_killing(base: Base, rank: Make, kind: str) -> None:
    with full(kind) as stderr:
        stuck = rank(stderr=stderr, soft_timeout=0.2, hard_timeout=0.6)
        monitor = stuck.start()
        base.begin(0, 1)
        stuck.enter()
        stuck.tell(HANGS["is stopped"])
        assert stuck.ended() == -signal.SIGTERM
        base.end(1, (0, 1))
        assert base.do(verbs.await_next(0)).removed == (0,)
        base.do(verbs.finish(1, 1, (1,)))
        stuck.monitor_ended(monitor)


#: what the disk does not answer, in the program of the monitor
DISKS = {
    "opening the log": "os.open = lambda path, *rest: hang() if path == {log!r} else opened(path, *rest)",
    "opening the pid file": "os.open = lambda path, *rest: hang() if path == {pid!r} else opened(path, *rest)",
    "writing": "os.write = lambda fd, data: hang() if b'monitor of' in data else written(fd, data)",
    "removing the pid file": "os.unlink = lambda path: hang() if path == {pid!r} else unlinked(path)",
}


@pytest.mark.parametrize("disk", DISKS)
def test_a_disk_that_does_not_answer_does_not_keep_it_from_killing(
    base: Base, rank: Make, tmp_path: Path, disk: str
) -> None:
    log, pid = str(tmp_path / "log"), str(tmp_path / "pid")
    stuck = rank(logfile=log, pidfile=pid, soft_timeout=0.2, hard_timeout=0.6)
    lines = [
        "import os, threading",
        "hang = lambda: threading.Event().wait()",
        "opened, written, unlinked = os.open, os.write, os.unlink",
        DISKS[disk].format(log=log, pid=pid),
        "from inprocess.monitor.program",
    ]
    change = f"('from inprocess.monitor.program', {chr(10).join(lines)!r})"
    stuck.do(f"starting.CODE = starting.CODE.replace{change}")
    monitor = stuck.start()
    base.begin(0, 1)
    stuck.enter()
    stuck.tell(HANGS["sleeps"])
    assert stuck.ended() == -signal.SIGTERM
    base.end(1, (0, 1))
    base.do(verbs.finish(1, 1, (1,)))
    stuck.monitor_ended(monitor)


def test_a_full_disk_does_not_keep_it_from_killing(base: Base, rank: Make) -> None:
    stuck = rank(logfile="/dev/full", soft_timeout=0.2, hard_timeout=0.6)
    stuck.start()
    base.begin(0, 1)
    stuck.enter()
    stuck.tell(HANGS["sleeps"])
    assert stuck.ended() == -signal.SIGTERM


OPTIONS = {"logfile": "monitor_process_logfile", "pidfile": "monitor_process_pidfile"}


def _link(path: Path) -> None:
    path.symlink_to(path.with_name("other"))


def _link_to_a_file(path: Path) -> None:
    path.with_name("theirs").write_text("theirs")
    path.symlink_to(path.with_name("theirs"))


def _in_no_folder(path: Path) -> None:
    path.parent.rmdir()


#: what may be where the log or the pid file should go
PLANTED: dict[str, Callable[[Path], object]] = {
    "a link": _link,
    "a link to a file": _link_to_a_file,
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "no folder": _in_no_folder,
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("what", PLANTED)
def test_what_is_in_the_way_is_an_error_that_names_the_option(
    rank: Make, tmp_path: Path, option: str, what: str
) -> None:
    """And is left as it is. Nobody waits for the other end of a pipe."""
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "file"
    PLANTED[what](path)
    before = sorted(entry.name for entry in tmp_path.rglob("*"))
    kept = rank(**{option: str(path)})
    kept.start(joined=False)
    text = kept.do("monitor._await('joined', 30)")
    assert text.startswith(f"OptionError: {OPTIONS[option]}='{path}' cannot be written: ")
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == before
    assert what != "a link to a file" or path.read_text() == "theirs"


@pytest.mark.parametrize("option", OPTIONS)
def test_a_new_monitor_in_a_running_call_does_without_its_file(
    base: Base, rank: Make, tmp_path: Path, option: str
) -> None:
    """A folder below /tmp is cleaned up, say: the rank was healthy, and left."""
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "file"
    kept = rank(**{option: str(path)})
    first = kept.start()
    base.begin(0, 1)
    signal.pidfd_send_signal(kept.monitors[first], signal.SIGKILL)
    kept.monitor_ended(first)
    path.unlink()
    path.parent.rmdir()
    assert kept.do("answer = monitor.replace(Membership(0, (0, 1), 0))") is True
    kept.monitors[pid] = os.pidfd_open(pid := kept.do("answer = monitor.pid"))
    assert kept.do(f"monitor._await('joined', {SOON})") is None


def test_a_pipe_with_a_reader_is_refused_too(rank: Make, tmp_path: Path) -> None:
    """Without one, opening it fails by itself."""
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    try:
        kept = rank(logfile=str(tmp_path / "log"))
        kept.start(joined=False)
        assert "is not a regular file" in kept.do("monitor._await('joined', 30)")
        assert os.read(reader, 10) == b""
    finally:
        os.close(reader)


def test_a_file_that_is_no_pid_file_is_not_deleted(rank: Make, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("years of work")
    kept = rank(pidfile=str(tmp_path / "data"))
    kept.start(joined=False)
    assert "is not a pid file, it holds something else" in kept.do("monitor._await('joined', 30)")
    assert (tmp_path / "data").read_text() == "years of work"


def test_a_stale_pid_file_is_replaced(rank: Make, tmp_path: Path) -> None:
    pidfile = tmp_path / "pid"
    dead = subprocess.Popen([sys.executable, "-S", "-c", ""])
    dead.wait()
    pidfile.write_text(f"{dead.pid}\n")
    kept = rank(pidfile=str(pidfile))
    assert int(pidfile.read_text()) != kept.start() or int(pidfile.read_text()) != dead.pid


def test_the_pid_file_of_another_job_s_live_monitor_is_an_error(rank: Make, tmp_path: Path) -> None:
    first, second = rank(pidfile=str(tmp_path / "pid")), rank(pidfile=str(tmp_path / "pid"))
    first.start()
    second.start(joined=False)
    assert "monitor_process_pidfile" in second.do("monitor._await('joined', 30)")


def test_the_time_until_it_protects_does_not_include_torch(rank: Make) -> None:
    kept = rank()
    kept.start(joined=False)
    begin = clock.monotonic()
    assert kept.do("answer = monitor._await('ready', 30)") > 0
    assert clock.monotonic() - begin < SOON


def test_a_store_is_lost_before_the_monitor_knows_that_the_job_has_begun():
    """Its rank knew, and has left: to wait for another store there would last until `barrier_timeout`."""
    board = Board.create()
    link = Link(MonitorConfig(member=0, roster=(0, 1), store=""), board, lambda _: None)
    assert not link._in_job()
    board.begin(0)
    assert link._in_job()
    board.close()
