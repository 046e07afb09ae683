"""What the launcher decides, without processes."""

from __future__ import annotations

import pytest

from inprocess.launcher.decisions import (
    Fail,
    Respawn,
    RestartAll,
    Rules,
    Situation,
    after_failure,
    delay,
    keep_ranks,
    why_ended,
)

HEALTHY = Rules(policy="min-healthy", respawns=3, restarts=1)
ANY = Rules(policy="any-failed", respawns=3, restarts=1)


def situation(wrapped: bool = True, respawned: int = 0, restarted: int = 0, company: bool = True) -> Situation:
    return Situation(wrapped, respawned, restarted, company)


@pytest.mark.parametrize(
    ("rules", "now", "kind"),
    [
        (HEALTHY, situation(), Respawn),
        (HEALTHY, situation(respawned=2), Respawn),
        (HEALTHY, situation(respawned=3), Fail),
        (HEALTHY, situation(wrapped=False), RestartAll),
        (HEALTHY, situation(wrapped=False, restarted=1), Fail),
        (HEALTHY, situation(company=False), RestartAll),
        (HEALTHY, situation(company=False, restarted=1), Fail),
        (ANY, situation(), RestartAll),
        (ANY, situation(restarted=1), Fail),
    ],
)
def test_after_failure(rules: Rules, now: Situation, kind: type) -> None:
    assert isinstance(after_failure(rules, now), kind)


def test_pauses() -> None:
    rules = Rules(backoff=1.0, backoff_limit=10.0)
    assert [delay(rules, n) for n in range(1, 8)] == [0, 1, 2, 4, 8, 10, 10]
    assert delay(rules, 10**9) == 10
    assert delay(Rules(backoff=0.0), 5) == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([-1, -1, -1], [0, 1, 2]),  # nobody had one
        ([2, 0, 1], [2, 0, 1]),  # all keep theirs
        ([2, -1, 0], [2, 1, 0]),  # a new node fills the gap
        ([3, 0], [1, 0]),  # the world is smaller now
        ([1, 1, -1], [1, 0, 2]),  # the first of two keeps it
        ([7], [0]),
    ],
)
def test_ranks_are_kept(before: list[int], after: list[int]) -> None:
    assert keep_ranks(before) == after


def test_why_ended() -> None:
    assert [why_ended(code) for code in (1, -9, -15, -63)] == [
        "exit code 1",
        "signal SIGKILL",
        "signal SIGTERM",
        "signal 63",
    ]
