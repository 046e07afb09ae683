"""What a rank does in the store, verb by verb: generators of store operations, which wait for nothing themselves.

``stores`` runs them over a store, the simulator one operation at a time. `inprocess.protocol.keys` lists the keys.

A verb may be cut off between any two operations (the process dies). Two rules make that safe: an entry that others
count is written before it is counted, and whoever speaks for a dead member recounts until there is a verdict.

A third is for values that none of us wrote. A verdict is read by everybody, so everybody ends. Whoever finds anything
else broken is the only one to know it: it says so to the others, who would wait for it in vain (`tells_everybody`).
"""

from inprocess.protocol.keys import JOINED_KEY, JOINING, KEEP, KEEP_VERDICTS, RECOUNT, TICKETS_KEY
from inprocess.protocol.verbs.follow import (
    await_next,
    await_next_awake,
    await_outcome,
    await_rendezvous,
    await_start,
    glance_next,
    has_started,
    look_next,
    refuse_other_size,
)
from inprocess.protocol.verbs.hosts import find_neighbors, place_on_host, register_on_host
from inprocess.protocol.verbs.outcome import finish, foretell, interrupt
from inprocess.protocol.verbs.rounds import (
    act_on_behalf_of_dead,
    alive,
    arrive_dead,
    arrived,
    await_founder,
    end_round,
    join,
    missing,
    recount,
    refuse_founding,
    refuse_stranger,
    start_round,
)
from inprocess.protocol.verbs.shared import Behind, give_up, refuse_behind
from inprocess.protocol.verbs.tickets import (
    await_begun,
    find_ticket,
    has_begun,
    has_ticket,
    is_founder,
    is_wanted,
    return_ticket,
    take_ticket,
    waiting,
    want,
)
from inprocess.protocol.verbs.upkeep import (
    await_over,
    beat,
    drop_digest,
    find_standby,
    forget,
    gone,
    publish_digest,
    publish_rendezvous,
    publish_standby,
    read_beat,
    read_beats,
    read_digest,
)

__all__ = [
    "Behind",
    "JOINED_KEY",
    "JOINING",
    "KEEP",
    "KEEP_VERDICTS",
    "RECOUNT",
    "TICKETS_KEY",
    "alive",
    "arrive_dead",
    "arrived",
    "await_begun",
    "await_founder",
    "await_next",
    "await_next_awake",
    "await_outcome",
    "await_over",
    "await_rendezvous",
    "await_start",
    "beat",
    "drop_digest",
    "end_round",
    "find_neighbors",
    "find_standby",
    "find_ticket",
    "finish",
    "foretell",
    "forget",
    "give_up",
    "glance_next",
    "gone",
    "has_begun",
    "has_started",
    "has_ticket",
    "interrupt",
    "is_founder",
    "is_wanted",
    "join",
    "look_next",
    "missing",
    "place_on_host",
    "publish_digest",
    "publish_rendezvous",
    "publish_standby",
    "read_beat",
    "read_beats",
    "read_digest",
    "recount",
    "refuse_behind",
    "refuse_other_size",
    "refuse_founding",
    "refuse_stranger",
    "register_on_host",
    "return_ticket",
    "act_on_behalf_of_dead",
    "start_round",
    "take_ticket",
    "waiting",
    "want",
]
