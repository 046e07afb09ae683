"""What a function of our own tests gets in its rank: points of its schedule, and the wrapped form of a body."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from inprocess.testing import rank
from inprocess.testing.coordinates import Point

from .faults import Returns

#: the hooks of `Wrapper` that take a state
STATE_HOOKS = ("initialize", "abort", "finalize", "health_check", "completion", "terminate")

Options = Mapping[str, Any] | Callable[["Context"], Mapping[str, Any]]


@dataclass
class Context(rank.Context):
    """With the hooks and steps of the test's function as points."""

    #: called at each point with its step; a test may strike there by rules of its own
    at_point: Callable[[int | str], None] = lambda step: None

    def point(self, step: int | str, iteration: int | None = None) -> None:
        """A place of the test's own function: a step, or a label."""
        at = self.iteration if iteration is None else iteration
        if isinstance(step, int):
            struck = self.reach(Point(self.rank, at, pings=step, at_ping=True, call=self.calls))
        else:
            struck = self.reach(Point(self.rank, at, label=step, call=self.calls))
        if not struck:
            self.at_point(step)

    def trace(self, owner: Any, method: str, step: str) -> None:
        """A `point` before each call of this method, or function of a module."""
        original = getattr(owner, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.point(step)
            return original(*args, **kwargs)

        setattr(owner, method, wrapped)

    @contextmanager
    def entered(self, iteration: int) -> Iterator[None]:
        """Around the body of a function: reports entry and exit, with the ranks of the environment."""
        self._report_entry(iteration)
        try:
            self.point("enter")
            yield
        finally:
            self.emit("leave")

    def _report_entry(self, iteration: int) -> None:
        self.iteration = iteration
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # 0: nothing is wrapped
        place = [int(os.environ.get(f"INPROCESS_LOCAL_{name}", "0")) for name in ("RANK", "WORLD_SIZE")]
        self.emit("enter", rank=rank, world_size=size, local=place, pid=os.getpid())

    def options(self, **more: Any) -> dict[str, Any]:
        """The options of the test's `wrapper=`, with hooks that are points where the schedule has a fault for one."""
        given = self.spec.wrapper(self) if callable(self.spec.wrapper) else self.spec.wrapper
        monitor_log = f"{os.path.dirname(self.spec.log)}/monitor{{rank}}.log"
        options: dict[str, Any] = {"monitor_process_logfile": monitor_log} | dict(given) | more
        steps = {at.label for at in self.spec.faults} | set(self.args.get("trace", ()))
        for name in STATE_HOOKS:
            if name in steps:
                options[name] = self._with_hook(name, options.get(name))
        if "rank_assignment" in steps:
            options["rank_assignment"] = self._with_assignment(options.get("rank_assignment"))
        return options

    def wrap(self, body: Callable[[Context, Any], Any], **options: Any) -> Callable[[], Any]:
        """The wrapped form of `body(context, call)`; calling it reports how it ended."""
        from inprocess import CallWrapper, Wrapper

        @Wrapper(**self.options(**options))
        def entry(call: CallWrapper | None = None) -> Any:
            assert call is not None
            self._report_entry(call.iteration)
            # not in a `with`: whether that swallows an error nobody knows before it has ended
            try:
                self.point("enter")
                return body(self, call)
            except Returns:
                return None
            finally:
                self.emit("leave")

        return lambda: self.called(entry)

    def _with_hook(self, name: str, given: Any) -> Any:
        from inprocess import Compose
        from inprocess.abort import AbortTorchDistributed

        def point(state: Any) -> Any:
            self.emit("phase", name=name, iteration=state.iteration)
            self.point(name, state.iteration)
            return state

        if given is None and name == "abort":
            given = AbortTorchDistributed()
        return point if given is None else Compose(given, point)

    def _with_assignment(self, given: Any) -> Any:
        from inprocess.rank_assignment import ShiftRanks

        inner = ShiftRanks() if given is None else given

        def assign(context: Any) -> Any:  # not a Compose: a Tree cannot be part of one
            self.emit("phase", name="rank_assignment", iteration=context.state.iteration)
            self.point("rank_assignment", context.state.iteration)
            return inner(context)

        return assign
