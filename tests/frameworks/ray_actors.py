"""Ranks that run in Ray's actors: an exception, a death, with a new actor in its place or without."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.frameworks.actor_ranks import FAULTS, report_of


@pytest.mark.parametrize("fault", FAULTS)
def test_actors(tmp_path: Path, fault: str) -> None:
    with tempfile.TemporaryDirectory(prefix="r") as folder:  # short: it has sockets in it
        report = report_of("ray_driver.py", fault, tmp_path, RAY_USAGE_STATS_ENABLED="0", RAY_TMPDIR=folder)
    for each, (pid, found) in enumerate(zip(report["before"], report["found"], strict=True)):
        if found is not None:
            assert (found["pid"] == pid) is (fault != f"kill {each}")
