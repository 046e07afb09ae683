"""An exception in a coalescing context, at each line: NCCL's and torch's counts, by stand-ins, are as before."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from inprocess.collectives import coalescing
from inprocess.collectives.coalescing import Contexts
from inprocess.collectives.nccl_shutdown import Shutdowns
from inprocess.interrupt import frames
from inprocess.interrupt.gate import Interrupted
from inprocess.interrupt.signals import Interrupter
from tests.threads.group_calls import Backend, Nccl

Patch = pytest.MonkeyPatch
DEVICE = torch.device("cuda", 0)
FILES = (coalescing.__file__, c10d.__file__, __file__)


class Group:
    group_name = "0"

    def __init__(self, nccl: Nccl) -> None:
        self.nccl = nccl
        self.aborted = self.freed = False
        self.begun = 0

    def _get_backend(self, device: torch.device) -> Any:
        assert device == DEVICE
        return Backend(self.nccl)

    def _start_coalescing(self, device: torch.device) -> None:
        self.nccl.start()

    def _end_coalescing(self, device: torch.device) -> str:
        self.nccl.end()
        return "work"

    def send(self) -> None:
        if self.aborted:
            raise RuntimeError("NCCL communicator was aborted")
        self.nccl.queue.append(self)
        if not self.nccl.depth:
            self.nccl.depth = 1
            self.nccl.ncclGroupEnd()

    def shutdown(self) -> None:
        assert not self.nccl.depth, "it would only be queued"

    def abort(self) -> None:
        self.aborted = self.freed = True


@pytest.fixture
def nccl(monkeypatch: Patch) -> Nccl:
    made = Nccl()
    monkeypatch.setattr(coalescing, "_nccl", lambda: made)
    return made


@pytest.fixture
def contexts() -> Iterator[Contexts]:
    shutdowns, own = Shutdowns(), Contexts()
    shutdowns.begin(Group)
    own.begin(Group)
    yield own
    own.end()
    shutdowns.end()


def check(nccl: Nccl) -> None:
    """The thread's next iteration does what it is asked to."""
    assert (nccl.depth, nccl.counted) == (0, 0)
    assert not c10d._world.pg_coalesce_state
    group = Group(nccl)
    with dist._coalescing_manager(group, DEVICE, async_ops=True) as manager:
        nccl.make_communicator()
        group.send()
        assert group.begun == 0
    assert manager.works == ["work"]
    group.send()
    assert group.begun == 2
    assert not c10d._world.pg_coalesce_state


class Stop(Exception):
    pass


class Raising:
    """Raises before the n-th line that may be interrupted."""

    def __init__(self, at: int | None, within: Callable[..., Any]) -> None:
        self._at, self._within, self.lines = at, within.__code__, 0

    def run(self, action: Callable[[], object]) -> None:
        sys.settrace(self._trace)
        try:
            action()
        except Stop:
            pass
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in FILES or not self._is_inside(frame):
            return None
        if event == "line":
            if self.lines == self._at:
                raise Stop
            self.lines += 1
        return self._trace

    def _is_inside(self, frame: FrameType | None) -> bool:
        """As a gate tells it."""
        while frame is not None and frame.f_code is not self._within:
            if id(frame.f_code) in frames.WHOLE:
                return False
            frame = frame.f_back
        return frame is not None


def one(nccl: Nccl) -> None:
    group = Group(nccl)
    with dist._coalescing_manager(group, DEVICE, async_ops=True) as manager:
        group.send()
        group.send()
    assert manager.works


def nested(nccl: Nccl) -> None:
    first, second = Group(nccl), Group(nccl)
    with c10d._coalescing_manager(first, device=DEVICE):
        first.send()
        with contextlib.suppress(RuntimeError), c10d._coalescing_manager(group=second, device=DEVICE, async_ops=True):
            second.send()
        first.send()


@pytest.mark.parametrize("function", [one, nested])
@pytest.mark.parametrize("aborted", [False, True])
def test_an_exception_at_each_line(
    contexts: Contexts, nccl: Nccl, monkeypatch: Patch, function: Callable[[Nccl], None], aborted: bool
) -> None:
    """And once more where an abort comes first, and waits for what is queued."""
    monkeypatch.setattr(coalescing, "LIMIT", 0.0)
    monkeypatch.setattr(Group, "_end_coalescing", ended_with_wait(Group._end_coalescing))
    counting = Raising(None, function)
    counting.run(lambda: function(nccl))
    check(nccl)
    assert counting.lines > 20
    for at in range(counting.lines):
        Raising(at, function).run(lambda: function(nccl))
        contexts.close()
        c10d._world.pg_coalesce_state.clear()  # as `groups.forget` does: some began before anything was to be ended
        check(nccl)
        if aborted:
            abort_in_the_middle(contexts, nccl)


