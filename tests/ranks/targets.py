"""The functions that rank processes run. Module level, so that a rank can import them by name.

A target gets the harness's Context; a body is what is wrapped and gets (context, call).
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch
import torch.distributed as dist

import inprocess
from inprocess.call import base_store
from inprocess.exception import RestartError
from inprocess.integrations.pacing import Pace
from inprocess.monitor import process as monitor_process
from inprocess.stores import addresses
from inprocess.system import logs
from inprocess.testing import forked_monitor, leaks
from inprocess.testing.coordinates import When
from inprocess.testing.faults import HoldGIL, wait_forever
from inprocess.tools.inject_fault import Fault, inject_fault
from tests.harness import faults
from tests.harness.child import Context
from tests.harness.launch import BEATING, HASTY, KILLING, PATIENT
from tests.harness.streams import full as full_stream

#: far longer than a test's deadline: whoever waits for this timeout has failed
LONG = datetime.timedelta(seconds=60)


#: for jobs that cannot start: whoever waits for the others gives up after four seconds
IMPATIENT = PATIENT | {
    "soft_timeout": 2,
    "hard_timeout": 3,
    "heartbeat_timeout": 2,
    "barrier_timeout": 4,
    "completion_timeout": 4,
}


def place_in_world() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def check_sum(size: int) -> None:
    """One all-reduce; its sum is right only if exactly the ranks of this iteration take part."""
    tensor = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(tensor)
    assert tensor.item() == size * (size + 1) // 2, f"sum {tensor.item()} with {size} ranks"


def strike(fault: Fault) -> None:
    """On this rank alone; when this returns, a kernel is launched, and a fault in the forward is ready for it."""
    inject_fault((fault,), num_faults=1 << 20, keep_alive=0)
    for thread in threading.enumerate():
        if thread.name == "inprocess-fault":
            thread.join()


def train(context: Context, call: Any) -> list[int]:
    """The ordinary body: a new group, some steps with an all-reduce each. Returns [iteration, rank, world size]."""
    rank, size = place_in_world()
    dist.init_process_group("gloo", timeout=LONG)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    for step in range(context.args.get("steps", 3)):
        context.point(step)
        call.ping()
        check_sum(size)
    dist.destroy_process_group()
    context.point("end")
    return [call.iteration, rank, size]


def alone(context: Context, call: Any) -> list[int]:
    """A body without any collective: ranks return whenever they like."""
    rank, size = place_in_world()
    for step in range(context.args.get("steps", 3)):
        context.point(step)
    return [call.iteration, rank, size]


def blocked(context: Context, call: Any) -> list[int]:
    """In iteration 0 all ranks but the victim block at `place`; the victim faults once they do."""
    place, victims = context.args["place"], context.args["victims"]
    if call.iteration > 0:
        return train(context, call)
    if place in ("all_reduce", "barrier", "recv_tensor", "new_group"):
        dist.init_process_group("gloo", timeout=LONG)
        check_sum(context.args["world_size"])
    if context.rank in victims:
        context.point("fault")
        raise AssertionError("the fault did not fire")
    context.emit("blocked", place=place)
    _block(place, victims[0], call)
    raise AssertionError(f"came out of {place}")


def _block(place: str, victim: int, call: Any) -> None:
    if place == "loop":
        faults.spin()
    elif place == "all_reduce":
        dist.all_reduce(torch.ones(1))
    elif place == "barrier":
        dist.barrier()
    elif place == "recv_tensor":
        dist.recv(torch.ones(1), src=victim)
    elif place == "new_group":
        dist.new_group(timeout=LONG)
    elif place == "init":
        dist.init_process_group("gloo", timeout=LONG)
    elif place == "store_wait":
        call.store.wait(["never set"], LONG)
    elif place == "store_get":
        call.store.get("never set")
    else:
        wait_forever(place)


def full(context: Context, call: Any) -> list[int]:
    """Steps until everybody is there after so many restarts. Returns [iteration, rank, world size]."""
    rank, size = place_in_world()
    dist.init_process_group("gloo", timeout=LONG)
    step = 0
    last = size == context.args["world_size"] and call.iteration >= context.args.get("restarts", 1)
    while step < 3 or not last:
        context.point(step)
        call.ping()
        check_sum(size)
        step += 1
    dist.destroy_process_group()
    return [call.iteration, rank, size]


class Waits(logging.Handler):
    """Reports that a process waits to join, or for others to do so."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context

    def emit(self, record: logging.LogRecord) -> None:
        for words, event in (("waiting for a free slot", "waits"), ("are too few", "short")):
            if words in record.getMessage():
                self._context.emit(event)


