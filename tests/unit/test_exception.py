"""Every exception can be pickled with its history, and belongs where the drawing in the module says."""

from __future__ import annotations

import builtins
import pickle
import signal
from typing import Any

import pytest

from inprocess import exception
from inprocess.health_check import FaultCounterExceeded

ALL = [getattr(exception, name) for name in exception.__all__] + [FaultCounterExceeded]


@pytest.mark.parametrize("kind", [*ALL, exception.TooFewRanks])
def test_survives_pickling(kind: type[BaseException]) -> None:
    error: BaseException = kind("what happened") if kind is not exception.Preempted else kind(signal.SIGTERM)
    if isinstance(error, exception.RestartError):
        error.history = ("start 3", "interrupted 3")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert str(copy).startswith("SIGTERM" if kind is exception.Preempted else "what happened")


def test_a_rank_that_leaves_in_time_ends_with_the_status_of_its_signal() -> None:
    for error in (exception.Preempted(), pickle.loads(pickle.dumps(exception.Preempted(signal.SIGTERM)))):
        assert isinstance(error, SystemExit)
        assert (error.code, error.signum) == (143, signal.SIGTERM)
    assert exception.Preempted(signal.SIGUSR1).code == 138


def test_history_is_shown_below_the_message() -> None:
    error = exception.RestartError("no way on", history=["start 0", "abort 0"])
    assert str(error) == "no way on\nlast phases and events of this rank:\n  start 0\n  abort 0"
    assert str(exception.RestartError("alone")) == "alone"


def test_tree() -> None:
    assert issubclass(exception.OptionError, ValueError)
    assert issubclass(exception.TimeoutError, builtins.TimeoutError)
    for kind in (exception.RestartAbort, exception.RankShouldRestart):
        assert not issubclass(kind, Exception)
    for kind in ALL:
        if issubclass(kind, Exception):
            assert issubclass(kind, exception.RestartError)
        assert kind.__name__ in (exception.__doc__ or "")


class Cancelled(BaseException):
    """As asyncio's and torch's CheckpointException: no Exception, and nothing that asks for the end."""


GROUP: Any = getattr(builtins, "BaseExceptionGroup", None)


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (SystemExit(0), True),
        (KeyboardInterrupt(), True),
        (GeneratorExit(), True),
        (exception.RestartAbort(), True),
        (exception.StateLost(), True),
        (exception.Preempted(), True),
        (Cancelled(), False),
        (ValueError(), False),
        (exception.RankShouldRestart(), False),
        (exception.RankDiscarded(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_asks_for_the_end(error: BaseException, ends: bool) -> None:
    assert exception.asks_for_end(error) is ends
    if GROUP is not None:
        assert exception.asks_for_end(GROUP("some", [ValueError(), GROUP("inner", [error])])) is ends
