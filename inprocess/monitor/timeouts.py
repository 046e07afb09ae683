"""How much time a worker may take, what was seen of it so far, and whether it is overdue: rules over plain data.

A worker and its launcher share this file. Nothing here looks at a clock, talks to anybody or acts. Durations are in
seconds, moments in nanoseconds of the monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

__all__ = ["MAX_NAME_LENGTH", "Limits", "Observed", "Overdue", "Seen", "decide", "limit_of", "longer", "section_limit"]

#: what may take a time of its own is allowed this many times the longest it took so far ...
SAFETY_FACTOR = 5.0
#: ... a section only once it was seen this often ...
OBSERVATIONS = 3
#: ... and never less than this (seconds)
MIN_LIMIT_S = 5.0
#: longer names of sections are cut (characters)
MAX_NAME_LENGTH = 200
#: most sections that are remembered
MAX_SECTIONS = 10_000
#: a section that was not seen: how often, and how long
NEVER = (0, 0.0)
#: longest duration that is believed (seconds)
MAX_DURATION_S = 1e9

#: seconds, or None: no limit
Limit: TypeAlias = float | None


def limit_of(longest: float, safety_factor: float = SAFETY_FACTOR) -> float:
    """How long something may take of which this was the longest so far; both in seconds."""
    return max(safety_factor * longest, MIN_LIMIT_S)


def section_limit(times: tuple[int, float], safety_factor: float = SAFETY_FACTOR) -> Limit:
    """What a section may take that was seen so often and took so long; None: not seen often enough to say."""
    count, longest = times
    return None if count < OBSERVATIONS else limit_of(longest, safety_factor)


@dataclass(frozen=True)
class Limits:
    """How long a watched worker may take; seconds, None for no limit."""

    #: from the start of the watch to the first ``ping()`` or section
    first: Limit = 3600.0
    #: between two ``ping()``
    heartbeat: Limit = 2700.0
    #: between two sections
    out_of_section: Limit = None
    #: for each section by its name
    sections: Mapping[str, Limit] = field(default_factory=dict)
    #: learned limits are this many times the longest duration seen
    safety_factor: float = SAFETY_FACTOR

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "first": self.first,
            "heartbeat": self.heartbeat,
            "out_of_section": self.out_of_section,
            "sections": dict(self.sections),
            "safety_factor": self.safety_factor,
        }

    @classmethod
    def from_json(cls, value: Any) -> Limits:
        """From plain data that came from elsewhere. Raises ValueError for anything else."""
        sections = _names(_take(value, "sections"))
        return cls(
            first=_limit(_take(value, "first")),
            heartbeat=_limit(_take(value, "heartbeat")),
            out_of_section=_limit(_take(value, "out_of_section")),
            sections={name: _limit(each) for name, each in sections.items()},
            safety_factor=_number(_take(value, "safety_factor")),
        )


@dataclass
class Observed:
    """The longest durations seen so far, in seconds; 0 where nothing was seen."""

    first: float = 0.0
    heartbeat: float = 0.0
    out_of_section: float = 0.0
    #: name -> (how often it was seen, the longest)
    sections: dict[str, tuple[int, float]] = field(default_factory=dict)

    def section(self, name: str, duration: float) -> None:
        """A section took this long."""
        name = str(name)[:MAX_NAME_LENGTH]
        count, longest = self.sections.get(name, NEVER)
        if count or len(self.sections) < MAX_SECTIONS:  # names that are made up anew each time teach nothing
            self.sections[name] = (count + 1, duration if duration > longest else longest)

    def times(self, name: str) -> tuple[int, float]:
        """How often a section was seen, and the longest it took."""
        return self.sections.get(str(name)[:MAX_NAME_LENGTH], NEVER)

    def merge(self, *others: Observed) -> Observed:
        """The longest of all, in whatever order they come. Of too many sections those seen most often stay."""
        every = (self, *others)
        found: dict[str, tuple[int, float]] = {}
        for each in every:
            for name, times in each.sections.items():
                found[name] = longer(found.get(name, NEVER), times)
        kept = sorted(found, key=lambda name: (-found[name][0], name))[:MAX_SECTIONS]
        return Observed(
            first=max(each.first for each in every),
            heartbeat=max(each.heartbeat for each in every),
            out_of_section=max(each.out_of_section for each in every),
            sections={name: found[name] for name in sorted(kept)},
        )

    def limits(self, configured: Limits, outside: bool = True) -> Limits:
        """What was learned in place of what was configured; the latter where nothing was learned.

        ``outside``: whether time outside of all sections gets a limit; otherwise it stays without one.
        """
        factor = configured.safety_factor
        between = limit_of(self.out_of_section, factor) if self.out_of_section else configured.out_of_section
        learned = {name: section_limit(times, factor) for name, times in self.sections.items()}
        return Limits(
            first=limit_of(self.first, factor) if self.first else configured.first,
            heartbeat=limit_of(self.heartbeat, factor) if self.heartbeat else configured.heartbeat,
            out_of_section=between if outside else None,
            sections={**configured.sections, **{name: each for name, each in learned.items() if each is not None}},
            safety_factor=factor,
        )

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "first": self.first,
            "heartbeat": self.heartbeat,
            "out_of_section": self.out_of_section,
            "sections": {name: list(each) for name, each in self.sections.items()},
        }

    @classmethod
    def from_json(cls, value: Any) -> Observed:
        """From plain data that came from elsewhere. Raises ValueError for anything else."""
        sections = _names(_take(value, "sections"))
        return cls(
            first=_number(_take(value, "first")),
            heartbeat=_number(_take(value, "heartbeat")),
            out_of_section=_number(_take(value, "out_of_section")),
            sections={name: _seen_section(each) for name, each in sections.items()},
        )


def longer(one: tuple[int, float], other: tuple[int, float]) -> tuple[int, float]:
    """Of two ranks' times of one section."""
    return max(one[0], other[0]), max(one[1], other[1])


