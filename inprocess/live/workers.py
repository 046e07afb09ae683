"""Workers of a DataLoader that load what they are asked for, in the order in which they are asked, until they are told
to end.

The main thread never calls torch's iterator: an interruption inside would leave a queue with its lock taken, or a
message half read. A thread of ours does, one batch for each time it is asked, and notes the batch in its `Task`. So
whatever the main thread is interrupted in, each task is either on its way or has its batch.

torch takes an index for each batch that it hands out, so a constant number of tasks is on its way, `Crew.depth`, and a
task's batch comes when as many others have been asked for behind it.
"""

from __future__ import annotations

import collections
import ctypes
import multiprocessing
import os
import queue
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from inprocess.live import randoms
from inprocess.live.batches import NotCopied, copied
from inprocess.system import clock
from inprocess.system.descriptors import milliseconds
from inprocess.system.errors import in_words
from inprocess.system.interpreter import join_with_progress

__all__ = ["Crew", "Failure", "Task", "Wanted", "Work", "depth_of"]

PR_SET_PDEATHSIG = 1
#: how long torch waits for a batch before our thread looks whether it is to end, and torch whether the workers live
LOOK_EVERY = 1.0
#: and how its message begins when it has waited that long
NOTHING_YET = "DataLoader timed out"
#: until the end of workers is given up: torch gives each of them five seconds
END_WITHIN = 30.0


class Wanted(NamedTuple):
    """A batch, named by all that decides what is in it."""

    step: int
    #: of the random numbers that the dataset draws
    seed: int
    indices: list[Any]


class Failure(NamedTuple):
    """What a dataset has raised, in a form that can be sent whatever it was."""

    kind: type[Exception]
    text: str

    def error(self) -> Exception:
        """To be raised: of the same type, where that is made from a text, and else a RuntimeError."""
        try:
            return self.kind(self.text)
        except Exception:
            return RuntimeError(self.text)


class Task:
    """A batch that is asked for. Our thread writes, and `is_there` last."""

    def __init__(self, wanted: Wanted | None, number: int) -> None:
        #: None: nobody wants it any more
        self.wanted, self.number = wanted, number
        self.batch: Any = None
        #: of the batch, untouched; None: it was not copied
        self.copy: Any = None
        self.failure: Failure | None = None
        self.is_there = False


class Work(Dataset[Any]):
    """What a worker does; sent to it."""

    def __init__(self, spec: DataLoader[Any], skipped: torch.Tensor | None = None) -> None:
        self.dataset, self.collate, self.begin = spec.dataset, spec.collate_fn, spec.worker_init_fn
        #: shared with the workers: nobody wants the tasks before this number
        self.skipped = skipped if skipped is not None else torch.zeros(1, dtype=torch.int64)
        # whose child the worker is, where the main thread starts it: its end is that of the rank
        direct = (spec.multiprocessing_context or multiprocessing).get_start_method() in ("fork", "spawn")
        self.rank = os.getpid() if direct and threading.current_thread() is threading.main_thread() else 0

    def enter(self, worker: int) -> None:
        """In a worker, first of all."""
        if self.rank:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != self.rank:  # it has ended before: torch would take the new parent for it
                os._exit(1)
        elif (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
            threading.Thread(target=_end_with, args=(parent.pid,), name="inprocess-parent", daemon=True).start()
        object.__setattr__(get_worker_info(), "dataset", self.dataset)
        if self.begin is not None:
            self.begin(worker)

    def __getitem__(self, index: tuple[int, int, list[Any]]) -> tuple[int, Any, Failure | None]:
        number, seed, indices = index
        try:
            return number, self.load(number, seed, indices), None
        except Exception as error:
            return number, None, _failure(error)

    def load(self, number: int, seed: int, indices: list[Any]) -> Any:
        """The batch; None where it is to be skipped."""
        randoms.use(seed)
        if (many := getattr(self.dataset, "__getitems__", None)) is not None:
            return self.collate(many(indices)) if number >= self.skipped[0] else None
        samples = []
        for each in indices:
            if number < self.skipped[0]:
                return None
            samples.append(self.dataset[each])
        return self.collate(samples)


def _end_with(parent: int) -> None:
    """End this process with that one, whose child it is not: a fork server's children know nothing of it."""
    try:
        process = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    select.select([process], [], [])
    os._exit(1)


def _failure(error: Exception) -> Failure:
    kind, info = type(error), get_worker_info()
    text = f"{kind.__name__} in DataLoader worker process {info.id if info else 0}:\n{traceback.format_exc()}"
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    # one that is not found by its name cannot be sent, and StopIteration would end the loop over the batches
    return Failure(kind if found is kind and not issubclass(kind, StopIteration) else RuntimeError, text)


def _as_it_is(loaded: Any) -> Any:
    return loaded


class _Feed(Sampler[Any]):
    """From where torch takes what to load."""

    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tasks.get, None)


