"""The options of `Wrapper` that are not hooks: checked once, completely, before anything starts. No clock, no torch."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import functools
import math
import os
import signal
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .exception import OptionError

__all__ = ["Options", "did_you_mean", "seconds"]

#: longest duration in seconds (about 31 years): the timeouts of locks overflow not far above it, those of poll() below
MAX_DURATION_S = 1e9
#: shortest pause between two looks, in seconds
MIN_INTERVAL_S = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """All options, as plain values; durations in seconds. Make it with :meth:`build`, which checks everything."""

    #: makes the base store from `store_kwargs`; None: the library's own TCPStore
    store_factory: Callable[..., Any] | None = None
    #: keyword arguments for `store_factory`
    store_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: upper limit for the time between two looks of the monitor thread at what it normally learns at once
    monitor_thread_interval: float = 1.0
    #: the same for the monitor process
    monitor_process_interval: float = 1.0
    #: time between two heartbeats of a rank
    heartbeat_interval: float = 1.0
    #: time between two automatic progress stamps
    progress_watchdog_interval: float = 1.0
    #: a rank without progress for this long is reported, and everybody restarts
    soft_timeout: float = 60.0
    #: a rank that does not answer for this long is killed
    hard_timeout: float = 90.0
    #: a rank without heartbeats for this long counts as gone together with its host
    heartbeat_timeout: float = 30.0
    #: longest wait for the other ranks at the start and at the end of an iteration
    barrier_timeout: float = 120.0
    #: longest wait for the other ranks to complete once this one has returned
    completion_timeout: float = 120.0
    #: extra time to wait for late interruption records; they are complete without it
    last_call_wait: float = 0.0
    #: time between SIGTERM and SIGKILL for a rank that is killed
    termination_grace_time: float = 5.0
    #: absolute path of the monitor process's log, ``{rank}`` is filled in; None: no log file
    monitor_process_logfile: str | None = None
    #: absolute path of the monitor process's pid file, ``{rank}`` is filled in; None: no pid file
    monitor_process_pidfile: str | None = None
    #: absolute path of the directory for the events of all ranks; None: INPROCESS_RUN_DIR, or none
    run_dir: str | None = None
    #: how many monitors, besides the one that serves the store, can go on with the job where that one is lost
    standby_stores: int = 2
    #: signal that interrupts the main thread's blocking calls; None: a free real-time signal
    interrupt_signal: int | None = None
    #: when a process that replaces a dead one comes in: "now" interrupts the iteration, "next_restart"
    #: waits for it to end
    join: str = "now"
    #: the job ends after the same error so many times in a row without any progress; None: repeats are not counted
    max_repeats: int | None = 10
    #: signals that ask the rank to leave the job after its step
    leave_signals: tuple[int, ...] = (signal.SIGTERM,)
    #: from such a signal until the function is interrupted where no step ended
    leave_grace: float = 20.0
    #: False: `Wrapper` returns the function itself
    enabled: bool = True

    @classmethod
    def build(cls, **kwargs: Any) -> Options:
        """Check and convert options as users pass them: durations as ``timedelta`` or seconds.

        Raises:
            OptionError: an option is unknown, of the wrong type, out of range, or in the wrong order with another;
                the message names it, its value and the remedy.
        """
        for name, value in kwargs.items():
            if name not in _NAMES:
                known = sorted((*_NAMES, *HOOKS))
                hint = did_you_mean(name, known) or f": known options: {', '.join(known)}"
                raise OptionError(f"unknown option {name}={value!r}{hint}")
        given = {name: _CONVERT.get(name, _seconds_above_zero)(name, value) for name, value in kwargs.items()}
        options = cls(**given)
        _check_order(options)
        return options

    @property
    def beats_every(self) -> float:
        """Between two heartbeats (seconds): not so rare that one which is late would count as the loss of its host."""
        return min(self.heartbeat_interval, BEAT_SHARE * self.heartbeat_timeout)

    @property
    def looks_every(self) -> float:
        """Between two looks of a monitor at its rank (seconds): it is replaced where it stands still for longer."""
        return min(self.monitor_process_interval, LOOK_SHARE * self.heartbeat_timeout)

    def logfile_for(self, rank: int) -> str | None:
        """The monitor's log path for the process started as `rank`; None when there is none."""
        return None if self.monitor_process_logfile is None else self.monitor_process_logfile.format(rank=rank)

    def pidfile_for(self, rank: int) -> str | None:
        """The monitor's pid file path for the process started as `rank`; None when there is none."""
        return None if self.monitor_process_pidfile is None else self.monitor_process_pidfile.format(rank=rank)


