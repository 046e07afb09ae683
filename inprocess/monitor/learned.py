"""Timeouts that are learned from what was observed: the same object on a CallWrapper and on a watch.

Each rank notes by itself how long things take. ``calculate()`` makes one value of that for all ranks, and only that is
saved: a state is the same on every rank, so that one of them can put it into a checkpoint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from inprocess.exception import OptionError
from inprocess.monitor.timeouts import SAFETY_FACTOR, Limit, Limits, Observed, longer, section_limit
from inprocess.system import strict_json

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["LearnedTimeouts"]

#: first in each state, so that a later version can tell
VERSION = 1


class LearnedTimeouts:
    """What was learned about durations; ``call.timeouts`` and ``watch.timeouts``.

    ::

        watch.timeouts.calculate()                            # on all ranks, once the first steps are done
        checkpoint["timeouts"] = watch.timeouts.state_dict()
        ...
        watch.timeouts.load_state_dict(checkpoint["timeouts"])
    """

    def __init__(self, applied: Callable[[], None] | None = None) -> None:
        #: what this rank has seen itself
        self.observed = Observed()
        #: what all ranks agreed on
        self.agreed = Observed()
        #: of the call (seconds); 0: there is none
        self.soft_timeout = 0.0
        #: set where a launcher sets another
        self.safety_factor = SAFETY_FACTOR
        #: whether time outside of all sections gets a limit; False where a launcher watches and has none for it
        self.outside = True
        self._applied = applied

    def calculate(self, group: ProcessGroup | None = None) -> dict[str, Any]:
        """Agree with all ranks on the longest durations, and let the timeouts that follow from them count.

        Values from before, calculated or loaded, are merged: what was longer stays. Where ``torch.distributed`` is
        initialized this is a collective operation of ``group`` (default: all ranks), so every rank must call it.
        Otherwise only what this process has seen counts.

        Returns:
            The agreed limits in seconds: ``first``, ``heartbeat``, ``out_of_section``, and ``sections`` by name. What
            was not seen is None, and so is ``out_of_section`` where the launcher has no limit for it; a section that
            was seen less than three times is missing.

        Raises:
            ValueError: another rank sent something else than durations.
        """
        mine = self.agreed.merge(self.observed)
        rows = _exchange(json.dumps(mine.to_json()).encode(), group)
        # at once: which sections stay, where there are too many, is the same on all ranks
        self._take(mine.merge(*(Observed.from_json(strict_json.parse(theirs)) for theirs in rows)))
        return self.limits()

    def limits(self) -> dict[str, Any]:
        """The limits that follow from what was agreed on, as :meth:`calculate` returns them."""
        nothing = Limits(first=None, heartbeat=None, out_of_section=None, safety_factor=self.safety_factor)
        limits = self.agreed.limits(nothing, self.outside).to_json()
        del limits["safety_factor"]
        return limits

    def section_limit(self, name: str) -> Limit:
        """What a section may take by all that this rank knows: its own observations and what was agreed on."""
        times = self.observed.times(name)
        if self.agreed.sections:
            times = longer(times, self.agreed.times(name))
        return section_limit(times, self.safety_factor)

    def state_dict(self) -> dict[str, Any]:
        """What was agreed on, as plain data: the same on all ranks."""
        return {"version": VERSION, **self.agreed.to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` gave, merge it with what is known (what was longer stays), and let it count.

        Raises OptionError where it is something else.
        """
        try:
            version = state.get("version") if isinstance(state, Mapping) else None
            if version != VERSION:
                raise ValueError(f"its version is {version!r}, not {VERSION}")
            loaded = Observed.from_json(state)
        except ValueError as error:
            raise OptionError(f"load_state_dict: this is no state of learned timeouts: {error}") from None
        self._take(self.agreed.merge(loaded))

    def _take(self, agreed: Observed) -> None:
        self.agreed = agreed
        if self._applied is not None:
            self._applied()


def _exchange(mine: bytes, group: ProcessGroup | None) -> list[bytes]:
    """What each rank of the group has; nothing but plain bytes goes over the wire."""
    dist = sys.modules.get("torch.distributed")  # who has not imported it has not initialized it
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return [mine]
    import torch  # noqa: PLC0415 - imported already; this file is imported where torch is not

    device = _device(dist.get_backend_config(group))
    length = torch.tensor([len(mine)], device=device)
    dist.all_reduce(length, op=dist.ReduceOp.MAX, group=group)
    width = int(length.item())
    # spaces behind a JSON text mean nothing
    row = torch.frombuffer(bytearray(mine.ljust(width)), dtype=torch.uint8).to(device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    return [bytes(each.tolist()) for each in rows]


def _device(config: str) -> str:
    """Where the group takes tensors, out of what torch says as ``cpu:gloo,cuda:nccl``."""
    devices = [part.partition(":")[0] for part in config.split(",")]
    return "cpu" if "cpu" in devices else devices[0]
