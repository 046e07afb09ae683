"""Every exception of the library, in one tree. Nothing here imports anything of the library.

::

    BaseException
    ├── Preempted                    (also SystemExit) a signal asked this rank to leave, and it has left
    ├── RestartAbort                 raise it to leave the job for good; the other ranks go on
    │   └── StateLost                nobody has a whole training state any more; all ranks leave
    ├── RankShouldRestart            interrupts the wrapped function, or asks for that where the function raises it
    └── Exception
        └── RestartError             whatever this library reports; carries the rank's last phases and events
            ├── OptionError          (also ValueError) an option, argument or environment variable is wrong
            ├── HealthCheckError     this rank is not fit to go on
            │   └── FaultCounterExceeded   (in `health_check`) this rank failed too often
            ├── RankDiscarded        the rank assignment has no place for this rank
            ├── Fenced               the others declared this rank dead; it must not run again
            ├── TimeoutError         (also the built-in one) something did not happen in time
            ├── StoreLost            the store's host is gone, so nothing can be agreed on any more
            │   └── BadMessage       somebody else writes into the store: a value in it is none of this library's
            ├── LiveStateError       the training state cannot be got back, or is damaged
            └── InternalError        the library contradicted itself: please report it

All of them can be pickled, together with their history.
"""

from __future__ import annotations

import builtins
import signal
from collections.abc import Iterable
from typing import Any

__all__ = [
    "BadMessage",
    "Fenced",
    "HealthCheckError",
    "InternalError",
    "LiveStateError",
    "OptionError",
    "Preempted",
    "RankDiscarded",
    "RankShouldRestart",
    "RestartAbort",
    "RestartError",
    "StateLost",
    "StoreLost",
    "TimeoutError",
]

#: what holds several exceptions, since Python 3.11
GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())


class RestartError(Exception):
    """Base class of everything the library raises on its own account.

    Args:
        args: as for any exception; usually one message.
        history: the last phases and events of this rank, oldest first; printed below the message.
    """

    def __init__(self, *args: object, history: Iterable[str] = ()) -> None:
        super().__init__(*args)
        #: the rank's last phases and events, oldest first; may be set later by whoever knows them
        self.history: tuple[str, ...] = tuple(history)

    def __str__(self) -> str:
        message = super().__str__()
        if not self.history:
            return message
        lines = "".join(f"\n  {line}" for line in self.history)
        return f"{message}\nlast phases and events of this rank:{lines}"


class OptionError(RestartError, ValueError):
    """An option, argument or environment variable is wrong; the message names it, its value and the remedy."""


class HealthCheckError(RestartError):
    """A health check found this rank unfit to go on; raise it (or a subclass) in your own checks.

    A rank leaves the job with one whose ``__cause__`` is what the check raised.
    """


class RankDiscarded(RestartError):
    """The rank assignment terminated this rank, for example because too few members of its group are left."""


class Fenced(RestartError):
    """The other ranks declared this one dead (it was stopped or unreachable); it leaves and never runs again."""


class TimeoutError(RestartError, builtins.TimeoutError):
    """Something did not happen within its time limit; the message names the option that sets the limit."""


class StoreLost(RestartError):
    """The store server cannot be reached any more, so this rank can agree on nothing with the others."""


class BadMessage(StoreLost):
    """A value in the store is not what this library writes, so nothing can be agreed on there; names the key."""


class NobodyLeft(RestartError):
    """All ranks of the job that a process was to join are gone; its launcher restarts all workers."""


class LiveStateError(RestartError):
    """The state of a training cannot be taken or got back: it arrived damaged, or does not fit."""


class InternalError(RestartError):
    """The library found itself in a state that should be impossible."""


class RestartAbort(BaseException):
    """Raise it in the wrapped function or a hook to take this rank out of the job; it reaches the caller unchanged."""


class TooFewRanks(RestartAbort):
    """RetryController's: with too few ranks everybody leaves, unless replacements come within ``patience`` seconds."""

    def __init__(self, message: str, patience: float = 0.0) -> None:
        super().__init__(message)
        self.patience = patience


class StateLost(RestartAbort):
    """`LiveState.recover`'s: nobody has a whole state any more. All ranks leave, some with its message alone."""


class Preempted(SystemExit):
    """A signal asked this rank to leave, and it has left the job in time; the other ranks go on without it.

    Nobody need catch it: as a SystemExit it ends the process with the status ``128 + signal``, 143 after SIGTERM, and
    prints nothing. Where `CallWrapper.leaving` is set, the function may raise it itself, to leave at once.

    Args:
        signum: the signal; its number, or one of ``signal.Signals``.
    """

    def __init__(self, signum: int = signal.SIGTERM) -> None:
        super().__init__(int(signum))
        #: the number of the signal
        self.signum = int(signum)
        self.code = 128 + self.signum

    def __str__(self) -> str:
        return signal_name(self.signum)


def signal_name(signum: int) -> str:
    """Such as SIGTERM; those between SIGRTMIN and SIGRTMAX have none."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


class RankShouldRestart(BaseException):
    """Interrupts the wrapped function for a restart. Let it pass: a function that swallows it is interrupted again.

    Raise it in the function, or in a hook before it, to have all ranks restart.
    """


#: what the function raises to leave the job; anything else is a failure
ENDS = (SystemExit, KeyboardInterrupt, GeneratorExit, RestartAbort)


def asks_for_end(error: BaseException, ends: tuple[type[BaseException], ...] = ENDS) -> bool:
    """Whether a rank whose function raises this leaves the job. A group does where it holds one of these."""
    return isinstance(error, ends) or (
        isinstance(error, GROUP) and any(asks_for_end(each, ends) for each in error.exceptions)
    )
