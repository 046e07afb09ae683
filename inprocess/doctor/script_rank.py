"""In a rank that the doctor examines: notes what the program does, beside what `inprocess.testing` notes.

Files of the working directory that are links to the user's own become copies before the program writes to them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.optim import optimizer as optimizers

from inprocess import events
from inprocess.call.participant import Participant
from inprocess.call_wrapper import Controls
from inprocess.doctor.script_copy import CHANGES, keep_above_apart, keep_apart
from inprocess.doctor.script_mending import Mending
from inprocess.interrupt.signals import Interrupter
from inprocess.options import Options, seconds
from inprocess.system import clock
from inprocess.system.errors import in_words
from inprocess.testing.coordinates import Point
from inprocess.testing.growth import line_of, users_line
from inprocess.testing.instruments import Instruments
from inprocess.testing.patching import change
from inprocess.testing.process import run_script
from inprocess.testing.rank import Context

__all__ = ["Examined"]

#: of each line that writes files, and of the steps of each run of the function, the first so many are told
TOLD = 3
_WRITES = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True)
class Examined:
    """A script, as a rank runs it; travels to it by pickle."""

    path: str
    args: tuple[str, ...]
    #: the working directory
    folder: str
    #: of `Wrapper`, in place of the program's own
    options: Mapping[str, Any] = field(repr=False)
    #: what of `script_mending` is mended
    mend: frozenset[str] = frozenset()
    #: whether the steps of optimizers are counted, where the function makes no ping
    by_optimizer: bool = False

    def __call__(self, context: Context) -> None:
        os.chdir(self.folder)
        sys.dont_write_bytecode = True
        observer = Observer(context, self)
        observer.install()
        try:
            run_script(self.path, self.args)
        finally:
            context.keep(observer.values)


class Observer(Instruments):
    """Of one rank. Its events: ``wrapper``, ``options``, ``step``, ``pace``, ``error``, ``file``, ``swallowed``,
    ``group_inside`` and ``too_few``."""

    def __init__(self, context: Context, script: Examined) -> None:
        super().__init__(context, script.options)
        self._script = script
        beside = os.path.join(os.path.dirname(context.spec.log), "tmp")
        self._mending = Mending(beside, script.mend)
        #: what the wrapped functions returned
        self.values: list[Any] = []
        self._told: Counter[str] = Counter()
        # of the run of the function: steps by ping, by optimizers; when the last one was; the longest
        self._steps, self._optimized, self._last, self._longest = 0, 0, 0.0, 0.0

    def install(self) -> None:
        super().install()
        self._mending.install()
        change(Interrupter, "report_swallowed", self._swallowed)
        optimizers.register_optimizer_step_pre_hook(self._optimizes)
        sys.addaudithook(self._audit)
        events.subscribe(self._waits)

    def _waits(self, event: events.Event) -> None:
        if event.kind == "too_few":
            self._context.emit("too_few")

    def _sees_files(self) -> bool:
        return True

    # --- the library ----------------------------------------------------------------------------------------------

    def _wrapper(self, begin: Callable[..., None], wrapper: Any, **given: Any) -> None:
        enabled = bool(given.get("enabled", True))
        self._context.emit("wrapper", enabled=enabled, where=users_line())
        super()._wrapper(begin, wrapper, **given)
        if enabled:
            soft_timeout = seconds("soft_timeout", given.get("soft_timeout", Options.soft_timeout))
            self._context.emit("options", soft_timeout=soft_timeout)

    def call(self, run: Callable[[], Any]) -> Any:
        self._mending.called()
        value = super().call(run)
        self.values.append(value)
        return value

    def _run(self, participant: Participant, fn: Callable[[], Any]) -> Any:
        call = participant.call

        def watched() -> Any:
            self._steps = self._optimized = 0
            self._last, self._longest = clock.monotonic(), 0.0
            try:
                value = fn()
                self._note_return(Controls(call).gate)
                return value
            except Exception as error:
                self._context.emit("error", text=in_words(error), line=line_of(error))
                raise
            finally:
                self._context.emit(
                    "pace", pings=Controls(call).counts.pings, optimized=self._optimized, longest=self._longest
                )

        self._mending.entered()
        self._mending.inside = True
        try:
            return super()._run(participant, watched)
        finally:
            self._mending.inside = False

    def _ping(self, ping: Callable[[Any], None], call: Any) -> None:
        self._note_step(Controls(call).counts.pings, "ping")
        super()._ping(ping, call)

    def _optimizes(self, *_: Any) -> None:
        """An optimizer's step begins."""
        call, number = self._call, self._optimized
        if call is None or Controls(call).counts.pings:
            return
        self._optimized += 1
        self._note_step(number, "optimizer")
        if self._script.by_optimizer:
            context = self._context
            context.reach(Point(context.rank, context.iteration, pings=number, at_ping=True, call=context.calls))

    def _note_step(self, number: int, by: str) -> None:
        now = clock.monotonic()
        self._longest, self._last = max(self._longest, now - self._last), now
        self._steps = number + 1
        if number < TOLD or not number & (number - 1):  # and powers of two, for what does not end
            self._context.emit("step", number=number, by=by)

    def _group(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._call is not None:
            self._context.emit("group_inside")
        return super()._group(make, *args, **kwargs)

    def _swallowed(self, report: Callable[..., None], gate: Any, who: str, where: str, dropped: bool) -> None:
        self._context.emit("swallowed", where=where, dropped=dropped)
        report(gate, who, where, dropped)

    def _note_return(self, gate: Any) -> None:
        """The function returns: not what it does when it is interrupted."""
        if gate is not None and gate.interrupting and gate.raised_where:
            self._context.emit("swallowed", where=gate.raised_where, dropped=False)

    # --- files ----------------------------------------------------------------------------------------------------

    def _save(self, save: Callable[..., None], obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        self._note_file(f, "w")
        with self._protected():
            super()._save(save, obj, f, *args, **kwargs)

    def _open(self, open_: Callable[..., Any], file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        self._note_file(file, mode)
        return super()._open(open_, file, mode, *args, **kwargs)

    def _protected(self) -> contextlib.AbstractContextManager[None]:
        """Faults that are not about files do not cut one in half, which would hide what else they show."""
        # not by the call's own atomic(), which counts as progress
        gate = None if self._call is None else Controls(self._call).gate
        return contextlib.nullcontext() if gate is None else gate.atomic

    def _note_file(self, file: Any, mode: str) -> None:
        if not isinstance(file, str | os.PathLike) or not set(mode) & set("wx+a"):
            return
        path = os.path.abspath(os.fsdecode(file))
        keep_apart(path, self._script.folder)
        line = users_line()
        self._told[line] += 1
        if line and self._told[line] <= TOLD:
            inside = self._call is not None
            self._context.emit("file", path=path, line=line, mode=mode, step=self._steps - 1, inside=inside)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[2], int) and args[2] & _WRITES
        if (writes or event == "os.truncate") and isinstance(args[0], str):
            keep_apart(args[0], self._script.folder)
        for path in (args[number] for number in CHANGES.get(event, ())):
            if isinstance(path, str | os.PathLike):
                keep_above_apart(os.fsdecode(path), self._script.folder)
