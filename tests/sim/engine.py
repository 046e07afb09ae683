"""Virtual time: an event queue, a simulated store, processes that can be killed between any two operations.

Nothing here knows the protocol. All randomness comes from one ``random.Random``, so a seed has exactly one story.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

from inprocess.exception import StoreLost
from inprocess.protocol.ops import Add, Claim, Delete, Exist, Now, Pause, Read, ReadAll, Set, Wait

#: one store operation takes this long each way (seconds): usually, and now and then
FAST, SLOW, SLOW_SHARE = 0.002, 0.1, 0.06


class Broken(AssertionError):
    """An invariant does not hold."""


class Stuck(AssertionError):
    """The simulation ran into its cap of steps or of virtual time."""


@dataclass(frozen=True)
class Until:
    """Wait for something in the same process; ``Process.notify`` has it looked at again."""

    check: Callable[[], bool]


@dataclass(frozen=True)
class Work:
    """Let time pass; answers True where ``Process.interrupt`` ended it early."""

    seconds: float
    interruptible: bool = False


@dataclass(frozen=True)
class Ask(Wait):
    """A Wait that ``Process.interrupt`` ends with the answer True: its connection is shut down."""

    interruptible: bool = True


Script = Generator[Any, Any, Any]


#: a host by its number; None: that of the first store
Host: TypeAlias = int | None


class Network:
    """Which hosts cannot reach each other for how long, from one to the other."""

    def __init__(self) -> None:
        self._cuts: list[tuple[Callable[[Host, Host], bool], float]] = []

    def cut(self, severs: Callable[[Host, Host], bool], until: float) -> None:
        """What one host for which ``severs`` is true sends to the other stands still until then."""
        self._cuts.append((severs, until))

    def open_at(self, source: Host, target: Host) -> float:
        """When messages go from one to the other (again)."""
        if source == target:
            return 0.0
        return max((until for severs, until in self._cuts if severs(source, target)), default=0.0)


class Engine:
    """The queue, the clock, and the trace of all that happened."""

    def __init__(self, seed: int, max_steps: int = 60_000, max_time: float = 400.0) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.trace: list[tuple[float, str, Any]] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._limits = (max_steps, max_time)
        self.network = Network()

    def at(self, delay: float, action: Callable[[], None]) -> None:
        """Do ``action`` in ``delay`` seconds."""
        self._number += 1
        heapq.heappush(self._queue, (self.now + delay, self._number, action))

    def latency(self) -> float:
        """How long one message travels."""
        random_ = self.rng.random
        return random_() * (SLOW if random_() < SLOW_SHARE else FAST)

    def note(self, who: str, what: Any) -> None:
        """A line of the story."""
        self.trace.append((self.now, who, what))

    def run(self, finished: Callable[[], bool]) -> None:
        """Until ``finished``. Raises Stuck at the caps, or where nothing is left to happen."""
        max_steps, max_time = self._limits
        while not finished():
            if not self._queue:
                raise Stuck("nothing is left to happen, and not everybody has ended (I3)")
            self.now, _, action = heapq.heappop(self._queue)
            self.steps += 1
            if self.steps > max_steps or self.now > max_time:
                raise Stuck(f"not ended after {self.steps} steps, {self.now:.1f} virtual seconds (I3)")
            action()


class SimStore:
    """The store as a dict. Operations are what ``protocol.ops`` lists, at a random moment after they were sent."""

    def __init__(self, server: Process | None = None) -> None:
        #: the process that serves it; None: nobody's, it never stands still
        self.server = server
        self.data: dict[str, bytes] = {}
        self.waiters: dict[str, list[Callable[[Any], None]]] = defaultdict(list)
        self.lost = False
        #: keys of iterations long ago
        self.deleted: set[str] = set()

    @property
    def host(self) -> Host:
        return None if self.server is None else self.server.host

    def execute(self, op: Any) -> Any:
        """Carry out an operation that does not wait."""
        return _ACTIONS[type(op)](self, op)

    def write(self, key: str, value: str) -> None:
        """Set a key and wake who waits for it."""
        self.data[key] = value.encode()
        for wake in self.waiters.pop(key, ()):
            wake(self.data[key])

    def lose(self) -> None:
        """The server is gone: every operation fails from now on, also those that wait."""
        self.lost = True
        for waiting in self.waiters.values():
            for wake in waiting:
                wake(StoreLost("the store is gone"))
        self.waiters.clear()

    def add(self, op: Add) -> int:
        total = int(self.data.get(op.key, b"0")) + op.amount
        self.write(op.key, str(total))
        return total

    def claim(self, op: Claim) -> bytes:
        if self.data.get(op.key, b"") == op.instead.encode():
            self.write(op.key, op.value)
        return self.data.get(op.key, op.instead.encode())

    def delete(self, op: Delete) -> bool:
        self.deleted.add(op.key)
        return self.data.pop(op.key, None) is not None

    def read_all(self, op: ReadAll) -> list[bytes]:
        absent = [key for key in op.keys if key not in self.data]
        assert not absent, f"ReadAll of absent keys {absent}: a real store would block"
        return [self.data[key] for key in op.keys]


_ACTIONS: dict[type, Callable[[SimStore, Any], Any]] = {
    Set: lambda store, op: store.write(op.key, op.value),
    Add: SimStore.add,
    Claim: SimStore.claim,
    Read: lambda store, op: store.data.get(op.key),
    ReadAll: SimStore.read_all,
    Exist: lambda store, op: all(key in store.data for key in op.keys),
    Delete: SimStore.delete,
}


class Process:
    """Threads that live and die together."""

    def __init__(self, engine: Engine, store: SimStore, name: str) -> None:
        self.engine, self.store, self.name = engine, store, name
        self.alive = True
        self.threads: list[Thread] = []
        #: store operations begun so far
        self.operations = 0
        #: operation number -> what to do (kill) before it is sent, or after it took effect
        self.before: dict[int, Callable[[], None]] = {}
        self.after: dict[int, Callable[[], None]] = {}
        #: requests of this process, and answers to it, stand still until then (a network partition)
        self.cut_out_until = self.cut_in_until = 0.0
        #: no thread of it runs until then (SIGSTOP, a paused host)
        self.frozen_until = -math.inf
        self._frozen_from = 0.0
        self.host: Host = None
        #: a connection over which nothing comes back for so many seconds counts as lost (None: never)
        self.silence: float | None = None
        #: seconds until its first threads run
        self.delay = 0.0
        #: its messages take that many times as long
        self.pace = 1.0
        self.on_end: list[Callable[[], None]] = []

    def freeze(self, seconds: float) -> None:
        """Stand still for a while."""
        if self.frozen_since is None:
            self._frozen_from = self.engine.now
        self.frozen_until = max(self.frozen_until, self.engine.now + seconds)

    @property
    def frozen_since(self) -> float | None:
        """Since when it stands still; None: it does not."""
        return self._frozen_from if self.engine.now < self.frozen_until else None

    def latency(self) -> float:
        """How long one message of this process travels."""
        return self.pace * self.engine.latency()

    def spawn(self, script: Script) -> Thread:
        """Start a thread."""
        thread = Thread(self, script)
        self.threads.append(thread)
        self.engine.at(self.delay + self.latency(), lambda: thread.resume(0, None))
        return thread

    def end(self, why: str) -> None:
        """Die, or exit: no thread takes another step. Requests on their way may still arrive."""
        if not self.alive:
            return
        self.alive = False
        self.engine.note(self.name, why)
        for action in self.on_end:
            action()

    def cannot_hear(self, store: SimStore) -> bool:
        """Whether nothing comes back from the store, wherever it stands still."""
        network, now = self.engine.network, self.engine.now
        return max(network.open_at(self.host, store.host), network.open_at(store.host, self.host)) > now

    def hush(self) -> None:
        """It has heard nothing for so long: connections over which it waits end."""
        if self.cannot_hear(self.store):
            for thread in self.threads:
                if thread.waits:
                    self.engine.at(self.engine.rng.random() * 0.5, thread.resumer(StoreLost("nothing came back")))

    def notify(self) -> None:
        """Local state changed: threads in ``Until`` look again."""
        for thread in self.threads:
            if thread.until is not None and thread.until():
                thread.until = None
                self.engine.at(self.latency(), thread.resumer(None))

    def interrupt(self, thread: Thread) -> None:
        """End that thread's ``Work`` or ``Ask``, if it is in one that lets itself be interrupted."""
        if thread.interruptible:
            thread.resume(thread.turn, True)


