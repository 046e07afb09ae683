"""What a process gets from its launcher: the environment variables that tell its rank, read, changed for a call and for
an iteration, put back in the end; and its standard streams."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from inprocess.exception import OptionError
from inprocess.system import slurm

#: this process among the active ranks of its host, and how many these are
LOCAL_RANK, LOCAL_WORLD_SIZE = "INPROCESS_LOCAL_RANK", "INPROCESS_LOCAL_WORLD_SIZE"
#: what the function sees in place of the launcher's values
CHANGED = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
)
#: the socket of this library's launcher, and what a worker proves with that it is the one it was started as
LAUNCHER, LAUNCHER_KEY = "INPROCESS_LAUNCHER", "INPROCESS_LAUNCHER_KEY"
#: set where the launcher wants to know which modules the worker has imported
LAUNCHER_LEARNS = "INPROCESS_LAUNCHER_LEARNS"
#: names a launcher whose variables have other names, and what reads them
LAUNCH = "INPROCESS_LAUNCH"
LAUNCHES: dict[str, Callable[[Mapping[str, str]], dict[str, str]]] = {"slurm": slurm.variables}


def derived(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK and the others from the variables of the launcher that INPROCESS_LAUNCH names; what is set stays as it is.

    Empty where it names none, and where RANK and WORLD_SIZE are set. Raises OptionError.
    """
    name = environ.get(LAUNCH, "").strip()
    if not name or all(environ.get(needed, "").strip() for needed in ("RANK", "WORLD_SIZE")):
        return {}
    if name not in LAUNCHES:
        raise OptionError(
            f"{LAUNCH}={name!r}: it can be {' or '.join(map(repr, LAUNCHES))}. Unset it where the launcher sets RANK "
            "and WORLD_SIZE itself"
        )
    return LAUNCHES[name](environ)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """What `derived` says is in the environment while a call lasts, and not before and after."""
    variables = derived(os.environ)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        put_back(before)


def put_back(before: Mapping[str, str | None]) -> None:
    """Set variables to these values; None: unset."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def watched(names: Collection[str]) -> Iterator[set[str]]:
    """Which of these variables Python code asks for meanwhile."""
    asked: set[str] = set()

    class Watched(os._Environ):  # type: ignore[type-arg]
        def __getitem__(self, name: str) -> Any:
            if name in names:
                asked.add(name)
            return super().__getitem__(name)

    os.environ.__class__ = Watched
    try:
        yield asked
    finally:
        os.environ.__class__ = os._Environ


def launcher() -> tuple[str, str] | None:
    """(socket, key) of this library's launcher; None where another one started this process, or none."""
    path, key = os.environ.get(LAUNCHER, ""), os.environ.get(LAUNCHER_KEY, "")
    return (path, key) if path and key else None


def local_rank() -> int | None:
    """Of this process among the active ranks of its host; None: no wrapped function runs."""
    text = os.environ.get(LOCAL_RANK)
    return None if text is None else int(text)


@dataclass(frozen=True)
class Place:
    """Of an active rank in one iteration."""

    rank: int
    world_size: int
    #: among the active ranks of its host, by rank, and how many these are
    local_rank: int
    local_world_size: int


def meet_at(host: str, port: int) -> None:
    """``init_process_group()`` joins the store that is served there, on every rank as a client.

    The three belong together: since torch 2.14 the last one counts for this address alone.
    """
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")


class Borrowed:
    """What is changed in the process for the time of a call; ``restore`` puts back what was there."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        """``settings``: further variables for the time in which the function runs."""
        self._settings = dict(settings)
        self._before = {name: os.environ.get(name) for name in (*CHANGED, *self._settings)}
        self._excepthook = sys.excepthook

    def show(self, place: Place, host: str, port: int) -> None:
        """What the function sees in this iteration; it meets at host:port."""
        meet_at(host, port)
        os.environ.update(
            RANK=str(place.rank),
            WORLD_SIZE=str(place.world_size),
            TORCHELASTIC_RESTART_COUNT="0",
            **{LOCAL_RANK: str(place.local_rank), LOCAL_WORLD_SIZE: str(place.local_world_size)},
            **self._settings,
        )

    def unhook(self) -> None:
        """Take away the hook that ``init_process_group()`` puts around the last one, each time it is called."""
        if getattr(sys.excepthook, "__name__", "") == "_distributed_excepthook":
            sys.excepthook = self._excepthook

    def restore(self) -> None:
        self.unhook()
        put_back(self._before)


class StandardStreams:
    """Standard input, output and error lead nowhere, instead of being closed, until `close`.

    What this library and torch open would otherwise get the numbers 0, 1 and 2: what a program prints would go to a
    store, and a process that is started, such as the monitor, puts streams of its own in their place.
    """

    def __init__(self) -> None:
        self._opened: list[int] = []
        while (fd := os.open(os.devnull, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)) <= 2:
            os.set_inheritable(fd, True)
            self._opened.append(fd)
        os.close(fd)

    def close(self) -> None:
        """Close those that are still ours; more than once is fine."""
        null = os.stat(os.devnull)
        for fd in self._opened:
            with contextlib.suppress(OSError):  # closed by the program
                if os.path.samestat(os.fstat(fd), null):
                    os.close(fd)
        self._opened.clear()
