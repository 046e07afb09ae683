"""Lines about who has not come yet: over a real store, beside a main thread that waits."""

from __future__ import annotations

import pytest

from inprocess.call import waiting
from inprocess.call.waiting import Absentees
from inprocess.protocol import verbs
from inprocess.protocol.keys import JOINING
from inprocess.protocol.membership import Membership
from inprocess.stores import serving
from inprocess.stores.connecting import connect
from inprocess.stores.driver import execute
from inprocess.stores.spec import StoreSpec
from inprocess.system import clock
from inprocess.testing.ports import ReservedPort

HERE = "127.0.0.1"


def _member(member: int) -> Membership:
    return Membership(member, tuple(range(8)), iteration=JOINING)


def _lines(
    present: list[int], speakers: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> list[str]:
    """What these members say after twenty seconds, with those present."""
    server = serving.serve(HERE, 0)
    spec = StoreSpec(host=HERE, port=server.port, prefix="call")
    store = connect(spec, 5)
    for member in present:
        execute(verbs.join(_member(member), f"process {member}"), store)
    waits = [Absentees(spec, _member(member), "end") for member in speakers]
    real = clock.monotonic
    monkeypatch.setattr(clock, "monotonic", lambda: real() + 20.0)
    for wait in waits:
        wait.look()
        wait.look()  # once in ten seconds
        if wait._thread is not None:
            wait._thread.join(10)
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("present", "line"),
    [
        ([0, 1, 2, 4, 5, 6], "waiting for ranks: 6 of 8 are here, missing are initial ranks 3, 7, for 20 s"),
        ([1, 2, 3, 4, 5, 6, 7], "waiting for ranks: 7 of 8 are here, missing is initial rank 0, for 20 s"),
        ([2, 3], "waiting for ranks: 2 of 8 are here, missing are initial ranks 0-1, 4-7, for 20 s"),
    ],
)
def test_one_of_those_that_are_there_says_who_is_missing(
    present: list[int], line: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert _lines(present, present, monkeypatch, caplog) == [line]


def test_of_many_only_the_number_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "NAMED", 4)
    said = _lines([1, 2, 3], [1, 2, 3], monkeypatch, caplog)
    assert said == ["waiting for ranks: 3 of 8 are here, 5 missing, for 20 s"]


def test_nothing_is_said_before_ten_seconds() -> None:
    wait = Absentees(StoreSpec(host=HERE, port=1), _member(0), "end")
    wait.look()
    assert wait._thread is None


def test_a_store_that_is_not_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.1)
    with ReservedPort() as port:
        wait = Absentees(StoreSpec(host=HERE, port=port.number), _member(0), "end")
        wait.progress._next = 0.0
        wait.look()
        assert wait._thread is not None
        wait._thread.join(10)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("waiting for the store, for 0 s: ")
