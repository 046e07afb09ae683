"""From a fault to the next optimizer step of all ranks: ``python -m benchmarks.back_to_training --against REV``.

Four ranks train a small GPT in DistributedDataParallel, compiled by inductor, with AdamW and four loader workers each
that decode. Three programs do so:

* *kept*: model, optimizer, compiled module and loader are made before the call, the module is compiled before it, too,
  and ``LiveState`` and ``KeptLoader`` bring them to the right step, as docs/after_the_restart.md advises.
* *fresh*: the function makes everything anew, and loads a checkpoint.
* *torchrun*: the same as *fresh*, not wrapped; torchrun restarts all processes.

Times are from the fault until the last rank is there: in the function, in its group, and so on. The first restart of a
job is told apart from later ones. Compiled kernels come from inductor's cache on disk, which a job before those that
count has filled.
"""

from __future__ import annotations

import argparse
import contextlib
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

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import inprocess
from benchmarks import libraries
from benchmarks.job import Job, Mark, free_port, here, last, mark
from benchmarks.parts import Parts
from benchmarks.restart import in_ms
from benchmarks.training import Server, checkout, serve
from benchmarks.training_report import HERE
from benchmarks.warm import ready
from inprocess.initialize import RetryController
from inprocess.rank_assignment import FillGaps, MaxActiveWorldSize

#: ranks that train, loader workers of each, and who meets the fault
RANKS, WORKERS, VICTIM = 4, 4, 1
#: steps of each run of the function before its fault, and after which a checkpoint is written
STEPS, SAVED = 5, 2
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
ROWS = (
    ("raise", "kept"),
    ("raise", "fresh"),
    ("raise", "torchrun"),
    *((fault, "kept") for fault in ("spare", "warm", "cold", "smaller")),
    ("cold", "torchrun"),
)


# --- inside a rank ------------------------------------------------------------------------------------------------


class Rank:
    """What one process of the job does."""

    def __init__(self, request: Request, rank: int, folder: Path) -> None:
        self._request, self._rank, self._file = request, rank, folder / "checkpoint.pt"
        self._iteration, self._before = 0, 0
        self._parts: Parts | None = None
        if request.program == "kept":
            from benchmarks.parts_ahead import PARTS as parts  # noqa: PLC0415  (it compiles)

            getattr(inprocess, "keep_compiled_code", lambda: None)()  # earlier revisions have it not
            self._parts = parts
            self._live = inprocess.LiveState(model=parts.network, optim=parts.optimizer, sampler=parts.sampler)
            self._loader = inprocess.KeptLoader(parts.loader(request.workers))

    def run(self) -> None:
        if self._request.program == "torchrun":
            self._iteration = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            self._fresh(lambda: None)
            return

        def function(call: inprocess.CallWrapper = None) -> None:  # type: ignore[assignment]
            self._iteration = call.iteration
            if self._parts is not None:
                self._kept(call, self._parts)
            else:
                self._fresh(call.ping)

        inprocess.Wrapper(max_repeats=None, **PATIENT, **self._options())(function)()

    def _options(self) -> dict[str, Any]:
        if self._request.fault == "spare":
            order = inprocess.Compose(MaxActiveWorldSize(self._request.ranks), FillGaps())
            return {"rank_assignment": order, "warm_up": lambda state: self._warm_up()}
        if self._request.fault in LAUNCHED:  # the next run waits until the dead process is replaced
            return {"initialize": RetryController(min_world_size=self._request.ranks, wait_for_replacement=LIMIT)}
        return {}

    def _mark(self, name: str, **fields: Any) -> None:
        mark(name, self._rank, self._iteration, size=dist.get_world_size() if dist.is_initialized() else 0, **fields)

    def _enter(self) -> None:
        self._mark("entry", pid=os.getpid())
        library = "torchrun" if self._request.program == "torchrun" else "inprocess"
        libraries.init_process_group(library, self._iteration, LIMIT)  # the first steps wait until all have compiled
        self._mark("group")

    def _kept(self, call: Any, parts: Parts) -> None:
        self._enter()
        step = self._live.recover(call)
        self._mark("state")
        model = DistributedDataParallel(parts.compiled)
        self._mark("model")
        for number, words in enumerate(self._loader.from_step(step)):
            self._begin(number, call.ping)
            parts.learn(model, words)
            with self._live.commit(step + number + 1):
                parts.optimizer.step()
                parts.sampler.advance()
            self._done(number)

    def _fresh(self, ping: Any) -> None:
        self._enter()
        parts, step = Parts(), 0
        if self._file.exists():
            found = torch.load(self._file)
            parts.network.load_state_dict(found["network"])
            parts.optimizer.load_state_dict(found["optimizer"])
            step, parts.sampler.position = found["step"], found["position"]
        self._mark("state")
        model = DistributedDataParallel(parts.compiled)
        self._mark("model")
        for number, words in enumerate(parts.loader(self._request.workers)):
            self._begin(number, ping)
            parts.learn(model, words)
            parts.optimizer.step()
            parts.sampler.advance()
            self._done(number)
            if number == SAVED and dist.get_rank() == 0:
                self._save(parts, step + number + 1)

    def _save(self, parts: Parts, step: int) -> None:
        found = {"network": parts.network.state_dict(), "optimizer": parts.optimizer.state_dict()}
        unfinished = self._file.with_suffix(".tmp")
        torch.save(found | {"step": step, "position": parts.sampler.position}, unfinished)
        unfinished.replace(self._file)

    def _begin(self, number: int, ping: Any) -> None:
        """A batch is there; a rank that is to raise does so in the middle of its step."""
        if number == 0:
            self._mark("batch")
        ping()
        due = number == STEPS and self._iteration < self._request.restarts
        if due and self._request.fault == "raise" and self._rank == VICTIM:
            self._mark("fault", step=time.monotonic_ns() - self._before)
            raise RuntimeError("injected by the benchmark")
        self._before = time.monotonic_ns()

    def _done(self, number: int) -> None:
        if number < 2:
            self._mark(("step", "next")[number])

    def _warm_up(self) -> None:
        """The function's first steps, in a group of this process alone."""
        parts = self._parts
        assert parts is not None
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = DistributedDataParallel(parts.compiled)
        parts.rehearse(model)
        self._mark("warm")
        del model
        dist.destroy_process_group()


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
    if request.program == "torchrun":
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
        reached = {name: in_ms((t or 0) - fault.t) for name, t in times.items()}
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

