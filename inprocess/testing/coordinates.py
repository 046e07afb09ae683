"""Where and when a fault strikes: the coordinates of a rank. Plain data that can be pickled."""

from __future__ import annotations

import fnmatch
import os
from dataclasses import dataclass, field

from inprocess.exception import OptionError
from inprocess.protocol.phases import Phase

__all__ = ["At", "PHASES", "Point", "When"]

PHASES = tuple(phase.value for phase in Phase if phase is not Phase.OUT)


@dataclass(frozen=True)
class Point:
    """Where a rank is: a place that a fault may name."""

    rank: int
    iteration: int | None
    #: pings since the function was entered; None outside it
    pings: int | None = None
    #: true at a ping
    at_ping: bool = False
    phase: str | None = None
    label: str | None = None
    file: str | None = None
    #: number of the wrapped call
    call: int = 0

    def __str__(self) -> str:
        what = [f"phase {self.phase!r}"] if self.phase else []
        what += [f"label {self.label!r}"] if self.label else []
        what += [f"half of {self.file} written"] if self.file else []
        what += [f"step {self.pings}"] if self.pings is not None else []
        return f"iteration {self.iteration}, {', '.join(what) or 'the entry'}"


@dataclass(frozen=True)
class At:
    """Where and when a fault strikes. Each strikes once, the first time that its rank is there.

    Args:
        rank: the initial rank, which a process keeps over all restarts.
        step: at this ping since the function was entered; the first is 0. With ``label`` or ``file``: there, after so
            many pings or more.
        iteration: in this iteration only; 0 is the one before the first restart. Default: in the first one that gets
            there.
        phase: when the rank enters this phase of a call, see `inprocess.protocol.phases.Phase`: ``"initialize"``,
            ``"abort"``, ``"end round"`` ... In phases with a hook it is inside the hook.
        label: where the program says ``inprocess.testing.here(label)``.
        file: when half of a file with such a name was written by ``torch.save``, or when one was opened for writing:
            ``file="*.pt"``. Patterns match the name without its folder.
        call: number of the wrapped call, for programs that make several; the first is 0. Default: any.

    Without step, phase, label and file it is the entry of the function. Raises OptionError for values that cannot be.
    """

    rank: int
    step: int | None = field(default=None, kw_only=True)
    iteration: int | None = field(default=None, kw_only=True)
    phase: str | None = field(default=None, kw_only=True)
    label: str | None = field(default=None, kw_only=True)
    file: str | None = field(default=None, kw_only=True)
    call: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("rank", "step", "iteration", "call"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise OptionError(f"At: {name}={value!r} is not a number from 0 on")
        for name in ("label", "file"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise OptionError(f"At: {name}={value!r} is not a text")
        if self.file is not None and os.sep in self.file:
            raise OptionError(f"At: file={self.file!r} has a folder; patterns match the name without its folder")
        if self.phase is not None and self.phase not in PHASES:
            raise OptionError(f"At: phase={self.phase!r} is none of {', '.join(map(repr, PHASES))}")
        given = [name for name in ("phase", "label", "file") if getattr(self, name) is not None]
        if len(given) > 1 or (self.phase is not None and self.step is not None):
            given += ["step"] * (self.step is not None)
            raise OptionError(f"{self}: give one of {', '.join(given)}; a step goes with a label or a file only")

    def __repr__(self) -> str:
        names = ("step", "iteration", "phase", "label", "file", "call")
        rest = "".join(f", {name}={value!r}" for name in names if (value := getattr(self, name)) is not None)
        return f"At(rank={self.rank}{rest})"

    def meets(self, point: Point) -> bool:
        """Whether a rank is there."""
        if point.rank != self.rank or self.iteration not in (None, point.iteration):
            return False
        if self.call not in (None, point.call) or point.phase != (self.phase or self._entry):
            return False
        if point.label != self.label or (self.file is None) != (point.file is None):
            return False
        if self.file is not None and not fnmatch.fnmatch(os.path.basename(point.file or ""), self.file):
            return False
        if self.step is None:
            return True
        if self.label is None and self.file is None:
            return point.at_ping and point.pings == self.step
        return point.pings is not None and point.pings >= self.step

    @property
    def _entry(self) -> str | None:
        """The phase at whose point the function is entered, where nothing else is named."""
        named = (self.step, self.label, self.file)
        return Phase.RUN.value if named == (None, None, None) else None


@dataclass(frozen=True)
class When:
    """Hold a fault back until ``count`` other ranks have reported this event (a name of `docs/testing.md`)."""

    event: str
    count: int
