"""Some kinds of the campaign, once each: those that no other test has. All of them: `nox -s report`."""

from __future__ import annotations

import pytest

from tests.campaign.kinds import KINDS
from tests.campaign.places import Unavailable
from tests.campaign.play import play

CHOSEN = (
    "exception, barrier in finally",
    "exception, barrier in __exit__",
    "exception, barrier in generator",
    "exception, barrier in except",
    "exception beside another, barrier in finally",
    "deadlock of two threads",
    "another collective",
    "a collective skipped",
    "loader worker is late and dies",
    "loader worker hangs",
    "memory limit, cgroup v1",
    "memory limit, cgroup v2",
    "full disk",
)


@pytest.mark.parametrize("name", CHOSEN)
def test_the_report_is_right_and_the_training_unharmed(name):
    try:
        score = play(KINDS[name])
    except Unavailable as error:
        pytest.skip(str(error))
    assert (score.culprit, score.kind, score.unharmed) == (True, True, True), score.notes
    assert score.seconds is not None and score.seconds <= 10