Found = dict[tuple[str, str, str], list[dict[str, Any]]]


def rows(fault: str, names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Fault, program and tree of all that are measured; torchrun's once."""
    for each, program in ROWS:
        for name in names:
            if re.search(fault, each) and (program != "torchrun" or name == HERE):
                yield each, program, name


def run(servers: dict[str, Server], options: argparse.Namespace) -> tuple[Found, bool]:
    """Jobs in turn; and whether all came back."""
    found: Found = {row: [] for row in rows(options.fault, [*servers])}
    print("fills the compiler's cache", file=sys.stderr, flush=True)
    first = servers[HERE].ask(Request("raise", "kept", 1, options.ranks, options.workers))
    notes = [first["note"]]
    for number in range(options.jobs):
        for fault, program, name in found:
            restarts = options.restarts if fault == "raise" and program != "torchrun" else 1
            result = servers[name].ask(Request(fault, program, restarts, options.ranks, options.workers))
            found[fault, program, name] += result["restarts"]
            notes.append(result["note"])
            print(number, name, fault, program, json.dumps(result), file=sys.stderr, flush=True)
    return found, not any(notes)


def table(found: Found) -> str:
    """Medians, in milliseconds."""
    lines = [f"| fault to, ms | {' | '.join(MOMENTS.values())} | restarts |", "| --- |" + " --- |" * (len(MOMENTS) + 1)]
    for (fault, program, name), results in found.items():
        for which, first in (("first", True), ("later", False)):
            if chosen := [each for each in results if each["first"] is first]:
                several = [which] if any(not each["first"] for each in results) else []
                label = ", ".join([FAULTS[fault], program, *several, *([] if name == HERE else [name])])
                medians = (statistics.median(each[moment] for each in chosen) for moment in MOMENTS)
                lines.append(f"| {label} | {' | '.join(f'{value:.0f}' for value in medians)} | {len(chosen)} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.back_to_training", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="one job of each row, with two restarts")
    add("--against", metavar="REV", default="", help="a revision of git, or the path of another checkout")
    add("--fault", metavar="REGEX", default="", help=f"only some of {', '.join(FAULTS)}")
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
        found, all_back = run(servers, options)
    values = {", ".join(part for part in row if part != HERE): results for row, results in found.items()}
    print(json.dumps(values) if options.json else table(found))
    sys.exit(0 if all_back else 1)


if __name__ == "__main__":
    main()
