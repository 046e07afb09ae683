"""inject_fault: the same plan on all ranks; every fault that needs no GPU, each in a process of its own; the others
with a fake of torch. tests/gpu has them on a GPU.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from inprocess.exception import OptionError
from inprocess.tools import inject_fault as module
from inprocess.tools.inject_fault import (
    GPU_FAULTS,
    Fault,
    InjectedException,
    clear_workload_exception,
    dispatch_fault_injection,
    inject_fault,
    maybe_raise_workload_exception,
)


@pytest.fixture(autouse=True)
def job(monkeypatch):
    """A job in which this process is a rank that no plan can name, so nothing strikes here."""
    for name, value in {"RANK": "999", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}.items():
        monkeypatch.setenv(name, value)


def test_all_ranks_make_the_same_plan(monkeypatch):
    plans = []
    for rank in range(100, 108):
        monkeypatch.setenv("RANK", str(rank))
        plans.append(inject_fault((Fault.SIGKILL, Fault.SIGTERM), num_faults=(1, 4), delay=(0, 1), seed=7))
    assert all(plan == plans[0] for plan in plans)


def test_without_a_seed_the_plan_depends_on_the_rendezvous(monkeypatch):
    same = [inject_fault(num_faults=4) for _ in range(3)]
    assert same[0] == same[1] == same[2]
    others = []
    for port in range(20):
        monkeypatch.setenv("MASTER_PORT", str(port))
        others.append(inject_fault(num_faults=4))
    assert any(other != same[0] for other in others)


def test_a_program_may_choose_the_fault_itself():
    """In this process, whatever its rank is."""
    called = []
    dispatch_fault_injection(Fault.WORKLOAD_EXC, 0.0, lambda: called.append("before"))
    for thread in threading.enumerate():
        if thread.name == "inprocess-fault":
            thread.join()
    with pytest.raises(InjectedException):
        maybe_raise_workload_exception()
    assert called == ["before"]
    with pytest.raises(OptionError, match="faults="):
        dispatch_fault_injection("WORKLOAD_EXC", 0.0)


@pytest.mark.parametrize(
    ("num_faults", "keep_alive", "expected"),
    [(0, 1, {0}), (3, 1, {3}), (8, 1, {7}), (8, 0, {8}), (8, 6, {2}), (8, 20, {0}), ((2, 5), 1, {2, 3, 4, 5})],
)
def test_number_of_victims(num_faults, keep_alive, expected):
    sizes = {len(inject_fault(num_faults=num_faults, keep_alive=keep_alive, seed=seed)) for seed in range(60)}
    assert sizes == expected


def test_victims_are_ranks_and_every_rank_may_be_one():
    victims = {rank for seed in range(200) for rank in inject_fault(seed=seed)}
    assert victims == set(range(8))


def test_gpu_faults_only_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(module, "_cuda", lambda: False)
    assert not GPU_FAULTS & {fault for seed in range(200) for fault in inject_fault(seed=seed).values()}
    monkeypatch.setattr(module, "_cuda", lambda: True)
    assert {fault for seed in range(200) for fault in inject_fault(seed=seed).values()} == set(Fault)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"faults": ()}, "faults"),
        ({"faults": ("sigkill",)}, "faults"),
        ({"num_faults": -1}, "num_faults"),
        ({"num_faults": (3, 2)}, "num_faults"),
        ({"delay": -1}, "delay"),
        ({"delay": "soon"}, "delay"),
        ({"delay": (5,)}, "delay"),
        ({"delay": (1, 2, 3)}, "delay"),
        ({"num_faults": (1,)}, "num_faults"),
        ({"faults": Fault.SIGINT}, "faults"),
        ({"faults": 3}, "faults"),
        ({"faults": {Fault.SIGINT, Fault.SIGTERM}}, "faults"),  # in another order on each rank
        ({"keep_alive": "1"}, "keep_alive"),
        ({"keep_alive": 0.5}, "keep_alive"),
        ({"keep_alive": -5, "num_faults": 9}, "keep_alive"),
    ],
)
def test_wrong_arguments_are_named(arguments, named):
    with pytest.raises(OptionError, match=named):
        inject_fault(**arguments)


def test_gpu_fault_without_a_gpu(monkeypatch):
    monkeypatch.setattr(module, "_cuda", lambda: False)
    with pytest.raises(OptionError, match="CUDA"):
        inject_fault((Fault.GPU_SLEEP,))


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_outside_a_job(monkeypatch, name):
    for text in ("", "\N{SUPERSCRIPT TWO}", "-1"):
        monkeypatch.setenv(name, text)
        with pytest.raises(OptionError, match=name):
            inject_fault()
    monkeypatch.delenv(name)
    with pytest.raises(OptionError, match=name):
        inject_fault()


def test_signal_fault_needs_the_main_thread(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    raised = []

    def call():
        try:
            inject_fault((Fault.SIGNAL_EXC,), num_faults=8, keep_alive=0)
        except OptionError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


# --- on a GPU, which is a fake: it knows who asked for what, in which thread


class OutOfMemory(RuntimeError):
    pass


class Storage:
    """A tensor that only takes memory."""


class FakeTorch:
    """As much of torch as the faults on the GPU use. The calling thread is on device 3, a new one on device 0."""

    #: how many portions of memory there are
    ROOM = 5

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.__version__ = "0"
        self.uint8 = "uint8"
        self.kernels: list[tuple[str, object]] = []
        self.allocated: weakref.WeakSet[Storage] = weakref.WeakSet()
        self.hooks: list[object] = []
        self._of_thread = threading.local()
        self._of_thread.stream = SimpleNamespace(device=3, synchronize=self._synchronize)
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            current_stream=lambda: self.stream,
            set_stream=lambda stream: setattr(self._of_thread, "stream", stream),
            current_device=lambda: self.stream.device,
            get_device_properties=lambda device: SimpleNamespace(total_memory=self.ROOM << 20),
            _sleep=lambda cycles: self.kernels.append((f"sleep {cycles}", self.stream)),
        )
        self.nn = SimpleNamespace(modules=SimpleNamespace(module=self))

    @property
    def stream(self):
        return getattr(self._of_thread, "stream", SimpleNamespace(device=0))

    def device(self, kind, index):
        return index

    def empty(self, size, dtype, device):
        assert device == 3
        if len(self.allocated) == self.ROOM:
            raise OutOfMemory("CUDA out of memory")
        self.allocated.add(storage := Storage())
        return storage

    def full(self, shape, value, device):
        return value

    def zeros(self, size, device):
        return self

    def __getitem__(self, index):
        self.kernels.append((f"index {index}", self.stream))

    def _synchronize(self):
        if self.error:
            raise RuntimeError(self.error)

    def register_module_forward_pre_hook(self, hook):
        self.hooks.append(hook)
        return SimpleNamespace(remove=lambda: self.hooks.remove(hook))

    def forward(self):
        """A call of a module, as torch makes it."""
        for hook in tuple(self.hooks):
            hook(self, ())


@pytest.fixture
def torch(monkeypatch):
    fake = FakeTorch("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported elsewhere")
    names = ("torch", "torch.nn", "torch.nn.modules", "torch.nn.modules.module")
    for name, part in zip(names, (fake, fake.nn, fake.nn.modules, fake), strict=True):
        monkeypatch.setitem(sys.modules, name, part)
    monkeypatch.setenv("RANK", "0")
    return fake


def strike(fault):
    """Let it strike here, and wait until it has."""
    inject_fault((fault,), num_faults=8, keep_alive=0)
    for thread in threading.enumerate():
        if thread.name == "inprocess-fault":
            thread.join()


def test_kernels_run_on_the_stream_of_the_caller(torch):
    strike(Fault.GPU_SLEEP)
    strike(Fault.GPU_ERROR)
    kernels = [kernel for kernel, _ in torch.kernels]
    assert kernels == [f"sleep {1 << 50}", f"index {1 << 20}"]
    assert all(stream is torch.stream for _, stream in torch.kernels)


def test_a_lost_context_is_told_in_one_line(torch, caplog):
    """Not as the traceback of a thread: pytest makes an error of that."""
    strike(Fault.GPU_ERROR)
    (record,) = caplog.records
    assert record.getMessage().endswith("is lost: CUDA error: device-side assert triggered")


def test_an_index_that_is_not_checked_is_told(torch, caplog):
    torch.error = ""
    strike(Fault.GPU_ERROR)
    assert "nothing was injected" in caplog.text


def test_no_sleep_kernel_is_an_error_for_the_caller(torch):
    del torch.cuda._sleep
    with pytest.raises(OptionError, match="choose another fault"):
        strike(Fault.GPU_SLEEP)


def test_out_of_memory_once_and_free_with_its_frames(torch):
    strike(Fault.GPU_OOM)
    assert not torch.allocated
    with pytest.raises(OutOfMemory) as caught:
        torch.forward()
    assert len(torch.allocated) == torch.ROOM
    traceback.clear_frames(caught.tb)
    assert not torch.allocated
    torch.forward()


def test_a_module_that_is_called_at_once_finds_the_hook_whole(torch):
    """The main thread may call one while the background thread is still registering."""
    called = threading.Event()
    register = torch.register_module_forward_pre_hook

    def slow(hook):
        handle = register(hook)
        threads.append(threading.Thread(target=forward))
        threads[0].start()
        assert not called.wait(0.05)  # it waits in the hook: a longer time shows no more
        return handle

    def forward():
        with pytest.raises(InjectedException):
            torch.forward()
        called.set()

    threads: list[threading.Thread] = []
    torch.register_module_forward_pre_hook = slow
    strike(Fault.WORKLOAD_EXC)
    threads[0].join(10)
    assert called.is_set() and not torch.hooks


def test_a_workload_without_modules_raises_where_it_asks(torch):
    maybe_raise_workload_exception()  # nothing has struck
    strike(Fault.WORKLOAD_EXC)
    with pytest.raises(InjectedException):
        maybe_raise_workload_exception()
    assert not torch.hooks
    maybe_raise_workload_exception()


def test_a_workload_raises_in_one_of_two_places(torch):
    strike(Fault.WORKLOAD_EXC)
    with pytest.raises(InjectedException):
        torch.forward()
    maybe_raise_workload_exception()


def test_a_workload_exception_is_taken_back_even_while_a_module_is_called(torch):
    strike(Fault.WORKLOAD_EXC)
    (hook,) = torch.hooks
    clear_workload_exception()
    assert not torch.hooks
    torch.hooks.append(hook)  # torch walks through a copy
    torch.forward()
    maybe_raise_workload_exception()


# --- one process per fault; all of them start at the same time

PRELUDE = """
import os, signal, sys, threading
from inprocess.tools.inject_fault import Fault, InjectedException, inject_fault
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
before = signal.getsignal(signal.SIGUSR1)
def strike(fault):
    inject_fault((fault,), num_faults=1, keep_alive=0, callback=lambda: print("strikes", flush=True))
