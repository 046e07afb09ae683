"""Whose a base store is. Its server says so, and who comes for the first time looks before it writes anything.

Two jobs with one MASTER_PORT meet at one server. A process of the second must neither wait there nor take a slot.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from inprocess.exception import BadMessage, StoreLost
from inprocess.protocol.messages import JoinMode
from inprocess.stores.raw import LOST, innermost, read
from inprocess.system import procfs, strict_json
from inprocess.system.errors import first_line

__all__ = ["OWNER_KEY", "Access", "Owner", "access", "find_owner", "kinship", "remedy"]

#: outside the prefixes of calls: the same for all jobs
OWNER_KEY = "inprocess/owner"


@dataclass(frozen=True)
class Owner:
    """The job of a server, as it says it; and that of a process, as far as that knows it."""

    #: given by the launcher; empty: it gives none
    name: str = ""
    #: drawn by the process that serves first; empty: not known yet
    drawn: str = ""
    #: number of the call, from 1 on, and how many processes it was started with
    call: int = 1
    world_size: int = 1
    #: the process whose monitor serves, and what its kin have in common with it, see `kinship`
    by: str = ""
    host: str = ""
    kin: str = ""
    #: the call is over: the server stays for those that have not heard of it
    over: bool = False

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Owner:
        """Raises BadMessage."""
        try:
            data = strict_json.parse(text)
            found = cls(**data)
        except (ValueError, TypeError) as error:
            raise BadMessage(f"store key {OWNER_KEY!r}: {error}. This library did not write it.") from None
        if any(type(getattr(found, each.name)) is not type(each.default) for each in dataclasses.fields(cls)):
            raise BadMessage(f"store key {OWNER_KEY!r}: a field has a wrong type. This library did not write it.")
        return found

    def is_kin(self, other: Owner) -> bool:
        """Whether nothing tells that they are of different jobs: the same parent and command on one host."""
        return self.host != other.host or self.kin == other.kin


class Access(enum.Enum):
    """What a process may do with a store."""

    #: use it
    GRANTED = "granted"
    #: it is that of a job that is over: wait for another server
    LATER = "later"
    #: nothing: it is another job's
    DENIED = "denied"


def access(found: Owner, mine: Owner, entry: JoinMode) -> Access:
    """May a process, which comes to the call in this way, use the store?"""
    if found.name == mine.name and mine.drawn:
        return Access.GRANTED if found.drawn == mine.drawn else Access.LATER if found.over else Access.DENIED
    comes_later = entry in (JoinMode.REPLACE, JoinMode.GROW) or (entry is JoinMode.EITHER and not found.over)
    if found.name == mine.name and comes_later:
        return Access.GRANTED
    if found.over:
        return Access.LATER
    same = (found.name, found.call, found.world_size) == (mine.name, mine.call, mine.world_size)
    return Access.GRANTED if same else Access.DENIED


def find_owner(store: Any) -> Owner | None:
    """What the server behind a connection says; None: nothing (yet). Raises StoreLost where it goes just now."""
    try:
        found = read(innermost(store), OWNER_KEY)
    except RuntimeError as error:  # torch's
        raise StoreLost(f"the store failed when it was asked whose it is: {first_line(error)}. {LOST}") from None
    return None if found is None else Owner.from_json(found)


def kinship() -> tuple[str, str]:
    """The host, and a hash of what the processes of one job mostly have in common there: parent, folder, command."""
    try:
        space = procfs.pid_space()
        parent = os.getppid()
        began = procfs.read(f"/proc/{parent}/stat").rpartition(")")[2].split()[19] if parent else ""
        common = [parent, began, os.getcwd(), sys.orig_argv]
    except (OSError, IndexError):
        return "", ""
    return space, hashlib.sha256(repr(common).encode(errors="replace")).hexdigest()[:16]


def remedy(where: str) -> str:
    """What to do about another job's store."""
    return (
        f"Another job uses the store at {where} (MASTER_ADDR:MASTER_PORT, or host_name and port in store_kwargs). Give "
        "each job a MASTER_PORT of its own, the same on all its ranks. Is this process to join a job that runs? Set "
        "INPROCESS_RESTART=1 for it, or INPROCESS_JOB to one name for all processes of the job."
    )
