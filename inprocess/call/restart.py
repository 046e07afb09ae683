"""The phases after an interruption: the abort, the end of the iteration, and the way out or to another store."""

from __future__ import annotations

from inprocess.attribution import RETURNED, Interruption
from inprocess.call.participant import Handover, Participant
from inprocess.call.start import Starting
from inprocess.call.user_code import UserCode
from inprocess.collectives.groups import unfinished
from inprocess.exception import HealthCheckError, RankDiscarded, StoreLost
from inprocess.protocol import verbs
from inprocess.protocol.messages import Arrival, ArrivalKind, Decision, Outcome, Spot
from inprocess.protocol.phases import Event
from inprocess.system import descriptors
from inprocess.system.errors import in_words
from inprocess.system.logs import get_logger

log = get_logger("inprocess")
#: somebody made no progress for long before it was noticed
STANDSTILL = (Interruption.SOFT_TIMEOUT, Interruption.HARD_TIMEOUT)


class Restarting:
    """From the interruption to the next iteration."""

    def __init__(self, participant: Participant, user: UserCode, start: Starting) -> None:
        self._participant, self._user, self._start = participant, user, start

    def wait_for_abort(self) -> Event:
        """Wait until the MonitorThread has run the ladder; then sweep up what the function made while it ran."""
        participant = self._participant
        if participant.loss is None and not participant.is_cut_off and not participant.quietly:
            self._await_aborted()
        if participant.loss is not None:
            participant.agents.thread.lose(participant.options.barrier_timeout)
        if participant.hooks.abort is not None and unfinished():
            self._user.abort(participant.membership.iteration)
        participant.agents.board.answer(participant.membership.iteration)
        if participant.loss is not None:
            return Event.LOST
        return Event.CUT_OFF if participant.is_cut_off else Event.OK

    def _await_aborted(self) -> None:
        participant = self._participant
        try:
            outcome: Outcome = participant.take(
                "outcome", participant.membership.iteration, participant.options.barrier_timeout, _no_outcome
            )
            if not outcome.completed:
                participant.take(
                    "aborted", participant.membership.iteration, participant.options.barrier_timeout, _no_abort
                )
        except StoreLost as error:
            if not participant.may_fail_over(error):
                raise
            participant.loss = error

    def finalize(self) -> Event:
        """The hook of that name; where it raises, this rank leaves."""
        try:
            self._user.hook("finalize")
        except BaseException as error:
            log.warning("%s leaves the job: its finalize hook raised %s", self._participant.who, in_words(error))
            raise
        return Event.QUIT if self._participant.leaving is not None else Event.OK

    def recheck(self) -> Event:
        """The health check after a fault."""
        try:
            self._user.hook("health_check")
        except Exception as error:
            raise HealthCheckError(f"this rank is not fit to go on: {in_words(error)}") from error
        return Event.OK

    def end(self) -> Event:
        """The end round: all say whether they go on. `inprocess.collectives` says what is left of the iteration."""
        participant = self._participant
        self._user.forget_exception()
        participant.agents.environment.unhook()
        participant.agents.board.answer(participant.membership.iteration)
        here = (participant.membership.rank, participant.membership.world_size)
        if participant.leaving is not None:
            if not participant.arrived:
                kind = ArrivalKind.DISCARDED if isinstance(participant.leaving, RankDiscarded) else ArrivalKind.LEFT
                participant.do(verbs.start_round(participant.membership, Arrival(kind)))
            participant.do(
                verbs.end_round(
                    participant.membership, Arrival(ArrivalKind.LEFT, *here, slot=participant.membership.slot)
                )
            )
            participant.said_so = True
            return Event.QUIT
        if participant.loss is not None:
            return Event.LOST
        participant.value = None
        participant.parts.function_left()
        self._user.collect()
        descriptors.check()  # once all is freed that is of the iteration
        spot = self._spot()
        arrival = verbs.alive(
            participant.membership,
            repeats=participant.failures.repeats,
            limit=participant.failures.limit,
            progressed=participant.counts.progressed,
            spot=spot,
            hangs=self._hangs(spot),
        )
        participant.do(verbs.end_round(participant.membership, arrival))
        following = participant.membership.iteration + 1
        decision: Decision = participant.take_round("next", following, participant.options.barrier_timeout, "end")
        participant.explain(decision.records)
        participant.account(any(record.interruption in STANDSTILL for record in decision.records))
        self._start.next_iteration(decision)
        return Event.OK

    def _spot(self) -> Spot | None:
        """Where this rank was when nobody made progress."""
        participant = self._participant
        spot = participant.agents.thread.spot(participant.membership.iteration)
        return Spot(RETURNED) if spot is not None and participant.has_returned else spot

    def _hangs(self, spot: Spot | None) -> int:
        """How many times in a row a rank has hung there before it did anything; 0: this one does not count."""
        participant = self._participant
        counts = (
            participant.options.max_repeats is not None
            and not participant.failures.repeats
            and not participant.counts.progressed
        )
        if spot is None or not counts or not participant.stood_at_once():
            return 0
        return participant.membership.streak.hangs_with(spot.where)

    def fail_over(self) -> Event:
        """Ask whether the job goes on over another store. This rank has left the function."""
        participant = self._participant
        assert participant.loss is not None
        log.warning("%s: store host lost; failing over to a standby: %s", participant.who, participant.loss)
        self._user.forget_exception()
        found = participant.agents.successor.fail_over(
            participant.membership, participant.loss, participant.who, self._has_done_all()
        )
        if found is None:
            return Event.COMPLETED
        participant.value = None
        participant.parts.function_left()
        self._user.collect()
        participant.account()
        participant.handover = Handover(
            found.contact, participant.fault, participant.size_before, participant.failures, participant.goodput
        )
        participant.job.move(participant.membership, found.verdict, found.contact.host, participant.counts.progressed)
        return Event.OK

    def _has_done_all(self) -> bool:
        """Its function has returned, or it has none to run in this iteration."""
        participant = self._participant
        return participant.has_returned or (participant.arrived and participant.is_reserve)


def _no_outcome(timeout: float) -> str:
    return f"the iteration had no outcome within barrier_timeout={timeout:g}s"


def _no_abort(timeout: float) -> str:
    return f"the abort did not end within barrier_timeout={timeout:g}s: an abort hook or an atomic() section blocks it"
