"""Restart a distributed PyTorch training function inside its own process, on the healthy ranks, when a rank fails.

Names are imported on first use: the monitor process, which needs a few pure modules only, does not import torch with
them.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from inprocess import composition  # noqa: F401  (names who implements the core's interfaces)

if TYPE_CHECKING:
    from inprocess.call_wrapper import CallWrapper, current_call
    from inprocess.compose import Compose
    from inprocess.exception import (
        HealthCheckError,
        InternalError,
        OptionError,
        Preempted,
        RankDiscarded,
        RankShouldRestart,
        RestartAbort,
        RestartError,
        TimeoutError,
    )
    from inprocess.heartbeats.launcher import ask_launcher
    from inprocess.heartbeats.watch import Watch, monitored
    from inprocess.kept.dynamo import keep_compiled_code
    from inprocess.kept.registry import on_restart
    from inprocess.live.loader import KeptLoader
    from inprocess.live.sampler import ElasticSampler
    from inprocess.live.state import LiveState
    from inprocess.monitor.learned import LearnedTimeouts
    from inprocess.state import FrozenState, Mode, State, Status
    from inprocess.wrap import Wrapper

__version__ = "0.1.0"

_HOME = {
    "CallWrapper": "call_wrapper",
    "Compose": "compose",
    "ElasticSampler": "live.sampler",
    "FrozenState": "state",
    "HealthCheckError": "exception",
    "InternalError": "exception",
    "KeptLoader": "live.loader",
    "LearnedTimeouts": "learned",
    "LiveState": "live.state",
    "Mode": "state",
    "OptionError": "exception",
    "Preempted": "exception",
    "RankDiscarded": "exception",
    "RankShouldRestart": "exception",
    "RestartAbort": "exception",
    "RestartError": "exception",
    "State": "state",
    "Status": "state",
    "TimeoutError": "exception",
    "Watch": "watch",
    "Wrapper": "wrap",
    "ask_launcher": "watch",
    "current_call": "call_wrapper",
    "keep_compiled_code": "kept.dynamo",
    "monitored": "watch",
    "on_restart": "kept.registry",
}

#: submodules with public names; ``inprocess.rank_assignment.ShiftRanks`` works after ``import inprocess``. Not
#: `compat`: what is in it is meant to be imported
_MODULES = frozenset(
    {
        "abort",
        "attribution",
        "call_wrapper",
        "completion",
        "compose",
        "etcd_store",
        "exception",
        "finalize",
        "health_check",
        "initialize",
        "learned",
        "live",
        "monitor_process",
        "monitor_thread",
        "nested_restarter",
        "progress_watchdog",
        "rank_assignment",
        "rank_filter",
        "state",
        "store",
        "terminate",
        "tools",
        "wait_daemon",
        "watch",
        "wrap",
    }
)

__all__ = [
    "CallWrapper",
    "Compose",
    "ElasticSampler",
    "FrozenState",
    "HealthCheckError",
    "InternalError",
    "KeptLoader",
    "LearnedTimeouts",
    "LiveState",
    "Mode",
    "OptionError",
    "Preempted",
    "RankDiscarded",
    "RankShouldRestart",
    "RestartAbort",
    "RestartError",
    "State",
    "Status",
    "TimeoutError",
    "Watch",
    "Wrapper",
    "__version__",
    "ask_launcher",
    "current_call",
    "keep_compiled_code",
    "monitored",
    "on_restart",
]


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"inprocess.{name}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        remedy = f"`{sys.executable} -m pip install torch`"
        raise ModuleNotFoundError(
            f"inprocess.{name} needs torch, which is not installed: {remedy}", name="torch"
        ) from None


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(_module(_HOME[name]), name)
    if name in _MODULES:
        return _module(name)
    raise AttributeError(f"module 'inprocess' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
