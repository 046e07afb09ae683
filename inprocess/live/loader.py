"""A DataLoader whose workers, and what they have loaded, stay over a restart: see `KeptLoader`."""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from inprocess.exception import OptionError
from inprocess.interrupt.frames import leave_alone
from inprocess.live import randoms, sampler
from inprocess.live.batches import duplicate
from inprocess.live.open_loaders import open_loaders
from inprocess.live.workers import Crew, Failure, Task, Wanted, Work, depth_of
from inprocess.system import clock
from inprocess.system.logs import get_logger

__all__ = ["KeptLoader"]

log = get_logger("inprocess.live")
#: a rank that has waited for so long when it is interrupted (seconds) may have a worker that hangs: it gets new ones
SUSPICIOUS = 5.0
#: the numbers that a dataset draws are not those that LiveState(seed=...) gives the program
OF_DATA = 1
_SHUFFLED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class KeptLoader:
    """A DataLoader whose workers stay over restarts, with the batches that they have loaded ahead.

    ::

        sampler = inprocess.ElasticSampler(len(dataset), batch_size=16)
        loader = inprocess.KeptLoader(DataLoader(dataset, batch_sampler=sampler, num_workers=4))    # outlives restarts

        @inprocess.Wrapper()
        def train(loader, call: inprocess.CallWrapper = None):
            dist.init_process_group("nccl")
            step = live.recover(call)
            for step, batch in enumerate(loader.from_step(step), step):
                ...

    A batch is named by its step, its indices and the seed of its random numbers. After a restart each batch that is
    still wanted, and was asked for before, is there or on its way; others are thrown away. So order and content are
    those of a run without faults, also where rank or world size changed.

    Workers start with the first `from_step`, and end with the call of the wrapped function, with `close`, with this
    object or with the process, also where that is killed. Where one has died, or the rank was interrupted after it had
    waited five seconds for a batch, all are started anew, nothing is kept, and the log says so.

    Memory: per worker ``prefetch_factor`` batches, as without it, two more in all, and copies of the last two and
    ``repeats`` more.

    Args:
        loader: a DataLoader, or a subclass such as torchdata's StatefulDataLoader, which says what to load and how.
            Nobody else iterates over it. The dataset has a length and indices; with ``num_workers=0`` nothing is kept.
        seed: Python's, NumPy's and torch's random numbers that dataset and ``collate_fn`` draw for a batch follow from
            it, the step and the rank. Those of the process are left alone.
        repeats: of how many of the last batches copies are kept, for a restart that repeats their steps; as many as a
            step takes. 0: they are loaded again, as are batches with anything but tensors of the host, numbers, texts,
            and dicts, lists and tuples of them.

    Raises:
        OptionError: it cannot be moved to a step: an ``IterableDataset``, ``batch_size=None``, or an order that is
            drawn anew each time, as with ``shuffle=True``.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int = 0, repeats: int = 1) -> None:
        if repeats < 0:
            raise OptionError(f"repeats={repeats} must be a number of batches, or 0")
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            what = "an IterableDataset" if isinstance(loader.dataset, IterableDataset) else "batch_size=None"
            raise OptionError(
                f"a KeptLoader cannot move a DataLoader with {what} to a step: it needs batches of indices, from "
                "batch_size=... or batch_sampler=..."
            )
        self._spec, self._seed, self._repeats = loader, seed, repeats
        self._work = Work(loader)
        self._stream: weakref.ref[_Stream] | None = None
        #: the last is at work; others are ending
        self._crews: list[Crew] = []
        #: by step: what is on its way, or there; and copies of what was handed out
        self._tasks: dict[int, Task] = {}
        self._last: dict[int, tuple[Wanted, Any]] = {}
        #: for how long the rank has waited for a batch that it did not get (seconds)
        self._waited = 0.0
        #: rank and world size that the sampler was used with first
        self._place: tuple[int, int] | None = None
        _check(loader.batch_sampler)
        weakref.finalize(self, _end, self._crews)
        open_loaders.add(self)

    def __len__(self) -> int:
        """Batches of an epoch; TypeError for a sampler without a length."""
        return len(self._spec)

    def from_step(self, step: int, batch_sampler: Iterable[list[Any]] | None = None) -> Iterator[Any]:
        """The batches from this step on, without an end. In the wrapped function, when there is a process group.

        A sampler with a length is used epoch after epoch, with `set_epoch` where it has that: step s is batch
        ``s % len(sampler)`` of epoch ``s // len(sampler)``. One without a length, such as an ElasticSampler, begins
        where it stands. Only the iterator of the last call works.

        Args:
            step: of the first batch.
            batch_sampler: one of this iteration instead of the loader's, where it follows from rank and world size:
                ``BatchSampler(DistributedSampler(dataset), 16, drop_last=True)``.

        Raises:
            OptionError: for a DistributedSampler of the loader that was made for another rank or world size.
        """
        if step < 0:
            raise OptionError(f"from_step({step}): steps begin at 0")
        if batch_sampler is None:
            batch_sampler = self._spec.batch_sampler
            assert batch_sampler is not None
            self._check_place(batch_sampler)
        else:
            _check(batch_sampler)
        stream = _Stream(self, step, batch_sampler)
        self._aim(stream)
        if self._spec.num_workers:
            stream.ask()
        return stream

    def close(self) -> None:
        """End the workers, and wait for that; later `from_step` starts new ones. Harmless when repeated."""
        self._dismiss()
        _end(self._crews)

    def _check_place(self, batch_sampler: Any) -> None:
        inner = getattr(batch_sampler, "sampler", batch_sampler)
        if hasattr(inner, "num_replicas"):
            now = sampler.place()
            self._place = self._place or now
            if now != self._place:
                raise OptionError(
                    f"the loader's {type(inner).__name__} was made for rank {self._place[0]} of {self._place[1]}, and "
                    f"this is rank {now[0]} of {now[1]}. Pass one of this iteration, from_step(step, "
                    "batch_sampler=...), or use an ElasticSampler"
                )

    # what follows is not interrupted half-way, except `_hire`

    def _aim(self, stream: _Stream) -> None:
        """From now on this is what is wanted."""
        self._stream = weakref.ref(stream)
        crew = self._crews[-1] if self._crews else None
        if crew is None or crew.is_dismissed:
            return
        why = crew.trouble()
        if not why and self._waited > SUSPICIOUS:
            why = f"this rank has waited {self._waited:.3g} s for a batch in vain"
        if why:
            log.warning("%s: the loader starts new workers, and keeps nothing", why)
            self._dismiss()
            return
        self._waited = 0.0
        wanted = {each.step: each for each in stream.plan}
        kept = {step: task for step, task in self._tasks.items() if task.wanted == wanted.get(step)}
        for step, task in self._tasks.items():
            if step not in kept:
                task.wanted = task.batch = task.copy = None
        crew.skip_before(min((task.number for task in kept.values()), default=crew.asked))
        log.info("the loader's %d workers stay, and %d of %d batches", len(crew.workers), len(kept), len(self._tasks))
        self._tasks = kept

    def _dismiss(self) -> None:
        for crew in self._crews:
            crew.dismiss()
        self._tasks, self._last, self._waited = {}, {}, 0.0

    def _hire(self, stream: _Stream) -> None:
        """Start workers."""
        if not self._crews or self._crews[-1].is_dismissed:
            plan = itertools.islice(stream.plan, depth_of(self._spec))
            seed = randoms.derive_seed(self._seed, stream.rank, OF_DATA)
            self._engage(Crew(self._spec, list(plan), seed, copies=self._repeats > 0))

    def _engage(self, crew: Crew) -> None:
        crew.start()
        self._crews[:] = [each for each in self._crews if not each.ended(0)]
        self._crews.append(crew)
        first, crew.first = crew.first, []
        self._tasks = {task.wanted.step: task for task in first if task.wanted is not None}

    def _ask(self, stream: _Stream) -> tuple[Crew, Task | None]:
        """Have as many batches on their way as workers take; the task of the next one. None: there is a copy of it."""
        crew = self._crews[-1]
        for wanted in stream.plan:
            if wanted.step not in self._tasks and not self._has_copy(wanted):
                self._tasks[wanted.step] = crew.ask(wanted)
        task = self._tasks.get(stream.plan[0].step)
        for _ in range(crew.comes_with(task) if task is not None else 0):
            crew.ask(None)
        return crew, task

    def _has_copy(self, wanted: Wanted) -> bool:
        return wanted.step in self._last and self._last[wanted.step][0] == wanted

    def _take(self, stream: _Stream, task: Task) -> Any:
        """The next batch is handed out."""
        wanted = stream.plan.popleft()
        del self._tasks[wanted.step]
        self._waited = 0.0
        if task.failure is not None:
            return task.failure
        self._last.pop(wanted.step, None)
        if task.copy is not None and self._repeats:
            self._last[wanted.step] = wanted, task.copy
            while len(self._last) > self._repeats:
                del self._last[next(iter(self._last))]
        return task.batch


class _Stream(Iterator[Any]):
    """The batches from a step on."""

    def __init__(self, loader: KeptLoader, step: int, batch_sampler: Iterable[list[Any]]) -> None:
        self._loader, self.rank = loader, sampler.place()[0]
        self._lists = enumerate(_lists(batch_sampler, step), step)
        #: what is wanted next
        self.plan: collections.deque[Wanted] = collections.deque()
        self._size = depth_of(loader._spec) + 2 if loader._spec.num_workers else 1
        self._fill()

    def _fill(self) -> None:
        """Ask the sampler; in the main thread alone."""
        while len(self.plan) < self._size:
            step, indices = next(self._lists)
            seed = randoms.derive_seed(self._loader._seed, step, self.rank, OF_DATA)
            self.plan.append(Wanted(step, seed, list(indices)))

    def ask(self) -> tuple[Crew, Task | None]:
        self._loader._hire(self)
        return self._loader._ask(self)

    def __next__(self) -> Any:
        loader = self._loader
        if loader._stream is None or loader._stream() is not self:
            raise RuntimeError("these batches are of an earlier from_step(): only those of the last one are loaded")
        self._fill()
        if not loader._spec.num_workers:
            return self._load()
        crew, task = self.ask()
        if task is None:
            batch = duplicate(loader._last[self.plan[0].step][1])
            self.plan.popleft()
            return batch
        begin = clock.monotonic()
        try:
            crew.wait(task, loader._spec.timeout)
        finally:
            loader._waited = clock.monotonic() - begin
        batch = loader._take(self, task)
        if isinstance(batch, Failure):
            raise batch.error()
        return batch

    def _load(self) -> Any:
        """Without workers."""
        _, seed, indices = self.plan[0]
        with randoms.kept():
            batch = self._loader._work.load(0, seed, indices)
        self.plan.popleft()
        return batch


def _lists(batch_sampler: Any, step: int) -> Iterator[list[Any]]:
    """The indices of each batch from that step on."""
    if not hasattr(batch_sampler, "__len__"):
        yield from batch_sampler
        raise RuntimeError(f"{type(batch_sampler).__name__} has no length, and has ended: it must not end, or have one")
    size = len(batch_sampler)
    if not size:
        raise OptionError(f"{type(batch_sampler).__name__} has no batches: the dataset is smaller than one, perhaps")
    epoch, done = divmod(step, size)
    while True:
        for each in (batch_sampler, getattr(batch_sampler, "sampler", None)):
            if (set_epoch := getattr(each, "set_epoch", None)) is not None:
                set_epoch(epoch)
        count = 0
        for count, indices in enumerate(batch_sampler, 1):
            if count > done:
                yield indices
        if count != size:
            raise RuntimeError(
                f"{type(batch_sampler).__name__} had {count} batches in epoch {epoch}, and its length is {size}: which "
                "batch a step has cannot be told"
            )
        epoch, done = epoch + 1, 0


def _check(batch_sampler: Any) -> None:
    inner = getattr(batch_sampler, "sampler", batch_sampler)
    if isinstance(inner, _SHUFFLED) and not hasattr(inner, "set_epoch"):
        raise OptionError(
            f"{type(inner).__name__} draws another order each time, so a KeptLoader cannot move it to a step: use "
            "batch_sampler=inprocess.ElasticSampler(len(dataset), batch_size), or sampler=DistributedSampler(dataset)"
        )


def _end(crews: list[Crew]) -> None:
    """Of all workers and threads; waits for it."""
    for crew in crews:
        crew.dismiss()
    for crew in crews:
        if not crew.ended():
            log.warning("workers of a loader have not ended: %s", ", ".join(str(each.pid) for each in crew.workers))
    crews.clear()


leave_alone(*(each.__code__ for each in (KeptLoader._aim, KeptLoader._dismiss, KeptLoader._engage)))
leave_alone(*(each.__code__ for each in (KeptLoader._ask, KeptLoader._take)))
