"""What a process remembers of its job between calls: who is still in it, and how many calls there were."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import secrets
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch.distributed as dist

from inprocess.call import launch_variables
from inprocess.call.launch_variables import Launch
from inprocess.exception import RestartError
from inprocess.protocol import verbs
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import JoinMode, Ticket, Verdict
from inprocess.protocol.repeats import ErrorStreak
from inprocess.state import FrozenState, State
from inprocess.stores.owner import Owner, kinship

__all__ = ["Job", "enter_call", "leave_call"]


def enter_call(call: object) -> None:
    """A call begins, which ends with `leave_call`.

    Raises RestartError outside the main thread, inside another call, its hooks included, or while multiprocessing
    starts this process.
    """
    global _call  # one at a time, in the main thread
    if threading.current_thread() is not threading.main_thread():
        raise RestartError(
            f"a wrapped function was called in thread {threading.current_thread().name!r}: call it in the main "
            "thread, the only one that can be interrupted for a restart"
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RestartError(
            "a wrapped function was called while multiprocessing imports the main module, to start a process such "
            "as a DataLoader's worker: it would begin a second job. Call it below "
            'if __name__ == "__main__":, which such processes pass over'
        )
    if _call is not None:
        raise RestartError("a wrapped function was called inside another one: wrap only the outermost function")
    _call = call


def leave_call(call: object) -> None:
    """It is over, if it has begun."""
    global _call
    if _call is call:
        _call = None


#: the call that this process is in
_call: object | None = None


@dataclass
class Job:
    """One launch of this process. All ranks make the same calls in the same order; each has its own store prefix."""

    launch: Launch
    #: members that take part in the next call
    members: tuple[int, ...]
    #: the rank of this process while everybody is there: where it was started, or the free one that it took
    slot: int
    #: number of slots
    world_size: int
    calls: int = 0
    #: members that were gone when the call completed
    gone: frozenset[int] = frozenset()
    #: it is no founder of the next call: it was not let in before its last one was over, or the store says so
    outside: bool = False
    #: names of this process and of all members when its last call ended
    last: tuple[str, tuple[str, ...]] = ("", ())
    #: where the base store is, since its first host was lost, and the slot of the member whose monitor serves it
    base: tuple[str, int] | None = None
    base_host: int = -1
    #: this call has been moved to the store of a standby; how many iterations there were before
    moved: bool = False
    before: int = 0
    #: and what was known of the errors of this call
    streak: ErrorStreak = field(default_factory=ErrorStreak)
    #: what the process drew that served the store first; empty: not known yet
    drawn: str = ""
    #: tells this process apart from another one that claims the same rank
    me: str = field(default_factory=lambda: f"pid {os.getpid()} on {socket.gethostname()} ({secrets.token_hex(4)})")

    @classmethod
    def enter(cls) -> Job:
        """The job of this process, at the beginning of a call.

        Raises OptionError for environment variables, ValueError where torch.distributed is initialized.
        """
        if dist.is_available() and dist.is_initialized():
            raise ValueError(
                "torch.distributed is initialized already: a wrapped function makes its process groups itself, so that "
                "they can be made anew after a fault. Move init_process_group() into the function, or call "
                "destroy_process_group() before."
            )
        launch = launch_variables.read()
        job = _jobs.get(launch)
        if job is None:
            job = _jobs[launch] = cls(launch, tuple(range(launch.world_size)), launch.rank, launch.world_size)
        job.calls += 1
        job.before, job.moved, job.streak = 0, False, ErrorStreak()
        return job

    def uncount(self) -> None:
        """The call has not begun, and nobody has heard of it: the next one of this process has the same keys."""
        self.calls -= 1

    @property
    def prefix(self) -> str:
        """Of each store key of this call; a slash follows it."""
        return self._prefix_of(self.calls)

    @property
    def stale_key(self) -> str:
        """In the store of the call before, and not in the one of this call."""
        return f"{self._prefix_of(self.calls - 1)}/{verbs.JOINED_KEY}" if self.calls > 1 else ""

    def _prefix_of(self, call: int) -> str:
        return f"inprocess/{self.launch.attempt}/{call}"

    @property
    def host(self) -> int:
        """The member whose monitor serves the base store."""
        return self.base_host if self.base_host in self.members else self.members[0]

    @property
    def entry(self) -> JoinMode:
        """How it comes to the next call. Of a later one its members know the job."""
        if self.outside:
            return JoinMode.GROW
        if self.moved:
            return JoinMode.EITHER
        later = self.calls > 1 and self.launch.entry is not JoinMode.REPLACE
        return JoinMode.EITHER if later else self.launch.entry

    @property
    def ticket(self) -> Ticket:
        """With which it joins a call that runs already."""
        return Ticket(self.slot, max(self.launch.world_size, self.slot + 1), by=self.me)

    @property
    def owner(self) -> Owner:
        """What it knows of its job, to be compared with what a server says."""
        host, kin = kinship()
        return Owner(self.launch.name, self.drawn, self.calls, self.launch.world_size, self.me, host, kin)

    @property
    def owner_to_serve(self) -> Owner:
        """What the server says that this process's monitor starts."""
        return dataclasses.replace(self.owner, drawn=self.drawn or secrets.token_hex(8))

    def membership(self) -> Membership:
        membership = Membership.founder(self.slot, self.members, self.world_size)
        membership.streak = self.streak
        return membership

    def state(self) -> FrozenState:
        """The state before ranks have been assigned."""
        launch = self.launch
        return State(
            rank=self.slot,
            world_size=max(self.world_size, self.slot + 1),
            initial_rank=launch.rank,
            initial_world_size=launch.world_size,
        ).freeze()

    def removed(self, members: Iterable[int]) -> None:
        """Reserves that were gone when the call completed."""
        self.gone = frozenset(members)

    def move(self, membership: Membership, verdict: Verdict, host: str, progressed: bool) -> None:
        """The call goes on, with these members and over another store. ``progressed``: in the iteration that ends."""
        self.streak = ErrorStreak(progressed=True) if progressed else membership.streak
        self.members, self.slot, self.gone = verdict.members, membership.slot, frozenset()
        self.world_size = self.members[-1] + 1  # the same for all, also where they were started with different ones
        self.base, self.base_host = (host, verdict.port), verdict.host
        self.before += verdict.iteration + 1
        self.moved = True

    def leave(self, membership: Membership) -> None:
        """The call is over: the slots of its last roster begin the next call."""
        if not membership.was_founder:
            self.outside = membership.member not in membership.known
        if self.outside:
            return
        stay = [member for member in membership.roster if member not in self.gone]
        self.last = (f"{self.calls}.{membership.member}", tuple(f"{self.calls}.{member}" for member in stay))
        self.members, self.slot, self.gone = (
            tuple(sorted(map(membership.slot_of, stay))),
            membership.slot,
            frozenset(),
        )
        if any(member in membership.slots for member in stay):
            self.world_size = self.members[-1] + 1


_jobs: dict[Launch, Job] = {}
