"""Hosts as network namespaces, each with one TUN device whose other end the test holds. Nothing of it has a name.

A namespace lives as long as a process in it or a descriptor of it, a TUN device as long as its descriptor: when the
test ends in whatever way, all of it is gone. TUN and not veth: what comes out of it are whole IP packets with their
checksums made, no larger than the MTU, and no ARP; it takes two ioctls and neither `ip` nor netlink.

Works as root, and as any other user where the kernel lets users make namespaces and /dev/net/tun can be opened. The
namespaces are made by a program of its own (`python -m inprocess.testing.network`), since a process with threads may
not enter a user namespace. It hands the descriptors over and ends.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .switch import Switch

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x8913, 0x8914, 0x8916, 0x891C
IFF_UP = 1
PR_SET_DUMPABLE = 4
DEVICE = "wire0"
MASK = "255.255.255.0"
ROOT = Path(__file__).parents[2]
#: how the program says that the kernel refuses; anything else it says is a failure
REFUSED = "refused: "

_libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """The kernel makes no namespaces or devices for this user; the text says which call it was."""


def address(host: int) -> str:
    """The IPv4 address of a host."""
    return f"10.77.0.{host + 1}"


# --- in the test's process


class Network:
    """Hosts that are wired to one switch. Raises Refused.

    Args:
        hosts: how many.
        seed: of the switch's random losses.
    """

    def __init__(self, hosts: int, seed: int = 0) -> None:
        self._namespaces, devices = _make(hosts)
        self.switch = Switch(devices, seed)
        self.switch.start()

    def variables(self) -> dict[str, str]:
        """What ranks on these hosts need in their environment."""
        return {"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": DEVICE}

    def place(self, host_of: Sequence[int]) -> Place:
        """Where each rank lives, for the ranks: `host_of[rank]` is its host."""
        user, *hosts = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self._namespaces]
        return Place(user, tuple(hosts[host] for host in host_of))

    def close(self) -> None:
        """Pull everything out; the namespaces go with their last process."""
        self.switch.close()
        for descriptor in self._namespaces:
            os.close(descriptor)
        self._namespaces = []


def _make(hosts: int) -> tuple[list[int], list[int]]:
    """Descriptors: the user namespace and each host's network namespace; each host's TUN device."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        command = [sys.executable, "-S", "-m", __name__, str(theirs.fileno()), str(hosts)]
        options: dict[str, Any] = {"pass_fds": [theirs.fileno()], "cwd": ROOT, "capture_output": True, "text": True}
        program = subprocess.run(command, check=False, **options)
        if program.stderr.startswith(REFUSED):
            raise Refused(program.stderr.removeprefix(REFUSED).strip())
        program.check_returncode()
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 2 * hosts + 1)
    return descriptors[: hosts + 1], descriptors[hosts + 1 :]


# --- in a rank's process


@dataclass(frozen=True)
class Place:
    """Takes a process that has one thread only to its host, and with it all that it starts. Travels by pickle."""

    user: str
    hosts: tuple[str, ...]

    def __call__(self, rank: int) -> None:
        if os.getuid() != 0:
            _enter(self.user, CLONE_NEWUSER)
            _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # entering took the right to look into its own /proc
        _enter(self.hosts[rank], CLONE_NEWNET)


def _enter(path: str, kind: int) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _check(_libc.setns(descriptor, kind), f"setns({path})")
    finally:
        os.close(descriptor)


# --- in the program that makes them


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _new_user() -> None:
    """A user namespace in which this user is root. Nothing for root, which needs none."""
    user, group = os.getuid(), os.getgid()
    if user == 0:
        return
    _check(_libc.unshare(CLONE_NEWUSER), "unshare(CLONE_NEWUSER)")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _new_host(host: int) -> tuple[int, int]:
    """A network namespace with a loopback and a TUN device; descriptors of both."""
    _check(_libc.unshare(CLONE_NEWNET), "unshare(CLONE_NEWNET)")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        _set_up(any_socket, b"lo")
        for request, text in ((SIOCSIFADDR, address(host)), (SIOCSIFNETMASK, MASK)):
            value = struct.pack("16sHH4s16x", DEVICE.encode(), socket.AF_INET, 0, socket.inet_aton(text))
            fcntl.ioctl(any_socket, request, value)
        _set_up(any_socket, DEVICE.encode())
    return os.open("/proc/self/ns/net", os.O_RDONLY), tun


def _set_up(any_socket: socket.socket, device: bytes) -> None:
    answer = fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16sH22x", device, 0))
    flags = struct.unpack("16sH22x", answer)[1]
    fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", device, flags | IFF_UP))


def main(channel: int, hosts: int) -> int:
    """Make them and hand the descriptors over."""
    try:
        _new_user()
        made = [_new_host(host) for host in range(hosts)]
    except OSError as error:
        sys.stderr.write(f"{REFUSED}{error}\n")
        return 1
    user = os.open("/proc/self/ns/user", os.O_RDONLY)
    descriptors = [user, *(namespace for namespace, _ in made), *(tun for _, tun in made)]
    with socket.socket(fileno=channel) as out:
        out.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
