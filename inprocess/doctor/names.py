"""Host names and addresses. Every look-up runs in a process of its own, which a silent name server cannot keep."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil

from inprocess.doctor.findings import Check, Finding, NothingToLookAt, Settings
from inprocess.stores.addresses import is_loopback
from inprocess.system.listening import is_port

__all__ = ["CHECKS", "Answer", "look_up", "own_address"]

#: a look-up that takes longer is a finding; after so long it is given up (seconds)
SLOW_S, LIMIT_S = 1.0, 8.0
#: an address to which the route is looked at; no packet is sent there (RFC 5737)
ELSEWHERE = "192.0.2.1"
_PROGRAM = """
import json, socket, sys, time
way, name = sys.argv[1:]
begin, found, error = time.monotonic(), [], ""
try:
    if way == "address":
        found = sorted({info[4][0] for info in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)})
    else:
        found = [socket.getnameinfo((name, 0), socket.NI_NAMEREQD)[0]]
except (OSError, UnicodeError) as failure:
    error = getattr(failure, "strerror", None) or str(failure)
print(json.dumps([time.monotonic() - begin, found, error]))
"""


@dataclass(frozen=True)
class Answer:
    """Of a look-up."""

    seconds: float
    #: addresses, or names
    found: list[str]
    #: why nothing was found
    error: str = ""
    #: it was given up after `LIMIT_S`
    is_late: bool = False

    @property
    def is_slow(self) -> bool:
        return self.seconds > SLOW_S

    def __str__(self) -> str:
        return f"{'no answer within' if self.is_late else 'the answer took'} {self.seconds:.1f} s"


def look_up(way: str, name: str, environ: Mapping[str, str]) -> Answer:
    """Look up the ``address`` of a name, or the ``name`` of an address, within `LIMIT_S`."""
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, way, name]
    try:
        told = subprocess.run(command, env=dict(environ), capture_output=True, timeout=LIMIT_S, check=True).stdout
    except subprocess.TimeoutExpired:
        return Answer(LIMIT_S, [], is_late=True)
    seconds, found, error = json.loads(told)
    return Answer(float(seconds), list(found), str(error))


def own_address(target: str = ELSEWHERE) -> str:
    """The address that others see when this host connects to the target; empty where it has no way there."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # of a datagram socket: sends nothing
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def host_name(settings: Settings) -> Iterator[Finding]:
    name = socket.gethostname()
    answer = look_up("address", name, settings.environ)
    if answer.is_slow:
        yield _slow("names.host", f"the address of this host's name {name!r}", answer)
    elif not answer.found:
        yield Finding(
            "names.host",
            "warning",
            f"this host's name {name!r} has no address: {answer.error}",
            "Gloo takes the address that other ranks connect to from it, and falls back to loopback",
            f"put a line `ADDRESS {name}` into /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )
    elif settings.is_on_several_hosts and all(map(is_loopback, answer.found)):
        yield Finding(
            "names.host",
            "problem",
            f"this host's name {name!r} means {', '.join(answer.found)}, and the job has ranks on other hosts",
            "Gloo tells the others this address, where they do not reach it",
            f"in /etc/hosts, give {name} its address in the network, or set GLOO_SOCKET_IFNAME",
        )


def reverse(settings: Settings) -> Iterator[Finding]:
    for address in dict.fromkeys(filter(None, (own_address(), "127.0.0.1"))):
        answer = look_up("name", address, settings.environ)
        if answer.is_slow:
            yield _slow("names.reverse", f"the name of this host's address {address}", answer)
            return


def master(settings: Settings) -> Iterator[Finding]:
    name = settings.environ.get("MASTER_ADDR", "")
    if not name:
        raise NothingToLookAt("MASTER_ADDR is not set")
    answer = look_up("address", name, settings.environ)
    if answer.is_slow:
        yield _slow("names.master", f"the address of MASTER_ADDR={name}", answer)
    elif not answer.found:
        yield Finding(
            "names.master",
            "problem",
            f"MASTER_ADDR={name} has no address here: {answer.error}",
            "ranks find the store of the job there; without an address the call raises TimeoutError",
            "set it to a name or an address of rank 0's host that every host can resolve",
        )
    elif settings.is_on_several_hosts and all(map(is_loopback, answer.found)) and not _is_first_host(settings.environ):
        yield Finding(
            "names.master",
            "problem",
            f"MASTER_ADDR={name} is this host itself, which has not rank 0",
            "each host would look for the store on itself",
            "set it to the address of rank 0's host in the network",
        )


def interface(settings: Settings) -> Iterator[Finding]:
    known = psutil.net_if_addrs()
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = settings.environ.get(variable, "")
        if wanted and not wanted.startswith("^") and not _names_one(wanted, variable, known):
            yield Finding(
                "names.interface",
                "problem",
                f"{variable}={wanted} names no interface of this host, which has {', '.join(sorted(known))}",
                "each restart makes its groups over it",
                f"unset {variable}, or set it to an interface of every host",
            )
    if settings.is_on_several_hosts and not own_address():
        yield Finding(
            "names.interface",
            "problem",
            "this host has no route to others, only loopback",
            "the job has ranks on other hosts, which must reach this one",
            "configure a network interface with a route to the other hosts",
        )


def port(settings: Settings) -> Iterator[Finding]:
    text = settings.environ.get("MASTER_PORT", "")
    if not text:
        raise NothingToLookAt("MASTER_PORT is not set")
    if not is_port(text):
        yield _port(f"MASTER_PORT={text} is no port", "set it to a number from 1 to 65535")
        return
    if settings.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True":
        raise NothingToLookAt("the launcher serves the store, so the port is in use")
    if not _is_first_host(settings.environ):
        raise NothingToLookAt("rank 0 is on another host")
    if reason := _in_use(int(text)):
        yield _port(f"MASTER_PORT={text}: {reason}", "choose another port, or end the program that uses it")
    elif _is_given_out(int(text), settings.root):
        yield Finding(
            "names.port",
            "warning",
            f"MASTER_PORT={text} is in the range from which the kernel takes ports of connections",
            "a connection of any program may have it when the job starts",
            "choose one below the range in /proc/sys/net/ipv4/ip_local_port_range, such as 29500",
        )


def _port(what: str, remedy: str) -> Finding:
    return Finding("names.port", "problem", what, "the monitor of rank 0 serves the store of the job there", remedy)


def _in_use(number: int) -> str:
    """Why nobody can listen there; empty where somebody can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", number))
            probe.listen(1)
        except OSError as error:
            return str(error.strerror)
    return ""


def _is_given_out(number: int, root: str) -> bool:
    try:
        with open(f"{root}/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = map(int, file.read().split())
    except (OSError, ValueError):
        return False
    return low <= number <= high


def _is_first_host(environ: Mapping[str, str]) -> bool:
    given = [environ[name] for name in ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID") if name in environ]
    return (given or ["0"])[0] == "0"


def _names_one(wanted: str, variable: str, known: Mapping[str, object]) -> bool:
    """Whether it names an interface; NCCL takes beginnings of names, and after ``=`` whole ones."""
    names = re.split(",", wanted.removeprefix("="))
    if variable.startswith("NCCL") and not wanted.startswith("="):
        return any(each.startswith(name) for name in names for each in known)
    return all(name in known for name in names) if variable.startswith("GLOO") else bool(set(names) & set(known))


def _slow(check: str, what: str, answer: Answer) -> Finding:
    return Finding(
        check,
        "problem",
        f"{what}: {answer}",
        "torch looks up the name of each peer that it connects to, so each restart waits for the name server",
        'add the hosts to /etc/hosts, or set RES_OPTIONS="timeout:1 attempts:1", or repair /etc/resolv.conf',
    )


CHECKS = (
    Check(
        "names.host",
        "the name of this host has an address, and the answer comes within 1 s",
        "put the name and its address into /etc/hosts",
        host_name,
    ),
    Check(
        "names.reverse",
        "the name of this host's address is answered within 1 s, also where it has none",
        'add the hosts to /etc/hosts, or set RES_OPTIONS="timeout:1 attempts:1"',
        reverse,
    ),
    Check(
        "names.master",
        "MASTER_ADDR has an address here, and not loopback where rank 0 is on another host",
        "set it to a name or an address of rank 0's host that every host can resolve",
        master,
    ),
    Check(
        "names.interface",
        "the interfaces in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME exist, and others reach this host",
        "unset the variable, or name an interface of every host",
        interface,
    ),
    Check(
        "names.port",
        "MASTER_PORT is free on the first host, and no connection can be given it",
        "choose a free port below the range in /proc/sys/net/ipv4/ip_local_port_range",
        port,
    ),
)
