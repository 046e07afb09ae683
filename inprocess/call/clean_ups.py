"""An error whose clean-up waits for the other ranks, which wait for this rank: they are told before it has ended.

``finally: dist.barrier()`` is the usual case. The error is on its way out of the function and nobody else can know. A
main thread that stands still for a second is looked at, which costs nothing where it handles no error. The others are
told only where the error is sure to leave the function (see ``interrupt.in_flight``) and the main thread waits for
them: then they would be restarted in any case. An ``except`` block that waits for ranks that are late is left alone,
and so is a clean-up that does something else.
"""

from __future__ import annotations

import threading

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.call.failures import record_of
from inprocess.call.participant import Participant
from inprocess.exception import Preempted, RankShouldRestart, StateLost, asks_for_end
from inprocess.interrupt import in_flight, whereabouts
from inprocess.interrupt.in_flight import InFlight
from inprocess.monitor.board import ATOMIC, PROGRESS, UNHANG
from inprocess.protocol import verbs
from inprocess.protocol.phases import Phase
from inprocess.stores.driver import execute
from inprocess.system import clock
from inprocess.system.errors import ErrorSnapshot, in_words
from inprocess.system.logs import get_logger

__all__ = ["CleanUps"]

log = get_logger("inprocess")
#: how long to connect to the store may take (seconds)
CONNECT_LIMIT_S = 5.0


class CleanUps:
    """One per loop."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._found: InFlight | None = None

    def end(self) -> None:
        """`look` looks at nothing any more."""
        self._over.set()

    def join(self) -> None:
        """Wait for the thread that tells the others, but not for long."""
        if self._thread is not None:
            self._thread.join(CONNECT_LIMIT_S)

    def look(self) -> None:
        """The main thread stands still. In the watchdog's thread."""
        participant = self._participant
        slots = participant.agents.board.slots
        if (
            participant.phase is not Phase.RUN
            or participant.is_reserve
            or slots[ATOMIC]
            or slots[UNHANG]
            or self._over.is_set()
        ):
            return
        # interrupted already: what is in flight is the interruption, or what the abort has raised
        if participant.agents.thread.heard[0] == participant.membership.iteration:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        self._found = in_flight.look()
        if self._found is not None:
            self._thread = threading.Thread(target=self._work, name="inprocess-clean-up", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        """In a thread of its own: reading code takes milliseconds, and what an error says of itself any time."""
        participant, iteration = self._participant, self._participant.membership.iteration
        stood_still = clock.monotonic() - participant.agents.board.slots[PROGRESS] / 1e9
        try:
            if (record := self._record()) is None:
                return
            record = record.noticed(record.at, record.clock, silent=max(0.0, stood_still))
            log.warning(
                "%s: an error is on its way out of the function, and its clean-up waits for ranks that wait for this "
                "one: all restart now, %s",
                participant.who,
                record,
            )
            execute(verbs.interrupt(iteration, record), participant.agents.connect_anew(CONNECT_LIMIT_S, self._over))
        except Exception as error:  # soft_timeout has it end
            log.debug("%s: the others could not be told of an error whose clean-up waits: %s", participant.who, error)

    def _record(self) -> InterruptionRecord | None:
        """Of what the others are to be told; the error is dropped here."""
        participant, found, self._found = self._participant, self._found, None
        spot, error = whereabouts.look(), None if found is None else found.leaving()
        if error is None or spot is None or not spot.waits:
            return None
        error = whereabouts.counts_as(error, None)
        if isinstance(error, RankShouldRestart):
            return participant.request(error)
        if not asks_for_end(error):
            return record_of(ErrorSnapshot(error), participant.membership, participant.counts.pings)
        # others have more to say as they leave, see `Loop._quit`
        is_plain = not isinstance(error, Preempted | StateLost)
        return participant.record(Interruption.BASE_EXCEPTION, error, in_words(error)) if is_plain else None
