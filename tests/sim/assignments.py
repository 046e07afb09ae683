"""The shipped rank assignments in the simulator: the real classes, one store operation at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from inprocess import Compose
from inprocess.exception import RankDiscarded
from inprocess.protocol.ops import Add, Set, Verb
from inprocess.rank_assignment import (
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    FilterCountGroupedByKey,
    Layer,
    LayerFlag,
    MaxActiveWorldSize,
    RankAssignment,
    RankAssignmentCtx,
    ShiftRanks,
    Tree,
)
from tests.sim.engine import Ask


class ShutDown(Exception):
    """The iteration's store was shut down while the assignment talked over it."""


class DiscardOdd(RankAssignment):
    """A user's own: an odd number of ranks is made even, the last one has to go."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        ctx = ShiftRanks()(ctx)
        state = ctx.state
        size = max(1, state.world_size - state.world_size % 2)
        if state.rank >= size:
            raise RankDiscarded(f"rank {state.rank} is one too many")
        state.world_size = state.active_world_size = size
        return ctx


def _host(member: int) -> str:
    """Two members each."""
    return f"host {member // 2}"


_UP = LayerFlag.RESERVE | LayerFlag.BACKFILL

#: name -> the assignment of one member
ASSIGNMENTS: dict[str, Callable[[int], Any]] = {
    "shift": lambda member: ShiftRanks(),
    "fill": lambda member: FillGaps(),
    "at most 1": lambda member: Compose(MaxActiveWorldSize(1), ShiftRanks()),
    "at most 2": lambda member: Compose(MaxActiveWorldSize(2), ShiftRanks()),
    "at most 3": lambda member: Compose(FillGaps(), MaxActiveWorldSize(3)),
    "even": lambda member: Compose(ActiveWorldSizeDivisibleBy(2), ShiftRanks()),
    "fours": lambda member: Compose(ActiveWorldSizeDivisibleBy(4), ShiftRanks()),
    "discard odd": lambda member: DiscardOdd(),
    "whole hosts": lambda member: Compose(ShiftRanks(), FilterCountGroupedByKey(_host(member), lambda n: n == 2)),
    "tree": lambda member: Tree([Layer(flag=_UP), Layer(max_ranks=1, key_or_fn=_host(member), flag=_UP)]),
    "tree of whole hosts": lambda member: Tree([Layer(flag=_UP), Layer(min_ranks=2, key_or_fn=_host(member))]),
}


def mate_of(name: str, member: int) -> int | None:
    """The member without which this one is discarded; -1: it may be discarded at any time; None: never."""
    if name in ("whole hosts", "tree of whole hosts"):
        return member ^ 1
    return -1 if name == "discard odd" else None


def assign(made: Any, ctx: RankAssignmentCtx, prefix: str) -> Verb[tuple[Any, RankAssignmentCtx]]:
    """Run an assignment as a verb; answers (the assignment with what it remembers, the result).

    It is ordinary blocking code, so it is begun anew, from a copy, with each further answer of the store.
    """
    answers: list[Any] = []
    while True:
        trial, own = copy.deepcopy(made), copy.deepcopy(ctx)
        own.store = _Replay(answers, prefix)
        try:
            return trial, trial(own)
        except _Unanswered as unanswered:
            answer = yield unanswered.op
            if answer is True:
                raise ShutDown from None
            answers.append(answer)


class _Unanswered(BaseException):
    def __init__(self, op: Any) -> None:
        self.op = op


class _Replay:
    """A torch store as far as assignments use one; knows the answers so far."""

    def __init__(self, answers: list[Any], prefix: str) -> None:
        self._answers, self._prefix = iter(answers), prefix

    def set(self, key: str, value: str) -> None:
        self._answer(Set(self._prefix + key, value))

    def add(self, key: str, amount: int) -> int:
        return int(self._answer(Add(self._prefix + key, amount)))

    def get(self, key: str) -> bytes:
        return bytes(self._answer(Ask(self._prefix + key)))

    def _answer(self, op: Any) -> Any:
        for answer in self._answers:
            return answer
        raise _Unanswered(op)
