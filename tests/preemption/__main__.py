"""Ask ranks to leave, again and again at random moments, and look at what comes of it.

A run starts a training of three processes (under torchrun three agents with one each), sends SIGTERM to one of them, to
two within a second, or to all, and expects: each ends with status 143 and within its grace; the others go on in the
same processes, with the state of the last step; where all leave, a checkpoint of the last step is there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.launcher.harness import free_port

SIZE = 3
#: seconds: `leave_grace` of the training and what leaving itself may take on a busy machine; a whole run
GRACE, DEADLINE = 10.0 + 5.0, 90.0
PROGRAM = str(Path(__file__).with_name("training.py"))


@dataclass
class Job:
    """A training, and the processes of which it consists."""

    folder: Path
    #: started here, by rank; under `inprocess run` one launcher
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, command: Sequence[str], **variables: object) -> None:
        log = (self.folder / f"log{len(self.started)}").open("wb")
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        program = [*command, PROGRAM, str(self.folder)]
        self.started.append(subprocess.Popen(program, env=environment, stdout=log, stderr=log))

    def notes(self) -> dict[int, list[dict[str, Any]]]:
        """What the training processes have noted, by process id."""
        found: dict[int, list[dict[str, Any]]] = {}
        for path in self.folder.glob("*.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            if lines:
                found[lines[0]["pid"]] = lines
        return found

    def await_notes(self, what: str, count: int) -> list[int]:
        """The processes that have noted it."""

        def seen() -> list[int]:
            return [pid for pid, notes in self.notes().items() if any(note["what"] == what for note in notes)]

        end = time.monotonic() + DEADLINE
        while len(found := seen()) < count:
            if time.monotonic() > end:
                raise AssertionError(f"{len(found)} of {count} processes have come to {what!r}")
            time.sleep(0.02)
        return found

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self.folder.glob("log*")))

    def close(self) -> None:
        for process in self.started:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            if process.poll() is None:
                process.kill()
            process.wait()


def plain(job: Job) -> None:
    with free_port() as port:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": SIZE}
    for rank in range(SIZE):
        job.start([sys.executable], RANK=rank, **address)


def launcher(job: Job) -> None:
    command = ["run", "--standalone", f"--nproc-per-node={SIZE}"]
    job.start([sys.executable, "-m", "inprocess", *command], INPROCESS_RUN_DIR="none")


def torchrun(job: Job) -> None:
    with free_port() as port:
        pass
    for node in range(SIZE):
        where = [f"--nnodes={SIZE}", "--nproc-per-node=1", f"--node-rank={node}", f"--master-port={port}"]
        job.start([sys.executable, "-m", "torch.distributed.run", *where, "--master-addr=127.0.0.1"])


LAUNCHERS: dict[str, Callable[[Job], None]] = {"plain": plain, "inprocess": launcher, "torchrun": torchrun}


@dataclass
class Result:
    """Seconds: from the signal to the end of each rank that left, and from the last step of the others to their next
    entry."""

    ends: list[float]
    pauses: list[float]
    #: steps that were done and are not in what goes on
    lost: int


def run(name: str, rng: random.Random, folder: Path) -> Result:
    job = Job(folder)
    try:
        LAUNCHERS[name](job)
        pids = job.await_notes("enter", SIZE)
        time.sleep(rng.uniform(0.0, 1.5))
        return _ask(name, job, pids, rng)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{job.logs()}") from None
    finally:
        job.close()


def _ask(name: str, job: Job, pids: list[int], rng: random.Random) -> Result:
    count = rng.choice([1, 2, SIZE])
    # under torchrun its agents are asked, as a host's are; the first one's has the store
    candidates = pids if name != "torchrun" else [process.pid for process in job.started]
    last = candidates[1:] if name == "torchrun" and count < SIZE else candidates
    chosen = rng.sample(last, min(count, len(last)))
    if name == "inprocess" and count == SIZE:
        chosen = [job.started[0].pid]
    begin = time.monotonic()
    for index, pid in enumerate(chosen):
        if index:
            time.sleep(rng.uniform(0.0, 0.4))
        os.kill(pid, signal.SIGTERM)
    leavers = _trainings(chosen, pids)
    ends = [_await_end(pid, begin) for pid in leavers]
    others = [pid for pid in pids if pid not in leavers]
    if others:
        _await_steps(job, others)
        (job.folder / "enough").touch()
    for pid in others:
        _await_end(pid, time.monotonic())
    if name != "torchrun":  # an agent whose worker has finished waits five minutes for one that was asked to leave
        for process in job.started:
            process.wait(DEADLINE)
    return _judge(name, job, leavers, others, ends)


def _trainings(chosen: Sequence[int], pids: Sequence[int]) -> list[int]:
    """The training processes of those that were asked."""
    below = {child.pid for pid in chosen for child in _children(pid)}
    return [pid for pid in pids if pid in below or pid in chosen]


def _children(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def _await_end(pid: int, begin: float) -> float:
    while _runs(pid):
        if time.monotonic() - begin > GRACE:
            raise AssertionError(f"process {pid} has not left within {GRACE:g} s")
        time.sleep(0.005)
    return time.monotonic() - begin


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _await_steps(job: Job, others: Sequence[int]) -> None:
    """Until the others have made a few steps after the restart."""
    end = time.monotonic() + DEADLINE
    while True:
        notes = job.notes()
        if all(_steps_since_entry(notes[pid]) >= 3 for pid in others):
            return
        if time.monotonic() > end:
            raise AssertionError("the others have not gone on")
        time.sleep(0.02)


def _steps_since_entry(notes: Sequence[dict[str, Any]]) -> int:
    last = max(index for index, note in enumerate(notes) if note["what"] == "enter")
    return sum(note["what"] == "step" for note in notes[last:]) if notes[last]["iteration"] else 0


def _judge(name: str, job: Job, leavers: Sequence[int], others: Sequence[int], ends: list[float]) -> Result:
    notes, codes = job.notes(), [process.returncode for process in job.started]
    for pid in leavers:
        left = [note for note in notes[pid] if note["what"] == "left"]
        assert left and left[0]["code"] == 143, f"process {pid} did not leave in time: {notes[pid][-1]}"
        assert any(note["what"] == "hook" for note in notes[pid]), f"process {pid} has not run its hook"
    reached = max(note["step"] for pid in notes for note in notes[pid] if note["what"] == "step")
    if not others:
        saved = [int(path.name.removeprefix("step_")) for path in (job.folder / "checkpoints").glob("step_*")]
        assert saved, "all ranks left without a checkpoint"
        return Result(ends, [], reached - max(saved))
    if name == "plain":
        assert sorted(codes) == sorted([143] * len(leavers) + [0] * len(others)), codes
    pauses, lost = [], 0
    for pid in others:
        entries = [index for index, note in enumerate(notes[pid]) if note["what"] == "enter"]
        assert notes[pid][-1]["what"] == "completed", f"process {pid} did not complete: {notes[pid][-1]}"
        for index in entries[1:]:
            before = notes[pid][index - 1]
            pauses.append(notes[pid][index]["at"] - before["at"])
            lost = max(lost, before.get("step", 0) - notes[pid][index]["step"])
    return Result(ends, pauses, lost)


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.preemption", description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="of each launcher (default 100)")
    parser.add_argument("--launcher", choices=LAUNCHERS, action="append", help="only these")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each has the next (default 0)")
    given = parser.parse_args()
    failed = 0
    for name in given.launcher or LAUNCHERS:
        results: list[Result] = []
        for done, seed in enumerate(range(given.seed, given.seed + given.runs), start=1):
            with tempfile.TemporaryDirectory(prefix="preemption-") as folder:
                try:
                    results.append(run(name, random.Random(seed), Path(folder)))
                except (AssertionError, subprocess.TimeoutExpired) as error:
                    failed += 1
                    print(f"{name}: seed {seed}: {error}", flush=True)
            if done % 10 == 0 or done == given.runs:
                print(_line(name, results, done), flush=True)
    return 1 if failed else 0


def _line(name: str, results: Sequence[Result], runs: int) -> str:
    ends = [end for result in results for end in result.ends]
    pauses = [1e3 * pause for result in results for pause in result.pauses]
    lost = max((result.lost for result in results), default=0)
    return (
        f"{name}: {len(results)} of {runs} runs; ranks left after {_spread(ends)} s; the others were back in the "
        f"function {_spread(pauses)} ms after their last step; at most {lost} steps lost"
    )


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.3g} (at most {max(values):.3g})"


if __name__ == "__main__":
    sys.exit(main())
