"""Shutdown beside abort: every overlap, with threads that are stopped at each line, and a stand-in for groups."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

from inprocess.collectives import nccl, nccl_shutdown, nccl_wake
from inprocess.collectives.nccl_shutdown import Replaced, Shutdowns
from inprocess.interrupt.gate import Interrupted
from inprocess.interrupt.signals import Interrupter
from inprocess.system import logs
from tests.threads import groups

Patch = pytest.MonkeyPatch
FILE = nccl_shutdown.__file__
LOGGER = "inprocess.collectives.nccl_shutdown"


class Group:
    """As torch's: what is aborted while or after it is shut down is no more."""

    group_name = "0"

    def __init__(self, inside: Callable[[], object] = lambda: None) -> None:
        self.inside = inside
        self.story: list[str] = []
        self.crashes: list[str] = []

    def shutdown(self) -> None:
        self._end("shutdown", "abort")

    def abort(self) -> None:
        self._end("abort", "shutdown")

    def _end(self, how: str, other: str) -> None:
        if any(each.startswith(other) for each in self.story):
            self.crashes.append(f"{how} after {self.story}")
        self.story.append(f"{how} begins")
        self.inside()
        self.story.append(f"{how} ends")


class Backend:
    """NCCL's part of one."""

    def __init__(self) -> None:
        self.splits: list[int] = []

    def perform_nocolor_split(self, device: int) -> None:
        self.splits.append(device)


@pytest.fixture(autouse=True)
def shutdowns(monkeypatch: Patch) -> Iterator[Shutdowns]:
    monkeypatch.setattr(nccl_shutdown, "LIMIT", 60.0)
    logs.once.cache_clear()
    own = Shutdowns()
    own.begin(Group, Backend)
    yield own
    own.end()


class Stepped(threading.Thread):
    """Calls a method of a group, and stops before the n-th line of the library that it runs, until told to go on."""

    def __init__(self, action: Callable[[], object], stop_at: int | None = None) -> None:
        super().__init__(daemon=True)
        self._action, self._stop_at, self._lines = action, stop_at, 0
        self.stopped, self.go, self.over = threading.Event(), threading.Event(), threading.Event()

    def run(self) -> None:
        sys.settrace(self._trace)
        try:
            self._action()
        finally:
            sys.settrace(None)
            self.over.set()
            self.stopped.set()

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != FILE:
            return None
        if event == "line":
            if self._lines == self._stop_at:
                self.stopped.set()
                assert self.go.wait(30)
            self._lines += 1
        return self._trace

    def is_waiting(self) -> bool:
        """For a lock, in the library."""
        frame = sys._current_frames().get(self.ident or 0)
        return frame is not None and frame.f_code.co_filename == FILE


def lines_of(action: Callable[[], object]) -> int:
    thread = Stepped(action)
    thread.start()
    assert thread.over.wait(30)
    return thread._lines


@pytest.mark.parametrize("first", ["shutdown", "abort"])
@pytest.mark.parametrize("second", ["shutdown", "abort"])
def test_every_overlap(first: str, second: str) -> None:
    """The first is stopped at each of its lines, while the second runs as far as it gets; then the first goes on."""
    count = lines_of(getattr(Group(), first))
    assert count > 5
    for stop_at in range(count):
        group = Group()
        one, two = Stepped(getattr(group, first), stop_at), Stepped(getattr(group, second))
        one.start()
        assert one.stopped.wait(30)
        two.start()
        while not two.over.is_set() and not two.is_waiting():
            time.sleep(0)
        one.go.set()
        assert one.over.wait(30)
        assert two.over.wait(30)
        assert not group.crashes, f"stopped at line {stop_at}: {group.crashes}"
        assert len(group.story) == 2, f"stopped at line {stop_at}: {group.story}"


@pytest.mark.parametrize("first", ["shutdown", "abort"])
def test_while_it_is_inside_torch(first: str) -> None:
    """A shutdown does nothing beside an abort, and does not wait for it; an abort waits for a shutdown."""
    inside, go = threading.Event(), threading.Event()
    group = Group(lambda: (inside.set(), go.wait(30)))
    one = threading.Thread(target=getattr(group, first))
    one.start()
    assert inside.wait(30)
    if first == "abort":
        group.shutdown()
        two = None
    else:
        two = threading.Thread(target=group.abort)
        two.start()
        two.join(0.05)
        assert two.is_alive()
    go.set()
    for thread in (one, two):
        if thread is not None:
            thread.join(30)
    assert group.story == [f"{first} begins", f"{first} ends"]


