"""The life of one rank as a table: phase x event -> next phase. Data only; ``call.loop.Loop`` walks it.

Read it top down: the first block is an undisturbed call, the second one restart, the third the ways out.
"""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """Where a rank is. The value is what the board shows to the monitor process and what error messages print."""

    #: wait until every founder has arrived (or has been declared dead)
    JOIN = "join"
    #: compute this process's rank in the coming iteration
    ASSIGN = "assign ranks"
    #: start round: everybody says which rank it took; ends with ``go`` or ``no``
    START = "start round"
    #: the user's ``initialize`` hook
    INITIALIZE = "initialize"
    #: the user's health check before the function runs
    CHECK = "health check"
    #: the wrapped function; a reserve rank waits here instead
    RUN = "run"
    #: the function returned; wait for the outcome of the iteration
    FINISH = "wait for the outcome"
    #: the user's ``completion`` hook, after everybody finished
    COMPLETE = "completion"
    #: the abort ladder runs in the monitor thread; wait until it has ended
    ABORT = "abort"
    #: the user's ``finalize`` hook
    FINALIZE = "finalize"
    #: the user's health check between two iterations
    RECHECK = "health check after a fault"
    #: end round: everybody says ``alive`` or ``left``; ends with the next roster
    END = "end round"
    #: the store is lost: ask an arbiter whether the job goes on over another one
    FAILOVER = "failover"
    #: the user's ``terminate`` hook where the call failed; everything is put back
    LEAVE = "leave"
    #: the call returns or raises
    OUT = "out"


class Event(enum.Enum):
    """What ended a phase."""

    #: the phase did its work
    OK = "ok"
    #: the start round's verdict is that this iteration does not start
    NO_START = "no start"
    #: some rank, perhaps this one, interrupted the iteration
    INTERRUPTED = "interrupted"
    #: every active rank's function returned
    COMPLETED = "completed"
    #: this rank leaves the job with an exception of its own
    QUIT = "quit"
    #: the store is gone, and there are others that may serve one
    LOST = "lost"
    #: the store is gone, or this rank has been declared dead: there is nobody left to talk to
    CUT_OFF = "cut off"


P, E = Phase, Event

