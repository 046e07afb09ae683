"""Plays one job: ranks, signals from outside, the log, the verdict."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.chaos import verdict
from tests.chaos.outside import Outside
from tests.chaos.schedule import HOOKS, Job
from tests.chaos.training import Log, options, run_chaos
from tests.chaos.verdict import Facts
from tests.harness import Run

#: seconds after the end of a schedule; several ranks may have to be killed at hard_timeout, one after the other
PATIENCE = 60.0


def play(job: Job) -> Facts:
    """Raises AssertionError with what went wrong; the story of the ranks goes to standard output."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        log = Log(f"{folder}/log")
        args = {"job": job, "log": log.path, "origin": f"{folder}/origin", "trace": HOOKS}
        args["folder"] = f"{folder}/checkpoints"
        run = Run(run_chaos, job.world_size, wrapper=options, args=args, respawn=job.world_size * job.respawn)
        outside = Outside(run, job)
        try:
            ranks = run.wait(job.seconds + PATIENCE, check=False, act=outside.act)
        finally:
            outside.close()
            run.close()
        facts = Facts(job, ranks, outside.sent, log.lines() if Path(log.path).exists() else [])
    offences = verdict.offences(facts)
    assert not offences, "\n".join(offences)
    return facts
