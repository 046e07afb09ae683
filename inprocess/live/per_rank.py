"""Parts that differ by rank, such as the position of a rank's own data loader: they never come from another rank.

What one was at a commit belongs to that rank of that many. A rank that goes on as the same one gets it back. One that
was interrupted before its commit of the step that all go on with keeps what it has: it has done the work of that step,
since the others needed its gradients. In a new process, with another rank or world size, at an earlier step, or where
the others made steps without it while it was in reserve (its last one again, say), nobody knows what it would be: the
part stays as it is, and a warning says so. The program sets it, and what that was is known with the next commit.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch

from inprocess.exception import OptionError
from inprocess.live.plan import NOTHING, NOWHERE, Point
from inprocess.live.present import checked
from inprocess.live.tree import Stateful
from inprocess.system.logs import get_logger

__all__ = ["RankParts"]

log = get_logger("inprocess.live")


class RankParts:
    """Those with these names.

    Args:
        names: of parts; each is given to the class or to `recover`, and is no module and no optimizer.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.names = (names,) if isinstance(names, str) else tuple(names)
        self._parts: dict[str, Stateful] = {}
        #: of parts that were replaced since the last commit: what they were then
        self._before: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}
        self.begin_call()
        self.forget()

    def begin_call(self) -> None:
        """Its iterations begin at 0 again."""
        #: the last iteration with this rank
        self._iteration = NOTHING

    def forget(self) -> None:
        """They are as the program has made them."""
        self._before.clear()
        #: where `_kept` is of; None: at no step yet
        self._point: Point | None = None
        #: rank and number of ranks
        self._place = (-1, -1)
        #: whether there were iterations without this rank since `_point`
        self._was_away = False

    def enter(self, iteration: int) -> None:
        """This rank takes part in the iteration, so nobody makes a step without it."""
        self._was_away |= iteration > self._iteration + 1
        self._iteration = iteration

    def split(self, parts: Mapping[str, Stateful]) -> dict[str, Stateful]:
        """Takes its own, and returns the others."""
        for name in self.names:
            part = parts.get(name)
            if part is None:
                continue
            if isinstance(part, torch.nn.Module | torch.optim.Optimizer):
                raise OptionError(
                    f"per_rank={name!r} is a {type(part).__name__}: modules and optimizers are the same on all ranks, "
                    "or sharded; give recover(shard=(index, count)) where each rank has another one"
                )
            part = checked(name, part)
            if name in self._parts and self._point not in (None, NOWHERE):
                self._before.setdefault(name, copy.deepcopy(self._parts[name].state_dict()))
            self._parts[name] = part
        return {name: part for name, part in parts.items() if name not in self.names}

    def recover(self, point: Point, place: tuple[int, int]) -> None:
        """All go on with this, and this is that rank of so many. Raises OptionError for a name without a part."""
        if missing := [name for name in self.names if name not in self._parts]:
            raise OptionError(f"per_rank={missing[0]!r} is no part: give it to LiveState() or to recover()")
        unknown = point.step > 0 if self._point is None else self._is_lost(self._point, point, place)
        if unknown and self._parts:
            log.warning(
                "rank %d of %d: what %s would be at step %d is not known here, since per_rank parts belong to the rank "
                "and the number of ranks that kept them. They stay as they are: set them from the step",
                *(*place, ", ".join(self.names), point.step),
            )
        elif self._point is not None:
            is_kept = self._point.step == point.step  # else it was interrupted before its commit of that step
            for name, state in (self._kept if is_kept else self._before).items():
                self._parts[name].load_state_dict(copy.deepcopy(state))
        self._place = place
        self.at(NOWHERE if unknown else point)

    def _is_lost(self, last: Point, point: Point, place: tuple[int, int]) -> bool:
        """Whether nobody knows what they would be then. Before the first step, in any history, they are as made."""
        is_of_another = self._was_away and point != last and max(point.step, last.step) > 0
        return last == NOWHERE or place != self._place or point.step < last.step or is_of_another

    def at(self, point: Point) -> None:
        """They are those of this step of its history; `NOWHERE`: of none."""
        self._kept = {name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items()}
        self._point = point
        self._was_away = False
        self._before.clear()