TRANSITIONS: dict[tuple[Phase, Event], Phase] = {
    # an undisturbed call
    (P.JOIN, E.OK): P.ASSIGN,
    (P.ASSIGN, E.OK): P.START,
    (P.START, E.OK): P.INITIALIZE,
    (P.INITIALIZE, E.OK): P.CHECK,
    (P.CHECK, E.OK): P.RUN,
    (P.RUN, E.OK): P.FINISH,
    (P.FINISH, E.COMPLETED): P.COMPLETE,
    (P.COMPLETE, E.OK): P.LEAVE,
    (P.LEAVE, E.OK): P.OUT,
    # a restart
    (P.ASSIGN, E.NO_START): P.END,
    (P.START, E.NO_START): P.END,
    (P.INITIALIZE, E.INTERRUPTED): P.ABORT,
    (P.CHECK, E.INTERRUPTED): P.ABORT,
    (P.RUN, E.INTERRUPTED): P.ABORT,
    (P.FINISH, E.INTERRUPTED): P.ABORT,
    (P.ABORT, E.OK): P.FINALIZE,
    (P.FINALIZE, E.OK): P.RECHECK,
    (P.RECHECK, E.OK): P.END,
    (P.END, E.OK): P.ASSIGN,
    # the host of the store is lost; OUT: the call goes on over another store, from JOIN
    (P.ASSIGN, E.LOST): P.FAILOVER,
    (P.START, E.LOST): P.FAILOVER,
    (P.INITIALIZE, E.LOST): P.ABORT,
    (P.CHECK, E.LOST): P.ABORT,
    (P.RUN, E.LOST): P.ABORT,
    (P.FINISH, E.LOST): P.ABORT,
    (P.ABORT, E.LOST): P.FINALIZE,
    (P.END, E.LOST): P.FAILOVER,
    (P.FAILOVER, E.OK): P.OUT,
    (P.FAILOVER, E.COMPLETED): P.COMPLETE,
    (P.FAILOVER, E.CUT_OFF): P.LEAVE,
    (P.FAILOVER, E.QUIT): P.LEAVE,
    # the job was over before this process was let in
    (P.JOIN, E.COMPLETED): P.LEAVE,
    # the ways out: the others are told, then the exception is raised again
    (P.JOIN, E.QUIT): P.LEAVE,
    (P.ASSIGN, E.QUIT): P.END,
    (P.START, E.QUIT): P.END,
    (P.INITIALIZE, E.QUIT): P.ABORT,
    (P.CHECK, E.QUIT): P.ABORT,
    (P.RUN, E.QUIT): P.ABORT,
    (P.FINISH, E.QUIT): P.ABORT,
    (P.COMPLETE, E.QUIT): P.LEAVE,
    (P.ABORT, E.QUIT): P.FINALIZE,
    (P.FINALIZE, E.QUIT): P.END,
    (P.RECHECK, E.QUIT): P.END,
    (P.END, E.QUIT): P.LEAVE,
    (P.LEAVE, E.QUIT): P.OUT,
    # nobody left to talk to: release what the function holds, then raise
    (P.JOIN, E.CUT_OFF): P.LEAVE,
    (P.ASSIGN, E.CUT_OFF): P.LEAVE,
    (P.START, E.CUT_OFF): P.LEAVE,
    (P.INITIALIZE, E.CUT_OFF): P.ABORT,
    (P.CHECK, E.CUT_OFF): P.ABORT,
    (P.RUN, E.CUT_OFF): P.ABORT,
    (P.FINISH, E.CUT_OFF): P.ABORT,
    (P.ABORT, E.CUT_OFF): P.LEAVE,
    (P.END, E.CUT_OFF): P.LEAVE,
}

# What phases have in common. A new one belongs where it fits: a test asks for each phase.

#: the function and the hooks before it, and the wait for its outcome: what a restart interrupts
INTERRUPTED = frozenset(phase for phase, event in TRANSITIONS if event is E.INTERRUPTED)
#: of these, where the user's code runs that the others wait for
RUNNING = INTERRUPTED - {P.FINISH}
#: up to the function's end, where nobody waits for this rank's step yet
BEFORE = RUNNING | {P.ASSIGN, P.START}
#: the user's code, whose error is a fault of this rank
RAISING = RUNNING | {P.FINALIZE, P.RECHECK}
#: a rank that does not call the function again, and that nobody waits for
LEAVING = frozenset({P.COMPLETE, P.FAILOVER, P.LEAVE, P.OUT})
#: the function of the iteration has been left
AFTERWARDS = LEAVING | {P.ABORT, P.FINALIZE, P.RECHECK, P.END}
#: does nothing in the store, so the loss of it is an error like any other
WITHOUT_STORE = frozenset(P) - {phase for phase, event in TRANSITIONS if event is E.CUT_OFF}
#: from where a rank leaves without telling the others
TELLS_NOBODY = frozenset(
    phase for (phase, event), following in TRANSITIONS.items() if event is E.QUIT and following in (P.LEAVE, P.OUT)
)

#: phases as small integers, for the board in shared memory
CODES: dict[Phase, int] = {phase: code for code, phase in enumerate(Phase)}
PHASES: dict[int, Phase] = {code: phase for phase, code in CODES.items()}


def next_phase(phase: Phase, event: Event) -> Phase:
    """Look up the table. Raises LookupError for a pair that cannot happen, naming both."""
    try:
        return TRANSITIONS[phase, event]
    except KeyError:
        raise LookupError(f"no transition from phase {phase.value!r} on event {event.value!r}") from None
