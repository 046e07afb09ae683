"""What the monitor processes do over the store, as verbs: send heartbeats, watch each other, speak for the dead.

Shared by the real monitor process (a thread and a connection for each of these) and the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.protocol import verbs
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import FIRST_JOINER
from inprocess.protocol.ops import Now, Pause, Verb


def report_death(membership: Membership, member: int, record: InterruptionRecord, by: str) -> Verb[None]:
    """Account for a dead member until it is off the roster or the job has ended. ``membership`` is this verb's own.

    Nothing where it is off the roster already: the others have gone on without it, and must not be interrupted again.
    """
    if member >= FIRST_JOINER:
        yield from verbs.return_ticket(member)
    while member in membership.roster:
        iteration, roster = membership.iteration, membership.roster
        yield from verbs.act_on_behalf_of_dead(iteration, roster, member, record, by)
        try:
            if iteration > verbs.JOINING and (yield from verbs.await_outcome(iteration, roster)).completed:
                return
            decision = yield from verbs.await_next(iteration, roster, membership)
        except verbs.Behind as behind:
            membership.jump(behind.roster)
            continue
        membership.apply(decision)
        if decision.abort:
            return


@dataclass
class Ring:
    """Who watches whom: each member the next live one, and as long as that one is silent the one after it too.

    So a run of neighbours that went down together (a rack) is noticed in one timeout, not one after the other.
    Counters of others are judged by this observer's clock: when did I last see it change?
    """

    member: int
    #: seconds without a heartbeat after which a member is declared dead
    timeout: float
    #: seconds between heartbeats
    interval: float
    #: member -> (counter, when it was first seen at that value)
    seen: dict[int, tuple[int, float]] = field(default_factory=dict)
    #: members declared dead by this observer
    dead: set[int] = field(default_factory=set)

    def targets(self, roster: Sequence[int], now: float) -> list[int]:
        """Members to read now."""
        after = [member for member in roster if member > self.member] + [m for m in roster if m < self.member]
        chosen: list[int] = []
        for member in after:
            chosen.append(member)
            if member not in self.dead and not self._silent(member, now):
                break
        self.seen = {member: seen for member, seen in self.seen.items() if member in chosen}
        return [member for member in chosen if member not in self.dead]

    def _silent(self, member: int, now: float) -> bool:
        return member in self.seen and now - self.seen[member][1] > 2 * self.interval

    def observe(self, member: int, counter: int, now: float) -> bool:
        """Note a counter; True where the member has just been found dead."""
        known = self.seen.get(member)
        if known is None or known[0] != counter:
            self.seen[member] = (counter, now)
            return False
        if now - known[1] < self.timeout or member in self.dead:
            return False
        self.dead.add(member)
        return True


@dataclass
class HeartbeatTracker:
    """Whom the process that serves the store hears. By its own clock, like `Ring`."""

    #: seconds after which a member counts as silent
    timeout: float
    seen: dict[int, tuple[int, float]] = field(default_factory=dict)

    def note(self, counters: Mapping[int, int], now: float) -> None:
        """What the heartbeat counters of all members hold now."""
        before = self.seen
        self.seen = {}
        for member, counter in counters.items():
            known = before.get(member)
            self.seen[member] = known if known is not None and known[0] == counter else (counter, now)

    def members(self, now: float) -> list[int]:
        """Who is not silent. One that has not sent any heartbeat yet is not missed: it has no lease."""
        return [member for member, (counter, when) in self.seen.items() if not counter or now - when < self.timeout]


def keep_watch(
    ring: Ring,
    membership: Callable[[], Membership],
    beaten: Callable[[float], None],
    lost: Callable[[int, float], None],
    ends: Callable[[], bool] = lambda: False,
) -> Verb[None]:
    """Send heartbeats and read the neighbour's, until ``ends`` says so.

    ``beaten(when)`` is told the time at which each successful heartbeat was begun (the lease counts from there);
    ``lost(member, seconds)`` that a member is to be declared dead. The monitor of a process that waits to join sends
    none, but watches: it may be the only one that is left.
    """
    while not ends():
        now = yield Now()
        if ring.member in membership().known:
            yield from verbs.beat(ring.member)
            beaten(now)
        for member in ring.targets(membership().roster, now):
            counter = yield from verbs.read_beat(member)
            if not counter and membership().iteration == verbs.JOINING:
                continue  # not started yet; whoever joins waits no longer than barrier_timeout for that
            if ring.observe(member, counter, (yield Now())):
                lost(member, ring.timeout)
        yield Pause(ring.interval)


def lost_record(slot: int, seconds: float) -> InterruptionRecord:
    """The record for the member in this slot, whose host does not answer."""
    message = f"no heartbeat for {seconds:g} s: its host or its monitor process is gone"
    return InterruptionRecord(slot, Interruption.UNRESPONSIVE, initial_rank=slot, message=message, silent=seconds)
