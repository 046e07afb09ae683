"""What a training process and its monitor process tell each other, as JSON. Imports nothing of torch.

Both ends belong to one user and inherit what they talk over. Yet children that a user forks hold copies of the socket,
so a line that is none is left out.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from inprocess.protocol.membership import Membership
from inprocess.stores.spec import StoreSpec
from inprocess.system import strict_json

__all__ = ["MonitorConfig"]


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """Everything a monitor process needs to know; durations in seconds.

    ``member``, ``roster`` and ``iteration`` are its membership at the start: -1 and all founders when a call begins,
    the state of the training process's own membership where it takes the place of a monitor that died.
    """

    member: int
    roster: tuple[int, ...]
    iteration: int = -1
    #: all members that the call has had; empty: the roster
    known: tuple[int, ...] = ()
    #: the slots of those that joined: member, slot, member, slot, ...
    slots: tuple[int, ...] = ()
    #: calls of wrapped functions in this process before this one
    call: int = 0
    #: the rank that this process was started with, and how it signs
    rank: int = 0
    me: str = ""
    #: whether ``member`` is certain; otherwise the store or the training process will tell
    identified: bool = True
    #: how to reach the base store: a ``StoreSpec`` as JSON
    store: str
    #: serve the base store on this port (0: any free one); None: somebody else does
    serve_port: int | None = None
    #: what its server says of its job, as JSON; empty: nothing
    owner: str = ""
    #: the host by which the others know this one: decides on which addresses the base store listens
    serve_host: str = "127.0.0.1"
    #: listen on this local address only, for the base store and the iterations' own; empty: as ``serve_host`` says
    bind: str = ""
    #: who serves the iterations' own stores: "always" this one, or "never", or the "smallest" live member's monitor
    rendezvous: str = "smallest"
    #: the host part of the address under which this host's rendezvous stores are published; "@" stands for the host
    #: of the base store, however a member reaches it
    rendezvous_host: str = "127.0.0.1"
    soft_timeout: float = 60.0
    hard_timeout: float = 90.0
    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 30.0
    barrier_timeout: float = 120.0
    termination_grace_time: float = 5.0
    #: whether SIGTERM ends the rank, or is for a handler of the program's; otherwise only SIGKILL ends one that hangs
    ends_by_sigterm: bool = True
    monitor_process_interval: float = 1.0
    #: how many members stand by to serve the store
    standby_stores: int = 0
    #: the member whose monitor serves it
    store_host: int = 0
    #: absolute paths, or None
    logfile: str | None = None
    pidfile: str | None = None
    #: for its events; and the job's name there
    run_dir: str | None = None
    job: str = ""
    #: how often the rank looks whether it is asked for its stacks
    progress_watchdog_interval: float = 1.0
    #: the signal on which the rank writes its stacks, and its descriptor of the memory to which; 0: none
    stacks_signal: int = 0
    stacks_fd: int = -1
    #: the signal that ends the rank, where it is process 1 of its container; 0: SIGKILL does
    deadly_signal: int = 0
    #: import torch in full, not only its stores
    full_torch: bool = False
    #: filled in at the start: pid and module search path of the training process
    training_pid: int = 0
    sys_path: tuple[str, ...] = ()

    def membership(self) -> Membership:
        """Of the rank, at the start."""
        slots = dict(zip(self.slots[::2], self.slots[1::2], strict=True))
        return Membership(self.member, self.roster, iteration=self.iteration, known=frozenset(self.known), slots=slots)

    @property
    def grace(self) -> float:
        """Between SIGTERM and SIGKILL for a rank that hangs (seconds): the others wait for it meanwhile."""
        return min(self.termination_grace_time, (self.barrier_timeout - self.hard_timeout) / 4)

    @property
    def needs_full_torch(self) -> bool:
        """Whether its stores are not enough: a user's own store class may need all of it."""
        module, _, _ = StoreSpec.from_json(self.store).factory.partition(":")
        return self.full_torch or module not in ("", "inprocess.store", "inprocess.etcd_store")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> MonitorConfig:
        """Raises TypeError where a field is unknown or missing, ValueError where it is no JSON object."""
        data: dict[str, Any] = strict_json.parse(text, limit=None, keep_halves=True)
        if not isinstance(data, dict):
            raise ValueError("the configuration of a monitor is a JSON object")
        data |= {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
        return cls(**data)
