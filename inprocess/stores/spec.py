"""Which base store a call uses, as data that can be handed to the monitor process."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from inprocess.protocol.messages import JoinMode
from inprocess.system import strict_json

__all__ = ["JobIdentity", "StoreSpec"]

_MODULE_AND_NAME = re.compile(r"[\w.]+:\w+")


@dataclasses.dataclass(frozen=True)
class JobIdentity:
    """A process's place in its job, for a store that outlives jobs and so has to tell them apart.

    A store class that has ``inprocess_enter(kwargs, seat, timeout)`` is asked before each call for the arguments of
    this job's connections, and whether the call begins with this process; otherwise it joins a call that runs.
    """

    #: its rank while everybody is there
    rank: int
    #: tells this process apart from another one that claims the same rank
    me: str
    #: sets one attempt of a launcher that restarts whole jobs apart from the next
    attempt: str
    #: whether it comes with the others, or later
    entry: JoinMode
    #: the ranks with which the call begins, as far as this process knows
    members: Callable[[], Sequence[int]]
    #: names, each unique in the job: of this process in the last call in which it took part, and of all that took part
    #: until its end; empty where there was none
    last: Callable[[], tuple[str, Sequence[str]]]


@dataclasses.dataclass(frozen=True)
class StoreSpec:
    """How to reach the base store; travels to the monitor process as JSON."""

    #: ``module:name`` of a store class, or empty for a TCPStore at host and port
    factory: str = ""
    #: keyword arguments of the factory; JSON values only
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 0
    #: put before each key
    prefix: str = ""
    #: a server that holds this key is the one of an earlier call and about to go; empty: any server will do
    stale_key: str = ""
    #: a connection over which nothing comes back for so long is lost (seconds); 0: the kernel's own patience, minutes
    silence: float = 0.0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StoreSpec:
        """What `to_json` wrote. It names what is imported and called, so it never comes out of a store: the training
        process hands it to the monitor it started, in memory that both inherit.

        Raises:
            ValueError: it is no JSON object, or ``factory`` is not ``module:name``.
            TypeError: a field is unknown.
        """
        data = strict_json.parse(text)
        if not isinstance(data, dict):
            raise ValueError("how to reach the store is a JSON object")
        spec = cls(**data)
        if spec.factory and not _MODULE_AND_NAME.fullmatch(spec.factory):
            raise ValueError(f"factory={spec.factory!r} is not module:name")
        return spec

    def __str__(self) -> str:
        # names alone: a value may be a password
        return f"{self.factory}({', '.join(self.kwargs)})" if self.factory else f"{self.host}:{self.port}"