class StandsBy(logging.Handler):
    """Reports that rank 3 stands by, and that this process has a contact to it."""

    def __init__(self, context: Context) -> None:
        super().__init__(logging.INFO)
        self._context = context
        self.known = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "standing by for the host of the store: members [3]":
            self._context.emit("stands by")
            self.known.set()


def run_stood_by(context: Context) -> Any:
    """Where two ranks are left, a fault strikes once both know that one stands by for the other."""
    logger, handler = logging.getLogger("inprocess.failover"), StandsBy(context)
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)

    def stood_by(context: Context, call: Any) -> list[int]:
        if int(os.environ["WORLD_SIZE"]) == 2:
            handler.known.wait()
            context.point("stands by")
            while True:
                call.ping()
        return train(context, call)

    try:
        return context.wrap(stood_by)()
    finally:
        logger.removeHandler(handler)


def run_full(context: Context) -> Any:
    waits = Waits(context)
    logging.getLogger("inprocess").addHandler(waits)
    try:
        return context.wrap(full)()
    finally:
        logging.getLogger("inprocess").removeHandler(waits)


def run_full_twice(context: Context) -> Any:
    """The one that joined late takes part in the second call, too."""
    first = run_full(context)
    return [first, context.wrap(train)()]


def run_full_at_last(context: Context) -> Any:
    """Who joins late finds the job in its second call."""
    first = context.wrap(train)()
    return [first, run_full(context)]


def wait_for_flag(flag: str) -> None:
    while not os.path.exists(flag):
        time.sleep(0.05)


def watched(context: Context, call: Any) -> list[int]:
    """After three steps rank 1 is at `place` until the flag is there, and the others wait for it."""
    rank, size = place_in_world()
    dist.init_process_group("gloo", timeout=LONG)
    for _ in range(3):
        call.ping()
        check_sum(size)
    place, flag = context.args["place"] if rank == 1 else "", context.args["flag"]
    with call.atomic() if place == "atomic" else contextlib.nullcontext():
        context.emit("at")
        if place in ("sleep", "atomic"):
            wait_for_flag(flag)
        elif place == "gil":
            HoldGIL(8.0).strike(context)  # for longer than a rank may take to say where it is
        elif place == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
    check_sum(size)
    dist.destroy_process_group()
    return [call.iteration, rank, size]


def run_watched(context: Context) -> Any:
    if context.args["place"] == "join" and context.rank == 1:
        context.emit("at")
        wait_for_flag(context.args["flag"])
    return context.wrap(watched)()


def run_train(context: Context) -> Any:
    return context.wrap(train)()


def run_slow_hook(context: Context) -> Any:
    """The hook takes longer than hard_timeout, in a program that it waits for."""

    def slow(state: Any) -> None:
        subprocess.run([sys.executable, "-c", "import time; time.sleep(2.5)"], check=True)
        context.emit("slow hook")

    return context.wrap(train, soft_timeout=0.5, hard_timeout=1, **{context.args["hook"]: slow})()


def run_wrapped_in_hook(context: Context) -> Any:
    def hook(state: Any) -> Any:
        try:
            inprocess.Wrapper()(lambda: None)()
        except RestartError as error:
            context.emit("refused", text=str(error), position=str(logs.position()))
        return state

    return context.wrap(train, **{context.args["hook"]: hook})()


def run_alone(context: Context) -> Any:
    return context.wrap(alone)()


def run_blocked(context: Context) -> Any:
    return context.wrap(blocked)()


def run_after_point(context: Context) -> Any:
    context.point("before")
    return context.wrap(train)()


# --- logs and standard streams


