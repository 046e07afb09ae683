"""Where the MonitorThread puts what it has learned: the main thread may be interrupted at any moment."""

from __future__ import annotations

import sys
import threading

import pytest

from inprocess.call.mailbox import Mailbox
from inprocess.exception import RestartError
from tests.harness.strike import Strike

WAIT_S, BLOCKED_S = 20.0, 5.0  # ceilings


def _put_and_wait(mailbox: Mailbox) -> None:
    """In another thread, which must not block."""
    thread = threading.Thread(target=mailbox.put, args=("next", 1, "letter"), daemon=True)
    thread.start()
    thread.join(BLOCKED_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("there", [True, False])
def test_ctrl_c_at_any_moment_leaves_no_lock(there: bool) -> None:
    number = 0
    while True:
        mailbox = Mailbox()
        if there:
            mailbox.put("next", 1, "letter")
        tracing = sys.gettrace()
        sys.settrace(Strike(number))
        try:
            found = mailbox.take("next", 1, 0.001)
        except KeyboardInterrupt:
            found = KeyboardInterrupt
        finally:
            sys.settrace(tracing)
        _put_and_wait(mailbox)
        assert mailbox.take("next", 1, WAIT_S) == "letter"
        if found is not KeyboardInterrupt:
            assert found == ("letter" if there else None)
            break
        number += 1
    assert number > (1 if there else 5)


def test_a_letter_wakes_who_waits() -> None:
    mailbox, found = Mailbox(), []
    thread = threading.Thread(target=lambda: found.append(mailbox.take("next", 1, WAIT_S)))
    thread.start()
    mailbox.put("start", 1, "another")
    mailbox.put("next", 1, "letter")
    thread.join(WAIT_S)
    assert found == ["letter"]


def test_a_failure_wakes_who_waits() -> None:
    mailbox, found = Mailbox(), []
    thread = threading.Thread(target=lambda: found.append(mailbox.await_failure(WAIT_S)))
    thread.start()
    assert not mailbox.await_failure(0.0)
    mailbox.fail(RestartError("lost"))
    thread.join(WAIT_S)
    assert found == [True]
    with pytest.raises(RestartError, match="lost"):
        mailbox.take("next", 1, WAIT_S)
