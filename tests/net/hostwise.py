"""What the partition tests do to a host, and what they say about its ranks afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Sequence

from tests.harness import Ranks, Run, leaks

from .shared import Shared


def processes(run: Run, rank: int) -> list[int]:
    """A rank's training process and its monitor."""
    return [run.pids[rank], *leaks.children_of(run.pids[rank])]


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


def left_by_itself(ranks: Ranks, victims: Collection[int], kind: str = "StoreLost") -> None:
    """These ranks ended with a clear error, and in an orderly way."""
    for victim in victims:
        assert (ranks[victim].exception, ranks[victim].exitcode) == (kind, 0), ranks[victim].trace


def stopped(ranks: Ranks, victims: Collection[int]) -> None:
    """These ranks left by themselves as soon as they knew that they were cut off, or were killed a moment later."""
    for victim in victims:
        if ranks[victim].done:
            left_by_itself(ranks, [victim])
        else:
            killed(ranks, [victim])


def killed(ranks: Ranks, victims: Collection[int]) -> None:
    """These ranks were stopped in the middle of what they did."""
    for victim in victims:
        assert ranks[victim].exitcode == -signal.SIGKILL
        assert not ranks[victim].done


def tell(what: str, ranks: Ranks, since: float, without: Collection[int] = (), iteration: int = 1) -> None:
    """How long the others took, for people who read the output."""
    print(f"{what}: others entered again {entered(ranks, iteration, without) - since:.2f} s later")