class Unread(logging.Handler):
    """Blocks until the call is over."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.over.wait()


@contextlib.contextmanager
def unread(stream: int, handler: logging.Handler) -> Iterator[None]:
    """Monitors have this standard error, and the log has this handler.

    The standard error of the rank itself stays: torch's C++ code writes to it whenever it connects.
    """
    popen = subprocess.Popen
    monitor_process.subprocess.Popen = lambda *args, **more: popen(*args, **{**more, "stderr": stream})  # type: ignore
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)
        subprocess.Popen = popen  # type: ignore[misc]


def run_unread(context: Context) -> Any:
    """With a log that blocks, from before the call until it has ended."""
    with full_stream() as stream:
        blocks = Unread()
        handler = (
            blocks
            if context.args.get("blocked") == "handler"
            else logging.StreamHandler(os.fdopen(stream, "w", closefd=False))
        )
        with unread(stream, handler):
            logging.getLogger("inprocess").warning("never read")
            value = context.wrap(train)()
        writer = logs._queue.writer()
        assert writer is not None and writer.is_alive(), "the log did not block"
        blocks.over.set()
        logs._divert(stream, writer)  # nothing else ends a write into a pipe that its own process holds
        assert logs.end(20)
    return value


def run_closed(context: Context) -> Any:
    """Without some of the standard streams, as where the program was started without them; so is its monitor."""
    forked_monitor.forget()
    kept = {number: fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 10) for number in context.args["closed"]}
    streams = sys.__stdin__, sys.__stdout__, sys.__stderr__
    for number in kept:
        os.close(number)
        setattr(sys, ("__stdin__", "__stdout__", "__stderr__")[number], None)
    before = sorted(os.listdir("/proc/self/fd"))
    try:
        return context.wrap(train)()
    finally:
        left = sorted(os.listdir("/proc/self/fd"))
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = streams
        for number, copy in kept.items():
            os.dup2(copy, number)
            os.close(copy)
        assert left == before


def run_again_when_the_name_is_known(context: Context) -> Any:
    """On rank 1 MASTER_ADDR does not resolve in the first call, which so does not begin. What that raised, and the
    value of the next call."""
    if context.rank == 0:
        return [None, context.wrap(train)()]
    wait, raised = base_store.await_name, []
    base_store.await_name = lambda host, seconds: addresses.await_name("late.invalid", 0.0)
    try:
        context.wrap(train)()
    except TimeoutError as error:
        raised = [type(error).__name__, str(error)]
    finally:
        base_store.await_name = wait
    return [raised, context.wrap(train)()]


# --- limits


#: the soft limit of descriptors under which a rank runs out of them (it begins with some 20 to 40)
FEW = 128


def run_out_of_descriptors(context: Context) -> Any:
    """The victim's function opens all that it may and raises (``left`` is None), or its call begins with that many."""
    forked_monitor.forget()  # which has what it needs
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    victim, left = context.args["victim"], context.args["left"]

    def body(context: Context, call: Any) -> list[int]:
        if context.rank == victim and call.iteration == 0 and left is None:
            taken.extend(_take_all())
            raise ValueError("no descriptor is left")
        return train(context, call)

    try:
        if context.rank == victim:
            resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, before[1]))
        if context.rank == victim and left is not None:
            taken.extend(_take_all())
            for descriptor in [taken.pop() for _ in range(left)]:
                os.close(descriptor)
        return context.wrap(body)()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in taken:
            os.close(descriptor)


def run_without_descriptors(context: Context) -> Any:
    """The victim's function has opened all that it may, and waits in Python until it is interrupted; ``hard``: it may
    not raise its limit either."""
    before, victim = resource.getrlimit(resource.RLIMIT_NOFILE), context.args["victim"]

    def body(context: Context, call: Any) -> list[int]:
        if call.iteration > 0:
            return train(context, call)
        if context.rank != victim:
            context.point("fault")
        resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW if context.args["hard"] else before[1]))
        taken = _take_all()
        try:
            context.emit("blocked")
            while True:
                time.sleep(0.01)
        finally:
            for descriptor in taken:
                os.close(descriptor)

    return context.wrap(body)()


def _take_all() -> list[int]:
    taken: list[int] = []
    while True:
        try:
            taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return taken


# --- progress and monitors


def run_pinged_loop(context: Context) -> Any:
    return context.wrap(_pinged_loop)()


def _pinged_loop(context: Context, call: Any) -> list[int]:
    if call.iteration == 0:
        call.ping()
        faults.spin()
    return train(context, call)


def run_hang(context: Context) -> Any:
    return context.wrap(_hang)()


