"""The forkserver from which ranks start: it has imported torch once, so four ranks start in 0.03 s.

What it does to the process of the tests: the process becomes a subreaper, so daemons that escape from a rank become its
children and can be seen, and it has multiprocessing's two helpers until it ends.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys

__all__ = ["become_subreaper", "heed_ctrl_c", "preload", "server_descriptors", "servers", "start_server"]

PR_SET_CHILD_SUBREAPER = 36
#: what it imports before the first rank starts
_preload = [
    "torch",
    "torch.distributed",
    "torch._dynamo",  # the first optimizer would import it
    "inprocess",
    "inprocess.wrap",
    "inprocess.testing.instruments",
    "inprocess.monitor.program",
    "inprocess.stores.serving",
]


def preload(*modules: str) -> None:
    """Have the server import these as well; without effect once it runs."""
    _preload.extend(module for module in modules if module not in _preload)


def become_subreaper() -> None:
    """Daemons that escape from a rank become children of this process, and so can be seen."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def heed_ctrl_c() -> None:
    """A shell has SIGINT ignored in what it runs in the background, and children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@functools.lru_cache(maxsize=1)
def start_server() -> None:
    """Start the forkserver; it imports torch while other tests run."""
    become_subreaper()
    before = os.environ.copy()
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    # in Python before 3.13 the server knows no other way to this process's path
    os.environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        multiprocessing.set_forkserver_preload(_preload)
        multiprocessing.resource_tracker.ensure_running()
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def servers() -> set[int]:
    """Process ids of multiprocessing's own helpers, which stay until the end."""
    pids = (
        getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None),
        getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None),
    )
    return {pid for pid in pids if pid is not None}


def server_descriptors() -> set[int]:
    fds = (
        getattr(multiprocessing.forkserver._forkserver, "_forkserver_alive_fd", None),
        getattr(multiprocessing.resource_tracker._resource_tracker, "_fd", None),
    )
    return {fd for fd in fds if fd is not None}
