"""What the launcher tells of failed workers, and when."""

from __future__ import annotations

import pytest

from inprocess.launcher.told import Told


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def told(said: list[str]) -> Told:
    return Told(said.append, hold=1.0)


def test_a_failure_is_told_a_moment_later(told: Told, said: list[str]) -> None:
    told.failed(3, "rank 3 failed", "again", now=10.0)
    told.tell(10.9)
    assert (said, told.due()) == ([], [11.0])
    told.tell(11.0)
    assert (said, told.due()) == (["rank 3 failed; again"], [])


def test_failures_are_told_together_when_the_job_has_failed(told: Told, said: list[str]) -> None:
    told.failed(3, "rank 3 failed", "again", now=10.0)
    told.failed(1, "rank 1 failed", "again", now=10.5)
    assert told.ranks() == [3, 1]
    assert told.together("rank 2 failed") == "rank 3 failed; rank 1 failed; rank 2 failed"
    assert (told.together(), told.due(), said) == ("", [], [])


def test_who_fails_again_was_started_again(told: Told, said: list[str]) -> None:
    told.failed(3, "rank 3 failed", "again", now=10.0)
    told.again(2)
    told.again(3)
    told.again(3)
    assert said == ["rank 3 failed; again"]


def test_all_are_told_when_the_job_is_done(told: Told, said: list[str]) -> None:
    told.failed(3, "rank 3 failed", "again", now=10.0)
    told.failed(1, "rank 1 failed", "again", now=10.5)
    told.all()
    assert said == ["rank 3 failed; again", "rank 1 failed; again"] and told.due() == []
