"""Whether the state of the parts can be given to another rank: what cannot is said early, not when a rank is lost.

It is a warning and no error. A state is given back within its own process whatever it holds. So a training in which no
rank ever needs that of another one works, and must not end for this.
"""

from __future__ import annotations

from inprocess.live.present import LiveParts
from inprocess.live.tree import dotted, faults
from inprocess.system.logs import get_logger

__all__ = ["SendableCheck"]

log = get_logger("inprocess.live")


class SendableCheck:
    """Looks twice at each set of parts: after the first `recover`, and after the first commit, since optimizers and
    schedules have all of their state only then. It takes milliseconds, for which a restart is not to wait each time."""

    def __init__(self) -> None:
        self._seen: set[frozenset[str]] = set()
        self._said: set[str] = set()
        self._is_commit_due = False

    def recovered(self, present: LiveParts, rank: int, ranks: int) -> None:
        """On all ranks, since a state_dict() may be collective. Nothing where there is one rank: it sends to nobody."""
        names = frozenset(present.parts)
        if ranks > 1 and names not in self._seen:
            self._seen.add(names)
            self._is_commit_due = True
            self._look(present, rank)

    def committed(self, present: LiveParts, rank: int) -> None:
        if self._is_commit_due:
            self._is_commit_due = False
            self._look(present, rank)

    def _look(self, present: LiveParts, rank: int) -> None:
        """One fault of a part is enough, there may be thousands; and it is said once, by the first rank."""
        for name, part in present.parts.items():
            fault = next(faults(part.state_dict()), None)
            if fault is None or name in self._said:
                continue
            self._said.add(name)
            path, kind = fault
            if not rank:
                log.warning(
                    "the part %r cannot be given to another rank: %s of its state_dict() is a %s, which cannot be "
                    "loaded without running code. The training works until a rank is lost; then recover() fails. Have "
                    "state_dict() return tensors, numbers (float(x), not NumPy's), strings, None, and dicts, lists "
                    "and tuples of these",
                    *(name, repr(dotted(path)) if path else "all", kind),
                )
