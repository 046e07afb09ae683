"""The workers of a KeptLoader over restarts: real workers, interrupted at every line and wherever they can be."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import multiprocessing
import os
import random
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, get_worker_info
from torch.utils.data._utils import signal_handling

from inprocess import ElasticSampler, KeptLoader
from inprocess.call.part import CallEnd
from inprocess.interrupt import frames
from inprocess.interrupt.gate import Interrupted
from inprocess.interrupt.signals import Interrupter
from inprocess.live import loader as module
from inprocess.live import open_loaders, sampler, workers
from tests.harness.at_line import AtLine

CEILING = 20.0
SIZE, BATCH = 20, 2
FORK = multiprocessing.get_context("fork")
FILES = (str(module.__file__), str(workers.__file__))


def _number(*values: int) -> torch.Tensor:
    """Shared with the workers."""
    return torch.tensor(values).share_memory_()  # type: ignore[no-untyped-call,no-any-return]


class Samples(Dataset[Any]):
    """Counts what is loaded; sample `held` waits until it is let go."""

    def __init__(self) -> None:
        self.loads = _number(*[0] * SIZE)
        self.held, self.bad, self.holder = _number(-1), _number(-1), _number(0)
        self.go, self.reached = FORK.Event(), FORK.Event()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float, torch.Tensor]:
        self.loads[index] += 1
        if index == self.held:
            self.holder[0] = os.getpid()
            self.reached.set()
            self.go.wait(CEILING)
        if index == self.bad:
            raise KeyError("damaged")
        return torch.tensor(index), random.random(), torch.rand(2)


@pytest.fixture(autouse=True)
def torchs_handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's handler of SIGCHLD goes again."""
    before = signal.getsignal(signal.SIGCHLD)
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    monkeypatch.setattr(workers, "LOOK_EVERY", 0.1)
    yield
    signal.signal(signal.SIGCHLD, before)


Make = Callable[..., KeptLoader]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[KeptLoader] = []

    def new(data: Dataset[Any], repeats: int = 1, count: int = 2, **options: Any) -> KeptLoader:
        options = {"batch_sampler": BatchSampler(SequentialSampler(data), BATCH, False)} | options  # type: ignore[arg-type]
        made.append(KeptLoader(DataLoader(data, num_workers=count, **options), repeats=repeats))
        return made[-1]

    yield new
    while made:  # pytest keeps the list with the function
        made.pop().close()


def plain(batch: Any) -> Any:
    return [each.tolist() for each in batch]


def expected(step: int, count: int) -> list[Any]:
    """Without workers, and without a fault."""
    return _in_order()[step : step + count]


@functools.cache
def _in_order() -> list[Any]:
    return without_workers(BatchSampler(SequentialSampler(range(SIZE)), BATCH, False), 0, 20)


def without_workers(order: Any, step: int, count: int) -> list[Any]:
    spec = DataLoader(Samples(), batch_sampler=order)
    return [plain(batch) for batch in itertools.islice(KeptLoader(spec).from_step(step), count)]


def taken(loader: KeptLoader, step: int, count: int) -> list[Any]:
    """So many batches, each spoiled afterwards as a program may do."""
    found = []
    for batch in itertools.islice(loader.from_step(step), count):
        found.append(plain(batch))
        batch[0].zero_()
        batch.clear()
    return found


def all_there(loader: KeptLoader) -> None:
    """Until what has been asked for is there, but for what torch keeps on its way."""
    for task in sorted(loader._tasks.values(), key=lambda task: task.number):
        for _ in range(loader._crews[-1].comes_with(task)):
            loader._crews[-1].ask(None)
        loader._crews[-1].wait(task, CEILING)


@pytest.mark.parametrize("repeats", [0, 1, 3])
def test_as_without_faults(make: Make, repeats: int) -> None:
    loader = make(Samples(), repeats)
    found: list[Any] = []
    for step, count in ((0, 4), (3, 1), (3, 2), (3, 9), (10, 4), (0, 2)):
        assert taken(loader, step, count) == expected(step, count)
        found.append([each.pid for each in loader._crews[-1].workers])
    assert found == [found[0]] * len(found)


