"""Limits of this process, of its user and of its control group: descriptors, processes, signals, memory; the clock."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timezone

import psutil

from inprocess.attribution import one_line
from inprocess.doctor.findings import Check, Finding, NothingToLookAt, Settings
from inprocess.system import cgroup, clock

__all__ = ["CHECKS"]

#: connections of the store's server for each rank, and what else its process has open
STORE_CONNECTIONS, STORE_OTHERS = 4, 64
#: what a rank has open before its first group, and a DataLoader's workers and checkpoints take beside it
RANK_OTHERS = 192
#: of a rank: its process and its monitor, and threads of both
TASKS = 2 + 30
#: of a rank and its monitor after they have imported torch, before there is a model (bytes)
RANK_BYTES = 400 << 20
#: Docker's default, with which a DataLoader with workers fails (bytes)
SMALL_SHM = 64 << 20
#: programs in Python that start the ranks as processes of their own
LAUNCHERS = frozenset(
    {"inprocess", "inprocess.run", "torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate"}
    | {"deepspeed", "ft_launcher", "ray"}
)
#: how long the clock is watched (seconds)
TICK_S = 0.02
#: nobody has run this library before that (seconds since 1970): 2025
PAST = datetime(2025, 1, 1, tzinfo=timezone.utc).timestamp()


def descriptors(settings: Settings) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    server = STORE_CONNECTIONS * settings.world_size + STORE_OTHERS
    rank = settings.world_size + RANK_OTHERS
    if hard != resource.RLIM_INFINITY and hard < server:
        yield Finding(
            "limits.descriptors",
            "problem",
            f"the hard limit of open files is {hard}; the store of {settings.world_size} ranks needs {server}",
            "whoever serves the store has four connections to each rank; without them restarts fail",
            f"have the administrator raise it (nofile in /etc/security/limits.conf) to {server} at least",
        )
    elif soft != resource.RLIM_INFINITY and soft < rank:
        yield Finding(
            "limits.descriptors",
            "problem" if soft < STORE_OTHERS else "warning",
            f"the soft limit of open files is {soft}; each of {settings.world_size} ranks may need {rank}",
            "each restart makes its groups, stores and the workers of DataLoaders anew",
            f"ulimit -n {max(rank, min(hard, 65536)) if hard != resource.RLIM_INFINITY else max(rank, 65536)}",
        )


def processes(settings: Settings) -> Iterator[Finding]:
    needed = TASKS * settings.nproc
    least = _least([_of_user(), _of_cgroup(settings)])
    if least is None:
        raise NothingToLookAt("nothing limits the processes of this user")
    left, name = least
    if left < needed:
        yield Finding(
            "limits.processes",
            "problem",
            f"{name} leaves {max(left, 0)} processes and threads; {settings.nproc} ranks with monitors need {needed}",
            "each rank has a monitor process, and a restart starts threads",
            "raise the limit: `ulimit -u`, nproc in limits.conf, or --pids-limit of the container",
        )


def _least(limits: list[tuple[int, str] | None]) -> tuple[int, str] | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _of_user() -> tuple[int, str] | None:
    """How many more the user may have; the kernel lets root have any number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY or os.getuid() == 0:
        return None
    used = 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        if process.info["uids"] and process.info["uids"].real == os.getuid():
            used += process.info["num_threads"] or 1
    return soft - used, f"ulimit -u {soft}"


def _of_cgroup(settings: Settings) -> tuple[int, str] | None:
    for folder in cgroup.folders("pids", settings.root):
        most, now = cgroup.number(folder, "pids.max"), cgroup.number(folder, "pids.current")
        if most is not None and now is not None:
            return most - now, f"pids.max {most} of the control group"
    return None


def signals(settings: Settings, pending: Callable[[int], tuple[int, int]] = resource.getrlimit) -> Iterator[Finding]:
    kinds = range(signal.SIGRTMIN, signal.SIGRTMAX + 1)
    if not any(signal.getsignal(number) is signal.SIG_DFL for number in kinds):
        yield Finding(
            "limits.signals",
            "problem",
            f"all {len(kinds)} real-time signals are ignored or have a handler in this process",
            "a restart interrupts the main thread by one of them; what is ignored here, ranks inherit",
            "start the job from a shell that does not ignore them (`trap - RTMIN`), or pass interrupt_signal=",
        )
    soft, _ = pending(resource.RLIMIT_SIGPENDING)
    if soft != resource.RLIM_INFINITY and soft < 8 * settings.nproc:
        yield Finding(
            "limits.signals",
            "warning",
            f"{soft} signals of this user may wait (ulimit -i)",
            "where there is no room, an interruption is sent again and takes longer",
            f"ulimit -i {8 * settings.nproc}, or sigpending in /etc/security/limits.conf",
        )


