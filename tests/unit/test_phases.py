"""The phase table: complete, without dead ends, and printable."""

from __future__ import annotations

import pytest

from inprocess.protocol import phases
from inprocess.protocol.phases import CODES, PHASES, TRANSITIONS, Event, Phase, next_phase

#: what each phase has in common with others. Whoever adds one decides it here
GROUPS = {
    Phase.JOIN: "TELLS_NOBODY",
    Phase.ASSIGN: "BEFORE",
    Phase.START: "BEFORE",
    Phase.INITIALIZE: "BEFORE INTERRUPTED RAISING RUNNING",
    Phase.CHECK: "BEFORE INTERRUPTED RAISING RUNNING",
    Phase.RUN: "BEFORE INTERRUPTED RAISING RUNNING",
    Phase.FINISH: "INTERRUPTED",
    Phase.COMPLETE: "AFTERWARDS LEAVING TELLS_NOBODY WITHOUT_STORE",
    Phase.ABORT: "AFTERWARDS",
    Phase.FINALIZE: "AFTERWARDS RAISING WITHOUT_STORE",
    Phase.RECHECK: "AFTERWARDS RAISING WITHOUT_STORE",
    Phase.END: "AFTERWARDS TELLS_NOBODY",
    Phase.FAILOVER: "AFTERWARDS LEAVING TELLS_NOBODY",
    Phase.LEAVE: "AFTERWARDS LEAVING TELLS_NOBODY WITHOUT_STORE",
    Phase.OUT: "AFTERWARDS LEAVING WITHOUT_STORE",
}


def walk(*events: Event) -> list[Phase]:
    """The phases of a life that starts in JOIN."""
    phases = [Phase.JOIN]
    for event in events:
        phases.append(next_phase(phases[-1], event))
    return phases


def test_undisturbed_call() -> None:
    ok = Event.OK
    *_, finish, complete, leave, out = walk(ok, ok, ok, ok, ok, ok, Event.COMPLETED, ok, ok)
    assert (finish, complete, leave, out) == (Phase.FINISH, Phase.COMPLETE, Phase.LEAVE, Phase.OUT)


@pytest.mark.parametrize("phase", [Phase.INITIALIZE, Phase.CHECK, Phase.RUN, Phase.FINISH])
def test_restart_comes_back_to_the_assignment(phase: Phase) -> None:
    """From every entered phase: abort, finalize, health check, end round, and a new assignment."""
    current = next_phase(phase, Event.INTERRUPTED)
    assert current is Phase.ABORT
    for expected in (Phase.FINALIZE, Phase.RECHECK, Phase.END, Phase.ASSIGN):
        current = next_phase(current, Event.OK)
        assert current is expected


def test_no_start_goes_to_the_end_round() -> None:
    assert next_phase(Phase.ASSIGN, Event.NO_START) is next_phase(Phase.START, Event.NO_START) is Phase.END


@pytest.mark.parametrize("phase", [Phase.INITIALIZE, Phase.CHECK, Phase.RUN, Phase.FINISH])
@pytest.mark.parametrize("event", [Event.QUIT, Event.CUT_OFF])
def test_who_leaves_releases_what_the_function_holds(phase: Phase, event: Event) -> None:
    assert next_phase(phase, event) is Phase.ABORT


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.OUT])
def test_out_is_reached_from_everywhere(phase: Phase) -> None:
    reached, todo = {phase}, [phase]
    while todo:
        current = todo.pop()
        fresh = {target for (source, _), target in TRANSITIONS.items() if source is current} - reached
        reached |= fresh
        todo += fresh
    assert Phase.OUT in reached


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.OUT])
def test_a_rank_can_leave_from_everywhere(phase: Phase) -> None:
    """Only forward: it never comes to the function again. And by the end round, where the others wait for it."""
    path, event = [phase], Event.QUIT
    while path[-1] is not Phase.OUT:
        path.append(next_phase(path[-1], event))
        event = Event.QUIT if path[-1] in (Phase.END, Phase.LEAVE) else Event.OK
        assert path[-1] not in (Phase.ASSIGN, Phase.RUN)
        assert len(path) < 8, f"{path} does not lead out"
    nobody_waits = phase in (Phase.JOIN, Phase.COMPLETE, Phase.FAILOVER, Phase.LEAVE)
    assert (Phase.END in path) is not nobody_waits


def test_out_is_the_end() -> None:
    assert not [source for source, _ in TRANSITIONS if source is Phase.OUT]


def test_impossible_pair_names_both() -> None:
    with pytest.raises(LookupError, match=r"'join' on event 'interrupted'"):
        next_phase(Phase.JOIN, Event.INTERRUPTED)


def test_codes_for_the_board() -> None:
    assert {PHASES[code] for code in CODES.values()} == set(Phase)


def test_every_phase_belongs_where_it_should() -> None:
    groups = {name: group for name, group in vars(phases).items() if isinstance(group, frozenset)}
    assert len(groups) == 8
    assert {phase: " ".join(sorted(name for name in groups if phase in groups[name])) for phase in Phase} == GROUPS
