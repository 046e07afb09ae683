"""What NCCL's groups need around them, so that a rank outlives their abort.

Read in the sources of torch 2.6 and NCCL 2.29, and in the library of torch 2.11; not yet run on a GPU.
docs/design/nccl.md has the places.

All groups at once
    ``ncclCommAbort`` tells a group's kernels to end, and then waits for its streams; where these wait for a kernel of
    another group, which has not been told yet, that is for ever (github.com/pytorch/pytorch/issues/119797). torch puts
    all aborts between ``ncclGroupStart`` and ``ncclGroupEnd``. NCCL counts these per thread, and each
    ``ProcessGroupNCCL::abort`` works in a thread of its own, which they do not reach. So does the step here: a thread
    for each group, and all of them have been told before one waits.
CUDA graphs
    An abort waits until all graphs that captured a collective of the group are gone. They are reset beside it.
torch's watchdog
    Its thread sees within 100 ms that a peer is gone, or that the GPU failed, and by default takes the process down:
    the healthy ranks, too. It is told not to for the time of a call: see ``settings``.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from inprocess import clock

log = logging.getLogger(__name__)

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
RETHROW = "TORCH_NCCL_RETHROW_CUDA_ERRORS"
HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
MONITORING = "TORCH_NCCL_ENABLE_MONITORING"
#: torch's own (seconds): after so long its heartbeat monitor ends a process whose watchdog stands still
HEARTBEAT_TIMEOUT = 480
#: how long threads are waited for that are replaying a CUDA graph (seconds), and how often they are looked at
REPLAYING, LOOK = 5.0, 0.001
#: where torch's flight recorder writes to, and how many entries it keeps; the names before and after torch 2.9
_RECORD_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_RECORD_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_TRUE = ("1", "y", "yes", "t", "true")


# --- the environment ----------------------------------------------------------------------------------------------


def settings(environ: Mapping[str, str], hard_timeout: float) -> dict[str, str]:
    """The variables of torch's that are set for the time of a call: none that the user has set.

    Each group reads them when it is made. They do nothing to other backends.

    * Errors are not handled by the watchdog: a restart does that. ``1`` under torchrun, and this library's launcher, is
      no choice of the user's: torch's agent sets it for its workers.
    * A CUDA error ends the watchdog, not the process: the rank's own function or health check says what happened.
    * The heartbeat monitor has more patience than ``hard_timeout``, so that a rank that hangs is killed by its own.
    """
    found = {}
    if HANDLING not in environ or (environ[HANDLING] == "1" and "TORCHELASTIC_RUN_ID" in environ):
        found[HANDLING] = "0"
    if RETHROW not in environ:
        found[RETHROW] = "0"
    if HEARTBEAT not in environ and 2 * hard_timeout > HEARTBEAT_TIMEOUT:
        found[HEARTBEAT] = str(int(2 * hard_timeout))
    return found


def objections(environ: Mapping[str, str], hard_timeout: float) -> list[str]:
    """What the user has set so that torch ends processes that a restart would save; in words, with the remedy."""
    found = []
    if environ.get(HANDLING) in ("1", "3") and HANDLING not in settings(environ, hard_timeout):
        found.append(
            f"{HANDLING}={environ[HANDLING]}: torch's watchdog ends the process when a peer of an NCCL group dies, so "
            "that healthy ranks are lost; unset it, or set 0"
        )
    if _is_true(environ.get(RETHROW, "")):
        found.append(
            f"{RETHROW}={environ[RETHROW]}: torch's watchdog ends the process at a CUDA error, before its rank can say "
            "what happened; unset it, or set 0"
        )
    for name in ("TORCH_NCCL_DESYNC_DEBUG", "TORCH_DISTRIBUTED_DEBUG"):
        value = environ.get(name, "")
        if _is_true(value) or value.upper() == "DETAIL":
            found.append(
                f"{name}={value}: with it torch's watchdog ends the process when a peer of an NCCL group dies, "
                f"whatever {HANDLING} says; unset it once the program is debugged"
            )
    patience = environ.get(HEARTBEAT, "")
    if patience.isdigit() and int(patience) <= hard_timeout and _is_true(environ.get(MONITORING, "1")):
        found.append(
            f"{HEARTBEAT}={patience} is not above hard_timeout={hard_timeout:g}s: torch ends a rank that hangs before "
            f"its monitor does; raise it, or set {MONITORING}=0"
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


def advise(hard_timeout: float, aloud: bool) -> None:
    """Log what is to be said about the environment, once in a process: as a warning on the rank that speaks for all."""
    if _told or not dist.is_available() or not dist.is_nccl_available():
        return
    _told.append(True)
    for objection in objections(os.environ, hard_timeout):
        log.log(logging.WARNING if aloud else logging.DEBUG, objection)
    for hint in hints(os.environ):
        log.log(logging.INFO if aloud else logging.DEBUG, hint)


_told: list[bool] = []


def _is_true(value: str) -> bool:
    return value.lower() in _TRUE


# --- groups -------------------------------------------------------------------------------------------------------


def is_used_by(group: Any) -> bool:
    """Whether a group has NCCL for tensors on a GPU, perhaps beside another backend for the others."""
    if not dist.is_nccl_available():
        return False
    try:
        backend = group._get_backend(torch.device("cuda"))
    except (RuntimeError, AttributeError):
        return False
    return isinstance(getattr(backend, "wrapped_pg", backend), dist.ProcessGroupNCCL)


# --- CUDA graphs --------------------------------------------------------------------------------------------------


def reset_graphs() -> int:
    """Reset all CUDA graphs of this process; answers how many. A replay raises from now on.

    Which ones captured a collective cannot be told. Where torch keeps graphs elsewhere, none are found.

    Raises:
        TimeoutError: a thread has been replaying a graph all the time; nothing was reset.
    """
    kind = getattr(sys.modules.get("torch.cuda.graphs"), "CUDAGraph", None)
    if kind is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    # an object refers to its class: 25 ms with 300,000 objects, a third of what it takes to look at each of them
    graphs = [each for each in gc.get_referrers(*_with_subclasses(kind)) if issubclass(type(each), kind)]
    for graph in graphs:  # first: from here on no replay can begin, which would use what is being destroyed
        graph.replay = _refuse
    end = clock.monotonic() + REPLAYING
    while graphs and _is_replaying():
        if clock.monotonic() > end:
            raise TimeoutError(f"a thread has been replaying a CUDA graph for {REPLAYING:g} s: no graph was reset")
        threading.Event().wait(LOOK)
    for graph in graphs:
        graph.reset()
    return len(graphs)


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def _refuse() -> None:
    raise RuntimeError("this CUDA graph was reset when the iteration that captured it was interrupted; capture it anew")


def _is_replaying() -> bool:
    return any(
        frame.f_code.co_name == "replay" and frame.f_code.co_filename.endswith("graphs.py")
        for frame in sys._current_frames().values()
    )


# --- flight recorder ----------------------------------------------------------------------------------------------


def record_file(folder: str | Path | None, iteration: int, rank: int) -> Path | None:
    """Where this rank's flight record goes; None: nobody wants one, or torch records nothing."""
    if any(os.environ.get(name, "1").strip("0") == "" for name in _RECORD_SIZES):
        return None
    if folder is not None:
        return Path(folder, f"iteration_{iteration}", f"rank_{rank}")
    prefix = next((os.environ[name] for name in _RECORD_FILES if os.environ.get(name)), "")
    return Path(f"{prefix}{rank}") if prefix else None


def dump_flight_record(path: Path, with_nccl: bool) -> None:
    """Write what torch recorded of the collectives, a pickle; mode 0600. torch's ``torchfrtrace`` reads NCCL's."""
    bindings = torch._C._distributed_c10d
    names = ("_dump_nccl_trace", "_dump_fr_trace") if with_nccl else ("_dump_fr_trace",)
    dump: Callable[..., bytes] | None = next(
        (getattr(bindings, each) for each in names if hasattr(bindings, each)), None
    )
    if dump is None:
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # not through a link, and without waiting for the other end of a pipe that somebody has put there
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o600)
    # to tell where a collective was called from, torch imports its compiler: a second, while others may be importing
    with_stacks = "torch._inductor.codecache" in sys.modules
    with os.fdopen(descriptor, "wb") as file:
        file.write(dump(includeStackTraces=with_stacks))


def forget_flight_record() -> None:
    """So that the next record is one of its own iteration; torch 2.11 has this for the purpose."""
    reset: Callable[[], object] | None = getattr(torch._C._distributed_c10d, "_reset_fr_recording_nccl", None)
    if reset is not None:
        reset()
