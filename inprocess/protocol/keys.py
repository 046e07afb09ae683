"""What the verbs keep in the store, and for how long.

Keys, below the prefix of the call; ``i`` is the iteration, -1 is the join::

    i/start/<member>   entry in the start round          i/start       verdict: go or no
    i/end/<member>     entry in the end round            i/next        verdict: the next roster, as a difference
    i/start#, i/end#   how many entries                  i/outcome     completed | interrupted; the first wins
    i/done#            functions that returned           i/rendezvous  host:port of the iteration's own store server
    i/record/<n>       why it was interrupted            i/record#     how many records
    i/abort            why everybody must leave          beat/<member> heartbeat counter
    i/wanted           it waits for somebody to join
    i/leaving#         how many ranks were asked to leave, see ``verbs.leaving``
    gone/<member>      has no further need of the store  gone#, over   all have none: its host may go
    ticket/<n>         a process that wants to join      ticket#       how many tickets
    digest/<member>    what a member's monitor knows of the last incident, where hosts have directories of their own
    host/<name>/<n>    the n-th member that came on this host        host/<name>#  how many, see ``verbs.hosts``
    standby/<member>   host:port of the arbiter in a member's monitor, see ``failover``
    roster             who is in the job, eight iterations ago or less
"""

from __future__ import annotations

__all__ = ["JOINED_KEY", "JOINING", "KEEP", "KEEP_VERDICTS", "MAX_TICKETS", "RECOUNT", "ROSTER_KEY", "TICKETS_KEY"]

#: the number of the iteration in which the job is founded, before the first one
JOINING = -1
#: exists from the moment everybody has joined
JOINED_KEY = f"{JOINING}/next"
#: whoever speaks for a dead member looks this often whether a round is complete, and a monitor that waits for the end
#: round sees once to it that everybody is awake (seconds)
RECOUNT = 1.0
#: how many iterations are kept: their entries and counters, and their verdicts, for which somebody may wait
KEEP, KEEP_VERDICTS = 4, 16
#: who is in the job, in the words of the last iteration that noted it; verdicts from there on are not deleted
ROSTER_KEY = "roster"
#: how many processes took a ticket; nobody starts so many in one call
TICKETS_KEY, MAX_TICKETS = "ticket#", 1 << 16
