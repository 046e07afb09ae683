"""How the launcher started this process: the environment variables that say its rank, and where the store is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from inprocess.exception import OptionError
from inprocess.protocol.messages import FIRST_JOINER, JoinMode

__all__ = ["Launch", "elsewhere", "master_addr", "master_port", "read", "whole"]

#: of a job (characters)
LONGEST_NAME = 200
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
    entry: JoinMode = JoinMode.FOUND

    @property
    def name(self) -> str:
        """The job's, as its launcher says; empty: it says none."""
        name = self.attempt.rpartition(".")[0]
        return "" if name == "none" else name

    @property
    def job(self) -> str:
        """Tells jobs apart, also where a launcher restarts the whole job."""
        return self.name or f"{self.host}:{self.port}"


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
    # in Kubernetes a service named "master" sets it to tcp://10.0.0.1:29500
    port = whole(env.get("MASTER_PORT", "").strip(), 1, 65535) or 0
    name = _name(env) or env.get("TORCHELASTIC_RUN_ID", "")
    attempt = f"{name}.{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(rank, world_size, host, port, agent_store, attempt, _entry(env))


def master_addr() -> str:
    """Where it is needed. Raises OptionError."""
    return _text(os.environ, "MASTER_ADDR")


def master_port() -> int:
    """Where it is needed. Raises OptionError."""
    return _number(os.environ, "MASTER_PORT", 1, 65535)


def run_dir(given: str | None) -> str | None:
    """The directory for events: that of the option, or of INPROCESS_RUN_DIR, where ``none`` is none."""
    path = given or os.environ.get("INPROCESS_RUN_DIR", "").strip()
    return os.path.abspath(path) if path and (given or path != "none") else None


def elsewhere(launch: Launch) -> str:
    """The variables that say that other ranks are on other hosts; empty where none does."""
    for local, name, number in (
        ("LOCAL_WORLD_SIZE", "WORLD_SIZE", launch.world_size),
        ("LOCAL_RANK", "RANK", launch.rank),
    ):
        text = os.environ.get(local, "").strip()
        if whole(text, 0, number - 1) is not None:
            return f"{local}={text} with {name}={number}"
    return ""


def _entry(env: Mapping[str, str]) -> JoinMode:
    if env.get("INPROCESS_GROW", "") not in ("", "0"):
        return JoinMode.GROW
    if env.get("INPROCESS_RESTART", "") not in ("", "0"):
        return JoinMode.REPLACE
    return JoinMode.EITHER if _name(env) else JoinMode.FOUND


def _name(env: Mapping[str, str]) -> str:
    """That a launcher, or the user, gives the job, and all of its processes whenever they start."""
    name = env.get("INPROCESS_JOB", "").strip()
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise OptionError(
            f"INPROCESS_JOB={name[:LONGEST_NAME]!r} is no name of a job: use at most {LONGEST_NAME} printable "
            "characters, the same on all its processes"
        )
    return name


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
