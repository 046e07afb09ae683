"""What the kernel tells in ``/proc``: this process's sockets and waiting threads; another one's state."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import signal
import socket
import stat
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

#: machine -> numbers of the system calls poll (True) and ppoll (False: its time is in memory)
_POLL_CALLS: Mapping[str, Mapping[str, bool]] = {"x86_64": {"7": True, "271": False}, "aarch64": {"73": False}}
#: an entry of the array that they get: descriptor, what is waited for, what came
_ENTRY = struct.Struct("=ihh")
#: the request, the bit that asks for the exit status, and the size of the first version of ``struct pidfd_info``
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT, _PIDFD_INFO_SIZE = 0xC040FF0B, 1 << 3, 64
_TIMESPEC = struct.Struct("=qq")
#: more entries than a process can have descriptors are no entries
_MOST_ENTRIES = 1 << 20


class Unknown(OSError):
    """The kernel does not tell, or tells it in a way that is not known here."""


@dataclass(frozen=True)
class Registered:
    """An entry of an epoll instance."""

    descriptor: int
    inode: int
    #: what the owner registered with it: an address, a number
    data: int


@dataclass(frozen=True)
class Poll:
    """A thread that waits in poll or ppoll."""

    descriptors: tuple[int, ...]
    #: how long in all (milliseconds); None: for ever
    timeout_ms: int | None


def read(path: str) -> str:
    """A file's whole text. An abort reads one for each thread: 9 us, 12 with a buffer and a decoder."""
    with open(path, "rb", buffering=0) as file:
        return file.read().decode(errors="replace")


def pid_space() -> str:
    """Within which process ids count: this boot of this machine, and the PID namespace. Raises OSError."""
    return f"{read('/proc/sys/kernel/random/boot_id').strip()} {os.readlink('/proc/self/ns/pid')}"


