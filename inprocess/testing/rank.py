"""Runs inside a rank: replaces the environment, calls the target, reports events, strikes, looks for leftovers.

Every event is one JSON line of at most PIPE_BUF bytes, written with one write: no lock that an interruption could leave
held, no half event when the process is killed.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import logging
import os
import pickle
import random
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

from inprocess.system import logs
from inprocess.system.errors import PACKAGE, in_words
from inprocess.testing.coordinates import At, Point, When

from . import coverage, forked_monitor, leaks
from .growth import line_of, users_line
from .process import become, mark

#: each report of an event takes up to so long (seconds), which shows what a test takes for granted; see CONTRIBUTING
LATE = float(os.environ.get("INPROCESS_TESTS_LATE", "0"))
#: of the ranks' log lines
FORMAT = "%(asctime)s %(threadName)s %(levelname)s %(name)s [%(inprocess)s]: %(message)s"
#: how long what a rank holds may be in use by others (seconds): its monitor, where that serves the store, leaves last
SETTLE_S = 10.0
#: less than PIPE_BUF (4096), so that one write is never split
MAX_EVENT_BYTES = 3500
#: lines of what was left behind that fit into one
LINES = 20
_HIDDEN = (PACKAGE, "<frozen importlib", os.path.dirname(importlib.__file__))


class Strikes(Protocol):
    """A fault, see `inprocess.testing.faults`."""

    @property
    def when(self) -> When | None: ...

    def strike(self, context: Any) -> None: ...


@dataclass(frozen=True)
class Spec:
    """What a rank needs to know; travels to it by pickle, from the test's own process."""

    rank: int
    target: Callable[[Any], Any]
    environment: Mapping[str, str]
    log: str
    faults: Mapping[At, Strikes]
    #: options of Wrapper, for the target
    wrapper: Any
    args: Mapping[str, Any]
    #: called with the rank before anything else: takes the process to where it is to live
    place: Callable[[int], None] | None = None
    #: whether the process ends as a program would: with Python's exit code
    as_program: bool = False
    #: class of what the target gets
    context: type[Context] | None = None
    #: of all processes of the run, see `process.mark`
    mark: int = 0


@dataclass
class Context:
    """What the target gets: the rank, its schedule of faults, and the way to report."""

    spec: Spec
    events: Connection
    control: Connection
    #: number of the wrapped call that runs or ran last, -1 before the first
    calls: int = -1
    #: iteration in which the function was last entered
    iteration: int | None = None
    #: how often it waited for an answer, up to 255
    waits: int = 0
    struck: set[At] = field(default_factory=set)
    #: how much longer each of the next pings takes (seconds), and how many
    slow: tuple[float, int] = (0.0, 0)
    reported: set[str] = field(default_factory=set)
    #: results of the wrapped calls that ended with a value
    values: list[Any] = field(default_factory=list)
    #: the port of the store over which the ranks agree; known while a wrapped function is called
    store_port: Callable[[], int | None] = lambda: None

    @property
    def rank(self) -> int:
        """The initial rank."""
        return self.spec.rank

    @property
    def args(self) -> Mapping[str, Any]:
        return self.spec.args

    def emit(self, event: str, **fields: Any) -> None:
        """Report an event to the test; `t` is CLOCK_MONOTONIC, which all processes share."""
        fields = {"event": event, "call": self.calls, "iteration": self.iteration} | fields
        fields["t"] = time.monotonic()
        os.write(self.events.fileno(), _line(fields) + b"\n")
        self.reported.add(event)
        if LATE:
            time.sleep(random.uniform(0, LATE))

    def reach(self, point: Point) -> bool:
        """A place where the schedule may have a fault for this rank; whether it had one, which came back."""
        for at, fault in self.spec.faults.items():
            if at not in self.struck and at.meets(point):
                self.struck.add(at)
                try:
                    if fault.when is not None:
                        self.wait_for(fault.when)
                except BaseException:  # a restart: it has not struck
                    self.struck.discard(at)
                    raise
                what = {"at": repr(at), "fault": repr(fault), "place": str(point), "line": users_line()}
                self.emit("fault", step=point.label or point.pings, **what)
                fault.strike(self)
                return True
        return False

    def slow_down(self, seconds: float, steps: int) -> None:
        """Take so much longer, now and at the next pings."""
        self.slow = (seconds, steps)
        self.delay()

    def delay(self) -> None:
        """At each ping."""
        seconds, steps = self.slow
        if steps:
            self.slow = (seconds, steps - 1)
            time.sleep(seconds)

    def wait_for(self, when: When) -> None:
        """Return once `when.count` other ranks have reported the event."""
        self.ask("wait_for", awaited=when.event, count=when.count)

    def ask(self, event: str, **fields: Any) -> None:
        """Report an event that the test answers, and wait for the answer.

        That is one byte, which names what it answers: a wait that is interrupted leaves no half of it behind, and its
        answer is not taken for that of the next one.
        """
        self.waits = (self.waits + 1) % 256
        self.emit(event, number=self.waits, **fields)
        while (answer := os.read(self.control.fileno(), 1)) != bytes([self.waits]):
            if not answer:
                raise EOFError("the test has ended")

    def keep(self, value: Any) -> None:
        """What the program returned, for the test: by pickle, in a file beside the log."""
        try:
            data = pickle.dumps(value)
        except Exception as error:
            self.emit("unpicklable", text=f"{type(value).__name__} ({error})")
            return
        with open(f"{self.spec.log}.value", "wb") as file:
            file.write(data)

    def called(self, function: Callable[[], Any], keep: bool = True) -> Any:
        """Call a wrapped function and report what came out; ``keep``: also its value, which JSON can show."""
        self.calls += 1
        self.iteration = None
        self.emit("call")
        try:
            value = function()
        except BaseException as error:
            self.emit("raised", type=type(error).__name__, message=str(error))
            raise
        self.emit("returned", value=value if keep or value is None else True)
        if keep:
            self.values.append(value)
        return value


