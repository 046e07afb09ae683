"""The parts of a call: in which order they are asked, and that each ends whatever the others do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from inprocess import composition
from inprocess.call import parts
from inprocess.call.part import CallEnd, Part
from inprocess.call.parts import Parts
from inprocess.collectives.dead_connections import dead_connections
from inprocess.collectives.dead_groups import dead_groups
from inprocess.system import extensions


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What two parts of an extension and one of the core say."""
    lines: list[str] = []

    def part(name: str) -> Part:
        def say(moment: str) -> object:
            return lambda *_: lines.append(f"{name} {moment}")

        moments = ("function_begins", "function_left", "collect", "call_ends", "call_ended")
        return Part(**{moment: say(moment) for moment in moments})  # type: ignore[arg-type]

    monkeypatch.setattr(parts, "CORE", (part("core"),))
    monkeypatch.setattr(parts, "BEFORE", (part("first"), part("second")))
    yield lines


def test_what_is_further_in_collects_first(said: list[str]) -> None:
    Parts().function_left()
    Parts().collect()
    assert said == [
        *("first function_left", "second function_left", "core function_left"),
        *("core collect", "second collect", "first collect"),
    ]


def test_each_ends_where_another_one_raises(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    def fail(*_: object) -> None:
        raise OSError("it does not end")

    monkeypatch.setattr(parts, "CORE", (*parts.CORE, Part(call_ends=fail, call_ended=fail)))
    with pytest.raises(OSError, match="it does not end"):
        Parts().call_ends(CallEnd(None))
    with pytest.raises(OSError, match="it does not end"):
        Parts().call_ended()
    assert said == [
        *("core call_ends", "second call_ends", "first call_ends"),
        *("core call_ended", "second call_ended", "first call_ended"),
    ]


def test_connections_are_closed_before_groups_are_freed() -> None:
    """Both when another iteration is decided and when the call is over, which runs from the last to the first."""
    ends = [part.call_ended for part in parts.CORE]
    assert ends.index(dead_connections.end) > ends.index(dead_groups.end)


@pytest.mark.parametrize("interface", composition.EXTENSIONS)
def test_who_is_named_is_there(interface: str) -> None:
    assert len(extensions.load(interface)) == len(composition.EXTENSIONS[interface])


def test_nobody_is_named() -> None:
    assert (extensions.load("a name of nothing"), extensions.first("a name of nothing")) == ((), None)


def test_who_takes_part_in_a_call_is_imported_before_it() -> None:
    """In a call there may be no descriptor left for that, and the first restart would wait for it."""
    program = """
import sys, inprocess.wrap
from inprocess.composition import EXTENSIONS
named = [entry for interface in ("Observer", "Part", "Successor") for entry in EXTENSIONS[interface]]
assert named and not {entry.partition(":")[0] for entry in named} - sys.modules.keys()
assert "inprocess.live.loader" not in sys.modules  # who has none
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
