"""Ctrl-C at each place of a restart: `python -m tests.torture.ctrl_c`; each must end the call, and leave nothing.

A place is an instruction of this library, in the main thread, behind which CPython may run the handler of a signal. It
is struck in a process of its own, where it comes up first, from the error of the function to the next entry. Places of
the standard library are left out: `logging`, for one, takes its lock and loses it there (until Python 3.13).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import inprocess
from inprocess.interrupt.frames import leave_alone
from inprocess.monitor.pidfile import PROGRAM
from inprocess.system.errors import PACKAGE
from inprocess.testing.server import become_subreaper
from tests.harness import Run
from tests.harness.child import Context
from tests.harness.strike import Strike

#: no part of a call
TESTING = os.path.join(PACKAGE, "testing", "")
#: seconds for one process, far more than it takes
DEADLINE_S = 60.0
#: seconds between two lines of progress
REPORT_S = 30.0
#: the chosen place has not come up: it depends on who was faster
NOT_STRUCK = "not struck"


class _AtPlace(Strike):
    """Notes each place in turn; raises at the chosen one."""

    def __init__(self, chosen: str) -> None:
        super().__init__(0)
        self._chosen = chosen
        self.places: dict[str, None] = {}

    def begin(self, frame: FrameType | None) -> None:
        """From here on, in this frame and all that called it too."""
        sys.settrace(self)
        while frame is not None:
            frame.f_trace, frame.f_trace_opcodes, frame.f_trace_lines = self, True, False
            frame = frame.f_back

    def is_due(self, frame: FrameType) -> bool:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_filename.startswith(TESTING):
            return False
        place = f"{code.co_filename[len(PACKAGE) :]}:{frame.f_lineno} {code.co_qualname}+{frame.f_lasti}"
        self.places[place] = None
        return place == self._chosen


# an interruption that is raised in there would end the tracing
leave_alone(Strike.__call__.__code__, _AtPlace.is_due.__code__)


def _restarts(context: Context) -> str:
    """One restart. Returns how the call ended: the type of what it raised, or "went on"; notes the places."""
    strike = _AtPlace(context.args["place"])
    struck, raises = context.spec.rank == 0, context.spec.rank == context.args["world_size"] - 1

    @inprocess.Wrapper(**context.options())
    def function(call: inprocess.CallWrapper) -> None:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if call.iteration == 0:
            if struck:
                strike.begin(sys._getframe())
            if raises:
                raise ValueError("restart")
            dist.all_reduce(torch.ones(1))
        if not context.args["to_end"]:
            sys.settrace(None)
        dist.destroy_process_group()

    try:
        function()
        ended = "went on"
    except BaseException as error:
        ended = type(error).__name__
    sys.settrace(None)
    if dist.is_initialized():
        dist.destroy_process_group()
    if struck:
        Path(context.args["file"]).write_text("\n".join(strike.places))
    return ended if strike.where or not struck else NOT_STRUCK


def _ended(ranks: int, to_end: bool, file: str, place: str = "") -> Any:
    """How the call ended on each rank, and what is left; or that it did not end. The monitor of a rank that leaves the
    others may stay for a while: it tells them."""
    run = Run(_restarts, ranks, args={"file": file, "place": place, "to_end": to_end})
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            found = run.wait(DEADLINE_S, check=False)
        return [*found.values, *(line for line in found.problems if ranks == 1 or PROGRAM not in line)]
    except AssertionError as error:
        return str(error)
    finally:
        run.close()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.ctrl_c", description=__doc__)
    parser.add_argument("--ranks", type=int, default=1, help="the last one raises, the first one is struck; default 1")
    parser.add_argument("--to-end", action="store_true", help="up to the end of the call, not only to the next entry")
    parser.add_argument("words", nargs="*", help="only places with all of these in their name")
    options = parser.parse_args(arguments)
    become_subreaper()
    others = ["went on"] * (options.ranks - 1)
    with tempfile.TemporaryDirectory() as folder:
        ended = functools.partial(_ended, options.ranks, options.to_end, file := os.path.join(folder, "places"))
        if (found := ended()) != [NOT_STRUCK, *others]:
            print(f"without Ctrl-C: {found}")
            return 1
        places = [place for place in Path(file).read_text().splitlines() if all(map(place.__contains__, options.words))]
        struck, wrong, told = 0, 0, time.monotonic()
        for number, place in enumerate(places):
            found = ended(place)
            struck += found != [NOT_STRUCK, *others]
            if found not in (["KeyboardInterrupt", *others], [NOT_STRUCK, *others]):
                wrong += 1
                print(f"{place}: {found}", flush=True)
            if time.monotonic() > told + REPORT_S:
                told = time.monotonic()
                print(f"{number + 1} of {len(places)} places", flush=True)
    print(f"{struck} of {len(places)} places struck, {wrong} wrong", flush=True)
    return bool(wrong or not struck)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
