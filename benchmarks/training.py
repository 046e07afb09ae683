"""How long a restart takes in a real training: ``python -m benchmarks.training --quick --against REV``.

One of two ranks raises while the other waits for it in the backward pass: a small GPT in DistributedDataParallel,
AdamW, a loader, in processes with a million objects. Beside it the same fault in a function that does nothing but one
all-reduce, in processes without these objects. Times are from the fault to the function's entry on the last rank, and
to the end of its first optimizer step (for the empty function: of its first all-reduce). The first restart of a job
is told apart from later ones, since faults are rare: the first is what users get. A second table has what the training
does between its entry and that step, which is the program's own time.

``--against`` measures another revision, or another checkout, in turn with this one. ``--write`` keeps what was found in
``benchmarks/training.json``, and renews the pages and pictures that quote it.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

import inprocess
from benchmarks import pictures, training_report
from benchmarks.__main__ import machine
from benchmarks.gpu.place import WITHOUT_CUDA, Place
from benchmarks.job import ENVIRONMENT, Job, free_port, here, last, mark
from benchmarks.restart import explain, in_ms
from benchmarks.training_report import BODIES, HERE
from benchmarks.work import OBJECTS, Training, heap

WORLD_SIZE, VICTIM = 2, 1
#: jobs of each kind and revision, and restarts in each
JOBS, RESTARTS = 10, 6
QUICK_JOBS, QUICK_RESTARTS = 4, 4
#: seconds after which no further job begins, with --quick
QUICK_S = 45.0
#: steps before the fault
STEPS = 3
#: the other rank has certainly begun to wait (seconds)
SETTLE = 0.1
#: seconds for one job
LIMIT = 60.0


# --- inside a rank ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One job."""

    body: str
    restarts: int
    #: "cpu", or "cuda": both ranks on the first GPU where there is one only
    device: str = "cpu"
    gpus: int = 0


class Rank:
    """What one process of the job does."""

    def __init__(self, request: Request, rank: int) -> None:
        self._request, self._rank = request, rank
        self._place = Place(request.device, request.gpus)
        self._device = self._place.enter(rank, WORLD_SIZE)

    def run(self) -> None:
        kept = heap(OBJECTS) if self._request.body == "training" else []

        def function(call: inprocess.CallWrapper = None) -> None:  # type: ignore[assignment]
            mark("entry", self._rank, call.iteration)
            self._place.init_process_group()
            mark("group", self._rank, call.iteration)
            getattr(self, self._request.body)(call)
            dist.destroy_process_group()

        # without it the same fault at the same line would end the job; earlier revisions have no such limit
        known = inspect.signature(inprocess.Wrapper).parameters
        inprocess.Wrapper(**({"max_repeats": None} if "max_repeats" in known else {}))(function)()
        del kept

    def training(self, call: Any) -> None:
        """A few steps, then the fault after a forward pass."""
        training = Training(self._device)
        mark("model", self._rank, call.iteration)
        for step, words in zip(range(STEPS + 1), training.batches(), strict=False):
            if step == 0:
                mark("batch", self._rank, call.iteration)
            call.ping()
            loss = training.loss(words)
            if step == STEPS:
                self._fail(call.iteration)
            training.learn(loss)
            if step == 0:
                self._place.synchronize()
                mark("step", self._rank, call.iteration)
        del training  # before the group: as its last owner the model would end it with Python's lock held

    def empty(self, call: Any) -> None:
        """An all-reduce, and another one in which the fault strikes."""
        number = torch.ones(1, device=self._device)
        dist.all_reduce(number)
        self._place.synchronize()
        mark("step", self._rank, call.iteration)
        self._fail(call.iteration)
        dist.all_reduce(number)

    def _fail(self, iteration: int) -> None:
        if self._rank == VICTIM and iteration < self._request.restarts:
            time.sleep(SETTLE)
            mark("fault", self._rank, iteration)
            raise RuntimeError("injected by the benchmark")


def measure(request: Request) -> dict[str, Any]:
    """Run one job: for each of its restarts what was measured (ms), and why there is nothing where it failed."""
    everybody = set(range(WORLD_SIZE))
    found: list[dict[str, Any]] = []
    with Job(WORLD_SIZE) as job:
        job.start(lambda rank: Rank(request, rank).run(), free_port())
        ended = job.wait(lambda marks: last(marks, "step", request.restarts, everybody) is not None, LIMIT)
        job.let_end()
        for iteration in range(request.restarts):
            fault = last(job.marks, "fault", iteration, {VICTIM})
            times = {name: last(job.marks, name, iteration + 1, everybody) for name in training_report.MARKS}
            ms = {name: in_ms(at - fault) for name, at in times.items() if at is not None and fault is not None}
            if {"entry", "step"} <= ms.keys():
                found.append({"first": iteration == 0, **ms})
        note = "" if ended else explain(LIMIT, job, everybody, []) + "".join(f"; {each}" for each in job.errors())
    return {"restarts": found, "note": note}