def threads_left():
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(10)
    return threading.active_count() - 1
"""
EXCEPTION = """
try:
    strike(Fault.%s)
    %s
except InjectedException:
    assert threads_left() == 0 and signal.getsignal(signal.SIGUSR1) == before
    print("raised", flush=True)
"""
BUSY = "while True: pass"
BLOCKED = "threading.Event().wait()"
MODULE = "import torch\n    linear = torch.nn.Linear(1, 1)\n    while True: linear(torch.zeros(1))"
ECHO = "strike(Fault.%s)\nfor line in sys.stdin: print(line, end='', flush=True)"


@contextmanager
def child(code: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PRELUDE + code], env=environment, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("fault", "code"),
    [("ASYNC_EXC", BUSY), ("SIGNAL_EXC", BUSY), ("SIGNAL_EXC", BLOCKED), ("WORKLOAD_EXC", MODULE)],
    ids=["asynchronous", "signal", "signal while blocked", "workload"],
)
def test_exceptions_reach_the_main_thread(fault, code):
    with child(EXCEPTION % (fault, code)) as process:
        out, error = process.communicate()
    assert (out, process.returncode) == ("strikes\nraised\n", 0), error


@pytest.mark.parametrize(
    ("fault", "signum"),
    [
        (Fault.OS_ABORT, signal.SIGABRT),
        (Fault.SEGFAULT, signal.SIGSEGV),
        (Fault.SIGKILL, signal.SIGKILL),
        (Fault.SIGTERM, signal.SIGTERM),
        (Fault.SIGINT, signal.SIGINT),
    ],
)
def test_deadly_faults(fault, signum):
    with child(ECHO % fault.name) as process:
        process.wait()
    assert process.returncode == -signum


def test_sigstop():
    with child(ECHO % "SIGSTOP") as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)


def test_lock_gil():
    """The main thread answers until the lock is held, and no more from then on."""
    with child(ECHO % "LOCK_GIL") as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "strikes\n"
        answered = True
        while answered:
            process.stdin.write("x\n")
            process.stdin.flush()
            answered = bool(select.select([process.stdout], [], [], 0.5)[0])
            if answered:
                assert process.stdout.readline() == "x\n"
