"""Hosts with run directories of their own: the report of the first rank has the others' evidence, through the store."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from inprocess.reports.incident import incidents
from inprocess.reports.reading import read
from tests.harness import At, Hang, Kill, Raise
from tests.harness.child import Context
from tests.harness.launch import HASTY, PATIENT

from . import targets
from .test_incidents import report

RANKS = 3
LIMIT_S = 20.0


def train(context: Context, call: Any) -> Any:
    """Rank 0 goes on until it has the report, and what came from the others."""
    value = targets.train(context, call)
    if value[1] == 0 and call.iteration:
        own, until = Path(context.args["parent"], "0"), time.monotonic() + LIMIT_S
        report(own, call.iteration, LIMIT_S)
        while len(list(own.glob("events/relayed-*"))) < RANKS - 1 and not context.args["shared"]:
            assert time.monotonic() < until, os.listdir(own / "events")
            time.sleep(0.05)
    return value


def run_on_hosts(context: Context) -> Any:
    """Each rank has a directory of its own."""
    name = "0" if context.args["shared"] else str(context.rank)
    return context.wrap(train, run_dir=os.path.join(context.args["parent"], name))()


@pytest.mark.parametrize(
    ("fault", "options", "kind", "after"),
    [
        (Raise(ValueError), PATIENT, "exception", 3),
        (Kill(), PATIENT, "signal", 2),
        (Hang("sleep"), HASTY, "hang", 3),
    ],
    ids=["raises", "killed", "hangs"],
)
def test_the_first_rank_knows_what_happened_on_the_others(launch, tmp_path, fault, options, kind, after):
    args = {"parent": str(tmp_path), "shared": False}
    launch(run_on_hosts, RANKS, faults={At(2, step=1): fault}, wrapper=options, args=args).wait()
    own = tmp_path / "0"
    relayed = list(own.glob("events/relayed-*"))
    assert {path.name.split("-")[1] for path in relayed} == {"1", "2"}
    assert max(path.stat().st_size for path in relayed) <= 4096
    (trail,), problems = read(str(own))
    assert problems == []
    (incident,) = incidents(trail)
    assert (incident.verdict.initial_rank, incident.verdict.kind) == (2, kind)
    assert (incident.before, incident.after) == (3, after)
    assert sorted(incident.evidence.witnesses) == [0, 1, 2]
    # the stacks of the others, whose files are not here
    # in the function, since all have finished a step; whether in its next all-reduce already, is chance
    assert any("targets.py" in frame for frame in incident.evidence.witnesses[1].frames)
    if kind != "signal":
        assert any("child.py" in frame for frame in incident.evidence.witnesses[2].frames)
        assert "child.py" in incident.verdict.where or "faults.py" in incident.verdict.where


def test_nothing_travels_where_the_directory_is_shared(launch, tmp_path):
    args = {"parent": str(tmp_path), "shared": True}
    launch(run_on_hosts, RANKS, faults={At(2, step=1): Raise(ValueError)}, wrapper=PATIENT, args=args).wait()
    names = os.listdir(tmp_path / "0" / "events")
    assert len(names) == 2 * RANKS
    assert not any(name.startswith("relayed-") for name in names)
