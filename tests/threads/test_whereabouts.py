"""Where the main thread is, told from another thread: its place in the user's code, and whether it waits for others."""

from __future__ import annotations

import importlib
import os
import queue
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from inprocess.exception import Preempted, RestartAbort
from inprocess.interrupt import whereabouts
from inprocess.interrupt.signals import Interrupter
from inprocess.protocol.messages import WHERE_LIMIT, Spot

TORCH = os.path.dirname(torch.__file__)
#: a file below torch, the name of a function in it, and its body
Body = tuple[str, str, str]


class Go(threading.Event):
    """Everything that a function here may wait for; it waits in its only line."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.full, self.store = threading.Lock(), queue.Queue[int](), HashStore()
        self.lock.acquire()

    def set(self) -> None:
        super().set()
        self.lock.release()
        self.full.put(1)
        self.store.set("key", "1")


def in_torch(body: Body) -> Callable[[Go], Any]:
    """That function, which calls nothing that Python sees."""
    file, name, line = body
    made: dict[str, Any] = {}
    exec(compile(f"def {name}(go, lock):\n    {line}\n", os.path.join(TORCH, file), "exec"), made)
    function = made[name]

    def call(go: Go) -> None:
        function(go, go.lock)

    return call


def seen(monkeypatch: pytest.MonkeyPatch, function: Callable[[Go], Any], sleeps: bool) -> Spot | None:
    """What is told of a thread in the library's window, once it sleeps in its function, or computes."""
    go = Go()
    gate = Interrupter().new_gate()
    entered = threading.Event()

    def enter() -> None:
        entered.set()
        function(go)

    thread = threading.Thread(target=lambda: gate.run(enter))
    monkeypatch.setattr(whereabouts.threading, "main_thread", lambda: thread)
    thread.start()
    try:
        entered.wait()
        end = time.monotonic() + 5.0
        while time.monotonic() < end:
            spot = whereabouts.look()
            there = spot is not None and " in enter" not in spot.where
            if there and whereabouts._is_asleep(thread.native_id) is sleeps:
                return whereabouts.look()  # it goes on to wait in the same line
        raise AssertionError("it does not get there")
    finally:
        go.set()
        thread.join()


def spins(go: Go) -> None:
    while not go.is_set():
        pass


def sleeps(go: Go) -> None:
    while not go.is_set():
        time.sleep(0.05)


def gets(go: Go) -> None:
    go.full.get()


def waits_for_a_key(go: Go) -> None:
    go.store.wait(["key"], timedelta(seconds=30))


C10D = os.path.join("distributed", "distributed_c10d.py")
DDP = os.path.join("nn", "parallel", "distributed.py")
FILES = os.path.join("distributed", "checkpoint", "filesystem.py")
AUTOGRAD = os.path.join("autograd", "graph.py")
BLOCKS, SPINS = "lock.acquire()", "while lock.locked(): pass"


@pytest.mark.parametrize(("function", "asleep"), [(spins, False), (sleeps, True), (gets, True)])
def test_a_rank_that_hangs(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], asleep: bool) -> None:
    spot = seen(monkeypatch, function, asleep)
    assert spot is not None and not spot.waits
    assert spot.where.startswith(__file__[-whereabouts.MAX_FILE_LENGTH :] + ":")
    assert spot.where.endswith(f" in {function.__name__}")


