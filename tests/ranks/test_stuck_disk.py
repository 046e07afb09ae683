"""A disk that does not answer restarts nobody and ends nothing: checkpoints are left out until it is back."""

from __future__ import annotations

import re

import pytest

from tests.harness.launch import HASTY

from . import stuck


@pytest.mark.parametrize("victim", [0, 1])
def test_it_comes_back(launch, tmp_path, victim):
    """It hangs for twice the soft timeout. No rank restarts, checkpoints are left out, and a later one is whole."""
    args = {"folder": str(tmp_path), "victim": victim}
    ranks = launch(stuck.run_until_it_is_back, 3, args=args, wrapper=HASTY).wait()
    assert ranks.exceptions == [None] * 3
    assert {rank.value[0] for rank in ranks} == {0}, "a rank restarted"
    (step,) = {rank.value[1] for rank in ranks}
    skipped = r"the checkpoint of step \d+ is skipped \(1 in a row\), .* that of step 4 .*, by ranks (\S+)\."
    said = re.search(skipped, ranks[0].log)
    assert said
    assert said[1] == str(victim)
    assert ranks[0].log.count(" is skipped ") < 30
    again = launch(stuck.run_recover, 3, args={"folder": str(tmp_path), "victim": 9}, wrapper=HASTY).wait()
    assert {rank.value[1] for rank in again} <= {*range(stuck.LAST + 1, step + 1)}


@pytest.mark.parametrize("victim", [0, 2])
def test_the_training_ends_beside_it(launch, tmp_path, victim):
    args = {"folder": str(tmp_path), "victim": victim}
    ranks = launch(stuck.run_to_the_end, 3, args=args, wrapper=HASTY).wait()
    assert [rank.value[:2] for rank in ranks] == [[0, 2 * stuck.LAST]] * 3, ranks.exceptions
    assert ranks[victim].of("ended beside it", busy=True)
    assert f"does not wait for the disk any longer: step {stuck.LAST + 1} is being written" in ranks[victim].log


@pytest.mark.parametrize("victim", [0, 1])
def test_nothing_else_has_the_state(launch, tmp_path, victim):
    """The ranks wait for it, and say so; that is no hang."""
    written = launch(stuck.run_to_the_end, 2, args={"folder": str(tmp_path), "victim": 9}, wrapper=HASTY).wait()
    (saved,) = {rank.value[2] for rank in written}
    ranks = launch(stuck.run_recover, 2, args={"folder": str(tmp_path), "victim": victim}, wrapper=HASTY).wait()
    source = f"the checkpoint stuck://{tmp_path}/step_{saved:08d}"
    assert [rank.value for rank in ranks] == [[0, saved, source]] * 2, ranks.exceptions
    assert f"{tmp_path} has not answered for 1 s; the training waits for it" in ranks[victim].log
