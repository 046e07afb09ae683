"""What the function of one window is given: when to ask for its interruption, how long to go on, and its books."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from inprocess.call_wrapper import CallWrapper
from inprocess.interrupt.gate import Gate

#: seconds: a lock or a queue that nobody will ever serve
FOR_EVER = 600.0


@dataclass
class Order:
    """An interruption that the asker is to carry out."""

    gate: Gate
    #: rounds of an empty loop, and seconds, before it begins
    spin: int = 0
    sleep: float = 0.0
    #: seconds for which the main thread is parked; None: not at all
    park: float | None = None
    #: whether the interpreter is made to hurry before it
    hurry: bool = False
    #: seconds after which a raise that did not end the function is repeated
    retry_after: float = 0.02


class Run:
    """One window. Everything is public: shapes are functions of a `Run`, and keep their books in it."""

    __slots__ = (
        "after",
        "asked",
        "begun",
        "call",
        "chance",
        "ended",
        "endless",
        "entered",
        "error",
        "gate",
        "order",
        "orders",
        "raising",
        "steps",
        "swallows",
        "tail",
    )

    def __init__(self, gate: Gate, chance: random.Random, steps: int, call: CallWrapper | None = None) -> None:
        self.gate, self.chance, self.call = gate, chance, call
        #: rounds until the interruption is asked for, and after that; `endless`: it never ends by itself
        self.steps, self.tail, self.endless = steps, 0, False
        #: where to ask, and for what; None: this window is not interrupted, or by somebody who does not ask
        self.orders: SimpleQueue[Order | None] | None = None
        self.order: Order | None = None
        self.asked = self.entered = False
        #: what it raises on its own account; `raising`: from now on that must be the outcome
        self.error: BaseException | None = None
        self.raising = False
        #: sections begun and ended, in all threads; changed only inside `atomic`
        self.begun = self.ended = 0
        #: how many interruptions it may still swallow
        self.swallows = 0
        #: undoes what the function did to the process; registered before it is done, called after the window
        self.after: list[Callable[[], object]] = []

    def on(self) -> bool:
        """Whether there is another round. In one of them the interruption is asked for."""
        self.steps -= 1
        if self.steps == 0:
            self.ask()
        return self.endless or self.steps > -self.tail

    def ask(self) -> None:
        """Ask for the interruption now, if it was not yet, and there is to be one."""
        if self.orders is not None and not self.asked:
            self.asked = True
            self.orders.put(self.order)

    def blocks(self) -> bool:
        """Whether to wait for something that never comes; then the interruption has been asked for."""
        if self.endless:
            self.ask()
        return self.endless

    def starts(self, target: Callable[[], object], stop: Callable[[], object] = lambda: None) -> threading.Thread:
        """A thread that is stopped and joined after the window, whatever became of the function."""
        thread = threading.Thread(target=target, name="of the function")

        def join() -> None:
            stop()
            if thread.ident is not None:
                thread._started.wait()  # type: ignore[attr-defined]  # start() may have been interrupted
                thread.join()

        self.after.append(join)
        thread.start()
        return thread
