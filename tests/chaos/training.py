"""Runs in the ranks: a training with whole numbers, whose result is known exactly, and the faults that strike inside.

Its checkpoint is a log. Rank 0 appends one line for each step, with one write, inside `atomic()`: that line is the
commit. A rank that begins an iteration appends `resume` first and reads afterwards, so whatever an older iteration's
rank 0 might still write stands behind that line, and counts for nothing. A fault between all-reduce and commit makes
the step be done again, by all: nobody takes the state from its own memory.

Or the state is in a LiveState. Then a rank adds up its samples as gradients, in several backward passes, and clears
them after the commit: those of an interrupted step must not count in the next one. Each rank has a loader of its own.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from inprocess.interrupt.frames import leave_alone
from inprocess.testing.faults import Exit, Kill, Raise
from tests.chaos.schedule import OPTIONS, Job, Signal
from tests.harness.child import Context
from tests.ranks.targets import LONG, place_in_world

#: numbers stay below it, products below 2**63
PRIME = 2**31 - 1
#: samples in one step, over all ranks
BATCH = 24
#: steps, of a LiveState
COPY_EVERY, SAVE_EVERY = 3, 20
#: samples of a backward pass
MICRO = 2
#: no step
NOTHING = -2
#: seconds that a step takes besides
STEP = 0.002


# --- what is computed -------------------------------------------------------------------------------------------


def sample(number: int) -> int:
    return number * 2654435761 % PRIME


def batch(step: int) -> range:
    return range(step * BATCH, (step + 1) * BATCH)


def advance(value: int, total: int) -> int:
    """The model after a step: depends on all steps before and on their order."""
    return (value * 48271 + total) % PRIME


def exact(steps: int) -> list[int]:
    """The model after 0, 1, ... steps."""
    values = [0]
    for step in range(steps):
        values.append(advance(values[-1], sum(map(sample, batch(step)))))
    return values


# --- the log ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """What `member` wrote as rank 0 of `iteration`."""

    #: resume | open (a save begins) | commit
    what: str
    iteration: int
    member: int
    step: int
    value: int


@dataclass(frozen=True)
class Log:
    """The checkpoint of a job."""

    path: str

    def append(self, line: Line) -> None:
        text = f"{line.what} {line.iteration} {line.member} {line.step} {line.value}\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def lines(self) -> list[Line]:
        words = (text.split() for text in Path(self.path).read_text().splitlines())
        return [Line(what, *map(int, numbers)) for what, *numbers in words]


def surviving(lines: list[Line], live: bool = False) -> list[Line]:
    """The commits that count: those of the iteration that resumed last before them.

    ``live``: it resumed at a step that may be another one than that of the last line: one newer, which nobody wrote
    down, or some older.
    """
    newest, found = -1, []
    for line in lines:
        if line.what == "resume":
            if live and line.iteration > newest:
                found = [commit for commit in found if commit.step <= line.step]
                found += [line] if line.step == len(found) + 1 else []
            newest = max(newest, line.iteration)
        elif line.what == "commit" and line.iteration == newest:
            found.append(line)
    return found


# --- the function -----------------------------------------------------------------------------------------------


def train(context: Context, call: Any) -> list[int]:
    """Until the time is over. Returns the number of steps and the model."""
    rank, size = place_in_world()
    dist.init_process_group("gloo", timeout=LONG)
    _expect(context, (dist.get_rank(), dist.get_world_size()) == (rank, size), "ranks of torch and environment differ")
    _report_roster(context, size)
    log = Log(context.args["log"])
    step, value, origin = _resume(context, call, log, rank)
    state = context.args.get("state")
    over = 0
    while not over:
        call.ping()  # before a fault: from here on a loop in Python counts as a hang, too
        context.point("step")
        time.sleep(STEP)
        late = time.monotonic() - origin > context.args["job"].seconds
        mine = batch(step)[rank::size]
        total = sum(map(sample, mine)) if state is None else state.accumulate(context, mine)
        step, value, over = _step(context, step, value, size, torch.tensor([total, len(mine), late, step]))
        if state is not None:
            state.commit(context, step, value)
        if rank == 0:
            context.point("commit")
            _commit(context, call, log, step, value)
    if state is not None:
        state.live.wait()
    dist.destroy_process_group()
    return [step, value]


def _report_roster(context: Context, size: int) -> None:
    members = torch.full((size,), -1)
    parts = list(members.split(1))
    dist.all_gather(parts, torch.tensor([context.rank]))
    context.emit("roster", members=torch.cat(parts).tolist(), t0=_origin(context))


def _resume(context: Context, call: Any, log: Log, rank: int) -> tuple[int, int, float]:
    """Rank 0 fences the log, reads it and tells the others; or what they have in memory tells."""
    if (live := context.args.get("state")) is not None:
        step, value = live.recover(context, call)
        if rank == 0:
            with call.atomic():
                log.append(Line("resume", call.iteration, context.rank, step, value))
        return step, value, _origin(context)
    state = torch.zeros(2, dtype=torch.int64)
    if rank == 0:
        with call.atomic():
            log.append(Line("resume", call.iteration, context.rank, 0, 0))
            last = surviving(log.lines())[-1:]
        state = torch.tensor([last[0].step, last[0].value] if last else [0, 0])
    dist.broadcast(state, 0)
    return int(state[0]), int(state[1]), _origin(context)


def _step(context: Context, step: int, value: int, size: int, sums: torch.Tensor) -> tuple[int, int, int]:
    dist.all_reduce(sums)
    total, count, votes, steps = sums.tolist()
    _expect(context, count == BATCH, f"step {step}: {count} samples of {BATCH}")
    _expect(context, steps == step * size, f"step {step}: the ranks were at different steps")
    return step + 1, advance(value, total), votes


def _commit(context: Context, call: Any, log: Log, step: int, value: int) -> None:
    with call.atomic():
        log.append(Line("open", call.iteration, context.rank, step, value))
        context.point("atomic")
        log.append(Line("commit", call.iteration, context.rank, step, value))


def _expect(context: Context, condition: bool, text: str) -> None:
    """An exception would only be one more fault."""
    if not condition:
        context.emit("wrong", text=text)


class Loader:
    """How many steps this rank has loaded, of one process."""

    def __init__(self, process: int) -> None:
        self.step, self.process = 0, process

    def state_dict(self) -> dict[str, int]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


class State:
    """The model in a LiveState, with a point for faults before whatever that does."""

    def __init__(self, context: Context) -> None:
        from inprocess import LiveState
        from inprocess.live import checkpoints, copies, transfer

        self.model = torch.nn.Module()
        self.model.value = torch.nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)
        #: its gradient is exact: a sum of samples is below 2**53
        self.model.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.loader = Loader(os.getpid())
        #: iteration, rank and size of the last run, and the last step at which its loader is known
        self._run = (-1, 0, 0)
        self._known = 0
        self.live = LiveState(
            model=self.model,
            loader=self.loader,
            per_rank="loader",
            copy_every=COPY_EVERY,
            folder=context.args["folder"],
            save_every=SAVE_EVERY,
            keep=2,
        )
        traced = {"copy": (copies.Copies, "take"), "load": (checkpoints.Checkpoints, "load")}
        traced |= {"stage": (checkpoints.Checkpoints, "stage"), "send": (transfer.Wire, "send")}
        traced |= {"receive": (transfer.Wire, "receive")}
        for place, (owner, method) in traced.items():
            context.trace(owner, method, place)

    def recover(self, context: Context, call: Any) -> tuple[int, int]:
        step = self.live.recover(call)
        context.emit("recovered", step=step, source=self.live.source.partition(" /")[0])
        run = (call.iteration, *place_in_world())
        known = (run[0] - 1, *run[1:]) == self._run and step in (self._known, self._known + 1)
        if known or step == 0:  # else nobody knows, and the program sets it
            _expect(context, self.loader.step == step, f"the loader is at step {self.loader.step}, recovered is {step}")
        _expect(context, self.loader.process == os.getpid(), "the loader is that of another rank")
        self.loader.step, self._run, self._known = step, run, step if known or step == 0 else NOTHING
        return step, int(self.model.value)

    def accumulate(self, context: Context, mine: Sequence[int]) -> int:
        """The sum of these samples, as the gradient of several backward passes."""
        self.loader.step += 1
        for start in range(0, len(mine), MICRO):
            (self.model.weight * sum(map(sample, mine[start : start + MICRO]))).backward()
            context.point("accumulate")
        assert self.model.weight.grad is not None
        return int(self.model.weight.grad)

    def commit(self, context: Context, step: int, value: int) -> None:
        with self.live.commit(step):
            self.model.value.fill_(-1)
            context.point("inside")
            self.model.value.fill_(value)
        self._known = step
        self.model.weight.grad = None


# --- the faults -------------------------------------------------------------------------------------------------


def _origin(context: Context) -> float:
    """When the job began: the first to ask notes it in a file, for all."""
    path = context.args["origin"]
    if not os.path.exists(path):
        mine = f"{path}.{context.rank}"
        Path(mine).write_text(repr(time.monotonic()))
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)  # only the first succeeds
        os.unlink(mine)
    return float(Path(path).read_text())


class Strikes:
    """The strikes inside this rank: each fires once, at its place, when its time has come."""

    def __init__(self, context: Context) -> None:
        self._context = context
        late = "INPROCESS_RESTART" in os.environ
        strikes = enumerate(() if late else context.args["job"].strikes)
        self._left = [(n, s) for n, s in strikes if s.rank == context.rank and not isinstance(s.fault, Signal)]

    def point(self, place: int | str) -> None:
        for entry in self._left:
            number, strike = entry
            if strike.place == place and (strike.at < 0 or self._now() >= strike.at):
                self._left.remove(entry)
                told = {"strike": number, "kind": strike.kind}
                if isinstance(strike.fault, (Raise, Exit, Kill)):
                    _tell_and_strike(self._context, strike.fault, told)
                else:
                    self._context.emit("struck", **told)
                    strike.fault.strike(self._context)
                return

    def _now(self) -> float:
        path = self._context.args["origin"]
        return time.monotonic() - float(Path(path).read_text()) if os.path.exists(path) else 0.0


def _tell_and_strike(context: Context, fault: Raise | Exit | Kill, told: dict[str, Any]) -> None:
    """Not interrupted in between: a rank that has told of its end, and has not come to it, would rightly go on."""
    context.emit("struck", **told)
    fault.strike(context)


leave_alone(_tell_and_strike.__code__)


def options(context: Context) -> dict[str, Any]:
    """The options of a job: its assignment, hasty timeouts."""
    return {**OPTIONS, **_assignment(context.args["job"], context.rank)}


def _assignment(job: Job, rank: int) -> dict[str, Any]:
    from inprocess import Compose, rank_assignment, rank_filter
    from inprocess.rank_assignment import Layer, LayerFlag

    shift, active = rank_assignment.ShiftRanks(), job.world_size - 2
    flags = LayerFlag.RESERVE | LayerFlag.BACKFILL
    layers = [Layer(max_ranks=active, flag=flags), Layer(key_or_fn=f"host {rank // 2}", flag=flags)]
    pairs = rank_assignment.FilterCountGroupedByKey(f"host {rank // 2}", lambda count: count == 2)
    made: dict[str, dict[str, Any]] = {
        "shift": {},
        "gaps": {"rank_assignment": rank_assignment.FillGaps()},
        "spares": {"rank_assignment": Compose(rank_assignment.MaxActiveWorldSize(active), shift)},
        "even": {"rank_assignment": Compose(rank_assignment.ActiveWorldSizeDivisibleBy(2), shift)},
        "pairs": {"rank_assignment": Compose(shift, pairs)},
        "tree": {"rank_assignment": rank_assignment.Tree(layers)},
        "older": {"rank_filter": rank_filter.WorldSizeDivisibleBy(2)},
    }
    return made[job.assignment]


def run_chaos(context: Context) -> Any:
    context.at_point = Strikes(context).point
    if context.args["job"].live:
        context.args["state"] = State(context)
    return context.wrap(train)()
