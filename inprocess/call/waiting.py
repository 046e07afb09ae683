"""Who has not come yet, said every ten seconds while the main thread waits for a round.

It reads the store over a connection of its own, in a thread that nobody waits for: the main thread learns what it waits
for as soon as ever, also where the store does not answer. One rank says it, the first one that is there.
"""

from __future__ import annotations

import threading

from inprocess.attribution import ranges
from inprocess.exception import RestartError, StoreLost, TimeoutError
from inprocess.protocol import verbs
from inprocess.protocol.membership import Membership
from inprocess.stores.connecting import connect
from inprocess.stores.driver import execute
from inprocess.stores.spec import StoreSpec
from inprocess.system.logs import get_logger
from inprocess.system.progress import Progress

__all__ = ["Absentees", "in_words"]

log = get_logger("inprocess")
#: members of the roster that look; the second says something only where the first is missing, and so on
SPEAKERS = 3
#: ranks that are asked for by name, one operation each; of more, only how many are missing is said
NAMED = 1024
#: how long a connection may take (seconds)
PATIENCE_S = 5.0


class Absentees:
    """Of one wait.

    Args:
        spec: how to reach the base store.
        membership: of this process; not changed while it waits.
        name: of the round, ``start`` or ``end``.
    """

    def __init__(self, spec: StoreSpec, membership: Membership, name: str) -> None:
        self._spec, self._name = spec, name
        self._iteration, self._roster = membership.iteration, tuple(membership.roster)
        self._slot_of, self._member = membership.slot_of, membership.member
        self.progress = Progress()
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """In the main thread, whenever the wait has woken: have it said where that is due."""
        if not self.progress.due() or self._member not in self._roster[:SPEAKERS]:
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._say, name="inprocess-absentees", daemon=True)
            self._thread.start()

    def _say(self) -> None:
        first, seconds = self._roster[: self._roster.index(self._member)], self.progress.seconds
        few = len(self._roster) <= NAMED
        try:
            store = connect(self._spec, PATIENCE_S)
            absent = execute(verbs.missing(self._iteration, self._name, self._roster if few else first), store)
            count = (
                len(absent) if few else len(self._roster) - execute(verbs.arrived(self._iteration, self._name), store)
            )
        except (RestartError, StoreLost, TimeoutError) as error:
            if not first:
                log.warning("waiting for the store, for %.0f s: %s", seconds, error)
            return
        if count > 0 and set(first) <= set(absent):
            named = ranges(map(self._slot_of, absent)) if few else ""
            log.warning("%s", in_words(len(self._roster), count, named, seconds))


def in_words(size: int, missing: int, named: str, seconds: float) -> str:
    """One line; ``named``: those that are missing, or an empty text."""
    who = (
        f"missing {'is initial rank' if missing == 1 else 'are initial ranks'} {named}"
        if named
        else f"{missing} missing"
    )
    return f"waiting for ranks: {size - missing} of {size} are here, {who}, for {seconds:.0f} s"