#: shares of ``heartbeat_timeout``: a host counts as lost at three quarters of it, and a monitor that stands still for a
#: third is replaced. So heartbeats are sent, and ranks looked at, at least so often, whatever the intervals say
BEAT_SHARE, LOOK_SHARE = 1 / 4, 1 / 8
#: when a process that comes to a running job is let in
JOIN = ("now", "next_restart")
MAX_STANDBYS = 16
#: a handler in Python returns to the instruction, which fails again, for ever
_OF_ERRORS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
MAX_REPEATS = 1_000_000
#: the other options of `Wrapper`: what the user's code does at certain moments
HOOKS = (
    "initialize",
    "abort",
    "finalize",
    "health_check",
    "completion",
    "terminate",
    "on_preemption",
    "warm_up",
    "rank_assignment",
    "rank_filter",
)
_NAMES = frozenset(field.name for field in dataclasses.fields(Options))

# (smaller, larger, why): each pair must be strictly increasing; what follows from others is not repeated
_ORDER = (
    ("soft_timeout", "hard_timeout", "a rank is asked to restart before it is killed"),
    ("hard_timeout", "barrier_timeout", "the others must still be waiting when a hung rank is killed"),
    ("monitor_process_interval", "heartbeat_timeout", "the monitor must look more often than the time it measures"),
    ("monitor_process_interval", "soft_timeout", "the monitor must look more often than the time it measures"),
    ("heartbeat_interval", "heartbeat_timeout", "a healthy rank must beat within the timeout"),
    ("heartbeat_timeout", "barrier_timeout", "the others must still be waiting when a lost host is noticed"),
    ("monitor_thread_interval", "soft_timeout", "the thread must look more often than the time it measures"),
    ("progress_watchdog_interval", "soft_timeout", "a healthy rank must show progress within the timeout"),
)


def _check_order(options: Options) -> None:
    for small, large, why in _ORDER:
        low, high = getattr(options, small), getattr(options, large)
        if not low < high:
            defaults = [name for name in (small, large) if getattr(options, name) == getattr(Options, name)]
            known = f" ({' and '.join(defaults)}: the default{'s' if len(defaults) > 1 else ''})" if defaults else ""
            raise OptionError(
                f"{small}={low:g}s must be less than {large}={high:g}s{known}, because {why}: lower {small} or raise "
                f"{large}. The order is soft_timeout < hard_timeout < barrier_timeout, and heartbeat_timeout < "
                "barrier_timeout; each interval is shorter than the timeout that it serves"
            )
    if options.interrupt_signal in options.leave_signals:
        raise OptionError(
            f"interrupt_signal={options.interrupt_signal} is one of leave_signals={options.leave_signals}, and one "
            "signal cannot mean both: pass another interrupt_signal, or None for a free one"
        )


def seconds(name: str, value: object, *, positive: bool = False) -> float:
    """`value` (a ``timedelta`` or a number of seconds, >= 0, or > 0 where it must be `positive`) as seconds.

    Raises:
        OptionError: it is something else; the message names the option `name`.
    """
    if isinstance(value, datetime.timedelta):
        result = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        result = float(value) if abs(value) <= MAX_DURATION_S else math.inf
    else:
        raise OptionError(f"{name}={value!r} is not a duration: pass a datetime.timedelta or a number of seconds")
    if not 0 <= result <= MAX_DURATION_S or (positive and not result):  # false for nan too
        least = "greater than 0, and at most" if positive else "from 0 to"
        raise OptionError(f"{name}={value!r} is out of range: pass a duration {least} {MAX_DURATION_S:g} seconds")
    return result