def serve(answer: Callable[[Any], dict[str, Any]]) -> None:
    """Measure what is asked for on stdin, a line of JSON each."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # whatever else is printed is no answer
        print(json.dumps(str(Path(inprocess.__file__).parents[1])), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


# --- outside ------------------------------------------------------------------------------------------------------


class Server:
    """A process that has loaded one revision, and measures with it."""

    def __init__(self, name: str, root: Path, log: IO[bytes], module: str = "benchmarks.training") -> None:
        self.name = name
        command = [sys.executable, "-W", "ignore", "-m", module, "--serve"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=root,
            env=os.environ | ENVIRONMENT | WITHOUT_CUDA | {"INPROCESS_RUN_DIR": "none"},
        )  # fmt: skip
        self._root = root

    def check(self) -> None:
        """That it measures what it is meant to."""
        found = Path(self._answer())
        if found.resolve() != self._root.resolve():
            raise SystemExit(f"{self.name}: the library was imported from {found} in place of {self._root}")

    def ask(self, request: Any) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(vars(request)) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = self._answer()
        return found

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: the process that measures has ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@contextlib.contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A folder with the library of a revision, or of another checkout, and the benchmarks of this one."""
    with tempfile.TemporaryDirectory(prefix="inprocess-benchmark-") as folder:
        root = Path(folder)
        (root / "benchmarks").symlink_to(here() / "benchmarks")
        if (Path(revision) / "inprocess").is_dir():
            (root / "inprocess").symlink_to(Path(revision).resolve() / "inprocess")
        else:
            with tempfile.TemporaryFile() as packed:
                command = ["git", "-C", str(here()), "archive", revision, "inprocess"]
                done = subprocess.run(command, check=False, stdout=packed, stderr=subprocess.PIPE, text=True)
                if done.returncode:
                    raise SystemExit(f"--against {revision}: neither a revision nor a checkout: {done.stderr.strip()}")
                packed.seek(0)
                with tarfile.open(fileobj=packed) as archive:
                    archive.extractall(root, filter="data")
        yield root


def run(servers: Sequence[Server], options: argparse.Namespace, gpus: int) -> dict[str, dict[str, list[Any]]]:
    """Jobs in turn: revision -> body -> what each job found."""
    found: dict[str, dict[str, list[Any]]] = {each.name: {body: [] for body in BODIES} for each in servers}
    begin = time.monotonic()
    for number in range(options.jobs):
        for body in BODIES:
            for server in servers if number % 2 else servers[::-1]:
                if options.quick and number and time.monotonic() - begin > QUICK_S:
                    return found
                result = server.ask(Request(body, options.restarts, options.device, gpus))
                found[server.name][body].append(result)
                print("x" if result["note"] else ".", end="", file=sys.stderr, flush=True)
                if result["note"]:
                    print(f"\n{server.name}, {body}: {result['note']}", file=sys.stderr, flush=True)
    return found


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """``arguments``: default: those of the program. Exits where they do not fit together."""
    options = parser().parse_args(arguments)
    options.jobs = options.jobs or (QUICK_JOBS if options.quick else JOBS)
    options.restarts = options.restarts or (QUICK_RESTARTS if options.quick else RESTARTS)
    if options.write and (options.quick or options.device != "cpu"):
        parser().error("--write keeps what a whole run on the CPU has found: leave out --quick and --device")
    if options.write and options.restarts < 2:
        parser().error("--write needs --restarts 2 or more: the first restart is told apart from later ones")
    if options.write and Path(options.against).is_dir() and options.against:
        parser().error("--write with --against needs a revision: a path says nothing on another machine")
    return options


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="at most a minute: fewer jobs and restarts")
    add("--against", metavar="REV", default="", help="a revision of git, or the path of another checkout")
    add("--json", action="store_true", help="print all values as JSON instead of the table")
    add("--write", action="store_true", help="keep it in benchmarks/training.json, and renew the documentation")
    add("--results", type=Path, metavar="FILE", help="also write all values there, as JSON")
    add("--jobs", type=int, help=f"of each kind and revision (default {JOBS}, with --quick {QUICK_JOBS} at most)")
    add("--restarts", type=int, help=f"in each job (default {RESTARTS}, with --quick {QUICK_RESTARTS})")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: NCCL, both ranks on one GPU if need be")
    add("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = parsed()
    if options.serve:
        serve(lambda given: measure(Request(**given)))
        return
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile(prefix="inprocess-benchmark-"))
        trees = {HERE: here()}
        if options.against:
            trees[options.against] = stack.enter_context(checkout(options.against))
        servers = [Server(name, root, log) for name, root in trees.items()]
        for server in servers:
            stack.callback(server.close)
        for server in servers:
            server.check()
        found = run(servers, options, gpus)
    print(file=sys.stderr)
    if options.results:
        options.results.write_text(json.dumps(found, indent=1) + "\n")
    kept = training_report.condense(found, machine() if options.write else None)
    print(json.dumps(found) if options.json else f"{training_report.table(kept)}\n\n{training_report.steps(found)}")
    if options.write:
        training_report.write(kept)
        pictures.write()
    if any(job["note"] for kinds in found.values() for jobs in kinds.values() for job in jobs):
        sys.exit(1)


if __name__ == "__main__":
    main()