def ended_with_wait(original: Any) -> Any:
    """What a context that waits for its work waits for."""

    class Work:
        def wait(self) -> None:
            pass

        def __eq__(self, other: object) -> bool:
            return other == "work"

        __hash__ = None  # type: ignore[assignment]

    def end(group: Group, device: torch.device) -> Any:
        original(group, device)
        return Work()

    return end


def abort_in_the_middle(contexts: Contexts, nccl: Nccl) -> None:
    group = Group(nccl)
    with pytest.raises(RuntimeError, match="was aborted"), dist._coalescing_manager(group, DEVICE):
        group.abort()
        group.send()
    contexts.close()
    check(nccl)


def test_the_first_batch_waits_for_its_communicator_and_is_cut(contexts: Contexts, nccl: Nccl) -> None:
    """NCCL's group call is over then, and torch's is not."""
    group = Group(nccl)
    with pytest.raises(RuntimeError, match="connection closed"), dist._coalescing_manager(group, DEVICE):
        nccl.make_communicator("connection closed")
    check(nccl)


def test_what_was_queued_is_not_begun(contexts: Contexts, nccl: Nccl) -> None:
    """It would wait for peers that do not come."""
    group = Group(nccl)
    with pytest.raises(Stop), dist._coalescing_manager(group, DEVICE):
        group.send()
        raise Stop
    assert group.begun == 0
    check(nccl)


def test_the_context_around_it_goes_on_and_fails(contexts: Contexts, nccl: Nccl) -> None:
    """What is dropped is the whole thread's, so nobody may believe that it was sent."""
    outer, inner = Group(nccl), Group(nccl)
    with pytest.raises(RuntimeError, match="NCCL error"), dist._coalescing_manager(outer, DEVICE):
        with contextlib.suppress(Stop), dist._coalescing_manager(inner, DEVICE):
            raise Stop
        assert (nccl.depth, nccl.counted) == (1, 1)
        outer.send()
    assert outer.begun == 0
    check(nccl)


def test_the_end_fails(contexts: Contexts, nccl: Nccl) -> None:
    group = Group(nccl)
    with pytest.raises(RuntimeError, match="NCCL error"), dist._coalescing_manager(group, DEVICE):
        group.send()
        nccl.ncclAllReduce(None, None, 0, 0, 0, None, None)
    check(nccl)


def test_no_context_begins_on_a_group_that_was_aborted(contexts: Contexts, nccl: Nccl) -> None:
    """The loop goes on to the next batch before the interruption arrives."""
    group = Group(nccl)
    group.abort()
    for _ in range(3):
        with (
            pytest.raises(RuntimeError, match="process group 0 was aborted for a restart"),
            dist._coalescing_manager(group, DEVICE),
        ):
            pytest.fail("it began")
    contexts.close()
    check(nccl)


def test_without_a_device_only_torchs_list_stays(contexts: Contexts, nccl: Nccl) -> None:
    """Nothing is begun with the backend; but the list would keep the group, and what is in it."""
    group = Group(nccl)
    with pytest.raises(Stop), dist._coalescing_manager(group):
        c10d._world.pg_coalesce_state[group].append("operation")  # type: ignore[arg-type, index]
        raise Stop
    group.abort()
    contexts.close()
    check(nccl)


def test_an_abort_waits_for_a_context(contexts: Contexts, nccl: Nccl, monkeypatch: Patch) -> None:
    """What is queued refers to the communicator, which an abort frees."""
    monkeypatch.setattr(coalescing, "LIMIT", 60.0)
    group, began, go = Group(nccl), threading.Event(), threading.Event()

    def batch() -> None:
        with dist._coalescing_manager(group, DEVICE, async_ops=True):
            group.send()
            began.set()
            assert go.wait(30)

    threads = [threading.Thread(target=batch), threading.Thread(target=group.abort)]
    threads[0].start()
    assert began.wait(30)
    threads[1].start()
    threads[1].join(0.05)
    assert not group.aborted
    other = Group(nccl)
    other.abort()  # does not wait
    go.set()
    for thread in threads:
        thread.join(30)
    assert group.aborted
    assert group.begun == 1


def test_but_not_for_ever(contexts: Contexts, nccl: Nccl) -> None:
    """It may be waiting for a peer that is gone."""
    group = Group(nccl)
    group._start_coalescing(DEVICE)
    group.abort()
    assert group.aborted
    contexts.close()
    check(nccl)


def test_a_shutdown_while_the_exception_passes(contexts: Contexts, nccl: Nccl) -> None:
    """``destroy_process_group()`` in a ``finally:``; where torch's context manager was not replaced."""
    group = Group(nccl)
    group._start_coalescing(DEVICE)
    group.send()
    group.shutdown()
    check(nccl)