def _hang(context: Context, call: Any) -> list[int]:
    """In iteration 0 rank 0 hangs, and the others wait for it in this place."""
    where = context.args["where"]
    if call.iteration > 0:
        return train(context, call)
    dist.init_process_group("gloo", timeout=LONG)
    check_sum(context.args["world_size"])
    if where == "ddp":
        _backward(context, call)
    elif where == "mismatch":
        (_receives if dist.get_rank() else _sends)()
    elif dist.get_rank() == 0 and where == "returned":
        return []
    elif dist.get_rank() == 0:
        faults.spin() if where == "loop" else context.point("hang")
    else:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        context.emit("ready")
        work.wait()
    raise AssertionError("it came out")


def _backward(context: Context, call: Any) -> None:
    with call.disable_hang_protection():  # it imports for seconds
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        check_sum(context.args["world_size"])
    loss = model(torch.ones(2)).sum()
    if dist.get_rank() == 0:
        context.point("hang")
    context.emit("ready")
    loss.backward()


def _sends() -> None:
    dist.recv(torch.ones(1), src=1)


def _receives() -> None:
    dist.recv(torch.ones(1), src=0)


def run_last_backward(context: Context) -> Any:
    return context.wrap(_last_backward)()


def _last_backward(context: Context, call: Any) -> None:
    for _ in range(context.args["times"]):
        call.ping()
        _ends_with_backward()


def _ends_with_backward() -> None:
    """Returns while Gloo's worker may still be freeing an operation of the backward pass; then the model goes."""
    dist.init_process_group("gloo", timeout=LONG)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    large = torch.ones(1_000_000)
    loss = model(torch.ones(2)).sum()
    loss.register_hook(lambda _: dist.all_reduce(large, async_op=True) and None)
    loss.backward()
    dist.destroy_process_group()


def run_unprotected(context: Context) -> Any:
    return context.wrap(_unprotected)()


def _unprotected(context: Context, call: Any) -> list[int]:
    with call.disable_hang_protection():
        time.sleep(KILLING["hard_timeout"] + 0.5)
    return train(context, call)


def run_with_new_monitor(context: Context) -> Any:
    return context.wrap(_with_new_monitor)()


def _with_new_monitor(context: Context, call: Any) -> list[int]:
    old = leaks.children_of(os.getpid())
    context.point("monitor")
    if "monitor_killed" in context.reported and call.iteration == 0:
        wait_until(lambda: bool(set(_living_children()) - set(old)))
        context.emit("new_monitor")
    return train(context, call)


def _living_children() -> list[int]:
    return [pid for pid in leaks.children_of(os.getpid()) if not leaks.command_of(pid).startswith(("Z", "gone"))]


def wait_until(condition: Callable[[], bool], seconds: float = 20.0, every: float = 0.005) -> None:
    """For what has no event to wait for: a process that somebody else starts."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} s")
        time.sleep(every)


# --- functions that do not let an interruption out


def run_awkward(context: Context) -> Any:
    return context.wrap(_awkward)()


def _awkward(context: Context, call: Any) -> list[int]:
    if call.iteration > 0:
        return train(context, call)
    dist.init_process_group("gloo", timeout=LONG)
    if context.rank == 1:
        context.point("fault")
    context.emit("blocked")
    AWKWARD[context.args["style"]]()
    raise AssertionError("the interruption was lost")


def _except_exception() -> None:
    while True:
        try:
            dist.all_reduce(torch.ones(1))
        except Exception:
            continue


def _bare_except() -> None:
    try:
        faults.spin()
    except:  # noqa: E722 (the subject of the test)
        wait_forever("queue")


def _finally_blocks() -> None:
    try:
        faults.spin()
    finally:
        wait_forever("lock")


class _Deleted:
    def __del__(self) -> None:
        faults.spin()


def _in_del() -> None:
    thing = _Deleted()
    del thing  # the interpreter prints and drops what __del__ raises
    wait_forever("sleep")


def _raises_own() -> None:
    try:
        wait_forever("recv")
    except BaseException as error:
        raise KeyError("another error instead") from error


AWKWARD: dict[str, Callable[[], None]] = {
    "except_exception": _except_exception,
    "bare_except": _bare_except,
    "finally_blocks": _finally_blocks,
    "in_del": _in_del,
    "raises_own": _raises_own,
}


# --- completion


def run_then_leave_in_order(context: Context) -> Any:
    value = context.wrap(train)()
    before = list(context.args["order"]).index(context.rank)
    if before:
        context.wait_for(When("ended", before))
    return value


def run_late(context: Context) -> Any:
    return context.wrap(_late)()


def _late(context: Context, call: Any) -> list[int]:
    context.point("late")
    return [call.iteration, *place_in_world()]


def run_dying_on_exit(context: Context) -> Any:
    return context.wrap(_dying_on_exit)()


def _dying_on_exit(context: Context, call: Any) -> list[int]:
    returned = threading.Event()
    if context.rank == context.args["victim"]:
        threading.Thread(target=_kill_after, args=(returned,)).start()
    value = [call.iteration, *place_in_world()]
    returned.set()
    return value


def _kill_after(event: threading.Event) -> None:
    event.wait()
    os.kill(os.getpid(), signal.SIGKILL)


def run_odd_values(context: Context) -> Any:
    return context.wrap(_odd_value)()


def _odd_value(context: Context, call: Any) -> Any:
    return [None, {"text": "rank 1"}, (0.5, None)][context.rank]


# --- Ctrl-C while the library waits


def run_interrupted_wait(context: Context) -> Any:
    """The victim's main thread gets a KeyboardInterrupt where it waits for the letter `args["letter"]`."""
    from inprocess.monitor_thread import Mailbox

    take, letter = Mailbox.take, tuple(context.args["letter"])

    def interrupted(self: Any, name: str, iteration: int, timeout: float | None = None) -> Any:
        if context.rank == context.args["victim"] and (name, iteration) == letter:
            raise KeyboardInterrupt
        return take(self, name, iteration, timeout)

    Mailbox.take = interrupted
    return context.wrap(train)()


