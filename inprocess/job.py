"""What a process remembers of its job between calls: who is still in it, and how many calls there were."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch.distributed as dist

from inprocess import coordinator, environment
from inprocess.call_wrapper import current_call
from inprocess.environment import Launch
from inprocess.exception import RestartError
from inprocess.protocol.book import Book
from inprocess.state import FrozenState, State

__all__ = ["Job"]


@dataclass
class Job:
    """One launch of this process. All ranks make the same calls in the same order; each has its own store prefix."""

    launch: Launch
    #: members that take part in the next call
    members: tuple[int, ...]
    calls: int = 0
    #: tells this process apart from another one that claims the same rank
    me: str = field(default_factory=lambda: f"pid {os.getpid()} on {socket.gethostname()} ({secrets.token_hex(4)})")

    @classmethod
    def enter(cls) -> Job:
        """The job of this process, at the beginning of a call.

        Raises OptionError for environment variables, RestartError outside the main thread or inside another call,
        ValueError where torch.distributed is initialized.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RestartError(
                f"a wrapped function was called in thread {threading.current_thread().name!r}: call it in the main "
                "thread, the only one that can be interrupted for a restart"
            )
        if current_call() is not None:
            raise RestartError("a wrapped function was called inside another one: wrap only the outermost function")
        if dist.is_available() and dist.is_initialized():
            raise ValueError(
                "torch.distributed is initialized already: a wrapped function makes its process groups itself, so that "
                "they can be made anew after a fault. Move init_process_group() into the function, or call "
                "destroy_process_group() before."
            )
        launch = environment.read()
        job = _jobs.get(launch)
        if job is None:
            job = _jobs[launch] = cls(launch, tuple(range(launch.world_size)))
        job.calls += 1
        return job

    @property
    def prefix(self) -> str:
        """Put before each store key of this call."""
        return f"inprocess/{self.launch.attempt}/{self.calls}/"

    @property
    def stale_key(self) -> str:
        """In the store of the call before, and not in the one of this call."""
        return f"inprocess/{self.launch.attempt}/{self.calls - 1}/{coordinator.JOINED_KEY}" if self.calls > 1 else ""

    @property
    def host(self) -> int:
        """The member whose monitor serves the base store."""
        return self.members[0]

    def book(self) -> Book:
        return Book.founder(self.launch.rank, self.members, self.launch.world_size)

    def state(self) -> FrozenState:
        """The state before ranks have been assigned."""
        launch = self.launch
        return State(
            rank=launch.rank,
            world_size=launch.world_size,
            initial_rank=launch.rank,
            initial_world_size=launch.world_size,
        ).freeze()

    def removed(self, members: Iterable[int]) -> None:
        """Reserves that were gone when the call completed."""
        gone = set(members)
        self.members = tuple(member for member in self.members if member not in gone)

    def leave(self, book: Book) -> None:
        """The call is over: its last roster begins the next call."""
        self.members = tuple(member for member in self.members if member in book.roster)


_jobs: dict[Launch, Job] = {}
