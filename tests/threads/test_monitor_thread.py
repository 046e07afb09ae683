"""How the MonitorThread gets the main thread out of an iteration: what follows what."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from inprocess.call.thread import JoinRequest
from inprocess.exception import RestartAbort, StoreLost
from inprocess.monitor_thread import MonitorThread
from inprocess.protocol import verbs
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import JoinMode, Ticket
from inprocess.store import StoreSpec
from inprocess.stores import connecting, serving
from inprocess.stores.driver import execute
from inprocess.stores.owner import Owner


class Gate:
    """Notes what is done to it. ``look`` is called while the main thread is interrupted."""

    def __init__(self, story: list[str], look: Callable[[], object]) -> None:
        self.story, self.look = story, look

    def close_for_abort(self, on_wait: Any) -> None:
        self.story.append("atomic() is closed")

    @contextlib.contextmanager
    def parked(self) -> Iterator[None]:
        self.story.append("parked")
        yield
        self.story.append("goes on")

    def interrupt_until_left(self, retry_after: float, release: Any) -> None:
        self.look()
        self.story.append("left")

    def leave(self) -> None:
        self.story.append("leaves")


STORY = ["atomic() is closed", "parked", "abort of 0", "goes on", "left"]


@pytest.fixture
def story() -> list[str]:
    return []


@pytest.fixture
def thread(story: list[str]) -> MonitorThread:
    """In iteration 0; never started, so that its steps are taken one by one."""

    def look() -> None:
        assert made.mailbox.take("aborted", 0, 0.0) is None, "the main thread goes on before it has left the function"

    def new_gate() -> Any:
        return Gate(story, look)

    def abort(iteration: int) -> None:
        story.append(f"abort of {iteration}")

    membership = Membership.founder(0, (0, 1), 2)
    membership.iteration = 0
    made = MonitorThread(
        StoreSpec(), membership, None, None, None, new_gate, abort, lambda: None, lambda: None, lambda: 0.0, 1.0, 1.0
    )
    return made


def test_atomic_ends_before_the_abort_and_the_function_is_left_after_it(
    thread: MonitorThread, story: list[str]
) -> None:
    assert thread.enter() is not None
    thread._get_out(0)
    assert story == STORY
    assert thread.mailbox.take("aborted", 0) is True


def test_nobody_enters_an_iteration_that_is_over(thread: MonitorThread, story: list[str]) -> None:
    thread._get_out(0)
    assert thread.enter() is None
    assert story == []


def test_the_next_iteration_can_be_entered(thread: MonitorThread) -> None:
    thread._get_out(0)
    thread._begin(1, None)  # type: ignore[arg-type]
    assert thread.enter() is not None


def test_who_is_cut_off_leaves_the_function_too(thread: MonitorThread, story: list[str]) -> None:
    """And hears why, whatever it waits for."""
    thread.enter()
    thread._fail(StoreLost("gone"))
    assert story == STORY
    with pytest.raises(StoreLost, match="gone"):
        thread.mailbox.take("outcome", 0)


def test_who_leaves_the_job_is_not_disturbed(thread: MonitorThread, story: list[str]) -> None:
    thread.enter()
    thread.leave_after_outcome()
    thread._fail(StoreLost("gone"))
    assert story == ["leaves"]


def test_where_two_jobs_have_met_nothing_is_said_for_who_leaves() -> None:
    """By then the rank 0 of its job may serve a store at that address, and would begin without this rank."""
    server = serving.serve("127.0.0.1", 0)
    spec = StoreSpec(host="127.0.0.1", port=server.port)
    execute(verbs.refuse_founding("both have RANK=1"), connecting.connect(spec, 20.0))
    request = JoinRequest(JoinMode.FOUND, Ticket(1, 2, "1A"), lambda *_: False, Owner(), has_owner=False)
    membership = Membership.founder(1, (0, 1), 2)
    thread = MonitorThread(spec, membership, request, None, None, None, None, None, None, None, 1.0, 20.0)
    thread.start()
    with pytest.raises(RestartAbort, match="both have RANK=1"):
        thread.mailbox.take("entered", -1, 20.0)
    thread.join()
    assert thread.stays_out
