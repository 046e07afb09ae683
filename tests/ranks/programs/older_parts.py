"""The parts of 0.2 one by one, as programs use them without a Wrapper, in tests of their own hooks for instance."""

import datetime
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time

import nvidia_resiliency_ext.inprocess as inprocess
import torch
from nvidia_resiliency_ext.inprocess import Compose
from nvidia_resiliency_ext.inprocess.abort import Abort, AbortTorchDistributed
from nvidia_resiliency_ext.inprocess.attribution import (
    Interruption,
    InterruptionRecord,
)
from nvidia_resiliency_ext.inprocess.finalize import ThreadedFinalize
from nvidia_resiliency_ext.inprocess.health_check import CudaHealthCheck, FaultCounter, FaultCounterExceeded
from nvidia_resiliency_ext.inprocess.initialize import RetryController
from nvidia_resiliency_ext.inprocess.monitor_thread import RankShouldRestart
from nvidia_resiliency_ext.inprocess.rank_assignment import FillGaps, FilterGroupedByKey, RankDiscarded, ShiftRanks
from nvidia_resiliency_ext.inprocess.rank_filter import MaxActiveWorldSize, RankFilter, WorldSizeDivisibleBy
from nvidia_resiliency_ext.inprocess.state import State, Status
from nvidia_resiliency_ext.inprocess.store import BarrierError, BarrierTimeout, FileStore, PrefixStore, TCPStore
from nvidia_resiliency_ext.inprocess.tools.inject_fault import Fault, InjectedException, inject_fault


def raises(kind, call, *args):
    try:
        call(*args)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def state_of(rank, world_size):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        return State()
    finally:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]


def state():
    one = State()
    assert (one.rank, one.world_size, one.initial_rank, one.initial_world_size, one.iteration) == (0, 1, 0, 1, 0)
    assert one.status == Status.INITIALIZED and one.active_world_size == 1
    other = state_of(2, 4)
    assert (other.rank, other.world_size, other.initial_rank, other.active_world_size) == (2, 4, 2, 4)
    for status in (Status.ACTIVE, Status.INACTIVE, Status.ABORTING, Status.ABORTED):
        other.status = status
    other.iteration, other.rank = 3, 1
    other.activate_all_ranks()
    assert other.status == Status.ACTIVE and other.initial_rank == 2


def compose():
    class AddOne(inprocess.initialize.Initialize):
        def __call__(self, state):
            state.iteration += 1
            return state

    class Double(inprocess.initialize.Initialize):
        def __call__(self, state):
            state.iteration *= 2
            return state

    both = Compose(Double(), AddOne())
    assert isinstance(both, inprocess.initialize.Initialize)
    assert both(State()).iteration == 2
    assert not isinstance(Compose(Double(), AbortTorchDistributed()), Abort)


def exceptions():
    for kind in (
        inprocess.exception.HealthCheckError,
        inprocess.exception.InternalError,
        inprocess.exception.TimeoutError,
        FaultCounterExceeded,
        RankDiscarded,
        BarrierError,
    ):
        assert issubclass(kind, inprocess.exception.RestartError)
    assert not issubclass(inprocess.exception.RestartAbort, Exception)
    assert not issubclass(RankShouldRestart, Exception)
    assert issubclass(BarrierTimeout, BarrierError)


def hooks():
    called = []
    finalize = ThreadedFinalize(datetime.timedelta(seconds=30), lambda *given: called.append(given), (1, 2))
    error = ValueError("of the function")
    one = state_of(0, 4)
    assert finalize(one, error) == (one, error) and called == [(1, 2)]
    too_long = ThreadedFinalize(timeout=datetime.timedelta(seconds=0.01), fn=time.sleep, args=(1,))
    raises(Exception, too_long, one, None)

    assert CudaHealthCheck()(one, None) == (one, None)
    counter = FaultCounter(max_rank_faults=2)
    counter(one, error)
    counter(one, KeyError("another"))
    counter(one, None)
    raises(FaultCounterExceeded, counter, one, ValueError("one more"))

    class Counter(FaultCounter):
        def __call__(self, state, train_ex=None):
            return super().__call__(state, train_ex)

    assert Counter()(one, error) == (one, error)

    AbortTorchDistributed()(one)

    control = RetryController(max_iterations=2, min_world_size=3)
    assert control(one) is one
    one.iteration = 2
    raises(inprocess.exception.RestartAbort, control, one)
    one.iteration, one.world_size = 0, 2
    raises(inprocess.exception.RestartAbort, control, one)