def shm(settings: Settings) -> Iterator[Finding]:
    path = os.path.join(settings.root, "dev/shm")
    why = "workers of DataLoaders hand their tensors over there, and Python's multiprocessing its locks"
    if not os.path.isdir(path):
        yield Finding("limits.shm", "problem", "there is no /dev/shm", why, "mount -t tmpfs tmpfs /dev/shm")
        return
    if not os.access(path, os.W_OK | os.X_OK):
        remedy = "chmod 1777 /dev/shm, or mount it without ro"
        yield Finding("limits.shm", "problem", "/dev/shm cannot be written to by this user", why, remedy)
        return
    usage = psutil.disk_usage(path)
    if usage.free < SMALL_SHM * settings.nproc or usage.total <= SMALL_SHM:
        yield Finding(
            "limits.shm",
            "warning",
            f"/dev/shm has {_mib(usage.free)} free of {_mib(usage.total)}, for {settings.nproc} ranks",
            why,
            "docker run --shm-size=8g, an emptyDir with medium: Memory in Kubernetes, or remove old files there",
        )


def memory(settings: Settings) -> Iterator[Finding]:
    left, name = cgroup.available_memory(settings.root)
    needed = RANK_BYTES * settings.nproc
    if left < needed:
        yield Finding(
            "limits.memory",
            "problem",
            f"{name} has {_mib(left)} left; {settings.nproc} ranks need {_mib(needed)} before they have a model",
            "where memory runs out the kernel kills processes, which may be monitors",
            "give the container more memory, or start fewer ranks on this host",
        )


def process_one(settings: Settings, pid: int | None = None) -> Iterator[Finding]:
    """``pid``: of the doctor itself."""
    try:
        with open(os.path.join(settings.root, "proc/1/cmdline"), "rb") as file:
            words = [os.fsdecode(word) for word in file.read().split(b"\0")]
    except OSError as error:
        raise NothingToLookAt(f"process 1 does not show what it is: {error}") from None
    is_doctor = (os.getpid() if pid is None else pid) == 1
    launches = any(os.path.basename(word) in LAUNCHERS for word in words[:4])
    if os.path.basename(words[0]).startswith("python") and (is_doctor or not launches):
        yield Finding(
            "limits.init",
            "warning",
            f"process 1 of this container is a Python program: {one_line(' '.join(words).strip(), 100)}",
            "SIGKILL from inside does not reach a rank that is process 1, and its monitor ends with it: the others "
            "wait for heartbeat_timeout",
            "docker run --init, dumb-init or tini as entry point, shareProcessNamespace: true, or `inprocess run`",
        )


def clocks(
    _: Settings, wall: Callable[[], float] = clock.wall, monotonic: Callable[[], float] = clock.monotonic
) -> Iterator[Finding]:
    before = monotonic()
    threading.Event().wait(TICK_S)
    if (passed := monotonic() - before) <= 0:
        yield Finding(
            "limits.clock",
            "problem",
            f"CLOCK_MONOTONIC moved by {passed:g} s during a wait of {TICK_S:g} s",
            "all timeouts are measured with it",
            "choose another clock source in /sys/devices/system/clocksource/clocksource0",
        )
    if wall() < PAST:
        yield Finding(
            "limits.clock",
            "warning",
            f"the date is {datetime.fromtimestamp(wall(), timezone.utc):%Y-%m-%d}",
            "reports of a restart and files of several hosts are ordered by it; timeouts are not",
            "set the clock, and keep it by NTP",
        )


def _mib(size: int) -> str:
    return f"{size >> 20:,} MiB"


CHECKS = (
    Check(
        "limits.descriptors",
        "open files: the store needs four connections for each rank, a rank one to each other",
        "ulimit -n with the hard limit; nofile in /etc/security/limits.conf raises that one",
        descriptors,
    ),
    Check(
        "limits.processes",
        "processes and threads that the user and the control group may have: each rank has a monitor process",
        "ulimit -u, nproc in limits.conf, or --pids-limit of the container",
        processes,
    ),
    Check(
        "limits.signals",
        "a real-time signal is free, by which a restart interrupts the main thread, and signals may wait",
        "start the job where they are not ignored; ulimit -i",
        signals,
    ),
    Check(
        "limits.shm",
        "/dev/shm is there, can be written to and has 64 MiB for each rank: DataLoaders use it",
        "docker run --shm-size=8g, or an emptyDir with medium: Memory",
        shm,
    ),
    Check(
        "limits.memory",
        "host and control group have 400 MiB left for each rank and its monitor",
        "more memory for the container, or fewer ranks",
        memory,
    ),
    Check(
        "limits.init",
        "process 1 of the container is an init or a launcher: nothing inside can kill process 1",
        "docker run --init, dumb-init or tini as entry point, or shareProcessNamespace: true",
        process_one,
    ),
    Check(
        "limits.clock",
        "CLOCK_MONOTONIC, by which timeouts are measured, runs forwards, and the date is set",
        "choose another clock source; set the clock by NTP",
        clocks,
    ),
)
