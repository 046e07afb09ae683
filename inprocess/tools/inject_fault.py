"""Faults on purpose: picks ranks by a seed that all of them share, and strikes there from a background thread.

Call it in the wrapped function, on every rank, with the same arguments. Nothing is sent between the ranks.
"""

from __future__ import annotations

import ctypes
import enum
import importlib
import os
import random
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from inprocess.exception import OptionError
from inprocess.options import seconds
from inprocess.system.logs import get_logger

__all__ = [
    "Fault",
    "InjectedException",
    "clear_workload_exception",
    "dispatch_fault_injection",
    "inject_fault",
    "maybe_raise_workload_exception",
]

log = get_logger(__name__)

#: longer than any training runs (seconds)
FOREVER = 1 << 30
#: longer than any training runs (clock cycles of a GPU: six days at 2 GHz)
FOREVER_ON_GPU = 1 << 50
#: GPU_OOM takes the memory in so many portions: what it leaves is smaller than one of them
PORTIONS = 64


class InjectedException(Exception):
    """What the three exception faults raise in the main thread."""


class Fault(enum.Enum):
    """What can happen to a rank. The faults on the GPU need CUDA."""

    #: an index outside a tensor on the GPU: the CUDA context of the process is lost, each later call of CUDA fails
    GPU_ERROR = "gpu_error"
    #: a kernel that ends in six days: what comes behind it on its stream, collectives too, never begins
    GPU_SLEEP = "gpu_sleep"
    #: the next call of any ``torch.nn.Module`` takes all memory of the GPU, and raises torch's OutOfMemoryError
    GPU_OOM = "gpu_oom"
    #: the next call of any ``torch.nn.Module`` never ends: the others wait for this rank in a collective
    STUCK_COLLECTIVE = "stuck_collective"
    #: the next call of any ``torch.nn.Module`` raises InjectedException, or `maybe_raise_workload_exception` does
    WORKLOAD_EXC = "workload_exc"
    #: InjectedException as an asynchronous exception; code that blocks in C sees it only afterwards
    ASYNC_EXC = "async_exc"
    #: InjectedException from a signal handler (SIGUSR1), which interrupts also what blocks in Python
    SIGNAL_EXC = "signal_exc"
    #: ``os.abort()``
    OS_ABORT = "os_abort"
    #: the interpreter lock is never given back: no other thread runs Python code any more
    LOCK_GIL = "lock_gil"
    #: a read from address 0
    SEGFAULT = "segfault"
    #: the signal, to this process
    SIGINT = "sigint"
    #: the signal, to this process
    SIGKILL = "sigkill"
    #: the signal, to this process
    SIGTERM = "sigterm"
    #: the signal, to this process: it stands still, with all its threads
    SIGSTOP = "sigstop"

    # nvidia-resiliency-ext 0.2's names of the same members
    GPU = "gpu_error"
    ABORT = "os_abort"
    GIL = "lock_gil"
    INT = "sigint"
    KILL = "sigkill"
    TERM = "sigterm"
    STOP = "sigstop"


GPU_FAULTS = frozenset({Fault.GPU_ERROR, Fault.GPU_SLEEP, Fault.GPU_OOM})
#: wait for the next call of a module
IN_FORWARD = frozenset({Fault.WORKLOAD_EXC, Fault.GPU_OOM, Fault.STUCK_COLLECTIVE})


def inject_fault(
    faults: Sequence[Fault] | None = None,
    num_faults: int | tuple[int, int] = 1,
    keep_alive: int = 1,
    delay: float | tuple[float, float] = 0.0,
    seed: int | None = None,
    callback: Callable[[], object] | None = None,
) -> dict[int, Fault]:
    """Pick ranks and, on those, let a fault strike after a while. Returns at once.

    Args:
        faults: choose from these; default: all, those on the GPU only where CUDA is available.
        num_faults: how many ranks are hit, or (least, most); default 1.
        keep_alive: so many ranks are spared whatever ``num_faults`` says; default 1.
        delay: seconds (or a timedelta) until the fault strikes, or (least, most); default 0.
        seed: the same on all ranks. Default: made from MASTER_ADDR and MASTER_PORT, which the ranks share; inside a
            wrapped function they change with each iteration.
        callback: called without arguments in the background thread, right before the fault.

    Returns:
        the whole plan, rank -> fault, the same on all ranks.

    Raises:
        OptionError: an argument is wrong, or RANK or WORLD_SIZE is missing in the environment.

    The thread ends when the fault has struck. It is a daemon thread; a restart does not take a pending fault back.
    Faults on the GPU strike on the device, and kernels on the stream, that are current where this is called: choose
    them before.
    """
    rank, world_size = _number_from_environment("RANK"), _number_from_environment("WORLD_SIZE")
    choice = _checked(faults)
    if isinstance(keep_alive, bool) or not isinstance(keep_alive, int) or keep_alive < 0:
        raise OptionError(f"keep_alive={keep_alive!r} must be a number of ranks >= 0")
    random_for_all = random.Random(_shared_seed() if seed is None else seed)
    number = random_for_all.randint(*_pair("num_faults", num_faults))
    victims = random_for_all.sample(range(world_size), max(0, min(number, world_size - keep_alive)))
    plan = {victim: random_for_all.choice(choice) for victim in sorted(victims)}
    wait = random_for_all.uniform(*(seconds("delay", value) for value in _pair_of("delay", delay)))
    if rank in plan:
        _begin(plan[rank], wait, callback)
    return plan