class Thread:
    """A generator of operations, resumed with their answers."""

    def __init__(self, process: Process, script: Script) -> None:
        self.process, self.script = process, script
        self.engine = process.engine
        self.until: Callable[[], bool] | None = None
        #: in an operation on the store that waits for a key
        self.waits = False
        self.interruptible = False
        self.done = False
        #: number of the operation it is in; an answer to an older one comes too late
        self.turn = 0

    def resumer(self, answer: Any) -> Callable[[], None]:
        turn = self.turn
        return lambda: self.resume(turn, answer)

    def resume(self, turn: int, answer: Any) -> None:
        """Go on with the answer to operation number ``turn``."""
        if turn != self.turn or self.done or not self.process.alive:
            return
        if self.engine.now < self.process.frozen_until:
            wakes = self.process.frozen_until - self.engine.now + self.engine.latency()
            self.engine.at(wakes, lambda: self.resume(turn, answer))
            return
        self.turn += 1
        self.interruptible = self.waits = False
        try:
            op = self.script.throw(answer) if isinstance(answer, Exception) else self.script.send(answer)
        except StopIteration:
            self.done = True
            return
        self._begin(op)

    def _begin(self, op: Any) -> None:
        local = _LOCAL.get(type(op))
        if local is not None:
            local(self, op)
            return
        process = self.process
        process.operations += 1
        number = process.operations
        self.engine.note(process.name, op)
        if number in process.before:
            process.before[number]()
            if not process.alive:
                return
        turn, store = self.turn, process.store
        self.interruptible, self.waits = isinstance(op, Ask), isinstance(op, Wait)
        self._listen(store)
        self.engine.at(process.latency(), lambda: self._arrive(store, op, turn, number))

    def _listen(self, store: SimStore) -> None:
        """An answer that does not come in time does not come any more."""
        silence = self.process.silence
        if silence is not None and (not self.waits or self.process.cannot_hear(store)):
            turn = self.turn
            self.engine.at(silence, lambda: self._give_up(store, turn))

    def _give_up(self, store: SimStore, turn: int) -> None:
        if not self.waits or self.process.cannot_hear(store):
            self.resume(turn, StoreLost("nothing came back"))

    def _arrive(self, store: SimStore, op: Any, turn: int, number: int) -> None:
        """The request reaches the store."""
        process, engine = self.process, self.engine
        stands = 0.0 if store.server is None else store.server.frozen_until
        opens = max(process.cut_out_until, engine.network.open_at(process.host, store.host), stands)
        if engine.now < opens:
            engine.at(opens - engine.now + engine.latency(), lambda: self._arrive(store, op, turn, number))
            return
        if store.lost:
            self._reply(store, turn, StoreLost("the store is gone"))
            return
        if not process.alive and (isinstance(op, Wait) or engine.rng.random() < 0.5):
            return  # sent by a process that is dead by now: one half gets through
        if not process.alive and isinstance(op, ReadAll):
            return  # of keys that may be long gone; it changes nothing
        if isinstance(op, Wait):
            self._wait(store, op, turn, number)
            return
        answer = store.execute(op)
        if number in process.after:
            process.after[number]()
        self._reply(store, turn, answer)

    def _wait(self, store: SimStore, op: Wait, turn: int, number: int) -> None:
        def answer(value: Any) -> None:
            if number in self.process.after:
                self.process.after[number]()
            self._reply(store, turn, value)

        if op.key in store.data:
            answer(store.data[op.key])
            return
        store.waiters[op.key].append(answer)
        if op.timeout is not None:
            self.engine.at(op.timeout, lambda: self._reply(store, turn, None))

    def _reply(self, store: SimStore, turn: int, answer: Any) -> None:
        """The answer travels back."""
        process, engine = self.process, self.engine
        opens = max(process.cut_in_until, engine.network.open_at(store.host, process.host))
        delay = max(0.0, opens - engine.now) + process.latency()
        engine.at(delay, lambda: self.resume(turn, answer))

    def _until(self, op: Until) -> None:
        if op.check():
            self.engine.at(0.0, self.resumer(None))
        else:
            self.until = op.check

    def _work(self, op: Work) -> None:
        self.interruptible = op.interruptible
        if not math.isinf(op.seconds):
            self.engine.at(op.seconds, self.resumer(False))


class Wire:
    """One way of a connection between two processes: messages arrive in order, and after the sender's death."""

    def __init__(self, source: Process, target: Process) -> None:
        self.source, self.target, self.engine = source, target, source.engine
        self._queue: deque[Callable[[], None]] = deque()

    def send(self, action: Callable[[], None]) -> None:
        """Do ``action`` at the other end."""
        self._queue.append(action)
        self.engine.at(self.source.latency(), self._arrive)

    def _arrive(self) -> None:
        engine, target = self.engine, self.target
        opens = max(engine.network.open_at(self.source.host, target.host), target.frozen_until)
        if engine.now < opens:
            engine.at(opens - engine.now + engine.latency(), self._arrive)
            return
        action = self._queue.popleft()
        if target.alive:
            action()


_LOCAL: dict[type, Callable[[Thread, Any], None]] = {
    Until: Thread._until,
    Work: Thread._work,
    Pause: lambda thread, op: thread.engine.at(op.seconds, thread.resumer(None)),
    Now: lambda thread, op: thread.engine.at(0.0, thread.resumer(thread.engine.now)),
}
