"""What may stand around a call, for tests of a program under faults: see `Instrument`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from inprocess.call.participant import Participant
from inprocess.protocol.phases import Event, Phase

__all__ = ["Instrument", "Step"]

Step = Callable[[], Event]


class Instrument(Protocol):
    """Unlike an observer it may raise, or end the process: that is what it is for. Main thread."""

    def call(self, run: Callable[[], Any]) -> Any:
        """Around a call of a wrapped function; returns what ``run`` does."""

    def begin(self, participant: Participant, steps: Mapping[Phase, Step]) -> dict[Phase, Step]:
        """A loop begins. The rank's hooks and its function may be replaced; returns what is done in each phase."""
