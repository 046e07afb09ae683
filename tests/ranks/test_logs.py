"""Logs that block, and standard streams that are closed, harm no rank: real ones, with monitors of their own."""

from __future__ import annotations

import re
import signal

import pytest

from tests.harness import At, Hang, HoldGIL, Raise, Stop
from tests.harness.launch import HASTY, KILLING

from . import checks, targets

QUIET = {"monitor_process_logfile": None}


@pytest.mark.parametrize("fault", [HoldGIL(), Stop()], ids=["gil", "stop"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_hung_rank_is_killed_though_nobody_reads_standard_error(launch, fault, victim):
    """Its monitor has inherited it; the log of the others goes there, too."""
    ranks = launch(targets.run_unread, 3, faults={At(victim, step=1): fault}, wrapper={**KILLING, **QUIET}).wait()
    assert ranks[victim].exitcode in (-signal.SIGTERM, -signal.SIGKILL)
    checks.went_on(ranks, without=[victim])


@pytest.mark.parametrize("where", ["standard error", "handler"])
def test_nobody_is_killed_for_a_log_that_blocks(launch, where):
    """Neither the rank that logs the restart, nor the thread that interrupts it; and the call ends."""
    faults = {At(1, step=1): Raise(), At(2, iteration=1, step=1): Hang()}
    args = {"blocked": where}
    ranks = launch(targets.run_unread, 3, args=args, faults=faults, wrapper={**HASTY, **QUIET}).wait()
    checks.went_on(ranks, iteration=2)


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_ranks_whose_standard_streams_are_closed(launch, closed):
    ranks = launch(targets.run_closed, 2, args={"closed": closed}, faults={At(1, step=1): Raise()}).wait()
    checks.went_on(ranks)


def test_a_killed_rank_without_standard_streams_is_spoken_for(launch):
    faults = {At(1, step=1): HoldGIL()}
    ranks = launch(targets.run_closed, 2, args={"closed": (0, 1, 2)}, faults=faults, wrapper=KILLING).wait()
    assert ranks[1].exitcode in (-signal.SIGTERM, -signal.SIGKILL)
    checks.went_on(ranks, without=[1])


def test_lines_say_where_their_process_was(launch, tmp_path):
    """Those of a rank, and those of its monitor."""
    options = {**KILLING, "monitor_process_logfile": f"{tmp_path}/{{rank}}"}
    ranks = launch(targets.run_train, 3, faults={At(1, step=1): HoldGIL()}, wrapper=options).wait()
    checks.went_on(ranks, without=[1])
    (line,) = [line for line in ranks[0].log.splitlines() if "continuing with 2 of 3 ranks" in line]
    assert " inprocess [call 0, iteration 1, rank 0, run]: restart 1: " in line
    assert re.search(r"monitor \[\d+\] of call 0, iteration 0, rank 1, run: WARNING: ", (tmp_path / "1").read_text())