def open_stderr() -> int:
    """The standard error, so that a write to it never waits; /dev/null where nobody reads it. Raises OSError."""
    try:
        # opened anew: the flags of the one that was inherited are those of other processes, too
        return os.open("/proc/self/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # a socket, or a pipe that nobody reads
        return os.open(os.devnull, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def tasks() -> list[str]:
    """The ids of this process's threads."""
    return os.listdir("/proc/self/task")


def state_of(pid: int) -> dict[str, str]:
    """Of another process's main thread, as far as it may be known: ``state``, ``wchan`` and ``syscall``.

    The state is a letter, see proc(5): R runs, S sleeps, D waits for a device, T is stopped, Z is dead.
    """
    found = {"state": "", "wchan": "", "syscall": ""}
    with contextlib.suppress(OSError, IndexError):
        found["state"] = read(f"/proc/{pid}/stat").rpartition(")")[2].split()[0]
    for name in ("wchan", "syscall"):
        with contextlib.suppress(OSError):  # only who may trace a process may see these
            found[name] = read(f"/proc/{pid}/{name}").split("\n")[0][:200]
    return found


def caught_signals(pid: int | str = "self") -> int:
    """Of a process: bit n - 1 stands for signal n, whoever installed the handler. Raises OSError where it is gone."""
    (line,) = (line for line in read(f"/proc/{pid}/status").splitlines() if line.startswith("SigCgt:"))
    return int(line.split()[1], 16)


def is_handled_outside(signum: int) -> bool:
    """Whether code outside Python handles this signal. Python knows only of what was there when it began."""
    handler = signal.getsignal(signum)
    if handler is not signal.SIG_DFL:
        return handler is None
    try:
        return bool(caught_signals() >> signum - 1 & 1)
    except (OSError, ValueError):  # the kernel does not tell
        return False


def exit_status(pidfd: int) -> int | None:
    """As ``wait()`` gives it, of a process that its parent has waited for; None where the kernel does not tell.

    Since Linux 6.15: ``PIDFD_GET_INFO`` with ``PIDFD_INFO_EXIT``, see ``linux/pidfd.h``.
    """
    info = bytearray(_PIDFD_INFO_EXIT.to_bytes(8, sys.byteorder).ljust(_PIDFD_INFO_SIZE, b"\0"))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    is_told = int.from_bytes(info[:8], sys.byteorder) & _PIDFD_INFO_EXIT
    return int.from_bytes(info[60:64], sys.byteorder) if is_told else None


# --- sockets ------------------------------------------------------------------------------------------------------


def sockets() -> dict[int, int]:
    """Inode of each socket of this process -> a descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":")
            if kind == "socket":
                found[int(inode.strip("[]"))] = int(name)
    return found


def copy_of(descriptor: int, inode: int | None = None) -> socket.socket | None:
    """A copy of a socket, to look at it or to shut it down: what is called of it waits for nothing.

    None where it is none, or closed, or the number has been given to another file than the one of that inode. No other
    file is copied, since closing the copy would release the program's locks on that file, and may wait for its disk.
    The socket stays as it is: where the program has set a default timeout, Python would make one that it wraps
    non-blocking, for all who have it.
    """
    if not _is_socket(descriptor, inode):
        return None
    try:
        copy = os.dup(descriptor)
    except OSError:  # closed meanwhile
        return None
    try:
        if _is_socket(copy, inode):  # it may have been given to another file since
            return socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=copy)
    except OSError:  # of a kind that has no address, such as AF_ALG
        pass
    os.close(copy)
    return None


def _is_socket(descriptor: int, inode: int | None) -> bool:
    try:
        status = os.fstat(descriptor)
    except OSError:  # closed
        return False
    return stat.S_ISSOCK(status.st_mode) and inode in (None, status.st_ino)


# --- epoll --------------------------------------------------------------------------------------------------------


def epolls() -> Iterator[int]:
    """Descriptors of the epoll instances of this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                yield int(name)


def registered(epoll: int) -> list[Registered]:
    """What an epoll instance watches; nothing where it is closed meanwhile. Raises Unknown."""
    try:
        lines = read(f"/proc/self/fdinfo/{epoll}")
    except FileNotFoundError:
        return []
    except PermissionError as error:
        raise Unknown(str(error)) from error
    found = re.findall(r"^tfd:\s*(\d+) .*\bdata:\s*([0-9a-f]+) .*\bino:([0-9a-f]+)", lines, re.MULTILINE)
    if "tfd:" in lines and not found:
        raise Unknown("this kernel does not tell which files an epoll instance watches")
    return [Registered(int(descriptor), int(inode, 16), int(data, 16)) for descriptor, data, inode in found]


# --- poll ---------------------------------------------------------------------------------------------------------


def polls() -> list[Poll]:
    """What the threads of this process wait for in poll and ppoll at this moment. Raises Unknown."""
    calls = _poll_calls()
    return [poll for task in tasks() if (poll := _poll_of(task, calls)) is not None]


def awaited(task: str) -> tuple[int, ...]:
    """The descriptors for which a thread of this process may be waiting at this moment. Raises Unknown.

    Those of its poll; else the first argument of its system call, which only reading, writing and the like have there.
    """
    if (poll := _poll_of(task, _poll_calls())) is not None:
        return poll.descriptors
    words = system_call(task)
    return (int(words[1], 16),) if len(words) > 3 else ()


def _poll_calls() -> Mapping[str, bool]:
    calls = _POLL_CALLS.get(platform.machine())
    if calls is None:
        raise Unknown(f"the system calls of {platform.machine()} are not known here")
    return calls


def _poll_of(task: str, calls: Mapping[str, bool]) -> Poll | None:
    words = system_call(task)
    # "running", or a number, six arguments and two registers
    if len(words) < 4 or words[0] not in calls:
        return None
    array, count, timeout = (int(word, 16) for word in words[1:4])
    try:
        entries = memory(array, _ENTRY.size * count) if count < _MOST_ENTRIES else b""
        timeout_ms = _signed(timeout) if calls[words[0]] else _milliseconds(timeout)
    except OSError:  # its stack is gone
        return None
    if len(entries) < _ENTRY.size * count or system_call(task) != words:  # it went on meanwhile
        return None
    descriptors = tuple(descriptor for descriptor, _, _ in _ENTRY.iter_unpack(entries))
    return Poll(descriptors, None if timeout_ms is None or timeout_ms < 0 else timeout_ms)


def system_call(task: str) -> list[str]:
    """In which system call a thread of this process is: its number, its arguments in hexadecimal, two registers.

    "running" alone where it is in none, nothing where it has ended. Raises Unknown.
    """
    path = f"/proc/self/task/{task}/syscall"
    try:
        return read(path).split()
    except PermissionError as error:
        raise Unknown(str(error)) from error
    except FileNotFoundError as error:
        if os.path.exists(os.path.dirname(path)):
            raise Unknown("this kernel does not tell which system call a thread is in") from error
        return []  # it has ended
    except ProcessLookupError:
        return []


def _signed(word: int) -> int:
    """An ``int`` in a register of 64 bits."""
    word &= 0xFFFFFFFF
    return word - (word >> 31 << 32)


def _milliseconds(address: int) -> int | None:
    if not address:
        return None
    seconds, nanoseconds = _TIMESPEC.unpack(memory(address, _TIMESPEC.size).ljust(_TIMESPEC.size, b"\0"))
    return int(seconds * 1000 + nanoseconds // 1_000_000)


def memory(address: int, size: int) -> bytes:
    """This process's own. Raises OSError where there is none, where reading it would end the process."""
    try:
        with open("/proc/self/mem", "rb", buffering=0) as file:
            return os.pread(file.fileno(), size, address)
    except OverflowError as error:
        raise OSError(str(error)) from error


def word_at(address: int) -> int:
    """The machine word at an address of this process. Raises OSError where there is none."""
    return int.from_bytes(memory(address, 8), sys.byteorder)
