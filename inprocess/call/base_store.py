"""Which base store a call uses, and where this process reaches it: from the options, the launcher and the job."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from inprocess.call import launch_variables
from inprocess.call.job import Job
from inprocess.call.launch_variables import Launch
from inprocess.exception import OptionError
from inprocess.finalize import run_in_thread
from inprocess.options import Options
from inprocess.protocol.timing import SILENCE_SHARE
from inprocess.stores.addresses import address_towards, await_name
from inprocess.stores.spec import JobIdentity, StoreSpec
from inprocess.stores.tcp import TCPStore
from inprocess.system import descriptors, strict_json
from inprocess.system.environment import StandardStreams
from inprocess.system.logs import get_logger

__all__ = ["bind", "is_agents", "own_address", "store_spec", "try_factory"]

log = get_logger(__name__)
#: where rank 0 is, if only the port of the store is known
THIS_HOST = "127.0.0.1"
#: TCPStore's, here and in torch
_TCP_ARGUMENTS = frozenset(
    {"host_name", "port", "timeout", "is_master", "bind", "world_size", "wait_for_workers", "use_libuv", "multi_tenant"}
)


def try_factory(options: Options) -> Any:
    """A connection to a store of the user's; None where the store is another one, or is asked for its arguments first.

    Before anything else, so what its constructor raises is what the call raises, whatever else is wrong with it. It is
    kept: a store that is served where it is made first would go with it.

    Raises TimeoutError where that takes longer than barrier_timeout; for this, and for Ctrl-C, it is done in a thread.
    """
    factory = options.store_factory
    if factory is None or factory is TCPStore or hasattr(factory, "inprocess_enter"):
        return None
    overdue = (
        f"store_factory={factory!r} has made no store within barrier_timeout={options.barrier_timeout:g}s: check that "
        "what it connects to is there, and is waited for no longer than that"
    )
    with contextlib.closing(StandardStreams()):
        made = run_in_thread("store", options.barrier_timeout, lambda: factory(**options.store_kwargs), overdue)
    if not all(hasattr(made, name) for name in ("get", "set", "add")):
        raise OptionError(f"store_factory={factory!r} returned {made!r}, which is no store of torch.distributed")
    return made


def store_spec(options: Options, job: Job) -> StoreSpec:
    """Which store the ranks agree through, in a form that the monitor process understands."""
    if options.store_factory is None or options.store_factory is TCPStore:
        return _tcp_spec(options, job)
    factory, kwargs = options.store_factory, dict(options.store_kwargs)
    module, name = getattr(factory, "__module__", ""), getattr(factory, "__qualname__", "")
    if module in ("", "__main__") or not _importable(module, name, factory):
        raise OptionError(
            f"store_factory={factory!r} must be a class or function at the top level of an importable module other "
            "than the main script: the monitor process imports it by name. Move it to a module of its own, and pass "
            "what a closure would know in store_kwargs"
        )
    for key, value in kwargs.items():
        _check_travels(key, value)
    if (enter := getattr(factory, "inprocess_enter", None)) is not None:
        seat = JobIdentity(job.slot, job.me, job.launch.attempt, job.entry, lambda: job.members, lambda: job.last)
        kwargs, founds = enter(kwargs, seat, options.barrier_timeout)
        job.outside = not founds
    return StoreSpec(factory=f"{module}:{name}", kwargs=kwargs, host=_own_host(options, job.launch), prefix=job.prefix)


def bind(options: Options, serves: bool) -> str:
    """The address to which the stores are bound; empty: the library chooses."""
    bind = "" if options.store_factory not in (None, TCPStore) else options.store_kwargs.get("bind") or ""
    if not isinstance(bind, str):
        raise OptionError(f"store_kwargs: bind={bind!r} must be the address of an interface as a string, or its name")
    if bind and not serves:
        raise OptionError(
            f"store_kwargs: bind={bind!r} cannot be kept: torchrun's agent serves the store, on all interfaces. Leave "
            "bind out, or give the library a port of its own with store_kwargs={'port': ..., 'bind': ...}"
        )
    return bind


def _tcp_spec(options: Options, job: Job) -> StoreSpec:
    kwargs = options.store_kwargs
    if unknown := sorted(set(kwargs) - _TCP_ARGUMENTS):
        raise OptionError(
            f"store_kwargs: TCPStore has no argument {unknown[0]!r}; use host_name, port, bind or timeout"
        )
    host, port = job.base or (_host(kwargs, job.launch), _port(kwargs, job.launch))
    stale_key = "" if is_agents(host, port, job.launch) else job.stale_key
    silence = SILENCE_SHARE * options.heartbeat_timeout
    return StoreSpec(host=host, port=port, prefix=job.prefix, stale_key=stale_key, silence=silence)


def _host(kwargs: Mapping[str, Any], launch: Launch) -> str:
    """Where the library's own store is served."""
    given = kwargs.get("host_name")
    if given is not None:
        if not isinstance(given, str) or not given.strip():
            raise OptionError(
                f"store_kwargs: host_name={given!r} is no name: pass a name or an address of rank 0's host as a "
                "string, or leave it out, for MASTER_ADDR"
            )
        return given.strip()
    if launch.host or kwargs.get("port") is None:  # the launcher forgot one of two
        return launch.host or launch_variables.master_addr()
    _check_alone(launch, f"store_kwargs: port={kwargs['port']!r} comes without host_name", "host_name in store_kwargs")
    return THIS_HOST


