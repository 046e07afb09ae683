"""Two launchers, one of which is killed with all its workers and monitors, and started again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.etcd import ETCD, MISSING, EtcdCluster

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(310)


def lose(victim, tmp_path, *options):
    """Answers what was printed; the job has ended well, and never went on with fewer ranks."""
    command = [sys.executable, str(ROOT / "examples" / "two_nodes.py"), "--victim", str(victim), "--steps", "120"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    result = subprocess.run([*command, *options], check=False, env=environment, capture_output=True, text=True)
    report = result.stdout + result.stderr
    assert result.returncode == 0, report
    assert "exit codes of the launchers: [0, 0]" in result.stdout
    assert set(re.findall(r"(\d) ranks +\d+ steps/s", result.stdout)) == {"4"}, report
    assert re.search(r"step +120/120", result.stdout), report
    return report


def went_on(report, stayed, victim):
    """Who stayed was not started again."""
    assert re.search(f"node {stayed}  .*finished; started again alone: none; restarts of all workers: 0", report), (
        report
    )
    assert re.search(rf"node {victim} of 2 joins a running job with ranks \d-\d of 4", report), report


def test_a_node_is_lost_and_comes_back(tmp_path):
    went_on(lose(1, tmp_path), stayed=0, victim=1)


def test_the_node_with_the_store_is_lost_and_comes_back(tmp_path):
    """All workers begin anew, from the last checkpoint."""
    report = lose(0, tmp_path)
    assert re.search(r"node 1  .*finished; .*restarts of all workers: 1", report), report


@pytest.mark.skipif(ETCD is None, reason=MISSING)
def test_with_an_etcd_the_others_go_on_without_the_node_of_rank_0(tmp_path):
    folder = tmp_path / "etcd"
    folder.mkdir()
    etcd = EtcdCluster(folder)
    try:
        report = lose(0, tmp_path, "--etcd", *etcd.endpoints)
    finally:
        etcd.close()
    went_on(report, stayed=1, victim=0)
