"""The figure that every user sees: the log's, the report's and the one that the function itself measures are the same.

A fault is reported right before it strikes, and by each rank its entry into the function.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from inprocess.initialize import RetryController
from inprocess.reports.incident import AROUND, all_incidents
from inprocess.reports.reading import read
from tests.harness import At, Hang, HostLoss, Kill, Raise, When
from tests.harness.child import Context
from tests.harness.launch import BEATING, HASTY, PATIENT

from . import checks, targets

LINE = re.compile(
    r"; continuing with .*? ranks?(?: \(\d before\))?(?:; noticed after ([\d.]+) s, restarted in| after) (\d+) ms"
)
#: how far the line may be off (seconds): the reader of a log is not misled
SHARE, MORE = 0.1, 0.01
SOFT = 2.0


def run(context: Context) -> Any:
    return context.wrap(body)()


def body(context: Context, call: Any) -> None:
    """In iteration 0 rank 1 meets its fault, the others compute or wait for it."""
    dist.init_process_group("gloo", timeout=targets.LONG)
    dist.all_reduce(torch.ones(1))
    call.ping()
    if call.iteration == 0:
        if context.rank == 1:
            context.point("fault")
        context.emit("waits")
        while context.args["others"] == "compute":
            call.ping()
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def strikes(fault: Callable[..., Any]) -> dict[At, Any]:
    """Rank 1, once the others compute or wait for it, or are about to."""
    return {At(1, step="fault"): fault(when=When("waits", 2))}


def the_line(ranks: Any, first: int = 0) -> tuple[float, float]:
    """Of the one restart, as the first rank logged it: how long it took, and after what standstill (seconds)."""
    (found,) = LINE.findall(ranks[first].log)
    return int(found[1]) / 1e3, float(found[0] or 0)


def measured(ranks: Any, victim: int = 1, first: int = 0) -> float:
    """From the fault to the first rank's entry."""
    return entry(ranks, first) - fault(ranks, victim)


def fault(ranks: Any, victim: int = 1) -> float:
    (found,) = (event["t"] for event in ranks[victim].of("fault"))
    return float(found)


def entry(ranks: Any, first: int = 0) -> float:
    """Before anything that a busy machine may put off."""
    return float(ranks[first].of("enter")[-1]["t"])


def close(told: float, took: float) -> bool:
    return abs(told - took) <= SHARE * took + MORE


@pytest.mark.parametrize("others", ["wait", "compute"])
@pytest.mark.parametrize("kind", [Raise, Kill])
def test_a_fault(launch: Any, tmp_path: Path, kind: Callable[..., Any], others: str) -> None:
    """A computing rank's threads learn late of it: the lock is taken. On a busy machine so does a monitor of a death,
    of which nobody knows any earlier."""
    options = {**PATIENT, "run_dir": str(tmp_path)}
    ranks = launch(run, 3, faults=strikes(kind), args={"others": others}, wrapper=options).wait()
    told, standstill = the_line(ranks)
    trails = read(str(tmp_path))[0]
    ((_, (incident,)),) = all_incidents(trails)
    took, known = measured(ranks), entry(ranks) - min(each.event.time for each in trails[0].of("raised", "interrupted"))
    for what, seconds in (("line", told), ("report", incident.took)):
        says = f"the {what} says {seconds} s, it took {took:.4f} s and {known:.4f} s since somebody knew"
        assert close(seconds, min(max(seconds, known), took)), says
    assert not standstill
    assert incident.took == pytest.approx(
        sum(incident.phases[name] or 0.0 for name in incident.phases if name not in AROUND)
    )


def test_a_hang(launch: Any, tmp_path: Path) -> None:
    """Counted from when it was noticed, which is said separately and comes neither early nor late."""
    options = {**HASTY, "soft_timeout": SOFT, "run_dir": str(tmp_path)}
    ranks = launch(run, 3, faults=strikes(Hang), args={"others": "wait"}, wrapper=options).wait()
    told, standstill = the_line(ranks)
    took = measured(ranks)
    assert SOFT <= standstill <= SOFT + 0.5
    assert close(told + standstill, took)
    assert told < 0.5
    ((_, (incident,)),) = all_incidents(read(str(tmp_path))[0])
    assert incident.took == pytest.approx(told, abs=0.01 + SHARE * told)
    assert incident.phases["standstill"] == pytest.approx(standstill, abs=0.1)


def test_a_replacement(launch: Any) -> None:
    """From the death to the entry of all three, the wait for the new process included."""
    options = {**PATIENT, "initialize": RetryController(min_world_size=3, wait_for_replacement=40)}
    ranks = launch(run, 3, faults=strikes(Kill), args={"others": "wait"}, wrapper=options, respawn=1).wait()
    joined = ranks[-1]
    (line,) = (found for found in LINE.findall(ranks[0].log))
    assert close(int(line[1]) / 1e3, measured(ranks)), line
    assert joined.of("enter")


def test_the_host_of_the_store_is_lost(launch: Any) -> None:
    faults = {At(0, step=1): HostLoss()}
    ranks = launch(targets.run_train, 3, faults=faults, wrapper=BEATING).wait()
    checks.went_on(ranks, without=[0])
    told, _ = the_line(ranks, 1)
    assert close(told, measured(ranks, 0, 1))
