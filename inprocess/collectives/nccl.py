"""What NCCL's groups need around them, so that a rank outlives their abort.

Read in the sources of torch 2.6 and NCCL 2.29, and in the library of torch 2.11; not yet run on a GPU.
docs/notebook/nccl.md has the places.

All groups at once
    ``ncclCommAbort`` tells a group's kernels to end, and then waits for its streams; where these wait for a kernel of
    another group, which has not been told yet, that is for ever (github.com/pytorch/pytorch/issues/119797). torch puts
    all aborts between ``ncclGroupStart`` and ``ncclGroupEnd``. NCCL counts these per thread, and each
    ``ProcessGroupNCCL::abort`` works in a thread of its own, which they do not reach. So does the step here: a thread
    for each group, and all of them have been told before one waits.
CUDA graphs
    An abort waits until all graphs that captured a collective of the group are gone. They are reset beside it.
torch's watchdog
    Its thread looks every 100 ms whether a peer is gone, or the GPU has failed, and by default may take the process
    down: the healthy ranks, too. It is told not to for the time of a call: see ``settings``.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from inprocess.collectives import groups
from inprocess.system import clock, private_folder
from inprocess.system.interpreter import is_inside
from inprocess.system.logs import get_logger

log = get_logger(__name__)
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
RETHROW = "TORCH_NCCL_RETHROW_CUDA_ERRORS"
MONITORING = "TORCH_NCCL_ENABLE_MONITORING"
#: in torch 2.15: a collective's timeout ends the process, whatever `RETHROW` says; off by default
TEARDOWN = "TORCH_NCCL_TEARDOWN_ON_TIMEOUT"
DUMP, DUMP_WAIT = "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
#: which count before these two, where a version knows them (2.15)
FR_DUMP, FR_DUMP_WAIT = "TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC"
#: NCCL's own: how often it tries a connection that is refused, with what pause, the n-th time n times as long (1.1 s in
#: all; its defaults make 59.5 s of it, in which nothing reaches it); and its service for telling the state of a job,
#: which crashes where the connections of a bootstrap are ended
NCCLS = {"NCCL_SOCKET_RETRY_CNT": "10", "NCCL_SOCKET_RETRY_SLEEP_MSEC": "20", "NCCL_RAS_ENABLE": "0"}
#: torch's classes of backends over NCCL; what all of them have, and no other backend: what a rank outside a new group
#: calls, where that is split from a group that is bound to a device
CLASSES, SPLIT = ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy"), "perform_nocolor_split"
#: torch's other names of variables
_OLDER = {
    HANDLING: "NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_DESYNC_DEBUG": "NCCL_DESYNC_DEBUG",
    FR_DUMP: DUMP,
    FR_DUMP_WAIT: DUMP_WAIT,
}
#: within what time all CUDA graphs are to be reset, and how often threads are looked at that replay one (seconds)
REPLAY_LIMIT_S, POLL_INTERVAL_S = 5.0, 0.001
#: where torch's flight recorder writes to, and how many entries it keeps; the names before and after torch 2.9
_RECORD_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_RECORD_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_TRUE = ("1", "y", "yes", "t", "true")


# --- the environment ----------------------------------------------------------------------------------------------


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of torch's and NCCL's that are set for the time of a call: none that the user has set.

    Each group reads torch's when it is made, a process NCCL's with its first one. They do nothing to other backends.

    * Errors are not handled by the watchdog: a restart does that. ``1`` under torchrun, and this library's launcher, is
      no choice of the user's: torch's agent sets it for its workers.
    * A CUDA error ends the watchdog, not the process: the rank's own function or health check says what happened.
    * Nor does a watchdog that stands still end it: this library's monitor looks after the rank. An abort that hangs
      would be enough for it, many minutes later.
    * No record is written at an error, for which the watchdog would wait, up to a minute with the lock that the next
      collective needs: the abort writes one.
    * NCCL gives up soon on a rank that is gone, and has no service beside: see `NCCLS`.
    """
    found = {name: value for name, value in NCCLS.items() if name not in environ}
    names = (HANDLING, RETHROW, MONITORING, DUMP, DUMP_WAIT, FR_DUMP, FR_DUMP_WAIT)
    found |= {name: "0" for name in names if _given(environ, name) is None}
    if environ.get(HANDLING) == "1" and "TORCHELASTIC_RUN_ID" in environ:
        found[HANDLING] = "0"
    return found


