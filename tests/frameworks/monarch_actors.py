"""Ranks that Monarch's actors start: an exception, a death, with a new process in its place or without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.actor_ranks import FAULTS, report_of


@pytest.mark.parametrize("fault", FAULTS)
def test_actors(tmp_path: Path, fault: str) -> None:
    refused = report_of("monarch_driver.py", fault, tmp_path)["refused"]
    assert "was called in thread 'monarch-actor-driver': call it in the main thread" in refused