def dispatch_fault_injection(fault: Fault, delay: float = 0.0, callback: Callable[[], object] | None = None) -> None:
    """Let this very fault strike in this process after ``delay`` seconds, whatever its rank. Returns at once.

    For programs that choose rank and fault themselves; ``callback`` and the rest as in `inject_fault`.
    """
    (checked,) = _checked((fault,))
    _begin(checked, seconds("delay", delay), callback)


def maybe_raise_workload_exception() -> None:
    """Raise InjectedException here where ``Fault.WORKLOAD_EXC`` has struck and waits for the next call of a module.

    For loops that call no ``torch.nn.Module``; the others need nothing.
    """
    if _forget_workload_exception():
        raise InjectedException("injected into the workload")


def clear_workload_exception() -> None:
    """Take a ``Fault.WORKLOAD_EXC`` back that has struck and waits for the next call of a module, if there is one."""
    _forget_workload_exception()


def _begin(fault: Fault, delay: float, callback: Callable[[], object] | None) -> None:
    strike = _prepare(fault)
    threading.Thread(target=_strike, args=(delay, callback, strike), name="inprocess-fault", daemon=True).start()


def _strike(delay: float, callback: Callable[[], object] | None, strike: Callable[[], object]) -> None:
    threading.Event().wait(delay)
    if callback is not None:
        callback()
    strike()


def _checked(faults: Sequence[Fault] | None) -> list[Fault]:
    if faults is None:
        return [fault for fault in Fault if fault not in GPU_FAULTS or _cuda()]
    if not isinstance(faults, Sequence) or not faults or not all(isinstance(fault, Fault) for fault in faults):
        raise OptionError(f"faults={faults!r} must be a non-empty tuple of inprocess.tools.inject_fault.Fault")
    if GPU_FAULTS.intersection(faults) and not _cuda():
        raise OptionError(f"faults={faults!r} has a fault on the GPU, but CUDA is not available: leave it out")
    return list(faults)


def _cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())


def _pair_of(name: str, value: Any) -> tuple[Any, Any]:
    pair = value if isinstance(value, tuple) else (value, value)
    if len(pair) != 2:
        raise OptionError(f"{name}={value!r} must be one value, or (least, most)")
    return pair


def _pair(name: str, value: int | tuple[int, int]) -> tuple[int, int]:
    pair = _pair_of(name, value)
    if not all(isinstance(each, int) for each in pair) or not 0 <= pair[0] <= pair[1]:
        raise OptionError(f"{name}={value!r} must be a number >= 0, or (least, most)")
    return pair


def _number_from_environment(name: str) -> int:
    text = os.environ.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise OptionError(
            f"the environment variable {name}={text!r} is no number: call inject_fault in a rank's process"
        )
    return int(text)


def _shared_seed() -> int:
    shared = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    return zlib.crc32(shared.encode())


# --- the faults; each is prepared in the calling thread and strikes in the background


def _prepare(fault: Fault) -> Callable[[], object]:
    if fault is Fault.SIGNAL_EXC:
        return _prepare_signal()
    if fault in GPU_FAULTS | IN_FORWARD:
        importlib.import_module("torch.nn")  # two threads that import torch at the same time get in each other's way
    if fault is Fault.GPU_SLEEP:
        _sleep_kernel()  # its error is for the caller
    if fault in GPU_FAULTS:
        return _on_this_stream(_STRIKES[fault])
    return _SIGNALS.get(fault) or _STRIKES[fault]


def _prepare_signal() -> Callable[[], object]:
    """The handler puts the one before it back as soon as it is called."""

    def handler(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGUSR1, before)
        raise InjectedException("injected through a signal")

    if threading.current_thread() is not threading.main_thread():
        raise OptionError("Fault.SIGNAL_EXC installs a signal handler: call inject_fault in the main thread")
    before = signal.signal(signal.SIGUSR1, handler) or signal.SIG_DFL
    main = threading.main_thread().ident
    assert main is not None
    return lambda: signal.pthread_kill(main, signal.SIGUSR1)