def test_what_was_loaded_stays(make: Make) -> None:
    """Each sample is loaded once, though two of four steps are interrupted and done again."""
    data = Samples()
    loader = make(data)
    for step, count in ((0, 2), (1, 2), (2, 2)):
        assert taken(loader, step, count) == expected(step, count)
        all_there(loader)
    assert data.loads.tolist()[:8] == [1] * 8
    assert data.loads.max() == 1


def test_without_copies_the_step_is_loaded_again(make: Make) -> None:
    data = Samples()
    loader = make(data, repeats=0)
    assert taken(loader, 0, 2) == expected(0, 2)
    assert taken(loader, 1, 2) == expected(1, 2)
    all_there(loader)
    assert data.loads.tolist()[:6] == [1, 1, 2, 2, 1, 1]


def test_memory_is_bounded(make: Make) -> None:
    """Restarts at one step, without copies: no more is asked for than is wanted."""
    loader = make(Samples(), repeats=0)
    for _ in range(10):
        taken(loader, 5, 1)
        assert len(loader._tasks) <= loader._crews[-1].depth + 2
        assert len(loader._crews[-1]._on_their_way) <= 2 * loader._crews[-1].depth + 2


def test_another_share_of_the_world(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has gone: the batches that were loaded are those of another world."""
    order = ElasticSampler(SIZE, BATCH, seed=1)
    data = Samples()
    loader = make(data, batch_sampler=order)
    monkeypatch.setattr(sampler, "place", lambda: (1, 2))
    before = without_workers(ElasticSampler(SIZE, BATCH, seed=1), 0, 3)
    assert taken(loader, 0, 3) == before
    pid = loader._crews[-1].workers[0].pid
    for _ in range(2):
        order.advance()
    monkeypatch.setattr(sampler, "place", lambda: (0, 1))
    alone = ElasticSampler(SIZE, BATCH, seed=1)
    alone.position = order.position
    assert taken(loader, 2, 4) == without_workers(alone, 2, 4)
    assert loader._crews[-1].workers[0].pid == pid


def test_what_nobody_wants_any_more_is_skipped(make: Make) -> None:
    """Of two tasks that wait behind the one that a worker is at, none is loaded."""
    data = Samples()
    data.held[0] = 0
    loader = make(data, count=1, prefetch_factor=3)
    loader.from_step(0)
    assert data.reached.wait(CEILING)
    stream = loader.from_step(4)
    data.go.set()
    assert plain(next(stream)) == expected(4, 1)[0]
    assert data.loads.tolist()[1:6] == [0] * 5


# --- interrupted --------------------------------------------------------------------------------------------------


def interrupted_at_each_line(loader: KeptLoader, limit: int = 1000) -> int:
    """Steps, in each of which an interruption comes a line later; the number of lines."""
    for line in range(1, limit):
        step, strike = line % 7, AtLine(line, FILES)
        with strike:
            stream = loader.from_step(step)
            first = plain(next(stream))
            second = plain(next(stream))
        if not strike.is_done:
            assert [first, second] == expected(step, 2)
            return line
        again = step + line % 2
        assert taken(loader, again, 3) == expected(again, 3), line
    raise AssertionError("no end of lines")


def test_interrupted_at_each_line(make: Make) -> None:
    loader = make(Samples())
    taken(loader, 0, 1)
    pid = loader._crews[-1].workers[0].pid
    assert interrupted_at_each_line(loader) > 50
    assert loader._crews[-1].workers[0].pid == pid


def test_without_the_guard_a_batch_is_lost(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bookkeeping, cut in half: an index that is noted and not sent, or sent and not begun."""
    monkeypatch.setattr(frames, "WHOLE", set())
    monkeypatch.setattr(workers.Crew, "wait", _impatient(workers.Crew.wait))
    with pytest.raises((AssertionError, RuntimeError)):
        interrupted_at_each_line(make(Samples()))


def _impatient(wait: Callable[..., None]) -> Callable[..., None]:
    return lambda crew, task, seconds: wait(crew, task, 0.3)


def test_interrupted_while_workers_start(make: Make) -> None:
    """At every third line."""
    for line in itertools.count(1, 3):
        loader = make(Samples())
        with AtLine(line, FILES, KeptLoader._hire, workers.Crew.__init__) as strike:
            loader.from_step(0)
        if not strike.is_done:
            break
        gc.collect()
        assert taken(loader, 0, 3) == expected(0, 3)
        assert len(multiprocessing.active_children()) == 2
        loader.close()
    assert line > 20


@pytest.fixture
def interrupt() -> Iterator[Callable[..., Any]]:
    """Run a function, and interrupt it as a restart does, once the event is set."""
    interrupter = Interrupter()
    interrupter.install()

    def run(function: Callable[[], Any], when: Any) -> Any:
        gate = interrupter.new_gate()

        def strike() -> None:
            assert when.wait(CEILING)
            gate.close_for_abort()
            gate.interrupt_until_left()

        thread = threading.Thread(target=strike)
        thread.start()
        try:
            return gate.run(function)
        finally:
            thread.join()

    yield run
    interrupter.restore()


def test_interrupted_while_it_waits_for_a_batch(make: Make, interrupt: Callable[..., Any]) -> None:
    data = Samples()
    data.held[0] = 3
    loader = make(data)
    found: list[Any] = []

    def train() -> None:
        for batch in loader.from_step(0):
            found.append(plain(batch))

    assert interrupt(train, data.reached) == Interrupted()
    pid = loader._crews[-1].workers[0].pid
    data.go.set()
    assert found + taken(loader, len(found), 4) == expected(0, len(found) + 4)
    assert loader._crews[-1].workers[0].pid == pid
    assert data.loads.max() == 1


def test_a_worker_that_hangs_is_not_kept(
    make: Make, interrupt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SUSPICIOUS", 0.0)
    data = Samples()
    data.held[0] = 3
    loader = make(data)
    assert interrupt(lambda: list(loader.from_step(0)), data.reached) == Interrupted()
    hanging = loader._crews[-1]
    data.held[0] = -1
    assert taken(loader, 0, 3) == expected(0, 3)
    assert "in vain: the loader starts new workers, and keeps nothing" in caplog.text
    assert loader._crews[-1] is not hanging
    data.go.set()
    assert hanging.ended(CEILING)
    assert not any(each.is_alive() for each in hanging.workers)


# --- faults of workers --------------------------------------------------------------------------------------------


def test_a_worker_dies_while_its_rank_waits(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    data = Samples()
    data.held[0] = 3
    loader = make(data)
    stream = loader.from_step(0)
    next(stream)
    assert data.reached.wait(CEILING)
    killer = threading.Timer(0.1, os.kill, (int(data.holder), signal.SIGKILL))
    killer.start()
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        next(stream)
    killer.join()
    data.held[0] = -1
    assert taken(loader, 1, 3) == expected(1, 3)
    assert "has died: the loader starts new workers, and keeps nothing" in caplog.text


def test_a_worker_that_died_unseen(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """In a restart, say, where torch's handler does not raise."""
    data = Samples()
    loader = make(data)
    taken(loader, 0, 2)
    all_there(loader)
    (dead, other) = loader._crews[-1].workers
    with contextlib.suppress(RuntimeError):
        os.kill(dead.pid, signal.SIGKILL)  # type: ignore[arg-type]
        dead.join(CEILING)
    assert taken(loader, 1, 3) == expected(1, 3)
    assert f"DataLoader worker (pid {dead.pid}, signal 9) has died" in caplog.text
    assert other not in loader._crews[-1].workers
    assert data.loads.tolist()[2:6] == [2] * 4  # nothing of before is kept


def test_a_dataset_that_raises(make: Make) -> None:
    data = Samples()
    data.bad[0] = 5
    loader = make(data)
    found = []
    stream = loader.from_step(0)
    found += [plain(next(stream)) for _ in range(2)]
    with pytest.raises(KeyError, match=r"KeyError in DataLoader worker process \d:.*damaged"):
        next(stream)
    data.bad[0] = -1
    found += taken(loader, 2, 3)
    assert found == expected(0, 5)


def test_a_timeout_of_its_own(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    data = Samples()
    data.held[0] = 0
    loader = make(data, timeout=0.2)
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.2 seconds"):
        next(loader.from_step(0))
    data.held[0] = -1
    data.go.set()
    assert taken(loader, 0, 2) == expected(0, 2)
    assert "starts new workers" in caplog.text


# --- the end ------------------------------------------------------------------------------------------------------


def test_after_its_end_it_starts_again(make: Make) -> None:
    loader = make(Samples())
    taken(loader, 0, 2)
    loader.close()
    loader.close()
    assert not multiprocessing.active_children()
    assert taken(loader, 1, 2) == expected(1, 2)


def test_workers_end_with_the_loader() -> None:
    data = Samples()
    loader = KeptLoader(DataLoader(data, batch_size=BATCH, num_workers=2))
    next(loader.from_step(0))
    thread = loader._crews[-1]._thread
    del loader
    assert thread is not None
    assert not thread.is_alive()
    assert not multiprocessing.active_children()


def test_workers_end_with_the_call(make: Make) -> None:
    loader = make(Samples())
    taken(loader, 0, 2)
    open_loaders.part.call_ends(CallEnd(None, moved=True))  # it continues over another store
    assert len(multiprocessing.active_children()) == 2
    open_loaders.part.call_ends(CallEnd(None))
    assert not multiprocessing.active_children()


def run_rank(method: str, batches: int, say: Callable[[str], Any] = print) -> None:
    """It tells its workers when it has so many batches, and waits to be killed."""
    data: Any = range(SIZE)
    loader = KeptLoader(DataLoader(data, batch_size=BATCH, num_workers=2, multiprocessing_context=method))
    stream = loader.from_step(0)
    for _ in range(batches):
        next(stream)
    say(" ".join(str(each.pid) for each in loader._crews[-1].workers))
    signal.pause()


def are_over(pids: bytes, rank: int) -> list[bool]:
    """Whether these end soon after that one is killed; torch would look after five seconds."""
    ends = [os.pidfd_open(int(pid)) for pid in pids.split()]
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    over = [bool(select.select([each], [], [], 2)[0]) for each in ends]
    for each in ends:
        os.close(each)
    return over


@pytest.mark.parametrize("batches", [0, 2])
def test_workers_end_with_a_rank_that_is_killed(batches: int) -> None:
    """Also where it has gone before they know."""
    reader, writer = os.pipe()
    if not (rank := os.fork()):
        try:
            run_rank("fork", batches, lambda text: os.write(writer, text.encode()))
        finally:
            os._exit(1)
    os.close(writer)
    assert are_over(os.read(reader, 100), rank) == [True, True]
    os.close(reader)


def test_workers_of_a_fork_server_end_with_a_rank_that_is_killed() -> None:
    """They are not its children. Both have given a batch."""
    code = f"from {__name__} import run_rank; run_rank('forkserver', 2)"
    with subprocess.Popen(
        [sys.executable, "-u", "-W", "ignore", "-c", code], stdout=-1, stderr=subprocess.DEVNULL
    ) as rank:
        assert rank.stdout is not None
        assert are_over(rank.stdout.readline(), rank.pid) == [True, True]


def test_two_hundred_restarts_leave_nothing(make: Make) -> None:
    loader, other = make(Samples()), make(Samples(), repeats=0)
    seen = []
    for number in range(200):
        for each in (loader, other):
            taken(each, number % 10, 2)
        if number % 50 == 9:
            gc.collect()
            seen.append((len(os.listdir("/proc/self/fd")), threading.active_count(), _tensors()))
    assert max(each[0] for each in seen[1:]) <= seen[0][0] + 20  # a batch on its way has a descriptor for each tensor
    assert {each[1] for each in seen} == {seen[0][1]}
    assert max(each[2] for each in seen[1:]) <= seen[0][2] + 20


def _tensors() -> int:
    return sum(type(each) is torch.Tensor for each in gc.get_objects())


class Configured(Samples):
    """As programs do it in `worker_init_fn`."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float, torch.Tensor]:
        return torch.tensor(self.base + index), 0.0, torch.ones(0)  # type: ignore[attr-defined]


def configure(worker: int) -> None:
    info = get_worker_info()
    assert isinstance(info.dataset, Configured)  # type: ignore[union-attr]
    info.dataset.base = 100  # type: ignore[union-attr]


def test_what_a_program_does_in_its_workers(make: Make) -> None:
    loader = make(Configured(), worker_init_fn=configure)
    assert [batch[0] for batch in taken(loader, 1, 1)] == [[102, 103]]


def test_the_numbers_of_the_program_are_left_alone(make: Make) -> None:
    loader = make(Samples())
    before = torch.get_rng_state(), random.getstate()
    taken(loader, 0, 2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
