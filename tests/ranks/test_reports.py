"""What a run directory says of real faults: who failed, how, and where the time went."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from inprocess import RankShouldRestart, RestartAbort
from inprocess import __main__ as command
from inprocess.attribution import ranges
from inprocess.reports.incident import PHASES, Incident, all_incidents
from inprocess.reports.program import LINES
from inprocess.reports.reading import read
from inprocess.testing.coordinates import When
from inprocess.testing.faults import Fault, HostLoss, Segfault, SlowDown
from tests.harness import At, Exit, Hang, HoldGIL, Kill, KillTogether, Raise, Stop
from tests.harness.child import Context
from tests.harness.faults import spin
from tests.harness.launch import BEATING, HASTY, KILLING, PATIENT

from . import targets
from .test_repeats import run_again


class Late(ValueError):
    """Has no text before another rank has left its function by one as well: that one could be interrupted before."""

    def __init__(self, context: Context) -> None:
        super().__init__("injected")
        self.context: Context | None = context

    def __str__(self) -> str:
        context, self.context = self.context, None
        if context is not None:
            context.emit("out")
            context.wait_for(When("out", 1))
        return "injected"


@dataclass(frozen=True, repr=False)
class RaiseTogether(Fault):
    def strike(self, context: Any) -> None:
        raise Late(context)


UNKNOWN = "its exit status is not known: its parent had asked for it before its monitor could"
#: name -> (faults, options, the rank that failed, class, other ranks that failed)
FAULTS: dict[str, tuple[dict[Any, Any], Any, int, str, tuple[int, ...]]] = {
    "exception": ({At(1, step=1): Raise(ValueError)}, PATIENT, 1, "exception", ()),
    "memory error": ({At(1, step=1): Raise(MemoryError)}, PATIENT, 1, "oom", ()),
    "out of GPU memory": ({At(2, step=1): Raise(RuntimeError, "CUDA out of memory. Tried")}, PATIENT, 2, "oom", ()),
    "CUDA error": ({At(2, step=1): Raise(RuntimeError, "CUDA error: uncorrectable ECC")}, PATIENT, 2, "gpu", ()),
    "killed": ({At(1, step=1): Kill()}, PATIENT, 1, "signal", ()),
    "rank 0 is killed": ({At(0, step=1): Kill()}, PATIENT, 0, "signal", ()),
    "segmentation fault": ({At(1, step=1): Segfault()}, PATIENT, 1, "signal", ()),
    "os._exit": ({At(1, step=1): Exit()}, PATIENT, 1, "exit", ()),
    "sys.exit": ({At(1, step=1): Raise(SystemExit)}, PATIENT, 1, "exit", ()),
    "ctrl-c": ({At(1, step=1): Raise(KeyboardInterrupt)}, PATIENT, 1, "signal", ()),
    "leaves": ({At(1, step=1): Raise(RestartAbort)}, PATIENT, 1, "request", ()),
    "asks": ({At(1, step=1): Raise(RankShouldRestart)}, PATIENT, 1, "request", ()),
    "stopped": ({At(1, step=1): Stop()}, KILLING, 1, "stopped", ()),
    "holds the interpreter lock": ({At(1, step=1): HoldGIL()}, KILLING, 1, "gil_hang", ()),
    "sleeps": ({At(2, step=1): Hang("sleep")}, HASTY, 2, "hang", ()),
    "waits for a lock": ({At(1, step=1): Hang("lock")}, HASTY, 1, "hang", ()),
    "waits for a queue": ({At(0, step=1): Hang("queue")}, HASTY, 0, "hang", ()),
    "its host is lost": ({At(1, step=1): HostLoss()}, BEATING, 1, "host_lost", ()),
    "two raise": ({At(rank, step=1): RaiseTogether() for rank in (0, 2)}, PATIENT, 0, "exception", (2,)),
    "two hang": ({At(0, step=1): Hang(), At(2, step=1): Hang()}, HASTY, 0, "hang", (2,)),
}


def report(run_dir: Path) -> list[Incident]:
    trails, problems = read(str(run_dir))
    assert problems == []
    return [incident for _, found in all_incidents(trails) for incident in found]


@pytest.mark.parametrize("name", FAULTS)
def test_who_failed_and_how(launch, tmp_path, name):
    faults, options, rank, kind, also = FAULTS[name]
    launch(targets.run_train, 3, faults=faults, wrapper=options | {"run_dir": str(tmp_path)}).wait()
    (incident,) = report(tmp_path)
    verdict = incident.verdict
    told = (verdict.initial_rank, verdict.kind, verdict.also)
    if UNKNOWN in verdict.evidence:  # the process that started the ranks was quicker than the monitor
        assert kind in ("signal", "exit") and verdict.confidence == 0.5
        kind = "signal"
    if also:  # which of them was first is chance
        told = (min(rank, *also), verdict.kind, tuple(sorted({verdict.initial_rank, *verdict.also} - {rank})))
    assert told == (rank, kind, also), incident
    assert incident.number == 1 and incident.before == 3
    gone = kind in ("signal", "exit", "stopped", "gil_hang", "host_lost") or name == "leaves"
    assert incident.after == 3 - gone
    assert all(incident.phases[each] is not None for each in PHASES), incident.phases
    assert (incident.phases["standstill"] >= 1.5) == (options in (HASTY, KILLING))
    if kind in ("hang", "gil_hang"):
        assert verdict.where.startswith("child.py:") and verdict.where.endswith(" point")
        assert set(verdict.waiting) == {0, 1, 2} - {rank, *also}


def test_a_slow_rank_is_no_incident(launch, tmp_path):
    slow = {At(1, step=1): SlowDown(0.5)}
    launch(targets.run_train, 2, faults=slow, wrapper=PATIENT | {"run_dir": str(tmp_path)}).wait()
    assert report(tmp_path) == []


@pytest.mark.parametrize(("where", "rank"), [("returned", 0), ("mismatch", None)])
def test_collectives_that_do_not_match(launch, tmp_path, where, rank):
    size = 3 if rank == 0 else 2
    options = HASTY | {"run_dir": str(tmp_path)}
    launch(targets.run_hang, size, wrapper=options, args={"where": where}).wait()
    (incident,) = report(tmp_path)
    assert incident.verdict.kind == "collective"
    assert rank is None or incident.verdict.initial_rank == rank


def handle_the_error(context: Context, call: Any) -> Any:
    """In iteration 0 rank 0 waits in vain for rank 1, which is killed once rank 0 handles the error of that."""
    if call.iteration == 0:
        dist.init_process_group("gloo", timeout=targets.LONG)
        targets.check_sum(2)
        if context.rank == 1:
            context.point("fault")
        try:
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=0.2))
        except RuntimeError:
            context.emit("blocked", place="except")
            spin()
    return targets.train(context, call)


def run_handle_the_error(context: Context) -> Any:
    return context.wrap(handle_the_error)()


def test_who_waited_though_its_frames_do_not_show_that(launch, tmp_path):
    """A rank that dies closes its connections: another one may get the error before the news of that death."""
    options = PATIENT | {"run_dir": str(tmp_path)}
    faults = {At(1, step="fault"): Kill(when=When("blocked", 1))}
    launch(run_handle_the_error, 2, faults=faults, wrapper=options).wait()
    (incident,) = report(tmp_path)
    assert (incident.verdict.initial_rank, incident.verdict.kind) == (1, "signal")
    assert incident.verdict.waiting == (0,)


def test_a_fault_during_a_restart_and_one_after_it(launch, tmp_path, capsys):
    """The variable alone switches it on. The command prints the same for people and for programs."""
    faults = {At(1, step=1): Raise(), At(2, 1, step=2): Kill(), At(0, 2, step=0): Raise(OSError)}
    launch(targets.run_train, 3, faults=faults, env={"INPROCESS_RUN_DIR": str(tmp_path)}).wait()
    capsys.readouterr()
    assert command.main(["report", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["number"] for each in told["incidents"]] == [1, 2, 3]
    assert [each["verdict"]["initial_rank"] for each in told["incidents"]] == [1, 2, 0]
    assert [each["verdict"]["class"] for each in told["incidents"]] == ["exception", "signal", "exception"]
    assert [each["world_size"] for each in told["incidents"]] == [
        {"before": 3, "after": 3},
        {"before": 3, "after": 2},
        {"before": 2, "after": 2},
    ]
    # the step of the fault, where another rank had begun it
    lost = zip(told["incidents"], (1, 2, 0), strict=True)
    assert all(0 <= each["steps_lost"] - before <= 1 for each, before in lost), told
    assert 0 < told["goodput"] < 1
    assert command.main(["report", str(tmp_path), "--incident", "2"]) == 0
    text = capsys.readouterr().out
    # which of the others had come to the collective already is chance
    waiting = told["incidents"][1]["verdict"]["waiting"]
    assert set(waiting) <= {0, 1}
    waited = {0: "", 1: f"; rank {ranges(waiting)} waited", 2: "; ranks 0-1 waited"}[len(waiting)]
    assert f"rank 2: signal{waited}; 3 -> 2 ranks" in text and "end_round" in text
    stacks = report(tmp_path)[1].stacks()
    assert stacks and all(frame in text for _, frames in stacks for frame in frames[:LINES])


def test_the_job_ends(launch, tmp_path):
    options = PATIENT | {"run_dir": str(tmp_path), "max_repeats": 2}
    launch(run_again, 2, wrapper=options, args={"until": 99, "raising": [1]}).wait()
    found = report(tmp_path)
    assert [incident.number for incident in found] == [1, 2]
    assert [incident.verdict.initial_rank for incident in found] == [1, 1]
    assert found[-1].after == 0 and "the same error" in found[-1].decision


def test_two_die_together(launch, tmp_path):
    faults = {At(rank, step=1): KillTogether(2) for rank in (1, 2)}
    launch(targets.run_train, 4, faults=faults, wrapper=PATIENT | {"run_dir": str(tmp_path)}).wait()
    (incident,) = report(tmp_path)
    assert incident.verdict.kind == "signal"
    assert {incident.verdict.initial_rank, *incident.verdict.also} == {1, 2}
    assert incident.after == 2