def _send(signum: signal.Signals) -> Callable[[], object]:
    return lambda: os.kill(os.getpid(), signum)


def _async_exception() -> None:
    main = threading.main_thread().ident
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main or 0), ctypes.py_object(InjectedException))


# --- in the next forward: of the thread that calls it, which is the main thread or one of the user's


def _at_next_forward(action: Callable[[object], object], waiting: list[Any]) -> None:
    """Until then the hook is in `waiting`; one that somebody takes out of there does nothing any more."""
    from torch.nn.modules.module import register_module_forward_pre_hook  # noqa: PLC0415  (only here)

    registered = threading.Event()

    def strike(module: object, args: object) -> None:
        registered.wait()  # it may be called before it has its own handle
        hook.remove()
        if _taken(hook, waiting):
            action(module)

    hook = register_module_forward_pre_hook(strike)
    waiting.append(hook)
    registered.set()


def _taken(hook: object, waiting: list[Any]) -> bool:
    try:
        waiting.remove(hook)
    except ValueError:
        return False
    return True


#: hooks of WORKLOAD_EXC that wait for the next forward
_workload: list[Any] = []


def _workload_exception() -> None:
    _at_next_forward(_fail, _workload)


def _fail(module: object) -> None:
    raise InjectedException(f"injected into the forward of {type(module).__name__}")


def _forget_workload_exception() -> bool:
    found = bool(_workload)
    while _workload:
        _workload.pop().remove()
    return found


def _stuck_collective() -> None:
    """Between two steps: all collectives so far were joined, so none is ever paired with a wrong one."""
    _at_next_forward(lambda module: threading.Event().wait(), [])


def _gpu_oom() -> None:
    import torch  # noqa: PLC0415  (only here)

    device = torch.cuda.current_device()
    portion = torch.cuda.get_device_properties(device).total_memory // PORTIONS

    def take_all(module: object) -> None:
        """As activations do: the frames of the error hold what it took, and it is free again when they are gone."""
        taken = []
        while True:
            taken.append(torch.empty(portion, dtype=torch.uint8, device=torch.device("cuda", device)))

    _at_next_forward(take_all, [])


# --- kernels


def _on_this_stream(strike: Callable[[], object]) -> Callable[[], None]:
    """CUDA's current device and stream belong to a thread: the background thread takes over those of this one."""
    import torch  # noqa: PLC0415  (only here)

    stream = torch.cuda.current_stream()

    def on_that_stream() -> None:
        torch.cuda.set_stream(stream)  # and with it the device
        strike()

    return on_that_stream


def _gpu_error() -> None:
    import torch  # noqa: PLC0415  (only here)

    index = torch.full((1,), 1 << 20, device="cuda")
    try:
        _ = torch.zeros(1, device="cuda")[index]
        torch.cuda.current_stream().synchronize()  # the error comes out where somebody waits for the kernel
    except RuntimeError as error:
        log.warning("Fault.GPU_ERROR: the CUDA context of this process is lost: %s", str(error).partition("\n")[0])
    else:
        log.error("Fault.GPU_ERROR: this build of torch does not check indices on the GPU; nothing was injected")


def _gpu_sleep() -> None:
    _sleep_kernel()(FOREVER_ON_GPU)


def _sleep_kernel() -> Callable[[int], object]:
    import torch  # noqa: PLC0415  (only here)

    sleep: Callable[[int], object] | None = getattr(torch.cuda, "_sleep", None)
    if sleep is None:
        raise OptionError(f"Fault.GPU_SLEEP: torch {torch.__version__} has no torch.cuda._sleep: choose another fault")
    return sleep


_SIGNALS = {
    Fault.SIGINT: _send(signal.SIGINT),
    Fault.SIGKILL: _send(signal.SIGKILL),
    Fault.SIGTERM: _send(signal.SIGTERM),
    Fault.SIGSTOP: _send(signal.SIGSTOP),
}
_STRIKES: dict[Fault, Callable[[], object]] = {
    Fault.GPU_ERROR: _gpu_error,
    Fault.GPU_SLEEP: _gpu_sleep,
    Fault.GPU_OOM: _gpu_oom,
    Fault.STUCK_COLLECTIVE: _stuck_collective,
    Fault.WORKLOAD_EXC: _workload_exception,
    Fault.ASYNC_EXC: _async_exception,
    Fault.OS_ABORT: os.abort,
    Fault.LOCK_GIL: lambda: ctypes.PyDLL(None).sleep(FOREVER),
    Fault.SEGFAULT: lambda: ctypes.string_at(0),
}