def test_another_thread_ends_what_it_has_begun(contexts: Contexts, nccl: Nccl) -> None:
    """Where torch's context manager was not replaced; autograd's threads outlive an iteration."""
    left: list[tuple[int, int]] = []

    def work() -> None:
        old, new = Group(nccl), Group(nccl)
        old._start_coalescing(DEVICE)
        old.abort()
        with dist._coalescing_manager(new, DEVICE, async_ops=True):
            left.append((nccl.depth, nccl.counted))
            new.send()
        left.append((nccl.depth, nccl.counted))
        left.append((new.begun, 0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert left == [(1, 1), (0, 0), (1, 0)]


# --- who has no such state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("attributes", [(), ("wrapped_pg",)], ids=["nccl2 or Gloo", "within another"])
def test_a_backend_without_group_calls(
    contexts: Contexts, nccl: Nccl, monkeypatch: Patch, attributes: tuple[str, ...]
) -> None:
    """torch 2.15 has a ProcessGroupNCCL2, which is no ProcessGroupNCCL; a context that is open goes with its group."""

    class ProcessGroupNCCL2:
        def __init__(self) -> None:
            for each in attributes:
                setattr(self, each, object())

    monkeypatch.setattr(Group, "_get_backend", lambda group, device: ProcessGroupNCCL2())
    monkeypatch.setattr(Group, "_start_coalescing", lambda group, device: None)
    contexts.end()
    contexts.begin(Group)
    group = Group(nccl)
    with pytest.raises(Stop), dist._coalescing_manager(group, DEVICE):
        raise Stop
    assert (nccl.depth, nccl.counted) == (0, 0)
    group.abort()
    with pytest.raises(RuntimeError, match="was aborted for a restart"):
        group._start_coalescing(DEVICE)


def test_gloo_itself(group: None, monkeypatch: Patch) -> None:
    """It supports no contexts; a batch is sent one by one, before, meanwhile and afterwards."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    own = Contexts()
    before = [vars(dist.ProcessGroup)["_start_coalescing"], dist._coalescing_manager, c10d._coalescing_manager]
    own.begin()
    try:
        assert dist._coalescing_manager is not before[1]
        with pytest.raises(RuntimeError, match="does not implement startCoalescing"):
            dist.group.WORLD._start_coalescing(torch.device("cpu"))
        assert not own._here.open
        assert not any(own._counts.values())
        with dist._coalescing_manager():
            tensor = torch.ones(2)
            dist.all_reduce(tensor)
        dist.group.WORLD.abort()
        own.close()
    finally:
        own.end()
    now = [vars(dist.ProcessGroup)["_start_coalescing"], dist._coalescing_manager, c10d._coalescing_manager]
    assert now == before


def test_torch_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    own = Contexts()
    before = dist._coalescing_manager
    own.begin()
    assert dist._coalescing_manager is before
    own.close()
    own.end()


def test_a_library_that_is_not_found_is_said_once(
    contexts: Contexts, nccl: Nccl, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    """NCCL's group call is ended all the same."""
    coalescing.once.cache_clear()
    monkeypatch.setattr(coalescing, "_nccl", lambda: None)
    group = Group(nccl)
    with pytest.raises(Stop), dist._coalescing_manager(group, DEVICE):
        raise Stop
    assert (nccl.depth, nccl.counted) == (0, 0)
    assert not caplog.records
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cut"), dist._coalescing_manager(group, DEVICE):
            nccl.counted = 1
            nccl.make_communicator("cut")
        nccl.counted = 0
    assert caplog.text.count("NCCL's library is not found") == 1
    coalescing.once.cache_clear()


def test_no_library_is_loaded_for_it() -> None:
    """Only one that this process has loaded already: torch's own, where it was built with NCCL."""
    assert (coalescing._nccl() is not None) == dist.is_nccl_available()


# --- with a real interruption -------------------------------------------------------------------------------------


def test_a_loop_over_batches_is_interrupted(contexts: Contexts, nccl: Nccl) -> None:
    """Again and again at any moment; the groups are aborted first, as a restart does it."""
    interrupter = Interrupter()
    interrupter.install()
    try:
        for _ in range(20):
            group, gate, sent = Group(nccl), interrupter.new_gate(), threading.Event()

            def ask(group: Group = group, gate: Any = gate, sent: threading.Event = sent) -> None:
                assert sent.wait(30)
                gate.close_for_abort()
                with gate.parked():
                    group.abort()
                gate.interrupt_until_left()

            def function(group: Group = group, sent: threading.Event = sent) -> None:
                while True:
                    with contextlib.suppress(RuntimeError), dist._coalescing_manager(group, DEVICE, async_ops=True):
                        group.send()
                    sent.set()

            monitor = threading.Thread(target=ask)
            monitor.start()
            assert isinstance(gate.run(function), Interrupted)
            contexts.close()
            monitor.join(30)
            check(nccl)
    finally:
        interrupter.restore()