def _given(environ: Mapping[str, str], name: str) -> tuple[str, str] | None:
    """The variable as the user has named it, and its value."""
    return next(((each, environ[each]) for each in (name, _OLDER.get(name, name)) if each in environ), None)


def objections(environ: Mapping[str, str]) -> list[str]:
    """What the user has set so that torch ends processes that a restart would save; in words, with the remedy."""
    found = []
    handling = _given(environ, HANDLING)
    if handling is not None and handling[1] in ("1", "3") and HANDLING not in settings(environ):
        found.append(
            f"{handling[0]}={handling[1]}: torch's watchdog may end the process when a peer of an NCCL group dies, and "
            "healthy ranks with it; unset it, or set 0"
        )
    if _is_true(environ.get(RETHROW, "")):
        found.append(
            f"{RETHROW}={environ[RETHROW]}: torch's watchdog ends the process at a CUDA error, before its rank can say "
            "what happened; unset it, or set 0"
        )
    if _is_true(environ.get(TEARDOWN, "")):
        found.append(
            f"{TEARDOWN}={environ[TEARDOWN]}: torch ends the process where a collective times out, before a restart "
            "can save it; unset it, or set 0"
        )
    for name in ("TORCH_NCCL_DESYNC_DEBUG", "TORCH_DISTRIBUTED_DEBUG"):
        given, value = _given(environ, name) or (name, "")
        if _is_true(value) or value.upper() == "DETAIL":
            found.append(
                f"{given}={value}: with it torch's watchdog may end the process when a peer of an NCCL group dies, "
                f"whatever {HANDLING} says; unset it once the program is debugged"
            )
    if _is_true(environ.get(MONITORING, "")):
        found.append(
            f"{MONITORING}={environ[MONITORING]}: torch ends the process when a watchdog stands still, for which an "
            "abort that hangs is enough; unset it, or set 0"
        )
    return found


def hints(environ: Mapping[str, str]) -> list[str]:
    """What may be worth setting, and is not set here since it has a price."""
    if "NCCL_NVLS_ENABLE" in environ:
        return []
    return [
        "NCCL_NVLS_ENABLE is not set: where NVLink SHARP is used (NVSwitch, H100 or later), look whether the GPU's "
        "memory outside torch grows with each restart; if so set NCCL_NVLS_ENABLE=0, which makes large all-reduces slow"
    ]


def advise(aloud: bool) -> None:
    """Log what is to be said about the environment, once in a process: as a warning on the rank that speaks for all."""
    if _told or not dist.is_available() or not dist.is_nccl_available():
        return
    _told.append(True)
    for objection in objections(os.environ):
        log.log(logging.WARNING if aloud else logging.DEBUG, objection)
    for hint in hints(os.environ):
        log.log(logging.INFO if aloud else logging.DEBUG, hint)


_told: list[bool] = []


def _is_true(value: str) -> bool:
    return value.lower() in _TRUE


# --- groups -------------------------------------------------------------------------------------------------------


def classes() -> list[Any]:
    """torch's backends over NCCL: the old one, and those of torch 2.15, which are no subclasses of it."""
    module = getattr(dist, "distributed_c10d", None)
    return [getattr(module, name) for name in CLASSES if hasattr(module, name)]


def is_used_by(group: Any) -> bool:
    """Whether a group has NCCL for tensors on a GPU, perhaps beside another backend for the others."""
    return hasattr(_backend_of(group), SPLIT)


def is_recorded_by_itself(group: Any) -> bool:
    """Whether its backend has a flight record for NCCL alone, as the old class has. Others share that of all."""
    return hasattr(_backend_of(group), "_group_start")


def _backend_of(group: Any) -> Any:
    """For tensors on a GPU; None: there is none, or torch has no NCCL."""
    if not dist.is_nccl_available():
        return None
    try:
        return groups.backend_of(group, torch.device("cuda"))
    except (RuntimeError, AttributeError):
        return None


# --- CUDA graphs --------------------------------------------------------------------------------------------------


