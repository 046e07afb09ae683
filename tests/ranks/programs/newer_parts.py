"""The parts of 0.4 to 0.7 one by one, as programs use them without a Wrapper, in tests of their own hooks for
instance."""

import dataclasses
import datetime
import os
import tempfile
import threading
import time

import nvidia_resiliency_ext.inprocess as inprocess
from nvidia_resiliency_ext.inprocess.abort import (
    AbortPersistentCheckpointProcesses,
    AbortTorchDistributed,
    AbortTransformerEngine,
)
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.completion import Completion
from nvidia_resiliency_ext.inprocess.finalize import ThreadedFinalize
from nvidia_resiliency_ext.inprocess.health_check import CudaHealthCheck, FaultCounter, FaultCounterExceeded
from nvidia_resiliency_ext.inprocess.initialize import RetryController
from nvidia_resiliency_ext.inprocess.monitor_thread import RankShouldRestart
from nvidia_resiliency_ext.inprocess.nested_restarter import (
    NestedRestarterAborted,
    NestedRestarterFinalized,
    NestedRestarterHandlingCompleted,
    NestedRestarterHandlingStarting,
)
from nvidia_resiliency_ext.inprocess.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    FilterCountGroupedByKey,
    Layer,
    LayerFlag,
    MaxActiveWorldSize,
    RankAssignmentCtx,
    RankDiscarded,
    ShiftRanks,
    Tree,
)
from nvidia_resiliency_ext.inprocess.rank_filter import ActiveWorldSizeDivisibleBy as OlderDivisibleBy
from nvidia_resiliency_ext.inprocess.state import FrozenState, Mode, State
from nvidia_resiliency_ext.inprocess.store import BarrierError, BarrierTimeout, FileStore, PrefixStore, StoreMixin
from nvidia_resiliency_ext.inprocess.terminate import Terminate
from nvidia_resiliency_ext.inprocess.tools import inject_fault as before_0_6
from nvidia_resiliency_ext.shared_utils.inject_fault import (
    Fault,
    InjectedException,
    clear_workload_exception,
    dispatch_fault_injection,
    inject_fault,
    maybe_raise_workload_exception,
)

PORT = os.environ["MASTER_PORT"]


def raises(kind, call, *args):
    try:
        call(*args)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def state():
    one = State(rank=2, world_size=4)
    assert (one.initial_rank, one.initial_world_size, one.mode) == (2, 4, Mode.INITIALIZED)
    assert one.active_rank is None and one.fn_exception is None
    one.rank, one.mode, one.active_rank, one.active_world_size = 1, Mode.ACTIVE, 1, 3
    frozen = one.freeze()
    assert isinstance(frozen, FrozenState) and frozen.active_world_size == 3
    raises(dataclasses.FrozenInstanceError, setattr, frozen, "rank", 0)
    os.environ.update(RANK="1", WORLD_SIZE="2")
    read = State.from_env()
    assert (read.rank, read.world_size) == (1, 2)
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    assert inprocess.State is State and inprocess.FrozenState is FrozenState and inprocess.Mode is Mode
    assert {mode.name for mode in Mode} == {"INITIALIZED", "ACTIVE", "INACTIVE", "TERMINATED"}


def compose():
    class First(Completion):
        def __call__(self, state):
            return dataclasses.replace(state, iteration=state.iteration + 1)

    class Second(Completion):
        def __call__(self, state):
            return dataclasses.replace(state, iteration=state.iteration * 2)

    both = inprocess.Compose(Second(), First())
    assert isinstance(both, Completion) and not isinstance(both, Terminate)
    assert both(State(0, 1).freeze()).iteration == 2


def exceptions():
    for kind in (
        inprocess.exception.HealthCheckError,
        inprocess.exception.InternalError,
        inprocess.exception.TimeoutError,
        FaultCounterExceeded,
        RankDiscarded,
        BarrierError,
        BarrierTimeout,
    ):
        assert issubclass(kind, inprocess.exception.RestartError)
    assert not issubclass(inprocess.exception.RestartAbort, Exception)
    assert not issubclass(RankShouldRestart, Exception)