def assignments():
    """The example of their documentation: 0 X 2 3 X X 6 7."""
    terminated = {1, 4, 5}
    for kind, expected in ((FillGaps, [0, 6, 2, 3, 7]), (ShiftRanks, [0, 2, 3, 6, 7])):
        places = {}
        for rank in sorted(set(range(8)) - terminated):
            one, left = kind()(state_of(rank, 8), set(terminated))
            assert one.world_size == 5 and left == set()
            places[one.rank] = rank
        assert [places[place] for place in range(5)] == expected, (kind, places)
        for rank in terminated:
            raises(RankDiscarded, kind(), state_of(rank, 8), set(terminated))


def grouped(rank, file, pipe):
    one = state_of(rank, 4)
    one.store = FileStore(file, 4)
    two_of_a_pair = FilterGroupedByKey(lambda rank, world_size: str(rank // 2), lambda count: count == 2)
    on_this_host = FilterGroupedByKey(key_or_fn=socket.gethostname(), condition=lambda count: count == 3)
    _, left = on_this_host(one, {1})
    try:
        one, left = Compose(ShiftRanks(), two_of_a_pair)(one, left)
        pipe.send([one.rank, one.world_size])
    except RankDiscarded:
        pipe.send(None)


def groups():
    """0 X 2 3 in pairs: rank 0 has nobody. In processes that are forked."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for rank in (0, 2, 3):
            mine, theirs = fork.Pipe()
            child = fork.Process(target=grouped, args=(rank, os.path.join(folder, "store"), theirs))
            child.start()
            running[rank] = (child, mine)
        assert {rank: mine.recv() for rank, (_, mine) in running.items()} == {0: None, 2: [0, 2], 3: [1, 2]}
        for child, _ in running.values():
            child.join()
            assert child.exitcode == 0


def filters():
    class Odd(RankFilter):
        def __call__(self, state):
            if state.rank % 2 == 0:
                state.status = Status.INACTIVE
            return state

    def seen(kind, rank):
        one = state_of(rank, 7)
        one.activate_all_ranks()
        one = kind(one)
        return one.active_world_size, one.status

    assert seen(WorldSizeDivisibleBy(4), 3) == (4, Status.ACTIVE)
    assert seen(WorldSizeDivisibleBy(divisor=4), 4) == (4, Status.INACTIVE)
    assert seen(MaxActiveWorldSize(2), 1) == (2, Status.ACTIVE)
    assert seen(MaxActiveWorldSize(max_active_world_size=2), 2) == (2, Status.INACTIVE)
    assert seen(MaxActiveWorldSize(None), 6) == (7, Status.ACTIVE)
    assert seen(Compose(WorldSizeDivisibleBy(3), MaxActiveWorldSize(4)), 3) == (3, Status.INACTIVE)
    assert seen(Odd(), 2)[1] == Status.INACTIVE


def stores():
    os.environ.update(RANK="0")  # which serves
    server = TCPStore(
        host_name="127.0.0.1", port=0, world_size=1, timeout=datetime.timedelta(seconds=30), wait_for_workers=False
    )
    in_iteration = PrefixStore(3, server)
    in_iteration.set("key", "value")
    assert in_iteration.get("key") == b"value" and not server.check(["key"])
    assert server.add("count", 2) == 2


def attribution():
    record = InterruptionRecord(rank=1, interruption=Interruption.EXCEPTION)
    assert record == pickle.loads(pickle.dumps(record)) and "1" in str(record)
    names = ["EXCEPTION", "BASE_EXCEPTION", "SOFT_TIMEOUT", "HARD_TIMEOUT", "TERMINATED", "UNRESPONSIVE"]
    assert all(Interruption[name].name == name for name in names)


def faults():
    """Rank 0 is never spared here. The exception is raised in the main thread, from another one."""
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    inject_fault(faults=(Fault.ASYNC_EXC,), num_faults=1, keep_alive=0, delay=0.05, seed=1)
    end = time.monotonic() + 60
    try:
        while time.monotonic() < end:
            time.sleep(0.01)
    except InjectedException:
        pass
    else:
        raise AssertionError("no fault struck")
    inject_fault((Fault.INT, Fault.INT), (1, 1), 0, (0.0, 0.05), 2)
    try:
        while time.monotonic() < end:
            time.sleep(0.01)
    except KeyboardInterrupt:
        pass
    assert (Fault.KILL, Fault.TERM, Fault.STOP) and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def disabled():
    @inprocess.Wrapper(enabled=False)
    def train(x):
        return torch.tensor(x).item()

    assert train(3) == 3


for part in (
    state,
    compose,
    exceptions,
    hooks,
    assignments,
    groups,
    filters,
    stores,
    attribution,
    faults,
    disabled,
):
    part()
    print(part.__name__)
