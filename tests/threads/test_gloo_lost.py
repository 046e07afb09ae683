"""An operation that Gloo has lost is ended; a healthy one, or one of later groups, is left alone."""

from __future__ import annotations

import errno
import os
import threading

import pytest
import torch
import torch.distributed as dist

from inprocess.collectives import gloo_lost
from inprocess.collectives.dead_groups import dead_groups
from inprocess.collectives.gloo_lost import LostOperations
from inprocess.system import symbols
from tests.ranks.targets import wait_until
from tests.threads.groups import Groups
from tests.threads.lost_send import Pair


def test_a_send_that_is_in_no_list_is_ended() -> None:
    with Pair() as pair:
        assert pair.heard(0) == "sends"
        pair.stop_sender()
        pair.go_on(1)
        assert pair.heard(1) == "ready"
        pair.processes[1].kill()
        pair.processes[1].join()
        pair.continue_sender()
        assert pair.heard(0) == (True, 1), "Gloo did not lose it, so nothing was tried"
        (how,) = pair.heard(0)
        assert "Gloo lost the operation" in how


def wait_in(group: dist.ProcessGroupGloo) -> dist.Work:
    """One of the group's own threads waits for the other rank, once this returns."""
    work = group.allreduce([torch.ones(1)], dist.AllreduceOptions())
    wait_until(lambda: bool(gloo_lost._waits(None)))
    return work


def finish(groups: Groups, work: dist.Work) -> None:
    groups[1].allreduce([torch.ones(1)], dist.AllreduceOptions()).wait()
    work.wait()


def test_nothing_was_aborted(groups: Groups) -> None:
    lost = LostOperations()
    work = wait_in(groups[0])
    assert lost.release() == lost.release_rest() == 0
    finish(groups, work)


def test_one_that_has_not_waited_for_long_is_left_alone(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(gloo_lost.clock, "monotonic", lambda: now[0])
    lost = LostOperations()

    def look(at: float) -> int:
        now[0] = at
        return lost.release()

    work = wait_in(groups[0])
    lost.note()
    assert look(100.04) == look(100.06) == look(100.3) == 0  # seen since 100.06, the first was too early to look
    finish(groups, work)
    lost.begin()
    work = wait_in(groups[0])
    now[0] = 110.0
    lost.note()
    assert look(110.1) == 0, "it was seen before this iteration, perhaps at the same address"
    assert look(110.34) == 0
    assert look(110.4) == 1
    with pytest.raises(RuntimeError, match="Gloo lost the operation"):
        work.wait()


def test_what_is_left_when_the_groups_are_freed(groups: Groups) -> None:
    work = wait_in(groups[0])
    lost = LostOperations()
    lost.note()
    assert lost.release_rest() == 1
    with pytest.raises(RuntimeError, match="Gloo lost the operation"):
        work.wait()


def test_groups_made_after_the_abort_are_left_alone(request: pytest.FixtureRequest) -> None:
    lost = LostOperations()
    lost.note()
    groups = request.getfixturevalue("groups")
    work = wait_in(groups[0])
    assert lost.release_rest() == 0
    finish(groups, work)


def test_a_thread_of_the_program_may_be_in_the_next_iteration(groups: Groups) -> None:
    buffer = torch.zeros(1)
    thread = threading.Thread(target=lambda: groups[0].recv([buffer], 1, 0).wait())
    thread.start()
    wait_until(lambda: bool(gloo_lost._waits(None)))
    lost = LostOperations()
    lost.note()
    assert lost.release_rest() == 0
    groups[1].send([torch.ones(1)], 0, 0).wait()
    thread.join()
    assert buffer.item() == 1


def test_two_callers_tell_a_buffer_once(groups: Groups) -> None:
    work = wait_in(groups[0])
    lost, told = LostOperations(), []
    lost.note()
    callers = [threading.Thread(target=lambda: told.append(lost.release_rest())) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sorted(told) == [0, 1]
    with pytest.raises(RuntimeError, match="Gloo lost the operation"):
        work.wait()


def test_groups_are_freed_with_it(groups: Groups) -> None:
    """The destructor of a group waits for its threads: one that waits for a lost operation would hold it up."""
    dead_groups.begin()
    work = wait_in(groups[0])
    gloo_lost.lost_operations.note()
    dead_groups._unused = [groups.pop(0)]
    (thread,) = dead_groups.free()
    thread.join(30)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="Gloo lost the operation"):
        work.wait()
    dead_groups.end()


@pytest.mark.parametrize("fault", ["no descriptor", "another Gloo", "another machine"])
def test_where_it_cannot_be_told_nothing_is_done(groups: Groups, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    lost = LostOperations()
    work = wait_in(groups[0])
    lost.note()
    with monkeypatch.context() as patch:
        if fault == "no descriptor":
            patch.setattr(gloo_lost.procfs, "read", refuse)
        elif fault == "another Gloo":
            gloo_lost._table.cache_clear()
            patch.setattr(gloo_lost, "_TABLE", "_ZTVN4gloo9transport5other13UnboundBufferE")
        else:
            patch.setattr(gloo_lost.platform, "machine", lambda: "pdp11")
        assert lost.release_rest() == 0
    gloo_lost._table.cache_clear()
    finish(groups, work)


def refuse(path: str) -> str:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_symbol_that_does_not_exist_is_missing() -> None:
    with pytest.raises(symbols.Missing):
        symbols.address("_ZN4gloo9no_such_thingEv")
