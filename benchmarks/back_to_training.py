"""From a fault to the next optimizer step of all ranks: ``python -m benchmarks.back_to_training --against REV``.

Four ranks train a small GPT in DistributedDataParallel, compiled by inductor, with AdamW and four loader workers each
that decode (`benchmarks.programs`). The programs:

* *kept*: model, optimizer, compiled module and loader are made before the call, the module is compiled before it, too,
  and ``LiveState`` and ``KeptLoader`` bring them to the right step, as docs/after_the_restart.md advises.
* *fresh*: the function makes everything anew, and loads a checkpoint.
* *transformers*, *lightning*: their Trainers (`benchmarks.trainers`), left out where they are not installed.
* *sharded*: FSDP2 and tensor parallelism, not compiled.

All but *kept* also run under torchrun, not wrapped, which restarts all processes. nvidia-resiliency-ext was tried with
*fresh* (0.4.1, Gloo) and has no row: its abort ends no wait of the other ranks in a collective, so each restart takes
as long as the timeout that the group happens to have.

Times are from the fault until the last rank is there: in the function, in its group, and so on. The first restart of a
job is told apart from later ones. Compiled kernels come from inductor's cache on disk, which a job before those that
count has filled.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

import inprocess
from benchmarks import libraries
from benchmarks.job import Job, Mark, free_port, here, last, mark
from benchmarks.programs import Program
from benchmarks.restart import in_ms
from benchmarks.training import Server, checkout, serve
from benchmarks.training_report import HERE
from benchmarks.warm import ready
from inprocess.initialize import RetryController
from inprocess.rank_assignment import FillGaps, MaxActiveWorldSize

#: ranks that train, loader workers of each, and who meets the fault
RANKS, WORKERS, VICTIM = 4, 4, 1
#: steps of each run of the function before its fault
STEPS = 5
#: seconds for one job, and between the moment at which everybody trains and a kill
LIMIT, SETTLE = 240.0, 0.5
#: what a rank reaches after a fault, in this order
MOMENTS = {
    "entry": "in the function",
    "group": "process group",
    "state": "state",
    "model": "model",
    "batch": "first batch",
    "step": "first step",
    "next": "second step",
}
#: the first step compiles, and takes no part in the search for ranks that hang (seconds)
PATIENT = {"soft_timeout": 300, "hard_timeout": 400, "barrier_timeout": 500}


@dataclass(frozen=True)
class Request:
    """One job."""

    fault: str
    program: str
    library: str = "inprocess"
    restarts: int = 1
    ranks: int = RANKS
    workers: int = WORKERS

    @property
    def size(self) -> int:
        """How many processes it has."""
        return self.ranks + (self.fault == "spare")

    @property
    def after(self) -> int:
        """How many ranks train after the fault."""
        return self.ranks - (self.fault == "smaller")


#: fault -> what the table calls it
FAULTS = {
    "raise": "one rank raises",
    "spare": "SIGKILL, a hot spare that has warmed up",
    "warm": "SIGKILL, a warm worker",
    "cold": "SIGKILL, a new process",
    "smaller": "SIGKILL, the world is smaller by one",
}
#: what runs: faults whose processes a launcher starts, and the others, which are forked
LAUNCHED = {"warm": "1", "cold": "0"}
FRAMEWORKS = ("transformers", "lightning", "sharded")
#: program -> module and class
PROGRAMS = {
    "kept": ("benchmarks.programs", "Kept"),
    "fresh": ("benchmarks.programs", "Fresh"),
    "sharded": ("benchmarks.programs", "Sharded"),
    "transformers": ("benchmarks.trainers", "Transformers"),
    "lightning": ("benchmarks.trainers", "Lightning"),
}
#: fault, program, library
ROWS = (
    ("raise", "kept", "inprocess"),
    ("raise", "fresh", "inprocess"),
    ("raise", "fresh", "torchrun"),
    *(("raise", program, library) for program in FRAMEWORKS for library in ("inprocess", "torchrun")),
    *((fault, "kept", "inprocess") for fault in ("spare", "warm", "cold", "smaller")),
    ("cold", "fresh", "torchrun"),
)


# --- inside a rank ------------------------------------------------------------------------------------------------


class Rank:
    """One process of the job: what its program tells, and when its fault is due."""

    def __init__(self, request: Request, rank: int, folder: Path) -> None:
        #: for a program's checkpoints, as are names beside it
        self.file = folder / "checkpoint.pt"
        self.request, self._rank = request, rank
        self._iteration, self._before = 0, 0

    def run(self) -> None:
        program = self._program()
        if self.request.library == "torchrun":
            self._iteration = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            program.run(None)
            return

        def function(call: inprocess.CallWrapper = None) -> None:  # type: ignore[assignment]
            self._iteration = call.iteration
            program.run(call)

        inprocess.Wrapper(max_repeats=None, **PATIENT, **self._options(program))(function)()

    def _program(self) -> Program:
        module, kind = PROGRAMS[self.request.program]
        made: Program = getattr(importlib.import_module(module), kind)(self)
        return made

    def _options(self, program: Program) -> dict[str, Any]:
        if self.request.fault == "spare":
            order = inprocess.Compose(MaxActiveWorldSize(self.request.ranks), FillGaps())
            return {"rank_assignment": order, "warm_up": lambda state: program.warm_up()}
        if self.request.fault in LAUNCHED:  # the next run waits until the dead process is replaced
            return {"initialize": RetryController(min_world_size=self.request.ranks, wait_for_replacement=LIMIT)}
        return {}

    def reached(self, name: str, **fields: Any) -> None:
        mark(name, self._rank, self._iteration, size=dist.get_world_size() if dist.is_initialized() else 0, **fields)

    def enter(self) -> None:
        """The function begins."""
        self.reached("entry", pid=os.getpid())

    def join(self) -> None:
        """It begins, and makes its process group."""
        self.enter()
        # the first steps wait until all have compiled
        libraries.init_process_group(self.request.library, self._iteration, LIMIT)
        self.reached("group")

    def begin(self, number: int) -> None:
        """A batch is there; a rank that is to raise does so in the middle of its step."""
        if number == 0:
            self.reached("batch")
        due = number == STEPS and self._iteration < self.request.restarts
        if due and self.request.fault == "raise" and self._rank == VICTIM:
            self.reached("fault", step=time.monotonic_ns() - self._before)
            raise RuntimeError("injected by the benchmark")
        self._before = time.monotonic_ns()

    def done(self, number: int) -> None:
        """The optimizer has made its step."""
        if number < 2:
            self.reached(("step", "next")[number])


# --- around a job -------------------------------------------------------------------------------------------------


def measure(request: Request) -> dict[str, Any]:
    """Run one job: for each of its restarts what was measured (ms), and why there is nothing where it failed."""
    found: list[dict[str, Any]] = []
    with Job(request.size) as job, open(job.folder / "errors", "w+b") as errors:
        start(job, request, errors.fileno())
        note = "" if follow(job, request, Path(errors.name), found) else f"not back within {LIMIT:g} s"
        if note:
            note += "".join(f"; {each}" for each in job.errors()) + Path(errors.name).read_text()[-500:]
    return {"restarts": found, "note": note}


def start(job: Job, request: Request, errors: int) -> None:
    arguments = ["--in-rank", json.dumps(asdict(request)), "--folder", str(job.folder)]
    if request.library == "torchrun":
        launcher, given = "torch.distributed.run", list[str]()
    elif request.fault in LAUNCHED:
        launcher = "inprocess.run"
        given = [f"--warm-workers={LAUNCHED[request.fault]}", "--restart-backoff=0", "--preload=benchmarks.parts_ahead"]
    else:
        job.start(lambda rank: Rank(request, rank, job.folder).run(), free_port())
        return
    job.launch(launcher, "benchmarks.back_to_training", arguments, request.restarts, given, errors)


def follow(job: Job, request: Request, errors: Path, found: list[dict[str, Any]]) -> bool:
    """See every restart, and kill where the fault is a kill."""
    if not job.wait(lambda marks: trained(marks, 0, request.ranks) is not None, LIMIT):
        return False
    for number in range(request.restarts):
        fault = strike(job, request, number, errors)
        if fault is None or not job.wait(
            lambda marks, at=fault.t: trained(marks, at, request.after) is not None, LIMIT
        ):
            return False
        iteration = trained(job.marks, fault.t, request.after)
        assert iteration is not None
        there = {each.rank for each in job.marks if (each.name, each.iteration) == ("next", iteration)}
        times = {name: last(job.marks, name, iteration, there) for name in MOMENTS}
        reached = {name: in_ms(t - fault.t) for name, t in times.items() if t is not None}
        before = {"a step before": in_ms(fault.fields["step"])} if "step" in fault.fields else {}
        found.append({"first": number == 0, **before, **reached})
    return True


def trained(marks: Sequence[Mark], since: int, size: int) -> int | None:
    """The iteration in which so many ranks have done two steps since then; None: not yet."""
    ends = [each.iteration for each in marks if each.name == "next" and each.t > since and each.fields["size"] == size]
    return next((iteration for iteration in ends if ends.count(iteration) == size), None)


def strike(job: Job, request: Request, number: int, errors: Path) -> Mark | None:
    """The fault, once everybody is ready: that of a rank that raises, or a kill; None: it does not come to it."""
    if request.fault == "raise":
        job.wait(lambda marks: last(marks, "fault", number, {VICTIM}) is not None, LIMIT)
        return next((each for each in job.marks if (each.name, each.iteration) == ("fault", number)), None)
    if request.fault == "spare" and not job.wait(lambda marks: any(each.name == "warm" for each in marks), LIMIT):
        return None
    if request.fault == "warm":
        ready(str(errors), 1)
    time.sleep(SETTLE)
    pid = [each.fields["pid"] for each in job.marks if each.name == "entry" and each.rank == VICTIM][-1]
    at = time.monotonic_ns()
    os.kill(pid, signal.SIGKILL)
    return Mark("fault", VICTIM, number, at)


# --- outside ------------------------------------------------------------------------------------------------------

Row = tuple[str, str, str, str]
Found = dict[Row, list[dict[str, Any]]]


def rows(options: argparse.Namespace, names: Sequence[str]) -> Iterator[Row]:
    """Fault, program, library and tree of all that are measured; other libraries once."""
    for fault, program, library in ROWS:
        for name in names:
            wanted = re.search(options.fault, fault) and re.search(options.program, f"{program}, {library}")
            if wanted and (library == "inprocess" or name == HERE):
                yield fault, program, library, name


def is_here(row: Row) -> bool:
    """Whether what it needs is installed."""
    return row[1] not in ("transformers", "lightning") or importlib.util.find_spec(row[1]) is not None


def chosen(options: argparse.Namespace, names: Sequence[str]) -> list[Row]:
    """Without those of what is not installed."""
    found = {row: is_here(row) for row in rows(options, names)}
    for program, library in dict.fromkeys(row[1:3] for row, is_installed in found.items() if not is_installed):
        print(f"left out: {program}, {library}: not installed", file=sys.stderr, flush=True)
    return [row for row, is_installed in found.items() if is_installed]


def run(servers: dict[str, Server], measured: Sequence[Row], options: argparse.Namespace) -> tuple[Found, bool]:
    """Jobs in turn; and whether all came back."""
    found: Found = {row: [] for row in measured}
    notes = []
    for program in {program: None for _, program, *_ in found}:
        print(f"fills the compiler's cache: {program}", file=sys.stderr, flush=True)
        notes.append(servers[HERE].ask(asked("raise", program, "inprocess", 1, options))["note"])
    for number in range(options.jobs):
        for row in found:
            fault, program, library, name = row
            restarts = options.restarts if fault == "raise" and library != "torchrun" else 1
            result = servers[name].ask(asked(fault, program, library, restarts, options))
            found[row] += result["restarts"]
            notes.append(result["note"])
            print(number, ", ".join(row), json.dumps(result), file=sys.stderr, flush=True)
    return found, not any(notes)


def asked(fault: str, program: str, library: str, restarts: int, options: argparse.Namespace) -> Request:
    return Request(fault, program, library, restarts, options.ranks, options.workers)


def table(found: Found) -> str:
    """Medians, in milliseconds."""
    lines = [f"| fault to, ms | {' | '.join(MOMENTS.values())} | restarts |", "| --- |" + " --- |" * (len(MOMENTS) + 1)]
    for row, results in found.items():
        for which, first in (("first", True), ("later", False)):
            if those := [each for each in results if each["first"] is first]:
                several = [which] if any(not each["first"] for each in results) else []
                label = ", ".join([FAULTS[row[0]], *named(row[1:3]), *several, *named(row[3:])])
                cells = (median([each[moment] for each in those if moment in each]) for moment in MOMENTS)
                lines.append(f"| {label} | {' | '.join(cells)} | {len(those)} |")
    return "\n".join(lines)


def named(words: Sequence[str]) -> list[str]:
    """Without what goes without saying."""
    return [word for word in words if word not in ("inprocess", HERE)]


def median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f}" if values else ""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.back_to_training", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="one job of each row, with two restarts")
    add("--against", metavar="REV", default="", help="a revision of git, or the path of another checkout")
    add("--fault", metavar="REGEX", default="", help=f"only some of {', '.join(FAULTS)}")
    add("--program", metavar="REGEX", default="", help="only some, as in 'fresh, torchrun'")
    add("--jobs", type=int, default=0, help="of each row (default 5, with --quick 1)")
    add("--restarts", type=int, default=0, help="where one rank raises, in each job (default 5, with --quick 2)")
    add("--ranks", type=int, default=RANKS, help=f"that train (default {RANKS})")
    add("--workers", type=int, default=WORKERS, help=f"of each rank's loader (default {WORKERS})")
    add("--json", action="store_true", help="print all values as JSON instead of the table")
    add("--serve", action="store_true", help=argparse.SUPPRESS)
    add("--in-rank", metavar="JSON", help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = parser().parse_args()
    if options.in_rank:
        Rank(Request(**json.loads(options.in_rank)), int(os.environ["RANK"]), options.folder).run()
        return
    if options.serve:
        serve(lambda given: measure(Request(**given)))
        return
    options.jobs = options.jobs or (1 if options.quick else 5)
    options.restarts = options.restarts or (2 if options.quick else 5)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile(prefix="inprocess-benchmark-"))
        cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="inprocess-benchmark-"))
        # compiled in the rank itself: pools of compilers would be in each other's way
        os.environ.update(TORCHINDUCTOR_CACHE_DIR=cache, TORCHINDUCTOR_COMPILE_THREADS="1")
        trees = {HERE: here()}
        if options.against:
            trees[options.against] = stack.enter_context(checkout(options.against))
        servers = {name: Server(name, root, log, "benchmarks.back_to_training") for name, root in trees.items()}
        for server in servers.values():
            stack.callback(server.close)
            server.check()
        found, all_back = run(servers, chosen(options, [*trees]), options)
    values = {", ".join([row[0], *named(row[1:])]): results for row, results in found.items()}
    print(json.dumps(values) if options.json else table(found))
    sys.exit(0 if all_back else 1)


if __name__ == "__main__":
    main()