def _line(fields: dict[str, Any]) -> bytes:
    """As JSON, which is ASCII. Of what is too long lists have their first items, and texts their ends."""
    given = dict(fields)
    while len(line := json.dumps(fields, default=repr)) > MAX_EVENT_BYTES:
        name = max(fields, key=lambda name: len(json.dumps(fields[name], default=repr)))
        shown = fields[name]
        if isinstance(shown, list) and len(shown) > 1:
            kept = (len(shown) - 1) // 2
            fields[name] = [*given[name][:kept], f"and {len(given[name]) - kept} more"]
        else:
            text = shown if isinstance(shown, str) else str(shown)
            fields[name] = text[(len(text) + 1) // 2 :]
    return line.encode()


def rank_main(spec: Spec, events: Connection, control: Connection) -> None:
    """What the forkserver's child runs."""
    gc.freeze()  # what the server imported is not worth collecting again
    _prepare(spec)
    context = (spec.context or Context)(spec, events, control)
    # that it has gone when the calls are over is looked at as well
    before = leaks.Snapshot.take(without_pids=forked_monitor.prepare())
    context.emit("start", pid=os.getpid())
    code = _call(context)
    forked_monitor.forget()
    if not spec.as_program:  # which may keep what it likes until its end
        gc.collect()
        if left := leaks.settled(before, _snapshot, float(spec.args.get("settle", SETTLE_S))):
            more = [f"and {len(left) - LINES} more"] if len(left) > LINES else []
            context.emit("leftovers", lines=left[:LINES] + more)
    context.emit("done")
    _exit(code if spec.as_program else 0, full=bool(spec.args.get("full_exit")))


def _snapshot() -> leaks.Snapshot:
    # a monitor that others still needed may have ended meanwhile; the next call would reap it
    if "inprocess.monitor.process" not in sys.modules:
        return leaks.Snapshot.take()
    writing = sys.modules["inprocess.monitor.process"].reap_lingering()
    return leaks.Snapshot.take(without_pids=writing)  # whoever started the rank waits for them


def _exit(code: int, full: bool) -> None:
    """Leave with Python's exit handlers; `full` also tears down all of torch (0.4 s), so only some tests do it."""
    coverage.finish()
    if full:
        ctypes.pythonapi.Py_Exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _prepare(spec: Spec) -> None:
    log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    become(spec.environment)
    mark(spec.mark)
    coverage.begin()
    if spec.place is not None:
        spec.place(spec.rank)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # a file of its own, open until the end: the stacks are told apart from the log
    faulthandler.enable(file=os.open(f"{spec.log}.stacks", os.O_WRONLY | os.O_CREAT, 0o600), all_threads=True)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, defaults={"inprocess": logs.NO_CALL}))
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(logging.INFO)


def _call(context: Context) -> int:
    """Python's exit code."""
    try:
        value = context.spec.target(context)
    except BaseException as error:
        code = _exit_code(error)
        if code == 0:  # `sys.exit(main())` at the end of a script
            return 0
        text = "".join(_traceback(error) if context.spec.as_program else traceback.format_exception(error))
        print(text, file=sys.stderr, flush=True)
        what = {"type": type(error).__name__, "message": str(error), "line": line_of(error), "trace": text[-2000:]}
        what["cause"] = "" if error.__cause__ is None else in_words(error.__cause__)[:500]
        context.emit("exception", **what)
        return code
    context.emit("value", value=value)
    return 0


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 1


def _traceback(error: BaseException) -> Iterator[str]:
    """Without the frames of this library, and those of an import."""
    whole = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = whole
    while each is not None:
        each.stack[:] = [frame for frame in each.stack if not frame.filename.startswith(_HIDDEN)]
        each = each.__cause__ or each.__context__
    return whole.format()
