"""What the doctor found: small frozen records, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["Check", "Finding", "NothingToLookAt", "Settings"]


@dataclass(frozen=True)
class Finding:
    """One thing that was found; every text is one line."""

    #: id of the check: area.name, lower case
    check: str
    #: "problem" (will break training or restarts), "warning" (may) or "note"
    level: str
    #: what was found, with the value that was measured
    what: str
    #: why it matters for a restart
    why: str
    #: what to do, with the command or the option where there is one
    remedy: str
    #: file:line of the user's code, where there is one
    where: str = ""


@dataclass(frozen=True)
class Settings:
    """What the checks look at."""

    #: ranks that are to run on this host
    nproc: int
    #: variables of the job
    environ: Mapping[str, str]
    #: folder in which proc, sys and dev are; tests have one of their own
    root: str = "/"
    #: timeouts and intervals that are meant for `Wrapper`, by name (seconds)
    options: Mapping[str, float] = field(default_factory=dict)
    #: the longest step of the training (seconds); None: nobody has said
    step: float | None = None

    @property
    def world_size(self) -> int:
        """Ranks of the whole job; those of this host where the variables do not say."""
        text = self.environ.get("WORLD_SIZE", "")
        return max(self.nproc, int(text)) if text.isascii() and text.isdecimal() else self.nproc

    @property
    def is_on_several_hosts(self) -> bool:
        return self.world_size > self.nproc


class NothingToLookAt(Exception):
    """A check does not apply here; the text says why."""


@dataclass(frozen=True)
class Check:
    """One check; ``docs/doctor.md`` lists them all."""

    id: str
    #: what it looks at and why, one line
    about: str
    #: the general remedy, one line
    remedy: str
    run: Callable[[Settings], Iterable[Finding]]