def test_a_store_is_waited_for_in_the_users_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the work of a collective: Python sees nothing but that line."""
    spot = seen(monkeypatch, waits_for_a_key, sleeps=True)
    assert spot is not None and spot.waits
    assert spot.where.endswith(" in waits_for_a_key")


@pytest.mark.parametrize(
    ("body", "asleep", "waits"),
    [
        ((C10D, "all_reduce", BLOCKS), True, True),
        ((C10D, "all_reduce", SPINS), False, True),  # NCCL, in its own way
        ((C10D, "barrier", "while not go.is_set(): pass"), False, True),  # it calls something of Python's own
        ((DDP, "_sync_buffers", BLOCKS), True, True),
        ((FILES, "write", BLOCKS), True, False),  # a disk that does not answer
        ((AUTOGRAD, "_engine_run_backward", BLOCKS), True, True),
        ((AUTOGRAD, "_engine_run_backward", SPINS), False, False),
        ((os.path.join("nn", "functional.py"), "linear", BLOCKS), True, False),
    ],
)
def test_inside_torch(monkeypatch: pytest.MonkeyPatch, body: Body, asleep: bool, waits: bool) -> None:
    spot = seen(monkeypatch, in_torch(body), asleep)
    assert spot is not None and spot.waits is waits
    assert spot.where.endswith(" in call")


def test_the_library_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function has returned, or the rank is a reserve; what called the wrapped function does not count."""
    monkeypatch.setattr(whereabouts, "_BOUNDARIES", {(__file__, "_step")})
    release, entered = threading.Event(), threading.Event()

    def _step() -> None:
        entered.set()
        release.wait()

    thread = threading.Thread(target=_step)
    monkeypatch.setattr(whereabouts.threading, "main_thread", lambda: thread)
    thread.start()
    entered.wait()
    assert whereabouts.look() == Spot("", waits=True)
    release.set()
    thread.join()
    assert whereabouts.look() is None


def test_a_place_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a long path is what tells."""
    file, made = "/" + "folder/" * 100 + "train.py", dict[str, Any]()
    name = "step" * 100
    exec(compile(f"def {name}(go):\n    while not go.is_set(): pass\n", file, "exec"), made)
    spot = seen(monkeypatch, made[name], sleeps=False)
    assert spot is not None and len(spot.where) < WHERE_LIMIT
    assert "/train.py:2 in step" in spot.where


@pytest.mark.parametrize(
    ("file", "inside", "left"),
    [(C10D, True, True), (FILES, True, False), ("nn/functional.py", True, False), (C10D, False, False)],
)
def test_an_error_that_came_out_of_a_collective(
    monkeypatch: pytest.MonkeyPatch, file: str, inside: bool, left: bool
) -> None:
    """Told only while it is handled, whatever the frames are by then."""
    raises = in_torch((file, "all_reduce", "raise RuntimeError('Connection closed by peer')"))
    release, entered = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        release.wait()

    def handle() -> None:
        try:
            raises(Go())
        except RuntimeError:
            if inside:
                wait()
        if not inside:
            wait()

    thread = threading.Thread(target=handle)
    monkeypatch.setattr(whereabouts.threading, "main_thread", lambda: thread)
    thread.start()
    try:
        assert entered.wait(30)
        assert whereabouts.has_left_collective() is left
    finally:
        release.set()
        thread.join()
    assert not whereabouts.has_left_collective()


# --- an exit in answer to an error ------------------------------------------------------------------------------


def rejected(in_a_wait: bool) -> None:
    """C code raises RuntimeError in a line of the user's own."""
    items = deque([1, 2])
    handle = SimpleNamespace(wait=iter(items).__next__, step=iter(items).__next__)
    items.clear()
    if in_a_wait:
        handle.wait()
    handle.step()


def in_module(go: Go) -> None:
    """DDP's forward, which calls the user's module."""
    vars(go)["inner"] = partial(rejected, False)
    in_torch((DDP, "_run_ddp_forward", "return go.inner()"))(go)


def in_operator(name: str, go: Go) -> None:
    vars(go)["_name"] = name
    in_torch(("_ops.py", "__call__", "raise RuntimeError('aborted')"))(go)


def waits_in_vain(get: bool, go: Go) -> None:
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=1))
    if get:
        store.get("key")
    store.wait(["key"])


