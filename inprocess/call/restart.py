"""The phases after an interruption: the abort, the end of the iteration, and the way out or to another store."""

from __future__ import annotations

from inprocess.attribution import RETURNED, Interruption
from inprocess.call.rank import Handover, Rank
from inprocess.call.start import Starting
from inprocess.call.user_code import UserCode
from inprocess.collectives.groups import unfinished
from inprocess.exception import HealthCheckError, RankDiscarded, StoreLost
from inprocess.protocol import verbs
from inprocess.protocol.messages import Arrival, ArrivalKind, Decision, Outcome, Spot
from inprocess.protocol.phases import Event
from inprocess.system.errors import in_words
from inprocess.system.logs import get_logger

log = get_logger("inprocess")
#: somebody made no progress for long before it was noticed
STANDSTILL = (Interruption.SOFT_TIMEOUT, Interruption.HARD_TIMEOUT)


class Restarting:
    """From the interruption to the next iteration."""

    def __init__(self, rank: Rank, user: UserCode, start: Starting) -> None:
        self._rank, self._user, self._start = rank, user, start

    def wait_for_abort(self) -> Event:
        """Wait until the MonitorThread has run the ladder; then sweep up what the function made while it ran."""
        rank = self._rank
        if rank.loss is None and not rank.is_cut_off and not rank.quietly:
            self._await_aborted()
        if rank.loss is not None:
            rank.agents.thread.lose(rank.options.barrier_timeout)
        if rank.hooks.abort is not None and unfinished():
            self._user.abort(rank.membership.iteration)
        rank.agents.board.answer(rank.membership.iteration)
        if rank.loss is not None:
            return Event.LOST
        return Event.CUT_OFF if rank.is_cut_off else Event.OK

    def _await_aborted(self) -> None:
        rank = self._rank
        try:
            outcome: Outcome = rank.take(
                "outcome", rank.membership.iteration, rank.options.barrier_timeout, _no_outcome
            )
            if not outcome.completed:
                rank.take("aborted", rank.membership.iteration, rank.options.barrier_timeout, _no_abort)
        except StoreLost as error:
            if not rank.may_fail_over(error):
                raise
            rank.loss = error

    def finalize(self) -> Event:
        """The hook of that name; where it raises, this rank leaves."""
        try:
            self._user.hook("finalize")
        except BaseException as error:
            log.warning("%s leaves the job: its finalize hook raised %s", self._rank.who, in_words(error))
            raise
        return Event.QUIT if self._rank.leaving is not None else Event.OK

    def recheck(self) -> Event:
        """The health check after a fault."""
        try:
            self._user.hook("health_check")
        except Exception as error:
            raise HealthCheckError(f"this rank is not fit to go on: {in_words(error)}") from error
        return Event.OK

    def end(self) -> Event:
        """The end round: all say whether they go on. `inprocess.collectives` says what is left of the iteration."""
        rank = self._rank
        self._user.forget_exception()
        rank.agents.environment.unhook()
        rank.agents.board.answer(rank.membership.iteration)
        here = (rank.membership.rank, rank.membership.world_size)
        if rank.leaving is not None:
            if not rank.arrived:
                kind = ArrivalKind.DISCARDED if isinstance(rank.leaving, RankDiscarded) else ArrivalKind.LEFT
                rank.do(verbs.start_round(rank.membership, Arrival(kind)))
            rank.do(verbs.end_round(rank.membership, Arrival(ArrivalKind.LEFT, *here, slot=rank.membership.slot)))
            rank.said_so = True
            return Event.QUIT
        if rank.loss is not None:
            return Event.LOST
        rank.value = None
        rank.parts.function_left()
        self._user.collect()
        spot = self._spot()
        arrival = verbs.alive(
            rank.membership,
            repeats=rank.failures.repeats,
            limit=rank.failures.limit,
            progressed=rank.counts.progressed,
            spot=spot,
            hangs=self._hangs(spot),
        )
        rank.do(verbs.end_round(rank.membership, arrival))
        following = rank.membership.iteration + 1
        decision: Decision = rank.take_round("next", following, rank.options.barrier_timeout, "end")
        rank.explain(decision.records)
        rank.account(any(record.interruption in STANDSTILL for record in decision.records))
        self._start.next_iteration(decision)
        return Event.OK

    def _spot(self) -> Spot | None:
        """Where this rank was when nobody made progress."""
        rank = self._rank
        spot = rank.agents.thread.spot(rank.membership.iteration)
        return Spot(RETURNED) if spot is not None and rank.has_returned else spot

    def _hangs(self, spot: Spot | None) -> int:
        """How many times in a row a rank has hung there before it did anything; 0: this one does not count."""
        rank = self._rank
        counts = rank.options.max_repeats is not None and not rank.failures.repeats and not rank.counts.progressed
        if spot is None or not counts or not rank.stood_at_once():
            return 0
        return rank.membership.row.hangs_with(spot.where)

    def fail_over(self) -> Event:
        """Ask whether the job goes on over another store. This rank has left the function."""
        rank = self._rank
        assert rank.loss is not None
        log.warning("%s: store host lost; failing over to a standby: %s", rank.who, rank.loss)
        self._user.forget_exception()
        found = rank.agents.successor.fail_over(rank.membership, rank.loss, rank.who, self._has_done_all())
        if found is None:
            return Event.COMPLETED
        rank.value = None
        rank.parts.function_left()
        self._user.collect()
        rank.account()
        rank.handover = Handover(found.contact, rank.fault, rank.size_before, rank.failures, rank.goodput)
        rank.job.move(rank.membership, found.verdict, found.contact.host, rank.counts.progressed)
        return Event.OK

    def _has_done_all(self) -> bool:
        """Its function has returned, or it has none to run in this iteration."""
        rank = self._rank
        return rank.has_returned or (rank.arrived and rank.is_reserve)


def _no_outcome(timeout: float) -> str:
    return f"the iteration had no outcome within barrier_timeout={timeout:g}s"


def _no_abort(timeout: float) -> str:
    return f"the abort did not end within barrier_timeout={timeout:g}s: an abort hook or an atomic() section blocks it"
