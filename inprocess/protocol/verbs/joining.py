"""How a process gets into a job that runs, as verbs: a ticket, the wait for a slot, and the ticket given back.

A process joins where its rank is a member's already, or was one's, and the job has begun. It follows the verdicts of
the job like a monitor, without being waited for. Every end round lets in those that wait and finds a slot for each
(``rounds.assign_slots``), and its verdict is all that a joiner needs: no member can die half way through a welcome.
"""

from __future__ import annotations

from collections.abc import Callable

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.exception import Fenced, NobodyLeft, RestartAbort
from inprocess.protocol import verbs
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import FIRST_JOINER, Decision, Ticket
from inprocess.protocol.ops import Now, Pause, Verb
from inprocess.protocol.rounds import assign_slots
from inprocess.protocol.verbs import watching

__all__ = ["await_slot", "follow", "register", "act_on_behalf_of", "act_on_behalf_of_unknown", "stand_down"]

#: how long the monitor of a joiner that died looks whether an end round that was being decided has let it in (seconds)
LAST_LOOK = 5.0
#: how often, and how many times at most, it is looked whether others come as well (seconds)
POLL_INTERVAL_S, MAX_POLLS = 0.25, 8


def register(ticket: Ticket) -> Verb[Membership]:
    """Wait until the job has begun, and take a ticket. The membership stands in the iteration of the job that runs.

    First the membership, then the ticket: the verdict that lets this process in may be made as soon as it has that,
    and must not be among those that it is too late for.
    """
    membership = Membership.joiner(FIRST_JOINER, (yield from verbs.await_begun()))
    yield from _catch_up(membership)
    membership.member = yield from verbs.take_ticket(ticket)
    return membership


def _catch_up(membership: Membership) -> Verb[None]:
    """Walk along the verdicts that there are."""
    while True:
        try:
            decision = yield from verbs.look_next(membership.iteration)
        except verbs.Behind as behind:
            membership.jump(behind.roster)
            continue
        if decision is None or decision.abort:
            return
        membership.apply(decision)


def follow(member: int) -> Verb[Membership]:
    """The same membership for the monitor of a process that has a ticket."""
    return Membership.joiner(member, (yield from verbs.await_begun()))


def await_slot(
    membership: Membership, ticket: Ticket, interrupts: Callable[[int, int], bool], waits: Callable[[Membership], None]
) -> Verb[Decision | None]:
    """Wait for the verdict that lets this process in; ``membership`` stands before it. None: the job completed.

    Args:
        interrupts: whether an iteration that runs is interrupted, given how many members it has, and how many it would
            have with those that wait; one that waits for somebody is in any case.
        waits: told the membership in each iteration for which it waits.

    Raises:
        RestartAbort: everybody leaves the job.
        NobodyLeft: everybody is dead.
        Fenced: it stood still, was let in meanwhile, and was too late for that.
    """
    while True:
        if not membership.roster:
            raise NobodyLeft(
                "there is nobody left to join: all ranks of the job have died or left, so all have to be started anew."
            )
        try:
            waits(membership)
            decision = yield from _next(membership, ticket, interrupts)
        except verbs.Behind as behind:
            membership.jump(behind.roster)
            if membership.included or not (yield from verbs.has_ticket(membership.member)):
                raise Fenced(f"{ticket.by} stood still or was cut off while the others let it in") from None
            continue
        if decision is None or any(member == membership.member for member, _ in decision.joined):
            return decision
        if decision.abort:
            raise RestartAbort(decision.abort)
        membership.apply(decision)


def _next(membership: Membership, ticket: Ticket, interrupts: Callable[[int, int], bool]) -> Verb[Decision | None]:
    """The next verdict; None where the iteration completes."""
    iteration = membership.iteration
    yield from verbs.refuse_behind(iteration)
    if iteration > verbs.JOINING:
        yield from _interrupt(membership, ticket, interrupts)
        if (yield from verbs.await_outcome(iteration)).completed:
            return None
    return (yield from verbs.await_next(iteration, membership=membership))


def _interrupt(membership: Membership, ticket: Ticket, interrupts: Callable[[int, int], bool]) -> Verb[None]:
    """End the iteration that runs, where there is a slot for this process and somebody gains by it."""
    iteration, members = membership.iteration, len(membership.roster)
    if not assign_slots(membership.taken, {membership.member: ticket}):
        return
    waiting = {**(yield from verbs.waiting(membership.roster)), membership.member: ticket}
    later = members + len(assign_slots(membership.taken, waiting))
    if interrupts(members, later) or (yield from verbs.is_wanted(iteration)):
        yield from _await_company(membership, ticket.world_size, len(waiting))
        yield from verbs.interrupt(iteration, joining_record(ticket))


def _await_company(membership: Membership, world_size: int, there: int) -> Verb[None]:
    """Where several slots are free, those that take them mostly come soon after each other: one restart for all.
    ``there``: how many wait already."""
    slots = max(world_size, *(slot + 1 for slot in membership.taken))
    free, before = slots - len(membership.taken), 0
    for _ in range(MAX_POLLS):
        if there >= free or there == before:
            return
        yield Pause(POLL_INTERVAL_S)
        before, there = there, len((yield from verbs.waiting(membership.roster)))


def joining_record(ticket: Ticket) -> InterruptionRecord:
    """Why an iteration ends where somebody joins."""
    return InterruptionRecord(
        ticket.slot, Interruption.JOINED, initial_rank=ticket.slot, message=f"{ticket.by} takes part"
    )


def stand_down(membership: Membership) -> Verb[bool]:
    """For a process that died while it waited, or does not want to any more. True: it has been let in nevertheless.

    An end round that is being decided may have seen the ticket already. Later ones do not; should somebody decide that
    one even later, the heartbeats that never come tell.
    """
    yield from verbs.return_ticket(membership.member)
    until = (yield Now()) + LAST_LOOK
    while not membership.included:
        left = until - (yield Now())
        try:
            decision = None if left <= 0 else (yield from verbs.glance_next(membership.iteration, left))
        except verbs.Behind as behind:
            membership.jump(behind.roster)
            continue
        if decision is None or decision.abort:
            return False
        membership.apply(decision)
    return True


def act_on_behalf_of(membership: Membership, record: InterruptionRecord, by: str) -> Verb[None]:
    """Account for this dead member, or for one that had not been let in yet. ``membership`` is this verb's own."""
    if membership.was_founder or membership.included or (yield from stand_down(membership)):
        yield from verbs.gone(membership.member, len(membership.known))
        yield from watching.report_death(membership, membership.member, record, by)


def act_on_behalf_of_unknown(
    membership: Membership, me: str, record: InterruptionRecord, by: str, identify: Callable[[int], None]
) -> Verb[None]:
    """Account for one that died before it could say whether it is a founder; ``membership``: that of a founder.

    ``me``: how it signed; ``identify``: told the id on its ticket, so that its monitor watches the others, of whom
    nobody else may be left to do so.
    """
    if (yield from verbs.arrive_dead(membership, me, by)):
        yield from verbs.await_next(verbs.JOINING, membership.roster)
        if verbs.is_founder(membership.member, (yield from verbs.await_begun())):
            yield from act_on_behalf_of(membership, record, by)
    elif (member := (yield from verbs.find_ticket(me))) is not None:
        identify(member)
        yield from act_on_behalf_of((yield from follow(member)), record, by)
