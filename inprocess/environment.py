"""What a process gets from its launcher: the environment variables that tell its rank, read, changed for an iteration,
put back in the end; and its standard streams."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from inprocess.exception import OptionError
from inprocess.protocol.messages import FIRST_JOINER, Entry

#: what the function sees in place of the launcher's values
CHANGED = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
)

#: the socket of this library's launcher, and what a worker proves with that it is the one it was started as
LAUNCHER, LAUNCHER_KEY = "INPROCESS_LAUNCHER", "INPROCESS_LAUNCHER_KEY"

_REMEDY = (
    "Start the script with a launcher (`inprocess run`, torchrun, SLURM, Kubernetes), or set RANK, WORLD_SIZE, "
    "MASTER_ADDR and MASTER_PORT yourself (store_kwargs={'host_name': ..., 'port': ...} in place of the last two). "
    "Wrapper(enabled=False) needs none of them."
)


@dataclass(frozen=True)
class Launch:
    """How the launcher started this process."""

    rank: int
    world_size: int
    #: MASTER_ADDR; empty: it is not set
    host: str
    #: MASTER_PORT; 0: it is not set, or no port
    port: int
    #: torchrun's agent serves a store at host:port already
    agent_store: bool
    #: sets one attempt of a launcher that restarts whole jobs apart from the next
    attempt: str
    #: whether it starts this process with the others, or later
    entry: Entry = Entry.FOUND


def read(environ: Mapping[str, str] | None = None) -> Launch:
    """Read the variables. Raises OptionError that names the variable, its value and the remedy.

    MASTER_ADDR and MASTER_PORT are not needed where the options say where the store is, see `master_addr`.
    """
    env = os.environ if environ is None else environ
    if not any(env.get(name, "").strip() for name in ("RANK", "WORLD_SIZE")):
        raise OptionError(f"the environment variables RANK and WORLD_SIZE are not set. {_REMEDY}")
    world_size = _number(env, "WORLD_SIZE", 1, FIRST_JOINER)
    rank = _number(env, "RANK", 0, FIRST_JOINER)
    if rank >= world_size:
        raise OptionError(f"RANK={rank} is not below WORLD_SIZE={world_size}: ranks are 0..{world_size - 1}. {_REMEDY}")
    host = env.get("MASTER_ADDR", "").strip()
    try:
        port = master_port(env)
    except OptionError:  # in Kubernetes a service named "master" sets it to tcp://10.0.0.1:29500
        port = 0
    attempt = f"{env.get('TORCHELASTIC_RUN_ID', '')}.{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(rank, world_size, host, port, agent_store, attempt, _entry(env))


def master_addr(environ: Mapping[str, str] | None = None) -> str:
    """Where it is needed. Raises OptionError."""
    return _text(os.environ if environ is None else environ, "MASTER_ADDR")


def master_port(environ: Mapping[str, str] | None = None) -> int:
    """Where it is needed. Raises OptionError."""
    return _number(os.environ if environ is None else environ, "MASTER_PORT", 1, 65535)


def elsewhere(launch: Launch, environ: Mapping[str, str] | None = None) -> str:
    """The variables that say that other ranks are on other hosts; empty where none does."""
    env = os.environ if environ is None else environ
    for local, name, number in (
        ("LOCAL_WORLD_SIZE", "WORLD_SIZE", launch.world_size),
        ("LOCAL_RANK", "RANK", launch.rank),
    ):
        text = env.get(local, "").strip()
        if whole(text, 0, number - 1) is not None:
            return f"{local}={text} with {name}={number}"
    return ""


def _entry(env: Mapping[str, str]) -> Entry:
    if env.get("INPROCESS_GROW", "") not in ("", "0"):
        return Entry.GROW
    return Entry.FOUND if env.get("INPROCESS_RESTART", "") in ("", "0") else Entry.REPLACE


def launcher(environ: Mapping[str, str] | None = None) -> tuple[str, str] | None:
    """(socket, key) of this library's launcher; None where another one started this process, or none."""
    env = os.environ if environ is None else environ
    path, key = env.get(LAUNCHER, ""), env.get(LAUNCHER_KEY, "")
    return (path, key) if path and key else None


def _text(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "").strip()
    if not value:
        raise OptionError(f"the environment variable {name} is not set. {_REMEDY}")
    return value


def _number(env: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = _text(env, name)
    number = whole(text, low, high)
    if number is None:
        raise OptionError(f"the environment variable {name}={text!r} is not a number in {low}..{high}. {_REMEDY}")
    return number


def whole(text: str, low: int, high: int) -> int | None:
    """The number from `low` to `high` that a text is; None where it is none."""
    return int(text) if text.isascii() and text.isdigit() and low <= int(text) <= high else None


class Borrowed:
    """What is changed in the process for the time of a call; ``restore`` puts back what was there."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        """``settings``: further variables for the time in which the function runs."""
        self._settings = dict(settings)
        self._before = {name: os.environ.get(name) for name in (*CHANGED, *self._settings)}
        self._excepthook = sys.excepthook

    def show(self, rank: int, world_size: int, host: str, port: int) -> None:
        """What the function sees in this iteration; ``init_process_group()`` joins host:port as a client."""
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            MASTER_ADDR=host,
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
            **self._settings,
        )

    def unhook(self) -> None:
        """Take away the hook that ``init_process_group()`` puts around the last one, each time it is called."""
        if getattr(sys.excepthook, "__name__", "") == "_distributed_excepthook":
            sys.excepthook = self._excepthook

    def restore(self) -> None:
        self.unhook()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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
