"""How a process gets into a job that runs, as verbs: a ticket, the wait for a place, and the ticket given back.

A process joins where its rank is a member's already, or was one's, and the job has begun. It follows the verdicts of
the job like a monitor, without being waited for. Every end round seats those that wait (``rounds.seat``), and its
verdict is all that a joiner needs: nobody has to welcome it, so nobody can die half way through that.
"""

from __future__ import annotations

from collections.abc import Callable

from inprocess import coordinator, guardian
from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.exception import Fenced, NobodyLeft, RestartAbort
from inprocess.protocol.book import Book
from inprocess.protocol.messages import FIRST_JOINER, Decision, Ticket
from inprocess.protocol.ops import Now, Pause, Verb
from inprocess.protocol.rounds import seat

__all__ = ["await_place", "follow", "register", "speak_for", "speak_for_unknown", "stand_down"]

#: how long the monitor of a joiner that died looks whether an end round that was being decided has let it in (seconds)
LAST_LOOK = 5.0
#: how often, and how many times at most, it is looked whether others come as well (seconds)
LOOK, LOOKS = 0.25, 8


def register(ticket: Ticket) -> Verb[Book]:
    """Wait until the job has begun, and take a ticket. The book stands in the iteration of the job that runs.

    First the book, then the ticket: the verdict that lets this process in may be made as soon as the ticket is there,
    and must not be among those that it is too late for.
    """
    book = Book.joiner(FIRST_JOINER, (yield from coordinator.await_begun()))
    yield from _catch_up(book)
    book.member = yield from coordinator.take_ticket(ticket)
    return book


def _catch_up(book: Book) -> Verb[None]:
    """Walk along the verdicts that there are."""
    while True:
        try:
            decision = yield from coordinator.look_next(book.iteration)
        except coordinator.Behind as behind:
            book.jump(behind.roster)
            continue
        if decision is None or decision.abort:
            return
        book.apply(decision)


def follow(member: int) -> Verb[Book]:
    """The same book for the monitor of a process that has a ticket."""
    return Book.joiner(member, (yield from coordinator.await_begun()))


def await_place(book: Book, ticket: Ticket, interrupts: bool, waits: Callable[[Book], None]) -> Verb[Decision | None]:
    """Wait for the verdict that lets this process in; ``book`` stands before it. None: the job completed.

    Args:
        interrupts: an iteration that runs although there is a place is interrupted (``join="now"``); one that waits
            for somebody is in any case.
        waits: told the book in each iteration for which it waits.

    Raises:
        RestartAbort: everybody leaves the job.
        NobodyLeft: everybody is dead.
        Fenced: it stood still, was let in meanwhile, and was too late for that.
    """
    while True:
        if not book.roster:
            raise NobodyLeft(
                "there is nobody left to join: all ranks of the job have died or left, so all have to be started anew."
            )
        try:
            waits(book)
            decision = yield from _next(book, ticket, interrupts)
        except coordinator.Behind as behind:
            book.jump(behind.roster)
            if book.included or not (yield from coordinator.has_ticket(book.member)):
                raise Fenced(f"{ticket.by} stood still or was cut off while the others let it in") from None
            continue
        if decision is None or any(member == book.member for member, _ in decision.joined):
            return decision
        if decision.abort:
            raise RestartAbort(decision.abort)
        book.apply(decision)


def _next(book: Book, ticket: Ticket, interrupts: bool) -> Verb[Decision | None]:
    """The next verdict; None where the iteration completes."""
    iteration = book.iteration
    yield from coordinator.refuse_behind(iteration)
    if iteration > coordinator.JOINING:
        is_free = bool(seat(book.taken, {book.member: ticket}))
        if is_free and (interrupts or (yield from coordinator.is_wanted(iteration))):
            yield from _await_company(book, ticket.world_size)
            yield from coordinator.interrupt(iteration, joining_record(ticket))
        if (yield from coordinator.await_outcome(iteration)).completed:
            return None
    return (yield from coordinator.await_next(iteration, book=book))


def _await_company(book: Book, world_size: int) -> Verb[None]:
    """Where several places are free, those that take them mostly come soon after each other: one restart for all."""
    places = max(world_size, *(place + 1 for place in book.taken))
    free, before = places - len(book.taken), 0
    for _ in range(LOOKS):
        there = len((yield from coordinator.waiting(book.roster)))
        if there >= free or there == before:
            return
        before = there
        yield Pause(LOOK)


def joining_record(ticket: Ticket) -> InterruptionRecord:
    """Why an iteration ends where somebody joins."""
    return InterruptionRecord(
        ticket.place, Interruption.JOINED, initial_rank=ticket.place, message=f"{ticket.by} takes part"
    )


def stand_down(book: Book) -> Verb[bool]:
    """For a process that died while it waited, or does not want to any more. True: it has been let in nevertheless.

    An end round that is being decided may have seen the ticket already. Later ones do not; should somebody decide that
    one even later, the heartbeats that never come tell.
    """
    yield from coordinator.return_ticket(book.member)
    until = (yield Now()) + LAST_LOOK
    while not book.included:
        left = until - (yield Now())
        try:
            decision = None if left <= 0 else (yield from coordinator.glance_next(book.iteration, left))
        except coordinator.Behind as behind:
            book.jump(behind.roster)
            continue
        if decision is None or decision.abort:
            return False
        book.apply(decision)
    return True


def speak_for(book: Book, record: InterruptionRecord, by: str) -> Verb[None]:
    """Account for this dead member, or for one that had not been let in yet. ``book`` is this verb's own."""
    if book.was_founder or book.included or (yield from stand_down(book)):
        yield from coordinator.gone(book.member, len(book.known))
        yield from guardian.stand_in(book, book.member, record, by)


def speak_for_unknown(
    book: Book, me: str, record: InterruptionRecord, by: str, identify: Callable[[int], None]
) -> Verb[None]:
    """Account for one that died before it could say whether it is a founder; ``book`` is the one it would have then.

    ``me``: how it signed; ``identify``: told the id on its ticket, so that its monitor watches the others, of whom
    nobody else may be left to do so.
    """
    if (yield from coordinator.arrive_dead(book, me, by)):
        yield from coordinator.await_next(coordinator.JOINING, book.roster)
        if coordinator.is_founder(book.member, (yield from coordinator.await_begun())):
            yield from speak_for(book, record, by)
    elif (member := (yield from coordinator.find_ticket(me))) is not None:
        identify(member)
        yield from speak_for((yield from follow(member)), record, by)