CLOSED = "raise RuntimeError('Connection closed by peer')"
#: what the function does before it exits, and whether that is a collective, or a wait for a store
FAILS: dict[str, tuple[Callable[[Go], Any], bool]] = {
    "all_reduce": (in_torch((C10D, "all_reduce", CLOSED)), True),
    "a group that is gone": (in_torch((C10D, "all_reduce", "raise ValueError('not initialized')")), True),
    "through Python's own lines": (in_torch((C10D, "all_reduce", "return next(map(int, ['x']))")), True),
    "backward": (in_torch((AUTOGRAD, "_engine_run_backward", CLOSED)), True),
    "DDP": (in_torch((DDP, "_sync_buffers", CLOSED)), True),
    "functional": (partial(in_operator, "_c10d_functional::wait_tensor"), True),
    "work.wait": (lambda go: rejected(True), True),
    "store.wait": (partial(waits_in_vain, False), True),
    "store.get": (partial(waits_in_vain, True), True),
    "another line": (lambda go: rejected(False), False),
    "another operator": (partial(in_operator, "aten::add"), False),
    "the module in DDP": (in_module, False),
    "a file": (in_torch((FILES, "write", CLOSED)), False),
    "a layer": (in_torch((os.path.join("nn", "functional.py"), "linear", CLOSED)), False),
    "memory": (in_torch((AUTOGRAD, "_engine_run_backward", "raise go.kind('CUDA out of memory')")), False),
    "Python's own wait": (lambda go: threading.Event().wait("x"), False),  # type: ignore[arg-type]
}


def left_with(act: Callable[[Go], Any], answer: Callable[[], object]) -> tuple[BaseException, Exception]:
    """What ``answer`` raises in a handler of what that raises, and that."""
    go, errors = Go(), list[Exception]()
    vars(go)["kind"] = torch.OutOfMemoryError
    try:
        try:
            act(go)
        except Exception as error:
            errors.append(error)
            answer()
    except BaseException as error:
        return error, errors[0]
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("name", FAILS)
def test_an_exit_in_answer_to_an_error(name: str) -> None:
    """Another rank's failure shows as an error out of a collective, and nowhere else."""
    act, is_collective = FAILS[name]
    exit, error = left_with(act, lambda: sys.exit(1))
    assert isinstance(exit, SystemExit)
    assert whereabouts.counts_as(exit, None) is (error if is_collective else exit)
    assert whereabouts.counts_as(exit, error) is exit, "handled around the function"
    assert whereabouts.counts_as(error, None) is error


@pytest.mark.parametrize("code", [0, None])
def test_an_exit_that_says_that_all_is_well(code: int | None) -> None:
    exit, _ = left_with(FAILS["all_reduce"][0], lambda: sys.exit(code))
    assert whereabouts.counts_as(exit, None) is exit


def test_ctrl_c_in_the_handler_is_answered() -> None:
    def answer() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(130)

    exit, _ = left_with(FAILS["all_reduce"][0], answer)
    assert whereabouts.counts_as(exit, None) is exit


@pytest.mark.parametrize("what", ["no gradient", "nan", "twice"])
def test_what_a_backward_pass_says_of_the_program_is_no_collectives(what: str) -> None:
    def fail(go: Go) -> None:
        if what == "no gradient":
            torch.ones(1).sum().backward()
        elif what == "nan":
            with torch.autograd.detect_anomaly(check_nan=True), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.sqrt(torch.zeros(1, requires_grad=True) * 0 - 1).sum().backward()
        else:
            loss = torch.ones(1, requires_grad=True).exp().sum()
            loss.backward()
            loss.backward()

    exit, _ = left_with(fail, lambda: sys.exit(1))
    assert whereabouts.counts_as(exit, None) is exit


def raise_another() -> None:
    try:
        raise KeyError
    except KeyError as error:
        raise SystemExit(1) from error


@pytest.mark.parametrize("kind", [Preempted, RestartAbort, KeyboardInterrupt, GeneratorExit])
def test_a_deliberate_exit(kind: type[BaseException]) -> None:
    def answer() -> None:
        raise kind

    exit, _ = left_with(FAILS["all_reduce"][0], answer)
    assert whereabouts.counts_as(exit, None) is exit


def test_an_exit_some_errors_later() -> None:
    exit, error = left_with(FAILS["all_reduce"][0], raise_another)
    assert whereabouts.counts_as(exit, None) is error


def test_an_exit_in_answer_is_on_its_way_out() -> None:
    """As the error that it stands for."""
    left: list[bool] = []

    def look() -> None:
        thread = threading.Thread(target=lambda: left.append(whereabouts.has_left_collective()))
        thread.start()
        thread.join()

    def answer() -> None:
        try:
            sys.exit(1)
        finally:
            look()

    for name in ("all_reduce", "store.wait", "a file"):
        left_with(FAILS[name][0], answer)
    assert left == [True, True, False]


