"""What the partition tests do to a host, and what they say about its ranks afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterator, Sequence

from inprocess.system.descriptors import await_readable
from inprocess.testing import leaks
from tests.harness import Ranks, Run
from tests.ranks import checks

from .shared import Shared


def processes(run: Run, rank: int) -> list[int]:
    """A rank's training process and its monitor."""
    return [run.pids[rank], *leaks.children_of(run.pids[rank])]


@contextlib.contextmanager
def until_ended(pids: Sequence[int], seconds: float = 30.0) -> Iterator[None]:
    """When the body is done, wait for the end of these processes."""
    with contextlib.ExitStack() as stack:
        pidfds = [os.pidfd_open(pid) for pid in pids]
        for pidfd in pidfds:
            stack.callback(os.close, pidfd)
        yield
        assert all(await_readable(pidfd, seconds) for pidfd in pidfds), "a process did not end in time"


def send(pids: Sequence[int], signum: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, signum)


def entered(ranks: Ranks, iteration: int, without: Collection[int] = ()) -> float:
    """When the first of the ranks entered an iteration (monotonic)."""
    return min(e["t"] for rank in ranks if rank.rank not in without for e in rank.of("enter", iteration=iteration))


def gave_up(ranks: Ranks, shared: Shared, victims: Collection[int], iteration: int = 1) -> None:
    """The functions of these ranks had stopped for good, and written their last checkpoint, before any other began
    the next iteration (I2); and nobody wrote for an iteration that was over."""
    begin = entered(ranks, iteration, victims)
    for victim in victims:
        assert shared.last_ran(victim) < begin
        assert max(write.t for write in shared.writes(victim)) < begin
        assert max(iteration for iteration, _, _ in ranks[victim].entries()) == iteration - 1
    late = [write for write in shared.writes() if write.iteration < iteration and write.t > begin]
    assert not late, late


def left_by_itself(ranks: Ranks, victims: Collection[int], *kinds: str) -> None:
    """These ranks ended with a clear error, and in an orderly way."""
    for victim in victims:
        assert (ranks[victim].exception in kinds, ranks[victim].exitcode) == (True, 0), ranks[victim].trace


def stopped(ranks: Ranks, victims: Collection[int]) -> None:
    """These ranks left by themselves as soon as they knew that they were cut off, or were killed a moment later. One
    that reaches a standby may hear there that the others have completed the job without it."""
    for victim in victims:
        if ranks[victim].done:
            left_by_itself(ranks, [victim], "StoreLost", "Fenced")
        else:
            killed(ranks, [victim])


def killed(ranks: Ranks, victims: Collection[int]) -> None:
    """These ranks were stopped in the middle of what they did."""
    for victim in victims:
        assert ranks[victim].exitcode == -signal.SIGKILL
        assert not ranks[victim].done


def judge_the_lost(
    run: Run, shared: Shared, victims: Collection[int], since: float, what: str, restarts: int | None = 1
) -> None:
    """The function is running again on the others: it ends there, had ended on these ranks before it began, and the
    output says how long that took. ``restarts``: None for any number but none."""
    shared.finish()
    ranks = run.wait(60)  # who is cut off waits for the others at its own standby
    if restarts is None:
        restarts = max(iteration for rank in ranks for iteration, _, _ in rank.entries())
    checks.went_on(ranks, without=victims, iteration=restarts)
    stopped(ranks, victims)
    gave_up(ranks, shared, victims)
    tell(f"{what}, {restarts} restarts", ranks, since, victims, restarts)


def wake_before_its_monitor(run: Run, shared: Shared, victim: int) -> None:
    """Pause a rank with its monitor until the others have gone on, then wake the training process alone: it ends
    itself and begins no checkpoint any more. One that it had begun before the pause may be finished after it."""
    pids = processes(run, victim)
    send(pids, signal.SIGSTOP)
    run.wait_event("enter", count=2, iteration=1)
    send(pids[:1], signal.SIGCONT)
    run.wait_event("ended")
    send(pids[1:], signal.SIGCONT)
    shared.finish()
    ranks = run.wait(fenced=[victim])
    checks.went_on(ranks, without=[victim])
    killed(ranks, [victim])
    begin = entered(ranks, 1, [victim])
    assert not [write for write in shared.writes(victim) if write.t > begin]


def tell(what: str, ranks: Ranks, since: float, without: Collection[int] = (), iteration: int = 1) -> None:
    """How long the others took, for people who read the output."""
    print(f"{what}: others entered again {entered(ranks, iteration, without) - since:.2f} s later")