def hooks():
    called = []
    one = State(0, 4).freeze()
    assert ThreadedFinalize(datetime.timedelta(seconds=30), called.append, (1,))(one) is one and called == [1]
    raises(Exception, ThreadedFinalize(timeout=datetime.timedelta(seconds=0.01), fn=time.sleep, args=(1,)), one)

    assert CudaHealthCheck(timeout=datetime.timedelta(seconds=20))(one) is one
    counter = FaultCounter(max_rank_faults=1)
    failed = dataclasses.replace(one, fn_exception=ValueError("of the function"))
    counter(failed)
    counter(one)
    raises(FaultCounterExceeded, counter, dataclasses.replace(one, fn_exception=ValueError("another")))

    assert AbortTorchDistributed()(one) is one
    assert AbortTransformerEngine()(one) is one
    assert AbortPersistentCheckpointProcesses()(one) is one
    assert AbortTorchDistributed("records")(one) is one

    control = RetryController(max_iterations=2, min_world_size=3, min_active_world_size=2)
    ready = dataclasses.replace(one, active_world_size=2)
    assert control(ready) is ready
    for changed in ({"iteration": 2}, {"world_size": 2}, {"active_world_size": 1}):
        raises(inprocess.exception.RestartAbort, control, dataclasses.replace(ready, **changed))

    for kind in (NestedRestarterAborted, NestedRestarterFinalized, NestedRestarterHandlingStarting):
        assert kind()(one) is one
    assert NestedRestarterHandlingCompleted(special_rank=0)(one) is one


def assigned(assignment, rank, world_size, terminated=()):
    ctx = assignment(RankAssignmentCtx(state=State(rank, world_size), store=None, terminated_ranks=set(terminated)))
    return ctx.state


def assignments():
    """The example of their documentation: 0 X 2 3 X X 6 7."""
    for kind, expected in ((FillGaps, [0, 6, 2, 3, 7]), (ShiftRanks, [0, 2, 3, 6, 7])):
        whole = inprocess.Compose(ActivateAllRanks(), kind())
        states = {rank: assigned(whole, rank, 8, {1, 4, 5}) for rank in (0, 2, 3, 6, 7)}
        assert {state.active_rank: rank for rank, state in states.items()} == dict(enumerate(expected))
        assert {(state.active_world_size, state.mode) for state in states.values()} == {(5, Mode.ACTIVE)}
        raises(RankDiscarded, assigned, whole, 4, 8, {1, 4, 5})
    few = inprocess.Compose(MaxActiveWorldSize(5), ActiveWorldSizeDivisibleBy(2), ShiftRanks())
    active = [assigned(few, rank, 8, {0}) for rank in range(1, 8)]
    assert [(state.active_rank, state.active_world_size) for state in active[:5]] == [(i, 5) for i in range(5)]
    assert [(state.active_rank, state.mode) for state in active[5:]] == [(None, Mode.INACTIVE)] * 2
    other = OlderDivisibleBy(4)(assigned(ActivateAllRanks(), 5, 7))
    assert (other.active_world_size, other.mode) == (4, Mode.INACTIVE)


def stores():
    with tempfile.TemporaryDirectory() as folder:
        store = PrefixStore(1, FileStore(os.path.join(folder, "store"), 1))
        assert isinstance(store, StoreMixin)
        store.set("key", "value")
        assert store.get("key") == b"value"


def in_threads(assignment, world_size, terminated):
    """All ranks of a job at once, each with its own view of the store."""
    found = {}

    def one(rank, file):
        ctx = RankAssignmentCtx(State(rank, world_size), PrefixStore("0", FileStore(file, -1)), set(terminated))
        try:
            found[rank] = assignment(ctx).state.rank
        except RankDiscarded:
            found[rank] = None

    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            threading.Thread(target=one, args=(rank, os.path.join(folder, "store")))
            for rank in sorted(set(range(world_size)) - set(terminated))
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    return found


