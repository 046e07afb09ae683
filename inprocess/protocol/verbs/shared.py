"""What several verbs do: count, read entries, tell everybody, notice that this member is behind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.exception import BadMessage
from inprocess.protocol import keys
from inprocess.protocol.keys import JOINING, ROSTER_KEY
from inprocess.protocol.messages import Decision, Outcome, Roster, Start, dump
from inprocess.protocol.ops import Add, Claim, Exist, Read, ReadAll, Verb
from inprocess.protocol.parsing import load_count, load_decision, load_roster

__all__ = [
    "Behind",
    "count_in",
    "count_processes",
    "give_up",
    "read_count",
    "read_each",
    "refuse_behind",
    "tells_everybody",
    "wake",
]

P = ParamSpec("P")
T = TypeVar("T")


class Behind(Exception):
    """The verdict that a monitor or a joiner waits for is deleted: it stood still, or was cut off, for many
    iterations. It goes on from ``roster``, where its rank may be or not.

    Not for members: in every end round the others wait for each training process, so one that is so late has gone.
    """

    def __init__(self, iteration: int, roster: Roster) -> None:
        super().__init__(
            f"this process stood still or was cut off in iteration {iteration}; the others are in {roster.iteration}"
        )
        self.roster = roster


def refuse_behind(iteration: int) -> Verb[None]:
    """For a monitor, or before joining, before it waits for a verdict: whether that is or will soon be deleted. Raises
    Behind.

    Once before, and not now and then: torch prints two warnings for each wait that does not last for ever. So it goes
    on from the roster long before the verdict is deleted, which it may be between this look and the wait.
    """
    roster = yield from roster_beyond(iteration)
    if roster is not None:
        raise Behind(iteration, roster)


def roster_beyond(iteration: int) -> Verb[Roster | None]:
    """The roster, where the verdicts of this iteration are deleted, or are the next to be."""
    found = yield Read(ROSTER_KEY)
    roster = None if found is None else load_roster(found, ROSTER_KEY)
    return None if roster is None or roster.iteration < iteration + keys.KEEP_VERDICTS // 2 else roster


def tells_everybody(verb: Callable[Concatenate[int, P], Verb[T]]) -> Callable[Concatenate[int, P], Verb[T]]:
    """For verbs that read what others do not read: a broken value there ends the iteration and the job for all."""

    @functools.wraps(verb)
    def telling(iteration: int, /, *args: P.args, **kwargs: P.kwargs) -> Verb[T]:
        try:
            return (yield from verb(iteration, *args, **kwargs))
        except BadMessage as error:
            yield from give_up(iteration, str(error))
            raise

    return telling


def give_up(iteration: int, reason: str) -> Verb[None]:
    """Everybody leaves. The end round, which may never be complete now, is decided as well.

    The job may be further on by now than whoever says so.
    """
    verdict = dump(Decision(abort=reason)).encode()
    record = InterruptionRecord(0, Interruption.BASE_EXCEPTION, message=reason)
    while True:
        if iteration > JOINING:
            yield Claim(f"{iteration}/outcome", dump(Outcome(completed=False, cause=record)))
            yield from wake(iteration)
        found = yield Claim(f"{iteration}/next", verdict.decode())
        if found == verdict or _is_the_end(found):
            roster = yield from roster_beyond(iteration)
            if roster is None:
                return
            iteration = roster.iteration  # nobody reads the old one any more
        else:
            iteration += 1


def _is_the_end(verdict: bytes) -> bool:
    """Whether nobody goes on from an end round: they are told to leave, or cannot read what they are told."""
    try:
        return bool(load_decision(verdict, "next").abort)
    except BadMessage:
        return True


def count_in(key: str, careful: bool = False) -> Verb[int]:
    """Count one up; the new value. ``careful``: look first, where a moment more does not matter."""
    if careful:  # a server closes the connection on which something else than a number is to be added to
        yield from read_count(key)
    number = load_count((yield Add(key, 1)), key)
    if not number:
        raise BadMessage(f"store key {key!r}: was set to less than nothing. This library did not write it.")
    return number


def read_count(key: str) -> Verb[int]:
    """What a counter holds; as text, for the same reason."""
    return load_count((yield Read(key)), key)


def count_processes(key: str) -> Verb[int]:
    """What a counter of processes holds. Raises BadMessage for more than there can be: each stands for a key."""
    count = yield from read_count(key)
    if count > keys.MAX_TICKETS:
        raise BadMessage(f"store key {key!r}: counts {count} processes, more than {keys.MAX_TICKETS}")
    return count


def read_each(names: tuple[str, ...]) -> Verb[list[bytes | None]]:
    """What the keys hold, in one operation where all exist."""
    if (yield Exist(names)):
        return (yield ReadAll(names))  # type: ignore[no-any-return]
    found = []
    for name in names:
        found.append((yield Read(name)))
    return found


def wake(iteration: int) -> Verb[None]:
    """Whoever has not started yet wakes up; once the iteration has started, there is nobody."""
    text = dump(Start(go=False))
    if (yield Claim(f"{iteration}/start", text)) == text.encode():
        yield Claim(f"{iteration}/rendezvous", "-")