_seconds_above_zero = functools.partial(seconds, positive=True)


def _interval(name: str, value: object) -> float:
    result = seconds(name, value, positive=True)
    if result < MIN_INTERVAL_S:
        raise OptionError(
            f"{name}={value!r} is too short: a process that looks so often does nothing else; pass at least "
            f"{MIN_INTERVAL_S:g} seconds, or leave it out"
        )
    return result


def _store_factory(name: str, value: object) -> Callable[..., Any] | None:
    if value is not None and not callable(value):
        raise OptionError(f"{name}={value!r} cannot be called: pass a store class or a function that returns a store")
    return value


def _store_kwargs(name: str, value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise OptionError(f"{name}={value!r} must be a dictionary of keyword arguments for store_factory, or None")
    return dict(value)


def _path(name: str, value: object) -> str | None:
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise OptionError(f"{name}={value!r} must be a path as a string, or None")
    if "\0" in path:
        raise OptionError(f"{name}={value!r} has a NUL byte in it, which no path may have")
    if not os.path.isabs(path):
        raise OptionError(f"{name}={value!r} must be absolute, as the working directory may change: start it with /")
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(path) if field is not None}
        path.format(rank=0)
    except (ValueError, KeyError, IndexError, AttributeError, TypeError):
        fields = {"?"}
    if not fields <= {"rank"}:
        raise OptionError(f"{name}={value!r} has a placeholder other than {{rank}}: use {{rank}}, and {{{{ for a brace")
    return path


def _directory(name: str, value: object) -> str | None:
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path or "\0" in path:
        raise OptionError(f"{name}={value!r} must be the path of a directory as a string, or None")
    return os.path.abspath(path)


def _signal(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value not in signal.valid_signals():
        raise OptionError(f"{name}={value!r} is no signal number: pass one such as signal.SIGRTMIN + 5, or None")
    if value in (signal.SIGKILL, signal.SIGSTOP, *_OF_ERRORS):
        raise OptionError(f"{name}={signal.Signals(value).name} cannot be handled by a process: pass another, or None")
    return int(value)


def _signals(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise OptionError(f"{name}={value!r} must be a tuple of signals such as (signal.SIGTERM,), or () for none")
    found = tuple(_signal(name, each) for each in value)
    if None in found:
        raise OptionError(f"{name}={value!r} has a None in it: pass signals only, or () for none")
    return tuple(dict.fromkeys(each for each in found if each is not None))


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_STANDBYS:
        raise OptionError(
            f"{name}={value!r} must be a number from 0, which means that the job ends with its store, to "
            f"{MAX_STANDBYS}: each costs every rank a connection"
        )
    return value


def _join(name: str, value: object) -> str:
    if value not in JOIN:
        raise OptionError(
            f"{name}={value!r} must be 'now', to interrupt the running iteration, or 'next_restart', to wait for one"
        )
    return str(value)


def _repeats(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_REPEATS:
        raise OptionError(
            f"{name}={value!r} must be an integer from 1 to {MAX_REPEATS}, or None, which restarts for ever, however "
            "often the same error comes again"
        )
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r} must be True or False")
    return value


# everything that is not named here is a duration above zero
_CONVERT: dict[str, Callable[[str, object], Any]] = {
    "store_factory": _store_factory,
    "store_kwargs": _store_kwargs,
    "last_call_wait": seconds,
    "monitor_process_logfile": _path,
    "monitor_process_pidfile": _path,
    "monitor_thread_interval": _interval,
    "monitor_process_interval": _interval,
    "heartbeat_interval": _interval,
    "progress_watchdog_interval": _interval,
    "run_dir": _directory,
    "standby_stores": _count,
    "interrupt_signal": _signal,
    "join": _join,
    "leave_signals": _signals,
    "max_repeats": _repeats,
    "enabled": _flag,
}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What to put behind "unknown ...": the name that it was meant to be, or nothing."""
    near = nearest(name, known)
    return f": did you mean {near!r}?" if near else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """The name that it was meant to be, or nothing."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), "")