class Graphs:
    """The CUDA graphs that captured something during a call: before it no group was there whose collective they have.

    They are noted as they capture: to look for them takes longer, the more objects the program has.
    """

    def __init__(self) -> None:
        self._kind: Any = None
        self._capture_begin: Any = None
        self._captured: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self) -> None:
        """A call begins. Where torch keeps graphs elsewhere, none are found."""
        self._kind = getattr(sys.modules.get("torch.cuda.graphs"), "CUDAGraph", None)
        self._capture_begin = original = getattr(self._kind, "capture_begin", None)
        if original is None:
            self._kind = None
            return

        @functools.wraps(original)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._captured.add(graph)
            return original(graph, *args, **kwargs)

        self._kind.capture_begin = capture_begin

    def end(self) -> None:
        """The call is over."""
        if self._kind is not None:
            self._kind.capture_begin, self._kind = self._capture_begin, None
        self._captured.clear()

    def reset(self, patience: float = REPLAY_LIMIT_S) -> int:
        """Reset them all; returns how many. Which ones captured a collective cannot be told.

        Args:
            patience: seconds; after that no graph is reset any more: it may be one that the next iteration has
                captured.

        Raises:
            TimeoutError: some are as they were: a thread has been replaying a graph all the time, or a reset hung.
        """
        end, graphs = clock.monotonic() + patience, list(self._captured)
        try:
            for graph in graphs:  # first: from here on no replay can begin, which would use what is being destroyed
                graph.replay = _refuse
            for graph in graphs:
                while _is_replaying():
                    _give_up_after(end)
                    threading.Event().wait(POLL_INTERVAL_S)
                _give_up_after(end)
                graph.reset()
                self._captured.discard(graph)
        finally:
            for graph in graphs:  # it may capture again; what was reset refuses by itself
                vars(graph).pop("replay", None)
        return len(graphs)


#: one per process; `call.parts` begins and ends it
graphs = Graphs()


def _give_up_after(end: float) -> None:
    if clock.monotonic() > end:
        raise TimeoutError("a thread replays a CUDA graph all the time, or a reset hung: not all graphs were reset")


def _refuse() -> None:
    raise RuntimeError("this CUDA graph was reset when the iteration that captured it was interrupted; capture it anew")


def _is_replaying() -> bool:
    """Whether a thread is inside ``replay``; also one that was parked there, by a signal handler further up."""
    return is_inside(("replay",), "graphs.py")


# --- flight recorder ----------------------------------------------------------------------------------------------


def record_file(folder: str | Path | None, iteration: int, rank: int) -> Path | None:
    """Where this rank's flight record goes; None: nobody wants one, or torch records nothing."""
    if any(os.environ.get(name, "1").strip("0") == "" for name in _RECORD_SIZES):
        return None
    if folder is not None:
        return Path(folder, f"iteration_{iteration}", f"rank_{rank}")
    prefix = next((os.environ[name] for name in _RECORD_FILES if os.environ.get(name)), "")
    return Path(f"{prefix}{rank}") if prefix else None


def dump_flight_record(path: Path, of_nccl_alone: bool) -> None:
    """Write what torch recorded of the collectives, a pickle; mode 0600. torch's ``torchfrtrace`` reads NCCL's."""
    bindings = torch._C._distributed_c10d
    names = ("_dump_nccl_trace", "_dump_fr_trace") if of_nccl_alone else ("_dump_fr_trace",)
    dump: Callable[..., bytes] | None = next(
        (getattr(bindings, each) for each in names if hasattr(bindings, each)), None
    )
    if dump is None:
        return
    # to tell where a collective was called from, torch imports its compiler: a second, while others may be importing
    record = dump(includeStackTraces="torch._inductor.codecache" in sys.modules)
    # the file last: where it hangs, and comes back an iteration later, the record is still the one of this iteration
    with private_folder.own(str(path.parent)) as folder:
        folder.replace(path.name, record)


def forget_flight_record() -> None:
    """So that the next record is one of its own iteration; torch has this for the purpose, 2.15 for each class."""
    for name in ("_reset_fr_recording_nccl", "_reset_fr_trace"):
        reset: Callable[[], object] | None = getattr(torch._C._distributed_c10d, name, None)
        if reset is not None:
            reset()
