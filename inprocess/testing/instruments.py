"""Inside a rank: what a program's wrapped functions do is reported, and its faults strike, without a line of its own.

The rank's process exists for one test, so the library's classes are changed in place and stay so: `Wrapper` gets the
test's options, `CallWrapper.ping` counts steps. Phases, hooks and entries are reported by an `Instrument`.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import io
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d

from inprocess import call_wrapper, wrap
from inprocess.call.instrument import Step
from inprocess.call.participant import Participant
from inprocess.call_wrapper import Controls
from inprocess.exception import OptionError
from inprocess.live import state as live
from inprocess.protocol.phases import Phase
from inprocess.system import extensions
from inprocess.system.errors import in_words
from inprocess.testing.coordinates import Point

from . import marks
from .growth import Growth, users_line
from .patching import change
from .rank import Context

__all__ = ["Instruments"]

#: hook -> the phases in which it runs
_HOOKS = {
    "initialize": (Phase.INITIALIZE,),
    "health_check": (Phase.CHECK, Phase.RECHECK),
    "abort": (Phase.ABORT,),
    "finalize": (Phase.FINALIZE,),
    "completion": (Phase.COMPLETE,),
    "terminate": (Phase.LEAVE,),
}
#: fields of each event that no value of `here` may have
_OF_EVENTS = {"event", "call", "t"}
_HOOKED = {phase for phases in _HOOKS.values() for phase in phases}
#: options where neither the program nor the test gives them: timeouts may be short
QUICK = {
    "monitor_thread_interval": 0.25,
    "monitor_process_interval": 0.25,
    "progress_watchdog_interval": 0.25,
    "heartbeat_interval": 0.25,
    "termination_grace_time": 1,
}


class Instruments:
    """Of one rank. `install` before the program is imported."""

    def __init__(self, context: Context, options: Mapping[str, Any]) -> None:
        self._context, self._options = context, options
        self._phases = {at.phase for at in context.spec.faults}
        #: of the wrapped function, while it runs
        self._call: call_wrapper.CallWrapper | None = None
        self._growth = Growth()

    def install(self) -> None:
        """Change the library, torch's `save` and Python's `open` in this process."""
        marks.reached = self._here
        self._growth.watch()
        change(wrap.Wrapper, "__init__", self._wrapper)
        extensions.give("Instrument", self)
        change(call_wrapper.CallWrapper, "ping", self._ping)
        change(live.LiveState, "recover", self._recover)
        change(distributed_c10d, "_new_process_group_helper", self._group)
        if self._sees_files():
            change(torch, "save", self._save)
            change(builtins, "open", self._open)
            io.open = builtins.open

    def _sees_files(self) -> bool:
        return any(at.file is not None for at in self._context.spec.faults)

    # --- the library ----------------------------------------------------------------------------------------------

    def _wrapper(self, begin: Callable[..., None], wrapper: Any, **given: Any) -> None:
        spec = self._context.spec
        log = os.path.join(os.path.dirname(spec.log), "monitor{rank}.log")
        of_test = {"max_repeats": spec.args["max_repeats"], "monitor_process_logfile": log}
        begin(wrapper, **{**QUICK, **of_test, **given, **self._options})

    def call(self, run: Callable[[], Any]) -> Any:
        """See `inprocess.call.instrument.Instrument`."""
        try:
            return self._context.called(run, keep=False)
        finally:
            self._context.store_port = _unknown

    def begin(self, participant: Participant, steps: Mapping[Phase, Step]) -> dict[Phase, Step]:
        """See `inprocess.call.instrument.Instrument`."""
        wanted: dict[str, Any] = {
            name: self._hook(participant, getattr(participant.hooks, name), phases)
            for name, phases in _HOOKS.items()
            if any(phase.value in self._phases for phase in phases)
        }
        participant.hooks = dataclasses.replace(participant.hooks, **wanted)
        participant.fn = functools.partial(self._run, participant, participant.fn)
        self._context.store_port = lambda: participant.agents.served_port
        return {phase: functools.partial(self._step, participant, phase, step) for phase, step in steps.items()}

    def _hook(self, participant: Participant, hook: Any, phases: Sequence[Phase]) -> Callable[[Any], Any]:
        def struck(state: Any) -> Any:
            # `abort` runs in another thread, at the end of the phase before
            phase = participant.phase if participant.phase in phases else phases[0]
            self._reach(iteration=state.iteration, phase=phase.value)
            return state if hook is None else hook(state)

        return struck

    def _step(self, participant: Participant, phase: Phase, step: Step) -> Any:
        iteration = participant.job.before + participant.membership.iteration
        self._context.emit("phase", name=phase.value, iteration=iteration)
        if phase is not Phase.RUN and phase not in _HOOKED:
            self._reach(iteration=iteration, phase=phase.value)
        return step()

    def _run(self, participant: Participant, fn: Callable[[], Any]) -> Any:
        """The wrapped function."""
        context, call = self._context, participant.call
        state = call.state
        context.iteration, context.slow = state.iteration, (0.0, 0)
        self._count()
        context.emit("enter", rank=state.active_rank, world_size=state.active_world_size, pid=os.getpid())
        self._call = call
        try:
            self._reach(phase=Phase.RUN.value)
            return fn()
        finally:
            self._call = None
            context.emit("leave", pings=Controls(call).counts.pings)

    def _count(self) -> None:
        """What has grown. Objects of the program may do anything when they are looked at: that is no error of its."""
        try:
            self._growth.count()
            lines = self._growth.lines()
        except Exception as error:
            self._context.emit("uncounted", error=in_words(error))
            return
        if lines:
            self._context.emit("grown", lines=lines)
        if self._growth.groups:
            self._context.emit("group_kept", where=self._growth.groups)

    def _ping(self, ping: Callable[[Any], None], call: Any) -> None:
        self._context.delay()
        try:
            self._reach(at_ping=True)
        except Exception as error:
            raise error.with_traceback(None)  # noqa: B904  # an injected one, without the way through this library
        ping(call)

    def _reach(self, iteration: int | None = None, **where: Any) -> None:
        context, call = self._context, self._call
        at = context.iteration if iteration is None else iteration
        pings = None if call is None else Controls(call).counts.pings
        context.reach(Point(context.rank, at, pings=pings, call=context.calls, **where))

    # --- the program ----------------------------------------------------------------------------------------------

    def _here(self, label: str, values: Mapping[str, Any]) -> None:
        for name in _OF_EVENTS & values.keys():
            raise OptionError(f"here({label!r}, {name}=...): each event has its own {name}; give this another name")
        self._context.emit("here", label=label, **values)
        self._reach(label=label)

    def _recover(self, recover: Callable[..., int], *args: Any, **kwargs: Any) -> int:
        step = recover(*args, **kwargs)
        self._context.emit("here", label="LiveState.recover", step=step)
        return step

    def _group(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._call is None:
            self._context.emit("group_outside", where=users_line())
        return make(*args, **kwargs)

    def _save(self, save: Callable[..., None], obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """Half of the file, the fault, the other half. The names are those of `torch.save`."""
        if not isinstance(f, str | os.PathLike) or not self._is_wanted(os.fspath(f)):
            save(obj, f, *args, **kwargs)
            return
        memory = io.BytesIO()
        save(obj, memory, *args, **kwargs)
        data = memory.getvalue()
        with io.FileIO(f, "wb") as out:
            out.write(data[: len(data) // 2])
            self._reach(file=os.fspath(f))
            out.write(data[len(data) // 2 :])

    def _open(self, open_: Callable[..., Any], file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        opened = open_(file, mode, *args, **kwargs)
        if isinstance(file, str | os.PathLike) and set(mode) & set("wax+") and self._is_wanted(os.fspath(file)):
            self._reach(file=os.fspath(file))
        return opened

    def _is_wanted(self, path: str | bytes) -> bool:
        """Whether a fault may strike at this file."""
        if isinstance(path, bytes):
            return False
        place = self._context
        pings = None if self._call is None else Controls(self._call).counts.pings
        point = Point(place.rank, place.iteration, pings=pings, call=place.calls, file=path)
        return any(at.meets(point) for at in place.spec.faults if at not in place.struck)


def _unknown() -> None:
    """No wrapped function is called."""