def _take(value: Any, name: str) -> Any:
    if not isinstance(value, Mapping) or name not in value:
        raise ValueError(f"there is no {name!r} in {value!r:.200}")
    return value[name]


def _names(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or len(value) > MAX_SECTIONS:
        raise ValueError(f"{value!r:.200} does not hold sections by name")
    for name in value:
        if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH:
            raise ValueError(f"{name!r:.200} is no name of a section")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_DURATION_S:
        raise ValueError(f"{value!r:.200} is not a duration in seconds")
    return float(value)


def _limit(value: Any) -> Limit:
    return None if value is None else _number(value)


def _seen_section(value: Any) -> tuple[int, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{value!r:.200} does not say how often a section was seen and how long it took")
    count, longest = value
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_DURATION_S:
        raise ValueError(f"{count!r:.200} is no number of times")
    return count, _number(longest)


# --- whether a worker is overdue


#: bits of `Seen.origin`: limits that were learned, and a section's that was given to ``section()``; else options
LEARNED_FIRST, LEARNED_PING, LEARNED_OUTSIDE, LEARNED_SECTION, GIVEN_SECTION = 1, 2, 4, 8, 16


@dataclass(frozen=True)
class Seen:
    """What a watched worker shows of itself: moments and limits in nanoseconds, 0 for none."""

    #: when the watch began
    began: int
    #: whether it has used ``ping()`` or a section
    used: bool = False
    #: the last ``ping()``; where they are used, the beginning and the end of a section count as one
    ping: int = 0
    #: when the section that is due first was entered; 0: it is in none that has a limit
    section_since: int = 0
    section_limit: int = 0
    #: the name of that section
    section: str = ""
    #: when it left the last section; 0: it is in one, or has used none
    outside_since: int = 0
    first_limit: int = 0
    ping_limit: int = 0
    outside_limit: int = 0
    #: where the limits come from
    origin: int = 0


@dataclass(frozen=True)
class Overdue:
    """A worker that has taken more time than it may."""

    rank: int
    #: in words: what did not happen, for how long, and which option says so, or that the limit was learned
    reason: str


def decide(now: int, state: Mapping[int, Seen], awake_since: int = 0) -> list[Overdue]:
    """Who is overdue now, and the first reason why.

    Args:
        now: nanoseconds of the clock by which the workers stamp.
        state: what each watched worker shows, by global rank.
        awake_since: no silence counts that began before this: the launcher itself had been stopped, perhaps with all
            its workers.
    """
    found = ((rank, _reason(now, seen, awake_since)) for rank, seen in sorted(state.items()))
    return [Overdue(rank, reason) for rank, reason in found if reason]


def _reason(now: int, seen: Seen, awake_since: int) -> str:
    for since, limit, text in _rules(seen):
        if limit and max(since, awake_since) + limit <= now:
            return text
    return ""


def _rules(seen: Seen) -> Iterator[tuple[int, int, str]]:
    """(since, limit, reason): overdue once ``limit`` has passed since ``since``; a limit of 0 is none."""
    if not seen.used:
        by = _by(seen, LEARNED_FIRST, "initial_rank_heartbeat_timeout")
        yield seen.began, seen.first_limit, f"no ping() and no section within {_shown(seen.first_limit)} ({by})"
        return
    if seen.section_since:
        text = f"in section {seen.section!r} for more than {_shown(seen.section_limit)} ({_by_section(seen)})"
        yield seen.section_since, seen.section_limit, text
    elif seen.ping:
        by = _by(seen, LEARNED_PING, "rank_heartbeat_timeout")
        yield seen.ping, seen.ping_limit, f"no ping() for {_shown(seen.ping_limit)} ({by})"
    if seen.outside_since:
        by = _by(seen, LEARNED_OUTSIDE, "rank_out_of_section_timeout")
        yield seen.outside_since, seen.outside_limit, f"in no section for {_shown(seen.outside_limit)} ({by})"


def _by(seen: Seen, learned: int, option: str) -> str:
    return f"learned, in place of {option}" if seen.origin & learned else option


def _by_section(seen: Seen) -> str:
    if seen.origin & GIVEN_SECTION:
        return "the timeout given to section()"
    return "learned limit of this section" if seen.origin & LEARNED_SECTION else "rank_section_timeouts"


def _shown(nanoseconds: int) -> str:
    return f"{math.ceil(nanoseconds / 1e6) / 1e3:g} s"
