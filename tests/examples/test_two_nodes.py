"""Two launchers, one of which is killed with all its workers and monitors, and started again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.etcd import ETCD, MISSING, EtcdCluster

SCRIPT = Path(__file__).parents[2] / "examples/two_nodes.py"
pytestmark = pytest.mark.timeout(310)


@pytest.fixture
def lose(command):
    """Answers what was printed; the job has ended well, and never went on with fewer ranks."""

    def to_its_end(victim, *options):
        example = command(SCRIPT, "--victim", victim, "--steps", 120, *options, deadline=300)
        assert example.finish() == 0, example.out + example.err
        report = example.out + example.err
        assert "exit codes of the launchers: [0, 0]" in example.out
        assert set(re.findall(r"(\d) ranks +\d+ steps/s", example.out)) == {"4"}, report
        assert re.search(r"step +120/120", example.out), report
        return report

    return to_its_end


def went_on(report, stayed, victim):
    """Who stayed was not started again."""
    assert re.search(f"node {stayed}  .*finished; started again alone: none; restarts of all workers: 0", report), (
        report
    )
    assert re.search(rf"node {victim} of 2 joins a running job with ranks \d-\d of 4", report), report


def test_a_node_is_lost_and_comes_back(lose):
    went_on(lose(1), stayed=0, victim=1)


def test_the_node_with_the_store_is_lost_and_comes_back(lose):
    """All workers begin anew, from the last checkpoint."""
    report = lose(0)
    assert re.search(r"node 1  .*finished; .*restarts of all workers: 1", report), report


@pytest.mark.skipif(ETCD is None, reason=MISSING)
def test_with_an_etcd_the_others_go_on_without_the_node_of_rank_0(lose, tmp_path):
    folder = tmp_path / "etcd"
    folder.mkdir()
    etcd = EtcdCluster(folder)
    try:
        report = lose(0, "--etcd", *etcd.endpoints)
    finally:
        etcd.close()
    went_on(report, stayed=1, victim=0)
