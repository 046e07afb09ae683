"""``inprocess run`` as a program: what torch reads as it is imported is set first, then the job runs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence

__all__ = ["main", "program"]

#: variables for the launcher and its workers, where they are not set: torch's C++ code warns of each connection that a
#: restart closes, with its stack
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}


def main(given: Sequence[str] | None = None) -> None:
    """Run a job, or one node of it, to its end.

    Raises what torchrun's main raises: ChildFailedError where the job has failed, SignalException for a signal; and
    SystemExit: with code 2 for a wrong option or script, with a message where a worker or another node ended the job,
    where the rendezvous fails, and where torch is not installed.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        from inprocess.launcher import job  # noqa: PLC0415  (imports torch)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        sys.exit(f"inprocess run: torch is not installed for {sys.executable}: `{sys.executable} -m pip install torch`")
    job.run(given)


def program(given: Sequence[str] | None = None) -> None:
    """`main` as a program: neither a signal, such as that of a scheduler, nor a failed job ends it with a traceback of
    this one; torch's report of the workers that failed is printed. After a signal the status is 128 and its number, as
    a worker's that left in time, by which a scheduler tells that from a failure."""
    try:
        _main(given)
    except SystemExit as error:
        _end_unread(error.code)
        raise
    _end_unread(None)


def _end_unread(code: object) -> None:
    """End at once where nobody reads what workers have printed: the interpreter would wait for who does."""
    processes = sys.modules.get("inprocess.launcher.processes")
    if processes is None:
        return
    with contextlib.suppress(KeyboardInterrupt):  # it is not to be waited for
        if processes.all_shown():
            return
    processes.say_cut("" if code is None or isinstance(code, int) else str(code))
    os._exit(code if isinstance(code, int) else int(code is not None))


def _main(given: Sequence[str] | None) -> None:
    try:
        main(given)
    except Exception as error:
        if hasattr(error, "failures"):  # torch's ChildFailedError
            sys.exit(str(error))
        number = getattr(error, "sigval", None)  # torch's SignalException
        if number is None:
            raise
        print(f"inprocess run: ended by {signal.Signals(number).name}, with its workers", file=sys.stderr)
        sys.exit(128 + number)
