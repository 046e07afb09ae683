"""The ``Wrapper`` decorator: checks its options once, then runs one ``Loop`` per call. Start to read here.

Where the host of the store is lost, another ``Loop`` goes on with the call, over another store.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import signal
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

from inprocess.abort import AbortTorchDistributed
from inprocess.call.disabled import disabled
from inprocess.call.hooks import adapt, adapt_rank_assignment
from inprocess.call.injection import Injector
from inprocess.call.job import Job, enter_call, leave_call
from inprocess.call.leaving import LeaveSignals
from inprocess.call.loop import Loop
from inprocess.call.participant import Hooks
from inprocess.call_wrapper import CallWrapper
from inprocess.collectives import nccl_wake
from inprocess.exception import OptionError
from inprocess.options import Options
from inprocess.protocol.assignment import ShiftRanks
from inprocess.system import environment, extensions, logs, observers
from inprocess.system.errors import shown

__all__ = ["CallWrapper", "Wrapper"]

F = TypeVar("F", bound=Callable[..., Any])
W = TypeVar("W", bound="Wrapper")
Duration = timedelta | float


class Wrapper:
    """Restarts the decorated function inside the same process, on all healthy ranks, when one of them fails.

    A call returns the function's value once all active ranks returned from the same iteration, None on reserve ranks.
    ``@inprocess.Wrapper`` alone means ``@inprocess.Wrapper()``; mypy, other than pyright, knows the latter only.
    It needs ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` in the environment (under SLURM
    ``INPROCESS_LAUNCH=slurm`` instead), and the main thread. The
    last two are not needed where ``store_kwargs`` has ``host_name`` and ``port``.

    All durations are ``datetime.timedelta`` or numbers of seconds.

    Args:
        store_factory: the store through which the ranks agree; default: a torch TCPStore that the monitor process of
            rank 0 serves at MASTER_ADDR:MASTER_PORT (or the one torchrun's agent serves there). An importable class or
            function. It is called in this process first: what it raises, the call raises.
        store_kwargs: its keyword arguments; for the default ``host_name``, ``port`` (default: MASTER_ADDR, MASTER_PORT;
            with ``port`` alone and no MASTER_ADDR all ranks are on this host) and ``bind``, the one address of the
            host on which the stores listen (default: loopback where MASTER_ADDR is, otherwise all interfaces).
        initialize: hook ``(state) -> state`` before each run of the function. An Exception restarts; a BaseException
            such as RestartAbort (see ``RetryController``) makes everybody leave.
        abort: hook that unblocks what the main thread waits for; runs in the monitor thread. Default
            ``AbortTorchDistributed()``; None: nothing is aborted.
        finalize: hook after the function was left because of a fault.
        health_check: hook before the function runs and after a fault. What it raises before is a fault like any other;
            what it raises after one takes this rank out of the job, as a HealthCheckError.
        rank_assignment: ``(ctx) -> ctx``, who gets which rank; default ``ShiftRanks()``.
        rank_filter: ``(state) -> state`` as in nvidia-resiliency-ext 0.2, applied after ``rank_assignment``.
        monitor_thread_interval: pause before an interruption that was swallowed is raised again; 1 s.
        monitor_process_interval: how often the monitor process looks at the rank; 1 s, and no less often than eight
            times in ``heartbeat_timeout``.
        heartbeat_interval: between two heartbeats of a monitor; 1 s. Four are sent in ``heartbeat_timeout`` at least.
        progress_watchdog_interval: between two automatic progress stamps; 1 s. Half a second is waited at most.
        soft_timeout: no progress for so long interrupts the iteration; 60 s.
        hard_timeout: a rank that does not answer for so long is killed; 90 s.
        heartbeat_timeout: a host that is silent for so long is given up; 30 s.
        barrier_timeout: the longest wait for the others before and between iterations; 120 s.
        completion_timeout: the longest wait, once this rank returned, for the others to return; 120 s.
        last_call_wait: accepted for compatibility: records are complete without waiting; 0 s.
        termination_grace_time: between SIGTERM and SIGKILL; 5 s, at most a quarter of ``barrier_timeout -
            hard_timeout``.
        monitor_process_logfile: absolute path of the monitor's log (mode 0600), ``{rank}`` is filled in; None: errors
            go to standard error.
        monitor_process_pidfile: absolute path of its pid file, likewise; for ``python -m inprocess.wait_daemon``. A
            process that replaces another one (``INPROCESS_RESTART``) puts a dot and its own id behind it.
        run_dir: directory for the events of all ranks, made where there is none; a relative one is below the working
            directory. None: the one in the environment variable ``INPROCESS_RUN_DIR`` (``none``
            is none), which `inprocess run` sets, or none.
        completion: hook after everybody returned.
        terminate: hook before the call raises.
        standby_stores: how many monitors, besides that of rank 0, can go on with the job where the host of its store is
            lost; default 2, 0: the job ends with it. The job goes on where more than half of the ranks meet.
            Only for the store that the library itself serves.
        interrupt_signal: signal that interrupts the main thread; None: a free real-time signal.
        join: what this process does where the job runs already, because it replaces one that died: ``"now"``
            interrupts the running iteration to take the free slot, ``"next_restart"`` waits for a restart. Where no
            slot is free, or it would only be a reserve, it waits in both cases.
        max_repeats: the same error so many times in a row, without progress in between, ends the job where no
            iteration of the call has ever made progress; default 10. From the third time on each restart waits, 0.05 s
            and up to 5 s; where the job made progress once, it continues with the longest pause. None: the same error
            is not counted, and nothing waits. The same hang before the first ``ping()`` ends such a call after three
            times. See "A function that fails again and again" in the guide.
        leave_signals: signals that ask a rank to leave, as schedulers send them before they kill; default SIGTERM. It
            leaves after its step, with `Preempted`, and the others go on without it; a handler of the program's is
            called as well. (): none. See "Leaving in time" in the guide.
        leave_grace: from such a signal until the function is interrupted where no step has ended; 20 s. Less than what
            the scheduler grants before it kills.
        on_preemption: hook on a rank that leaves so, when the others know and go on.
        warm_up: hook on a reserve rank while it waits, once in each iteration: it loads and compiles what the first
            step of the function would. A restart ends it. What it raises takes this rank out of the job, and nobody
            else. See "Reserve ranks" in the guide.
        enabled: False: the function itself is returned, unchanged. Only where it has a parameter annotated plain
            ``CallWrapper`` it gets one that does nothing, if the caller leaves it out; it runs once, in any thread.

    Raises:
        OptionError: (also a ValueError) an option is wrong; names it, its value and the remedy.
    """

    def __init__(
        self,
        *,
        store_factory: Callable[..., Any] | None = None,
        store_kwargs: dict[str, Any] | None = None,
        initialize: Callable[..., Any] | None = None,
        abort: Callable[..., Any] | None = AbortTorchDistributed(),  # noqa: B008  (stateless)
        finalize: Callable[..., Any] | None = None,
        health_check: Callable[..., Any] | None = None,
        rank_assignment: Callable[..., Any] | None = None,
        rank_filter: Callable[..., Any] | None = None,
        monitor_thread_interval: Duration = timedelta(seconds=1),
        monitor_process_interval: Duration = timedelta(seconds=1),
        heartbeat_interval: Duration = timedelta(seconds=1),
        progress_watchdog_interval: Duration = timedelta(seconds=1),
        soft_timeout: Duration = timedelta(seconds=60),
        hard_timeout: Duration = timedelta(seconds=90),
        heartbeat_timeout: Duration = timedelta(seconds=30),
        barrier_timeout: Duration = timedelta(seconds=120),
        completion_timeout: Duration = timedelta(seconds=120),
        last_call_wait: Duration = timedelta(seconds=0),
        termination_grace_time: Duration = timedelta(seconds=5),
        monitor_process_logfile: str | None = None,
        monitor_process_pidfile: str | None = None,
        run_dir: str | None = None,
        completion: Callable[..., Any] | None = None,
        terminate: Callable[..., Any] | None = None,
        standby_stores: int = 2,
        interrupt_signal: int | None = None,
        join: str = "now",
        max_repeats: int | None = 10,
        leave_signals: Iterable[int] = (signal.SIGTERM,),
        leave_grace: Duration = timedelta(seconds=20),
        on_preemption: Callable[..., Any] | None = None,
        warm_up: Callable[..., Any] | None = None,
        enabled: bool = True,
        **unknown: NoReturn,
    ) -> None:
        self._options = Options.build(
            **unknown,
            store_factory=store_factory,
            store_kwargs=store_kwargs,
            monitor_thread_interval=monitor_thread_interval,
            monitor_process_interval=monitor_process_interval,
            heartbeat_interval=heartbeat_interval,
            progress_watchdog_interval=progress_watchdog_interval,
            soft_timeout=soft_timeout,
            hard_timeout=hard_timeout,
            heartbeat_timeout=heartbeat_timeout,
            barrier_timeout=barrier_timeout,
            completion_timeout=completion_timeout,
            last_call_wait=last_call_wait,
            termination_grace_time=termination_grace_time,
            monitor_process_logfile=monitor_process_logfile,
            monitor_process_pidfile=monitor_process_pidfile,
            run_dir=run_dir,
            standby_stores=standby_stores,
            interrupt_signal=interrupt_signal,
            join=join,
            max_repeats=max_repeats,
            leave_signals=leave_signals,
            leave_grace=leave_grace,
            enabled=enabled,
        )
        self._hooks = Hooks(
            assign=adapt_rank_assignment(ShiftRanks() if rank_assignment is None else rank_assignment, rank_filter),
            initialize=adapt("initialize", initialize),
            abort=adapt("abort", abort),
            finalize=adapt("finalize", finalize),
            health_check=adapt("health_check", health_check),
            completion=adapt("completion", completion),
            terminate=adapt("terminate", terminate),
            on_preemption=adapt("on_preemption", on_preemption),
            warm_up=adapt("warm_up", warm_up),
            wakes_nccl=nccl_wake.is_wanted(abort),
        )

    if TYPE_CHECKING:

        @overload
        def __new__(cls, fn: F, /) -> F: ...  # type: ignore[misc]  # no instance

        @overload
        def __new__(cls: type[W], *others: Any, **options: Any) -> W: ...

    def __new__(cls, *fn: Any, **options: Any) -> Any:
        """For ``@Wrapper`` without parentheses: the wrapped function in place of a Wrapper."""
        if not fn or cls.__init__ is not Wrapper.__init__:  # a subclass may take what it likes
            return super().__new__(cls)
        if len(fn) > 1 or not callable(fn[0]):
            raise OptionError(
                f"Wrapper({', '.join(map(shown, fn))}): options are given by name, as in Wrapper(soft_timeout=60); "
                "only the function to be wrapped may stand without one"
            )
        return cls(**options)(fn[0])

    # what inspect.signature shows of the class
    __new__.__wrapped__ = __init__  # type: ignore[attr-defined]

    def __call__(self, fn: F) -> F:
        """The wrapped function. With ``enabled=False`` the function itself, see there."""
        if not callable(fn):
            raise OptionError(f"Wrapper() decorates a function, not {fn!r}: write @inprocess.Wrapper() above it")
        if not self._options.enabled:
            return disabled(fn)
        _refuse_later(fn)
        injector = Injector(fn, CallWrapper)
        if forgotten := injector.forgotten():
            warnings.warn(
                f"the parameter {forgotten!r} of {shown(fn)} gets no CallWrapper, for want of an annotation: write "
                f"`{forgotten}: inprocess.CallWrapper`",
                stacklevel=2,
            )

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as closing:  # said before anything begins: Ctrl-C may cut one of them short
                closing.callback(leave_call, closing)
                enter_call(closing)
                closing.callback(logs.leave)
                closing.callback(observers.leave)
                logs.begin()
                closing.enter_context(environment.translated())
                run = functools.partial(self._call, injector, fn, args, kwargs)
                instrument = extensions.first("Instrument")
                return run() if instrument is None else instrument.call(run)

        return wrapped  # type: ignore[return-value]

    def _call(self, injector: Injector, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        job, handover = Job.enter(), None
        with LeaveSignals(self._options) as leaving:
            while True:
                with contextlib.ExitStack() as opened:
                    try:
                        options, hooks = self._options, self._hooks
                        loop = Loop(options, hooks, injector, fn, args, kwargs, job, leaving, opened, handover)
                    except BaseException:
                        if handover is None:
                            job.uncount()
                        raise
                    value = loop.run()
                if (handover := loop.handover) is None:
                    return value


def _refuse_later(fn: Callable[..., Any]) -> None:
    """A call of such a function runs none of it."""
    for kind, is_one in _LATER.items():
        if is_one(fn) or is_one(type(fn).__call__):
            raise OptionError(
                f"{shown(fn)} is {kind}: its body would run after the call, where nothing restarts it. Wrap an "
                "ordinary function that runs it to its end, such as one that calls asyncio.run()"
            )


_LATER: dict[str, Callable[[object], bool]] = {
    "a coroutine function (async def)": inspect.iscoroutinefunction,
    "a generator function": inspect.isgeneratorfunction,
    "an asynchronous generator function": inspect.isasyncgenfunction,
}