def test_each_at_most_once() -> None:
    for first, second in (("shutdown", "abort"), ("abort", "shutdown"), ("abort", "abort"), ("shutdown", "shutdown")):
        group = Group()
        getattr(group, first)()
        getattr(group, second)()
        assert group.story == [f"{first} begins", f"{first} ends"]


def test_a_shutdown_that_waits_for_ever_is_aborted_beside(monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> None:
    """Where a peer is gone, only the abort ends it."""
    monkeypatch.setattr(nccl_shutdown, "LIMIT", 0.05)
    inside, aborted = threading.Event(), threading.Event()
    group = Group(lambda: aborted.set() if "abort begins" in group.story else (inside.set(), aborted.wait(30)))
    one = threading.Thread(target=group.shutdown)
    one.start()
    assert inside.wait(30)
    with caplog.at_level(logging.WARNING, LOGGER):
        group.abort()
        group.abort()
    one.join(30)
    assert group.story == ["shutdown begins", "abort begins", "abort ends", "shutdown ends"]
    assert caplog.text.count("destroy_process_group() has not ended for 0.05 s") == 1


def test_a_shutdown_that_fails_may_be_followed_by_an_abort() -> None:
    group = Group()

    def fail() -> None:
        raise RuntimeError("NCCL error")

    group.inside = fail
    with pytest.raises(RuntimeError, match="NCCL error"):
        group.shutdown()
    group.inside, group.story = lambda: None, []
    group.abort()
    assert group.story == ["abort begins", "abort ends"]


def test_groups_do_not_wait_for_each_other_and_are_forgotten(shutdowns: Shutdowns) -> None:
    go, inside = threading.Event(), threading.Event()
    held, other = Group(lambda: (inside.set(), go.wait(30))), Group()
    thread = threading.Thread(target=held.shutdown)
    thread.start()
    assert inside.wait(30)
    other.abort()
    assert other.story
    assert len(shutdowns._ends) == 2
    del other
    gc.collect()
    assert len(shutdowns._ends) == 1
    go.set()
    thread.join(30)


def test_the_function_is_not_interrupted_inside(shutdowns: Shutdowns) -> None:
    """It would leave the lock locked; and parked there, the main thread would have the abort wait for it."""
    interrupter = Interrupter()
    interrupter.install()
    gate = interrupter.new_gate()
    asked = threading.Event()

    def ask() -> None:
        gate.close_for_abort()
        with gate.parked():
            asked.set()
            group.abort()
        gate.interrupt_until_left()

    def inside() -> None:
        may_strike.append(gate._is_inside(sys._getframe()))
        monitor.start()
        assert asked.wait(30)

    def function() -> None:
        may_strike.append(gate._is_inside(sys._getframe()))
        group.shutdown()
        while True:
            time.sleep(10)

    group, monitor, may_strike = Group(inside), threading.Thread(target=ask), list[bool]()
    try:
        assert isinstance(gate.run(function), Interrupted)
        monitor.join(30)
    finally:
        interrupter.restore()
    assert may_strike == [True, False]
    assert group.story == ["shutdown begins", "shutdown ends"]
    assert not shutdowns._end_of(group).lock.locked()


# --- a restart aborts the group on every rank ----------------------------------------------------------------------


class Communicator:
    """As NCCL 2.31's and later: a rank that destroys it and a rank that aborts it wait for each other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ways: dict[int, str] = {}
        self.seen: list[str] = []

    def end(self, rank: int, way: str) -> None:
        """Until both ranks do the same; an abort ends what its own rank has begun."""
        with self._changed:
            self._ways[rank] = way
            self.seen.append(way)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(self._ways) == 2 and len(set(self._ways.values())) == 1, 30)


class Member:
    """Of a communicator: the group of one rank."""

    group_name = "0"

    def __init__(self, communicator: Communicator, rank: int) -> None:
        self._communicator, self._rank = communicator, rank

    def shutdown(self) -> None:
        self._communicator.end(self._rank, "destroy")

    def abort(self) -> None:
        self._communicator.end(self._rank, "abort")


@pytest.mark.parametrize("moment", ["before it is known", "before the abort", "beside the abort", "after it"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_leaves_while_the_others_abort(monkeypatch: Patch, moment: str, first: int) -> None:
    """Rank 0 destroys the group at that moment; either rank may be the first that aborts it."""
    monkeypatch.setattr(nccl_shutdown, "LIMIT", 0.05)
    communicator = Communicator()
    members = [type("Member", (Member,), {})(communicator, rank) for rank in (0, 1)]
    ranks = [Shutdowns(), Shutdowns()]
    for rank, member in zip(ranks, members, strict=True):
        rank.begin(type(member))
    threads: list[threading.Thread] = []

    def start(action: Callable[[], object]) -> None:
        threads.append(threading.Thread(target=action, daemon=True))
        threads[-1].start()

    def abort(number: int) -> None:
        leaves = number == 0
        if leaves and moment == "before it is known":
            start(members[0].shutdown)
        ranks[number].doom([members[number]])
        if leaves and moment == "before the abort":
            start(members[0].shutdown)
        start(members[number].abort)
        if leaves and moment == "beside the abort":
            start(members[0].shutdown)

    try:
        abort(first)
        abort(1 - first)
        if moment == "after it":
            threads[0].join(30)
            threads[1].join(30)
            members[0].shutdown()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        known = moment != "before it is known"
        assert sorted(communicator.seen) == ["abort"] * 2 + ["destroy"] * (not known)
    finally:
        for rank in ranks:
            rank.end()


# --- NCCL's threads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wakes", "used"), [(True, True), (False, True), (True, False)])
def test_a_shutdown_wakes_them(shutdowns: Shutdowns, monkeypatch: Patch, wakes: bool, used: bool) -> None:
    """Only where they are NCCL's, and the user wants it."""
    monkeypatch.setattr(nccl, "is_used_by", lambda group: used)
    woken = threading.Event()
    monkeypatch.setattr(nccl_wake, "wake_receivers", woken.set)
    shutdowns.end()
    shutdowns.begin(Group, Backend, wakes)
    expected = wakes and used
    group = Group(lambda: woken.wait(30 if expected else 0.05))
    group.shutdown()
    assert woken.is_set() is expected
    assert group.story == ["shutdown begins", "shutdown ends"]


# --- for the time of a call ---------------------------------------------------------------------------------------


def test_what_was_there_is_put_back(shutdowns: Shutdowns) -> None:
    replaced = Group.shutdown
    shutdowns.begin(Group, Backend)  # again does nothing
    assert Group.shutdown is replaced
    shutdowns.end()
    assert Group.shutdown is not replaced
    group = Group()
    group.shutdown()
    group.abort()
    assert group.crashes
    shutdowns.end()


def test_what_the_program_puts_there_stays(shutdowns: Shutdowns, monkeypatch: Patch) -> None:
    original = Group.abort.__wrapped__  # type: ignore[attr-defined]

    def own(group: Group) -> None: ...

    monkeypatch.setattr(Group, "abort", own)
    shutdowns.end()
    assert Group.abort is own
    monkeypatch.undo()
    Group.abort = original  # type: ignore[method-assign]


def test_torch_itself_where_it_has_nccl(monkeypatch: Patch, group: None) -> None:
    """And where it has none only shutdowns are noted. Afterwards groups end as before."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    before = methods()
    own = Shutdowns()
    own.begin()
    assert methods()[0] != before[0] and methods()[1] == before[1]
    own.end()
    assert methods() == before
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for _ in range(2):
        own.begin()
        try:
            assert methods() != before
            dist.group.WORLD.abort()
            dist.destroy_process_group()
        finally:
            own.end()
        assert methods() == before
        groups.init()
        dist.destroy_process_group()
        groups.init()


class InPython(dist.ProcessGroup):
    """As small backends are; it leaves the rest to torch."""


class OnTop(InPython):
    def abort(self) -> None:
        super().abort()


@pytest.mark.parametrize("kind", [InPython, OnTop])
def test_a_group_in_python_is_aborted_once(kind: type[dist.ProcessGroup]) -> None:
    """torch's method in C++ calls what the class has under its name: the replacement, again and again."""
    calls: list[str] = []

    def note(original: Callable[..., object], group: Any) -> None:
        calls.append("abort")
        assert len(calls) < 5
        original(group)

    replaced = Replaced(dist.ProcessGroup, "abort", note)
    try:
        kind(0, 1).abort()
    finally:
        replaced.restore()
    assert calls == ["abort"]


def methods() -> list[Any]:
    """As the class has them: asked for them it answers what they contain."""
    return [vars(dist.ProcessGroup)[name] for name in ("shutdown", "abort")]


def test_a_method_of_a_base_class_is_that_again(shutdowns: Shutdowns) -> None:
    class Derived(Group):
        """With its base's methods."""

    shutdowns.end()
    shutdowns.begin(Derived)
    assert "shutdown" in vars(Derived)
    shutdowns.end()
    assert "shutdown" not in vars(Derived)


def test_a_group_of_some_ranks_with_device_id_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    backend = Backend()
    with caplog.at_level(logging.WARNING, LOGGER):
        backend.perform_nocolor_split(0)
        backend.perform_nocolor_split(1)
    assert backend.splits == [0, 1]
    assert len(caplog.records) == 1
    assert "device_id=" in caplog.text