def _port(kwargs: Mapping[str, Any], launch: Launch) -> int:
    given = kwargs.get("port")
    if given is None:
        return launch.port or launch_variables.master_port()
    port = launch_variables.whole(str(given), 1, 65535)
    if port is None:
        raise OptionError(
            f"store_kwargs: port={given!r} is no port: pass a number in 1..65535, the same on all ranks, or leave it "
            "out, for MASTER_PORT"
        )
    return port


def _own_host(options: Options, launch: Launch) -> str:
    """By the route to which the others find this host, where the store is the user's."""
    if launch.host or hasattr(options.store_factory, "inprocess_enter"):  # such a one is for jobs of many hosts
        return launch.host or launch_variables.master_addr()
    if isinstance(given := options.store_kwargs.get("host_name"), str) and given:
        return given
    _check_alone(launch, f"store_factory={options.store_factory!r} does not tell where rank 0 is", "")
    if launch.rank == 0 and launch.world_size > 1:
        log.warning(
            "MASTER_ADDR is not set: all ranks are taken to be on this host. Set it to the address of rank 0's host, "
            "on every rank, where they are not"
        )
    return THIS_HOST


def _check_alone(launch: Launch, why: str, instead: str) -> None:
    """Without an address all ranks are on this host: raises OptionError where they cannot be."""
    if split := launch_variables.elsewhere(launch):
        raise OptionError(
            f"{why}, and MASTER_ADDR is not set, so all ranks would have to be on this host; but {split} means that "
            f"they are not. Set MASTER_ADDR{instead and f', or {instead},'} to the address of rank 0's host, the same "
            "on all ranks"
        )


def is_agents(host: str, port: int, launch: Launch) -> bool:
    """Whether torchrun's agent serves this store."""
    return launch.agent_store and (host, port) == (launch.host, launch.port)


def _check_travels(key: str, value: object) -> None:
    """The arguments reach the monitor process as JSON."""
    try:
        strict_json.parse(json.dumps({"kwargs": {key: value}}))
    except (TypeError, ValueError, RecursionError):
        raise OptionError(
            f"store_kwargs: {key}={value!r} is not JSON-serializable, so the monitor process cannot get "
            "it: pass a string, a number, a list or a dict, and let a store_factory of your own make anything "
            "else from it. A timeout is not needed: "
            "the library sets its own before each wait"
        ) from None


def _importable(module: str, name: str, factory: Any) -> bool:
    return getattr(sys.modules.get(module), name, None) is factory


def own_address(spec: StoreSpec, timeout: float) -> str:
    """The address under which the other ranks reach this host: that of the route to MASTER_ADDR."""
    await_name(spec.host, timeout)
    try:
        return address_towards(spec.host)
    except OSError as error:
        if descriptors.shortage(error):
            raise
        raise OptionError(
            f"MASTER_ADDR={spec.host!r}: this host has no route to it ({error.strerror}). Set it to an address of rank "
            "0's host that this host reaches: by the way there the others find the address of this host."
        ) from None
