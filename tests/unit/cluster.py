"""Rank assignments on many simulated ranks: each with its own copy of the assignment, threads over one HashStore."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist

from inprocess.call.hooks import adapt_rank_assignment
from inprocess.rank_assignment import RankAssignmentCtx, RankDiscarded
from inprocess.state import State


@dataclasses.dataclass
class Member:
    """One simulated process; `state` is of the last iteration that started."""

    name: int
    state: State
    #: as made, and adapted
    made: object
    assign: Callable[[RankAssignmentCtx], RankAssignmentCtx]


class Cluster:
    """A job of which ranks die. `make(name)` builds the rank assignment of the member with that initial rank."""

    def __init__(self, size: int, make: Callable[[int], object], rank_filter: object = None) -> None:
        self.make, self.rank_filter, self.fresh = make, rank_filter, set[int]()
        self.members = [
            self._member(name, State(rank=name, world_size=size, initial_rank=name, initial_world_size=size))
            for name in range(size)
        ]

    def _member(self, name: int, state: State) -> Member:
        made = self.make(name)
        return Member(name, state, made, adapt_rank_assignment(made, self.rank_filter))

    def restart(
        self, dead: Collection[int] = (), commit: bool = True, without: Collection[int] = ()
    ) -> dict[int, State]:
        """Assign again with the members `dead` (by name) gone; the new states by name. Checks that all agree.

        commit: the iteration starts, so the new numbering counts; else it was interrupted before.
        without: members whose assignment is not run at all, as if the interruption came before it.
        """
        ranks = {member.name: member.state.rank for member in self.members}
        self.gone = {*getattr(self, "gone", ()), *(ranks[name] for name in dead)}
        self.members = [member for member in self.members if member.name not in dead]
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=20))
        runs = [member for member in self.members if member.name not in without]
        with ThreadPoolExecutor(max(1, len(runs))) as pool:
            results = dict(zip([m.name for m in runs], pool.map(lambda m: self._run(m, store), runs), strict=True))
        states = {name: state for name, state in results.items() if state is not None}
        if not without:
            check_agreement(states)
        if commit:
            self.gone, self.fresh = set(), set()
            self.members = [member for member in self.members if member.name in states]
            for member in self.members:
                member.state = states[member.name]
        return states

    def join(self, slots: dict[int, int], dead: Collection[int] = (), commit: bool = True) -> dict[int, State]:
        """New members (name: slot) join, and all others, whose names are their slots, are back in theirs."""
        self.members = [member for member in self.members if member.name not in dead]
        size = 1 + max([*slots.values(), *(member.name for member in self.members), *self._sizes()])
        for member in self.members:
            member.state.rank, member.state.world_size = member.name, size
        for name, slot in slots.items():
            state = State(rank=slot, world_size=size, initial_rank=slot, initial_world_size=size)
            self.members.append(self._member(name, state))
        self.members.sort(key=lambda member: member.name)
        self.fresh |= set(slots.values())
        self.gone = set(range(size)) - {member.state.rank for member in self.members}
        return self.restart(commit=commit)

    def _sizes(self) -> list[int]:
        return [member.state.world_size - 1 for member in self.members]

    def _run(self, member: Member, store: dist.Store) -> State | None:
        ctx = RankAssignmentCtx(copy.copy(member.state), store, set(self.gone), set(self.fresh))
        try:
            return member.assign(ctx).state
        except RankDiscarded:
            return None


def check_agreement(states: dict[int, State]) -> None:
    """Ranks are 0..n-1, active ranks 0..a-1, and everybody knows the same sizes."""
    assert sorted(state.rank for state in states.values()) == list(range(len(states)))
    assert {state.world_size for state in states.values()} <= {len(states)}
    assert len({state.active_world_size for state in states.values()}) <= 1
    active = sorted(state.active_rank for state in states.values() if state.active_rank is not None)
    assert active == list(range(len(active)))
    assert all(state.active_world_size == len(active) for state in states.values())


def drawn(states: dict[int, State], names: Collection[int]) -> str:
    """The active ranks of the members `names`, in this order: '.' is a reserve, 'X' out of the job."""
    return " ".join(
        "X" if name not in states else "." if states[name].active_rank is None else str(states[name].active_rank)
        for name in names
    )