# --- operators, as compiled code calls them -----------------------------------------------------------------------


@pytest.mark.parametrize("overload", [True, False])
def test_a_functional_collective(monkeypatch: pytest.MonkeyPatch, groups: list[Any], overload: bool) -> None:
    """Of Gloo, whose peer comes late: the innermost frame is where torch calls its operators."""
    importlib.import_module("torch.distributed._functional_collectives")  # registers what torch calls in between
    name, kind = "a group", dist.ProcessGroup
    group = kind(dist.HashStore(), 0, 2)
    group._set_default_backend(kind.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), kind.BackendType.GLOO, groups[0])
    torch._C._distributed_c10d._register_process_group(name, group)
    operator = torch.ops._c10d_functional.all_reduce
    called = operator.default if overload else operator
    over = threading.Event()

    def reduce(rank: int, name: str) -> None:
        result = called(torch.ones(2), "sum", name)
        torch.ops._c10d_functional.wait_tensor(result)
        over.set()

    thread = threading.Thread(target=reduce, args=(0, name))
    monkeypatch.setattr(whereabouts.threading, "main_thread", lambda: thread)
    thread.start()
    try:
        while not _is_in(thread, "_ops.py"):
            assert not over.is_set()
            time.sleep(0.001)
        frame = sys._current_frames()[thread.ident or 0]
        assert whereabouts.in_collective(frame)
        spot = whereabouts.look()
        assert spot is not None and spot.waits
        assert "in reduce" in spot.where
        groups[1].allreduce([torch.ones(2)]).wait()
    finally:
        thread.join(30)
        torch._C._distributed_c10d._unregister_process_group(name)
    assert over.is_set()


def _is_in(thread: threading.Thread, file: str) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_filename == os.path.join(TORCH, file)


@pytest.mark.parametrize(
    ("name", "attributes", "waits"),
    [
        ("__call__", {"_name": "_c10d_functional::all_reduce"}, True),
        ("__call__", {"_qualified_op_name": "c10d::allreduce_"}, True),
        ("redispatch", {"_name": "_c10d_functional::all_reduce"}, True),
        ("__call__", {"_name": "aten::add"}, False),
        ("__call__", {"_name": "mine::c10d"}, False),
        ("__call__", {}, False),
        ("decompose", {"_name": "_c10d_functional::all_reduce"}, False),
    ],
)
def test_an_operator_by_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, attributes: dict[str, str], waits: bool
) -> None:
    function = in_torch(("_ops.py", name, "lock.acquire()"))

    def call(go: Go) -> None:
        vars(go).update(attributes)
        function(go)

    spot = seen(monkeypatch, call, sleeps=True)
    assert spot is not None and spot.waits is waits


@pytest.mark.parametrize(("name", "waits"), [("_c10d_functional::wait_tensor", True), ("aten::add", False)])
def test_an_operator_whose_gradient_is_prepared(monkeypatch: pytest.MonkeyPatch, name: str, waits: bool) -> None:
    """As seen in compiled code: the operator calls a function of torch's that calls C++."""
    made: dict[str, Any] = {}
    line = "def autograd_impl(go): go.lock.acquire()"
    exec(compile(line, os.path.join(TORCH, "_library/autograd.py"), "exec"), made)
    outer = in_torch(("_ops.py", "__call__", "go.inner(go)"))

    def call(go: Go) -> None:
        vars(go).update(_name=name, inner=made["autograd_impl"])
        outer(go)

    spot = seen(monkeypatch, call, sleeps=True)
    assert spot is not None and spot.waits is waits


def test_an_operator_without_attributes() -> None:
    """Of a version that has them elsewhere."""
    made: dict[str, Any] = {}
    line = "def __call__(self):\n    return check()\n"
    exec(compile(line, os.path.join(TORCH, "_ops.py"), "exec"), made)
    made["check"] = lambda: whereabouts.in_collective(sys._getframe().f_back)  # type: ignore[arg-type]
    assert made["__call__"](object()) is False