class _Bell:
    """Wakes the main thread; closed with the last reference to it."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


class Crew:
    """The workers of one DataLoader, and the thread that waits for them. Made in the thread that uses it; until `start`
    the workers end with the last reference to this.

    Args:
        spec: a DataLoader with workers that nobody iterates over.
        first: `depth` batches to begin with.
        seed: of what `get_worker_info` tells as such.
        copies: whether batches are to be copied.
    """

    def __init__(self, spec: DataLoader[Any], first: list[Wanted], seed: int, copies: bool) -> None:
        self.depth = depth_of(spec)
        assert len(first) == self.depth
        self.copies = copies
        #: how many tasks there have been
        self.asked = 0
        #: why there will be no more batches; empty: nothing is wrong
        self.broken = ""
        self._skipped = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._bell, self._feed = _Bell(), _Feed()
        self._on_their_way: collections.deque[Task] = collections.deque()
        self._begin: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._ending = False
        self._process = os.getpid()
        self.first = [self._send(wanted) for wanted in first]
        work = Work(spec, self._skipped)
        before = set(multiprocessing.active_children())
        #: the only reference to torch's iterator, until the thread takes it: the workers end with the last one
        self._iterator = [
            iter(
                DataLoader(
                    work,
                    batch_size=None,
                    sampler=self._feed,
                    num_workers=spec.num_workers,
                    collate_fn=_as_it_is,
                    pin_memory=spec.pin_memory,
                    timeout=LOOK_EVERY,
                    worker_init_fn=work.enter,
                    multiprocessing_context=spec.multiprocessing_context,
                    generator=torch.Generator().manual_seed(seed >> 1),  # otherwise it draws from the program's own
                    prefetch_factor=spec.prefetch_factor,
                )
            )
        ]
        self.workers: list[BaseProcess] = [each for each in multiprocessing.active_children() if each not in before]
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """The thread, which ends with `dismiss` alone. Not interrupted half-way."""
        self._thread = threading.Thread(target=self._carry, name="inprocess-loader", daemon=True)
        self._thread.start()

    def ask(self, wanted: Wanted | None) -> Task:
        """For one more batch, or for nothing, so that others come. Not interrupted half-way."""
        task = self._send(wanted)
        self._begin.put(True)
        return task

    def _send(self, wanted: Wanted | None) -> Task:
        task = Task(wanted, self.asked)
        self.asked += 1
        self._on_their_way.append(task)
        self._feed.tasks.put((task.number, wanted.seed if wanted else 0, wanted.indices if wanted else []))
        return task

    def comes_with(self, task: Task) -> int:
        """How many more must be asked for until this one's batch comes."""
        return max(0, task.number + 1 + self.depth - self.asked)

    def skip_before(self, number: int) -> None:
        """Nobody wants what was asked for before: the workers need not load it."""
        self._skipped[0] = number

    def wait(self, task: Task, seconds: float) -> None:
        """Until its batch is there; it has been asked for, and so have those behind it. May be interrupted anywhere.

        Raises:
            RuntimeError: a worker has died, torch's iterator has failed, or the seconds are over (0: no limit).
        """
        poll, until = select.poll(), clock.monotonic() + seconds
        for fd in (self._bell.fd, *(each.sentinel for each in self.workers)):
            poll.register(fd, select.POLLIN)
        while not task.is_there:
            left = until - clock.monotonic() if seconds else None
            for fd, _ in poll.poll(None if left is None else milliseconds(left)):
                if fd == self._bell.fd:
                    os.eventfd_read(fd)
            if not task.is_there and self.trouble():
                raise RuntimeError(self.broken)
            if not task.is_there and left is not None and left <= 0:
                self.broken = f"DataLoader timed out after {seconds:g} seconds"
                raise RuntimeError(self.broken)

    def trouble(self) -> str:
        """Why there will be no more batches; empty: nothing is wrong."""
        dead = [f"{each.pid}, {_end(each)}" for each in self.workers if not each.is_alive()]
        if dead and not self.broken:
            self.broken = f"DataLoader worker (pid {'; '.join(dead)}) has died"
        return self.broken

    def dismiss(self) -> None:
        """The workers and the thread end, and nobody waits for that. In a process that was forked, nothing."""
        if self._process == os.getpid():
            self._ending = True
            self.skip_before(torch.iinfo(torch.int64).max)
            self._begin.put(False)

    @property
    def is_dismissed(self) -> bool:
        return self._ending

    def ended(self, seconds: float = END_WITHIN) -> bool:
        """Wait for it, after `dismiss`. Whether it has."""
        thread = self._thread
        if thread is None or self._process != os.getpid() or thread is threading.current_thread():
            return True
        return join_with_progress(thread, seconds)

    def _carry(self) -> None:
        """The thread."""
        iterator = self._iterator.pop()
        try:
            while self._begin.get() and not self._ending:
                self._carry_one(iterator)
        except Exception as error:
            self.broken = self.trouble() or f"the DataLoader workers cannot be heard any more: {in_words(error)}"
            self._bell.ring()
        finally:
            self._on_their_way.clear()
            del iterator

    def _carry_one(self, iterator: Iterator[Any]) -> None:
        """The oldest that is on its way; nothing where it is to end."""
        while not self._ending:
            try:
                return self._note(*next(iterator))
            except RuntimeError as error:
                if not str(error).startswith(NOTHING_YET):
                    raise

    def _note(self, number: int, batch: Any, failure: Failure | None) -> None:
        task = self._on_their_way.popleft()
        if task.number != number:
            raise RuntimeError(f"batch {number} has come in the place of {task.number}")
        if task.wanted is not None:
            if self.copies and failure is None:
                try:
                    task.copy = copied(batch)
                except NotCopied:
                    self.copies = False
            task.batch, task.failure = batch, failure
            task.is_there = True
            self._bell.ring()


def depth_of(spec: DataLoader[Any]) -> int:
    """How many batches its workers have to load at a time."""
    return int(spec.num_workers * (spec.prefetch_factor or 0))


def _end(process: BaseProcess) -> str:
    code = process.exitcode
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