def groups():
    """0 X 2 3 in pairs: rank 0 has nobody."""
    everybody = FilterCountGroupedByKey(key_or_fn=3, condition=lambda count: count == 3)
    assert in_threads(inprocess.Compose(ShiftRanks(), everybody), 4, {1}) == {0: 0, 2: 1, 3: 2}
    pairs = FilterCountGroupedByKey(
        key_or_fn=lambda state: str(state.rank // 2),
        condition=lambda count: count == 2,
        timeout=datetime.timedelta(seconds=60),
    )
    assert in_threads(inprocess.Compose(ShiftRanks(), pairs), 4, {1}) == {0: None, 2: 0, 3: 1}


def tree():
    """Two nodes of four; two active ranks in each, and the others in reserve."""
    layers = [
        Layer(min_ranks=1, max_ranks=4, key_or_fn="job", flag=LayerFlag.RESERVE),
        Layer(
            min_ranks=2,
            max_ranks=2,
            key_or_fn=lambda state: f"node {state.rank // 4}",
            flag=LayerFlag.RESERVE | LayerFlag.BACKFILL,
        ),
    ]

    def place(rank, file, found):
        store = FileStore(file, -1)
        assignment = Tree(layers)
        ctx = assignment(RankAssignmentCtx(State(rank, 8), PrefixStore("0", store), set()))
        found[rank] = (ctx.state.active_rank, ctx.state.active_world_size)

    with tempfile.TemporaryDirectory() as folder:
        found = {}
        ranks = [threading.Thread(target=place, args=(rank, os.path.join(folder, "s"), found)) for rank in range(8)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    assert found == {rank: (where, 4) for rank, where in enumerate([0, 1, None, None, 2, 3, None, None])}, found


def attribution():
    record = InterruptionRecord(rank=1, interruption=Interruption.MONITOR_PROCESS_EXCEPTION)
    assert record.rank == 1 and record in {record}


def faults():
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    end = time.monotonic() + 60
    struck = []
    inject_fault(
        faults=(Fault.ASYNC_EXC,), num_faults=1, keep_alive=0, delay=0.05, seed=1, callback=lambda: struck.append(1)
    )
    try:
        while time.monotonic() < end:
            time.sleep(0.01)
    except InjectedException:
        assert struck == [1]
    else:
        raise AssertionError("no fault struck")
    assert before_0_6.Fault is Fault
    dispatch_fault_injection(Fault.WORKLOAD_EXC, 0.0, None)
    try:
        while time.monotonic() < end:
            maybe_raise_workload_exception()
            time.sleep(0.01)
    except Exception as error:
        assert "workload" in str(error).lower(), error
    else:
        raise AssertionError("no fault struck")
    clear_workload_exception()
    maybe_raise_workload_exception()
    names = "GPU_ERROR GPU_SLEEP ASYNC_EXC SIGNAL_EXC OS_ABORT LOCK_GIL SEGFAULT SIGINT SIGKILL SIGTERM SIGSTOP"
    assert all(Fault[name] for name in names.split())


def aborted():
    """A job of one rank, which gives up."""
    seen = []

    class NoteTerminate(Terminate):
        def __call__(self, state):
            seen.append(state.iteration)
            return state

    @inprocess.Wrapper(
        initialize=RetryController(max_iterations=2),
        terminate=inprocess.Compose(NestedRestarterAborted(), NoteTerminate()),
    )
    def train(call: inprocess.CallWrapper = None):
        seen.append(f"run {call.iteration}")
        raise ValueError(f"run {call.iteration}")

    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT)
    raises(inprocess.exception.RestartAbort, train)
    assert seen == ["run 0", "run 1", 2], seen


for part in (state, compose, exceptions, hooks, assignments, stores, groups, tree, attribution, faults, aborted):
    part()
    print(part.__name__)