# --- spares and rank assignments


def two_active(context: Context) -> dict[str, Any]:
    from inprocess import Compose
    from inprocess.rank_assignment import MaxActiveWorldSize, ShiftRanks

    return {**PATIENT, "rank_assignment": Compose(MaxActiveWorldSize(2), ShiftRanks())}


def one_active(context: Context) -> dict[str, Any]:
    from inprocess import Compose
    from inprocess.rank_assignment import MaxActiveWorldSize, ShiftRanks

    return {**PATIENT, "rank_assignment": Compose(MaxActiveWorldSize(1), ShiftRanks())}


def two_active_hasty(context: Context) -> dict[str, Any]:
    return two_active(context) | HASTY


def two_active_beating(context: Context) -> dict[str, Any]:
    return two_active(context) | BEATING


def fill_gaps(context: Context) -> dict[str, Any]:
    from inprocess.rank_assignment import FillGaps

    return {**PATIENT, "rank_assignment": FillGaps()}


def divisible_by_two(context: Context) -> dict[str, Any]:
    from inprocess.rank_filter import WorldSizeDivisibleBy

    return {**PATIENT, "rank_filter": WorldSizeDivisibleBy(2)}


def whole_hosts(context: Context) -> dict[str, Any]:
    from inprocess import Compose
    from inprocess.rank_assignment import FilterCountGroupedByKey, ShiftRanks

    host = "ab"[context.rank // 2]
    grouped = FilterCountGroupedByKey(lambda state: host, lambda count: count == 2)
    return {**PATIENT, "rank_assignment": Compose(ShiftRanks(), grouped)}


def run_until_spare_died(context: Context) -> Any:
    return context.wrap(_until_spare_died)()


def _until_spare_died(context: Context, call: Any) -> list[int]:
    context.wait_for(When("ended", 1))
    return train(context, call)


# --- several calls


def run_several(context: Context) -> Any:
    first = context.wrap(train)
    second = context.wrap(alone, **two_active(context))
    third = context.wrap(alone)
    return [first(), second(), first(), third()]


def run_twice(context: Context) -> Any:
    function = context.wrap(train)
    return [function(), function()]


def run_again_after_failure(context: Context) -> Any:
    function = context.wrap(train)
    try:
        first: Any = function()
    except BaseException as error:
        first = type(error).__name__
    return [first, function()]


# --- limits


def at_most_two_iterations(context: Context) -> dict[str, Any]:
    from inprocess.initialize import RetryController

    return {**PATIENT, "initialize": RetryController(max_iterations=2)}


def at_most_two_iterations_beating(context: Context) -> dict[str, Any]:
    return at_most_two_iterations(context) | BEATING


def at_least_three(context: Context) -> dict[str, Any]:
    from inprocess.initialize import RetryController

    return {**PATIENT, "initialize": RetryController(min_world_size=3)}


# --- the call object


def run_disabled(context: Context) -> Any:
    from inprocess import Wrapper

    return Wrapper(enabled=False)(alone) is alone


def run_disabled_inside(context: Context) -> Any:
    """Inside one that is not disabled, which is interrupted there."""
    from inprocess import CallWrapper, Wrapper, current_call

    @Wrapper(enabled=False)
    def inner(context: Context, inner_call: CallWrapper) -> bool:
        context.point("inner")
        return current_call() is not inner_call

    def outer(context: Context, call: CallWrapper) -> list[bool]:
        before = current_call() is call
        return [before, inner(context), current_call() is call]

    value = context.wrap(outer)()
    return [*value, current_call() is None]


def run_disabled_around(context: Context) -> Any:
    """Around one that is not disabled."""
    from inprocess import CallWrapper, Wrapper, current_call

    def inner(context: Context, call: CallWrapper) -> bool:
        context.point("inner")
        return current_call() is call

    @Wrapper(enabled=False)
    def outer(call: CallWrapper) -> list[bool]:
        before = current_call() is call
        return [before, context.wrap(inner)(), current_call() is call]

    return [*outer(), current_call() is None]


def run_injected(context: Context) -> Any:
    from inprocess import CallWrapper, Wrapper, current_call

    def annotated(call: CallWrapper) -> str:
        return type(call).__name__

    def optional(config: str, *, call: Optional[CallWrapper] = None) -> str:  # noqa: UP045 (the subject of the test)
        return type(call).__name__

    def named(inprocess_call_wrapper: Optional[Any] = None) -> str:  # noqa: UP045 (as Megatron-LM has it)
        return type(inprocess_call_wrapper).__name__

    def nothing() -> str:
        return type(current_call()).__name__

    wrap = Wrapper(**context.options())
    functions = {
        "annotated": wrap(annotated),
        "optional": functools.partial(wrap(optional), "config"),
        "named": wrap(named),
        "current_call": wrap(nothing),
        "partial": wrap(functools.partial(optional, "config")),
    }
    found = {name: context.called(function) for name, function in functions.items()}
    assert current_call() is None
    return found


def run_store(context: Context) -> Any:
    from inprocess import current_call

    inside = context.wrap(_use_store)()
    return [*inside, current_call()]


def _use_store(context: Context, call: Any) -> list[Any]:
    from inprocess import current_call

    rank, size = place_in_world()
    assert not call.store.check([f"from {rank}"]), "a store of its own for each iteration"
    call.store.set(f"from {rank}", str(rank))
    other = call.store.get(f"from {1 - rank}").decode()
    context.point("used")
    dist.init_process_group("gloo", store=call.store, rank=rank, world_size=size, timeout=LONG)
    check_sum(size)
    dist.destroy_process_group()
    return [other, current_call() is call]


def run_hooked(context: Context) -> Any:
    return context.wrap(_hooked)()


def _hooked(context: Context, call: Any) -> list[int]:
    context.emit("hook", name=getattr(sys.excepthook, "__name__", ""))
    return train(context, call)


def run_atomic(context: Context) -> Any:
    return context.wrap(_atomic)()


def _atomic(context: Context, call: Any) -> list[int]:
    if call.iteration > 0:
        return train(context, call)
    if context.rank == 1:
        context.point("fault")
    seconds = {"long": 0.5, "short": 0.001}[context.args["style"]]
    while True:
        with call.atomic():
            context.emit("atomic_begin")
            time.sleep(seconds)  # stands for the work that must not be cut in half
            context.emit("atomic_end")


# --- misuse: what is done wrong, and the words its error must have

MISUSE: dict[str, tuple[str, ...]] = {
    "unknown option": ("soft_timout", "soft_timeout"),
    "order of options": ("soft_timeout", "10", "hard_timeout", "5"),
    "type of a duration": ("soft_timeout", "'long'"),
    "relative path": ("monitor_process_logfile", "relative.log", "absolute"),
    "hook that cannot be called": ("finalize", "3"),
    "hook with wrong arguments": ("health_check",),
    "not a function": ("3",),
    "RANK missing": ("RANK", "WORLD_SIZE"),
    "RANK not a number": ("RANK", "'first'"),
    "RANK too large": ("RANK", "5", "WORLD_SIZE", "1"),
    "MASTER_ADDR missing": ("MASTER_ADDR",),
    "MASTER_PORT missing": ("MASTER_PORT",),
    "MASTER_PORT no port": ("MASTER_PORT", "99999"),
    "torch.distributed initialized": ("torch.distributed", "destroy_process_group"),
    "outside the main thread": ("main thread",),
}


def run_misuse(context: Context) -> Any:
    from inprocess import Wrapper

    function = context.wrap(alone)
    tries: dict[str, Callable[[], Any]] = {
        "unknown option": lambda: Wrapper(soft_timout=1),
        "order of options": lambda: Wrapper(soft_timeout=10, hard_timeout=5),
        "type of a duration": lambda: Wrapper(soft_timeout="long"),
        "relative path": lambda: Wrapper(monitor_process_logfile="relative.log"),
        "hook that cannot be called": lambda: Wrapper(finalize=3),
        "hook with wrong arguments": lambda: Wrapper(health_check=lambda: None),
        "not a function": lambda: Wrapper()(3),
        "RANK missing": lambda: _call_with(function, RANK=None, WORLD_SIZE=None),
        "RANK not a number": lambda: _call_with(function, RANK="first"),
        "RANK too large": lambda: _call_with(function, RANK="5"),
        "MASTER_ADDR missing": lambda: _call_with(function, MASTER_ADDR=None),
        "MASTER_PORT missing": lambda: _call_with(function, MASTER_PORT=None),
        "MASTER_PORT no port": lambda: _call_with(function, MASTER_PORT="99999"),
        "torch.distributed initialized": lambda: _call_while_initialized(function),
        "outside the main thread": lambda: _call_in_thread(function),
    }
    return {name: _error_of(attempt)[:230] for name, attempt in tries.items()}  # an event is not long


def _error_of(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return str(error) if "inprocess" in type(error).__module__ else f"unexpected {error!r}"
    return "no error"


def _call_with(function: Callable[[], Any], **variables: str | None) -> None:
    before = os.environ.copy()
    try:
        for name, text in variables.items():
            os.environ.pop(name) if text is None else os.environ.update({name: text})
        function()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _call_while_initialized(function: Callable[[], Any]) -> None:
    hook = sys.excepthook  # torch replaces it in every init_process_group and never puts it back
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        function()
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def _call_in_thread(function: Callable[[], Any]) -> None:
    errors: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def run_port_in_use(context: Context) -> Any:
    """Rank 0 listens on MASTER_PORT itself, as another program would."""
    function = context.wrap(train)
    if context.rank > 0:
        return function()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        other.listen()
        return function()


# --- hooks of both generations


def _report(context: Context, name: str, iteration: int, error: BaseException | None = None) -> None:
    context.emit("phase", name=name, iteration=iteration, error=None if error is None else repr(error))


ORDER: dict[str, list[tuple[str, int]]] = {
    "newer": [
        ("rank_assignment", 0),
        ("initialize", 0),
        ("health_check", 0),
        ("abort", 0),
        ("finalize", 0),
        ("health_check", 0),
        ("rank_assignment", 1),
        ("initialize", 1),
        ("health_check", 1),
        ("completion", 1),
    ],
    "older": [
        ("rank_assignment", 0),
        ("rank_filter", 0),
        ("initialize", 0),
        ("health_check", 0),
        ("finalize", 0),
        ("health_check", 0),
        ("rank_assignment", 1),
        ("rank_filter", 1),
        ("initialize", 1),
        ("health_check", 1),
    ],
}


def newer_hooks(context: Context) -> dict[str, Any]:
    from inprocess import Compose
    from inprocess.abort import AbortTorchDistributed
    from inprocess.rank_assignment import ShiftRanks

    def hook(name: str) -> Callable[[Any], Any]:
        def run(state: Any) -> Any:
            _report(context, name, state.iteration, state.fn_exception)
            return state

        return run

    def assign(ctx: Any) -> Any:
        _report(context, "rank_assignment", ctx.state.iteration)
        return ctx

    hooks = {name: hook(name) for name in ("initialize", "finalize", "health_check", "completion", "terminate")}
    abort = Compose(hook("abort"), AbortTorchDistributed())
    return {**PATIENT, **hooks, "abort": abort, "rank_assignment": Compose(ShiftRanks(), assign)}


def older_hooks(context: Context) -> dict[str, Any]:
    def initialize(state: Any) -> Any:
        _report(context, "initialize", state.iteration)
        return state

    def finalize(state: Any, exception: BaseException | None) -> Any:
        _report(context, "finalize", state.iteration, exception)
        return state

    def health_check(state: Any, exception: BaseException | None) -> Any:
        _report(context, "health_check", state.iteration, exception)
        return state

    def assign(state: Any, terminated_ranks: set[int]) -> Any:
        _report(context, "rank_assignment", state.iteration)
        state.rank -= sum(rank < state.rank for rank in terminated_ranks)
        state.world_size -= len(terminated_ranks)
        return state, set()

    def rank_filter(state: Any) -> Any:
        _report(context, "rank_filter", state.iteration)
        return state

    return {
        **PATIENT,
        "initialize": initialize,
        "finalize": finalize,
        "health_check": health_check,
        "rank_assignment": assign,
        "rank_filter": rank_filter,
    }


# --- for the tests of the harness itself: no library involved


def unwrapped(context: Context) -> Any:
    with context.entered(0):
        for step in range(3):
            context.point(step)
    return {"rank": context.rank, "environment": place_in_world()}


def preloaded(context: Context) -> Any:
    return {
        "modules": [name for name in ("torch", "tests.ranks.targets", "pytest") if name in sys.modules],
        "variables": sorted(os.environ),
    }


def group_only(context: Context) -> Any:
    """Plain torch, as the library's rendezvous would have it: everybody joins the store at MASTER_PORT."""
    rank, size = place_in_world()
    hook = sys.excepthook  # torch replaces it in every init_process_group and never puts it back
    dist.init_process_group("gloo", timeout=LONG)
    check_sum(size)
    dist.destroy_process_group()
    sys.excepthook = hook
    return rank


def leave_things(context: Context) -> Any:
    import subprocess

    kept: Any = context.__dict__.setdefault("kept", [])
    kept.append(socket.socket())
    os.environ["LEFT"] = "1"
    signal.signal(signal.SIGUSR2, lambda *_: None)
    threading.Thread(target=threading.Event().wait, name="left", daemon=True).start()
    kept.append(subprocess.Popen(["sleep", "0.2"]))


def leave_daemon(context: Context) -> Any:
    """A daemon with two forks: gone from this process's children, not from the test's sight."""
    if os.fork() == 0:
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", context.args["seconds"]])
        os._exit(0)
    os.wait()


# --- learned timeouts


def agreeing(context: Context, call: Any) -> Any:
    """Each rank has seen something of its own; what is agreed on is kept over a restart and goes to disk."""
    rank, _ = place_in_world()
    if call.iteration == 0:
        for _ in range(3):
            call.timeouts.observed.section("save", 10.0 + rank)
            call.timeouts.observed.section(f"only on {rank}" + "." * 40 * rank, 2.0)
    dist.init_process_group("gloo", timeout=LONG)
    call.timeouts.calculate()
    context.point("agreed")
    dist.destroy_process_group()
    pace = Pace()
    pace.enter("only on 0")
    limit = call._board.snapshot().soft_timeout / 1e9
    pace.leave()
    return {**call.timeouts.state_dict(), "limit of a callback": limit}


def run_agreeing(context: Context) -> Any:
    return context.wrap(agreeing)()


class NoGrad:
    """A context manager as torch.no_grad() is one, which is interrupted while it is entered."""

    def __init__(self, entered: Callable[[], None]) -> None:
        self._entered = entered

    def __enter__(self) -> None:
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        self._entered()

    def __exit__(self, *exc_info: object) -> None:
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)


def stay(context: Context) -> None:
    context.emit("entered")
    time.sleep(LONG.total_seconds())


def run_in_a_context_manager(context: Context) -> Any:
    """One rank raises while the others are inside ``__enter__``; answers what is trained with afterwards."""

    def body(context: Context, call: Any) -> list[object]:
        if call.iteration == 0:
            context.point("fault")
            with NoGrad(lambda: stay(context)):
                pass
        loss = torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum()
        return [call.iteration, loss.requires_grad, str(loss.dtype), torch.is_autocast_enabled("cpu")]

    return context.wrap(body)()
