"""Phases cover the time from a real fault to the first step after it, on each rank that goes on."""

from __future__ import annotations

import re

import pytest

from inprocess import __main__ as command
from inprocess.reports.incident import all_incidents
from inprocess.reports.reading import read
from inprocess.reports.timeline import nanoseconds
from tests.harness import At, Kill, Raise
from tests.harness.launch import PATIENT
from tests.harness.tracks import read_tracks, share_covered

from . import targets

FAULTS = {
    "exception": ({At(1, step=1): Raise()}, 1),
    "killed": ({At(1, step=1): Kill()}, 1),
    # the second one before every rank has come to its first step again
    "during a restart": ({At(1, step=1): Raise(), At(2, 1, step=0): Kill()}, 2),
}


@pytest.mark.parametrize("name", FAULTS)
def test_phases_cover_a_restart(launch, tmp_path, name):
    faults, restarts = FAULTS[name]
    run_dir, path = tmp_path / "run", tmp_path / "trace.pftrace"
    launch(targets.run_train, 3, faults=faults, wrapper=PATIENT | {"run_dir": str(run_dir)}).wait()
    for output in (path, tmp_path / "timeline.svg"):
        assert command.main(["timeline", str(run_dir), "-o", str(output)]) == 0
    tracks = read_tracks(path)
    ranks = {int(number[1]): track for each, track in tracks.items() if (number := re.match(r"rank (\d+) \(", each))}
    assert sorted(ranks) == [0, 1, 2]
    trails, _ = read(str(run_dir))
    ((_, found),) = all_incidents(trails)
    assert len(found) == restarts
    gone = {rank for rank, track in ranks.items() if track.at("died")}
    assert len(gone) == (name != "exception")
    shares = []
    for incident in found:
        fault = nanoseconds(incident.at)
        for rank, track in ranks.items():
            after = [at for at in track.at("first step") if at > fault]
            if rank not in gone and after:
                shares.append(share_covered(track, fault, after[0]))
    assert len(shares) == restarts * (3 - len(gone)) and min(shares) >= 0.99, shares
    starts = [flow for track in ranks.values() for _, _, event in track.instants for flow in event.flow_ids]
    ends = [flow for track in ranks.values() for _, _, event in track.instants for flow in event.terminating_flow_ids]
    assert sorted(starts) == sorted(ends) and len(ends) >= restarts * (3 - len(gone))
    print(f"coverage of {name}: {min(shares):.4%} on {len(shares)} restarts of ranks")
