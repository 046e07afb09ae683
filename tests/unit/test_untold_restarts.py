"""Each restart is told once, whoever is the first rank then."""

from __future__ import annotations

import pytest

from inprocess.call.untold_restarts import REASONS, UntoldRestarts


def test_one_restart_after_the_other() -> None:
    story = UntoldRestarts()
    story.note(0, "everybody has come")
    assert story.tell(0) == ""
    for iteration in (1, 2):
        story.note(iteration, f"reason {iteration}")
        assert story.tell(0) == f"restart {iteration}: reason {iteration}"
        assert story.tell(0) == ""


def test_iterations_whose_function_was_not_called() -> None:
    story = UntoldRestarts()
    story.note(1, "one died")
    story.note(2, "another died")
    story.note(3, "another died")
    assert story.tell(10) == "restarts 11-13: one died; then another died"


def test_only_the_last_reasons_are_told() -> None:
    story = UntoldRestarts()
    for iteration in range(1, 1000):
        story.note(iteration, f"reason {iteration}")
    text = story.tell(0)
    assert text.startswith("restarts 1-999: reason 997; then ")
    assert text.count("reason") == REASONS


def test_another_store_is_a_restart() -> None:
    story = UntoldRestarts(-1)
    story.note(0, "the host of the store was lost")
    assert story.tell(3) == "restart 3: the host of the store was lost"


class Job:
    """A roster of processes, the first of which is the first rank; it alone is heard."""

    def __init__(self, size: int) -> None:
        self.ranks = [UntoldRestarts() for _ in range(size)]
        self.iteration, self.heard = 0, list[str]()

    def restart(self, dies: int | None = None, joins: int | None = None, runs: bool = True) -> None:
        """By the death of a rank, or because a process takes this rank; ``runs``: the function is called."""
        self.iteration += 1
        if dies is not None:
            del self.ranks[dies]
        if joins is not None:
            self.ranks.insert(joins, UntoldRestarts())
            self.ranks[joins].join(self.iteration)
        for story in self.ranks:
            story.note(self.iteration, f"{dies} {joins}")
        if runs:
            told = [story.tell(0) for story in self.ranks]
            self.heard.append(told[0].partition(":")[0])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_dies_and_is_replaced(rank: int) -> None:
    """Also the first one: the process that joins in its place tells that."""
    job = Job(3)
    job.restart(dies=rank)
    job.restart(joins=rank)
    job.restart(dies=rank, joins=rank)
    job.restart()
    assert job.heard == ["restart 1", "restart 2", "restart 3", "restart 4"]


def test_a_reserve_becomes_the_first_rank_after_many_restarts() -> None:
    job = Job(4)
    for _ in range(3):
        job.restart()
    job.restart(dies=0)
    job.restart(dies=0, runs=False)
    job.restart(dies=0)
    assert job.heard == ["restart 1", "restart 2", "restart 3", "restart 4", "restarts 5-6"]
