"""What the launcher does about a worker that failed, and who gets which node rank. Nothing here does IO.

`after_failure` returns an instruction; `agent` carries it out.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Fail", "Respawn", "RestartAll", "Rules", "Situation", "after_failure", "delay", "keep_ranks", "why_ended"]

ANY_FAILED, MIN_HEALTHY = "any-failed", "min-healthy"
#: restarts of one worker where --max-restarts is not given
DEFAULT_RESPAWNS = 3


@dataclass(frozen=True)
class Rules:
    """The options that decide."""

    policy: str = MIN_HEALTHY
    #: how often each worker may be replaced alone
    respawns: int = DEFAULT_RESPAWNS
    #: how often all workers may be restarted
    restarts: int = 0
    #: pause before the second replacement of a worker (seconds); doubles from one to the next
    backoff: float = 1.0
    #: it grows no longer than this (seconds)
    backoff_limit: float = 60.0


@dataclass(frozen=True)
class Situation:
    """What is known when a worker failed."""

    #: one of this worker's processes told the launcher that it runs a wrapped function
    wrapped: bool
    #: how often this worker was replaced alone already
    respawned: int
    #: how often all workers were restarted already
    restarted: int
    #: somebody is left in the job whom a replacement can join: a worker that is a member, or one that is done
    company: bool


@dataclass(frozen=True)
class Respawn:
    """Start this worker again, alone, after ``delay`` seconds."""

    delay: float


@dataclass(frozen=True)
class RestartAll:
    """Stop all workers of the job and start them again in a new rendezvous."""


@dataclass(frozen=True)
class Fail:
    """The job has failed."""

    why: str


def after_failure(rules: Rules, now: Situation) -> Respawn | RestartAll | Fail:
    """What to do about a worker that failed."""
    if rules.policy == MIN_HEALTHY and now.wrapped and now.company:
        if now.respawned < rules.respawns:
            return Respawn(delay(rules, now.respawned + 1))
        return Fail(f"it has used up its restarts (--max-restarts={rules.respawns} for each worker)")
    if now.restarted < rules.restarts:
        return RestartAll()
    return Fail(f"all workers would have to be restarted, and {no_restart_left(rules)}")


def no_restart_left(rules: Rules) -> str:
    """Why not all workers are restarted."""
    if rules.restarts:
        return f"that has been done {rules.restarts} times: pass a larger --max-restarts to allow more"
    return "that is not allowed: pass --max-restarts=N to allow it N times"


def delay(rules: Rules, n: int) -> float:
    """Seconds to wait before the n-th replacement of a worker (n >= 1): none, then doubling up to the limit."""
    if n <= 1:
        return 0.0
    return min(rules.backoff_limit, rules.backoff * 2.0 ** min(n - 2, 64))


def keep_ranks(preferred_ranks: Sequence[int]) -> list[int]:
    """Ranks 0..n-1 for n nodes that had the ranks ``preferred_ranks`` before (-1: none).

    A node keeps its rank where that is below n and nobody before it in the list has the same; the others fill the gaps.
    """
    size = len(preferred_ranks)
    first: dict[int, int] = {}
    for index, preferred in enumerate(preferred_ranks):
        if 0 <= preferred < size:
            first.setdefault(preferred, index)
    gaps = iter(rank for rank in range(size) if rank not in first)
    return [
        preferred if first.get(preferred) == index else next(gaps) for index, preferred in enumerate(preferred_ranks)
    ]


def why_ended(exitcode: int) -> str:
    """An exit code as people read it; negative: minus the number of the signal."""
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        return f"signal {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"signal {-exitcode}"
