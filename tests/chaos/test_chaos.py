"""A short slice of the chaos: fixed seeds, a few seconds of faults each."""

from __future__ import annotations

import pytest

from tests.chaos.play import play
from tests.chaos.schedule import ASSIGNMENTS, LONG, SHORT, random_job


@pytest.mark.parametrize("seed", [94, 316])
def test_a_seed(seed):
    facts = play(random_job(seed, SHORT))
    assert facts.restarts > 0
    assert len(facts.all_struck) > 3


def test_a_seed_is_a_schedule():
    assert random_job(7) == random_job(7)
    assert random_job(7) != random_job(8)


def test_seeds_differ_in_everything():
    jobs = [random_job(seed, LONG) for seed in range(300)]
    assert {job.assignment for job in jobs} == set(ASSIGNMENTS)
    assert {job.world_size for job in jobs} == set(range(4, 9))
    assert any(job.host for job in jobs)
