"""Who interrupted an iteration, how, and where. Records travel as JSON, so what comes in is checked field by field."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Interruption", "InterruptionRecord", "is_echo", "is_error", "one_line", "ranges", "standstill", "summary"]

MESSAGE_LIMIT = 500  # characters; a record must stay small: every rank reads all of them
WHERE_LIMIT = 200
CLOCK_LIMIT = 40
LONGEST = 1e12  # seconds that may be right


@enum.unique
class Interruption(enum.Enum):
    """Why an iteration ended early."""

    EXCEPTION = "exception"  #: the function failed: whatever it raised that does not ask for the end
    BASE_EXCEPTION = "base_exception"  #: it raised SystemExit, KeyboardInterrupt, GeneratorExit or RestartAbort
    SOFT_TIMEOUT = "soft_timeout"  #: no progress within soft_timeout
    HARD_TIMEOUT = "hard_timeout"  #: did not answer the interruption within hard_timeout, and was killed
    TERMINATED = "terminated"  #: the training process died
    UNRESPONSIVE = "unresponsive"  #: no heartbeat within heartbeat_timeout: the host is gone
    MONITOR_PROCESS_EXCEPTION = "monitor_process_exception"  #: the rank's monitor process failed
    JOINED = "joined"  #: no failure: a process joins the running job
    REQUESTED = "requested"  #: no failure: the function raised RankShouldRestart
    PREEMPTED = "preempted"  #: no failure: a signal asked the rank to leave, as a scheduler's does


_WORDS = {
    Interruption.EXCEPTION: "raised an exception",
    Interruption.BASE_EXCEPTION: "left the job",
    Interruption.SOFT_TIMEOUT: "made no progress",
    Interruption.HARD_TIMEOUT: "did not answer and was killed",
    Interruption.TERMINATED: "process died",
    Interruption.UNRESPONSIVE: "did not answer",
    Interruption.MONITOR_PROCESS_EXCEPTION: "monitor process failed",
    Interruption.JOINED: "joins",
    Interruption.REQUESTED: "asked for a restart",
    Interruption.PREEMPTED: "left as asked",
}


@dataclasses.dataclass(frozen=True)
class InterruptionRecord:
    """One reason why an iteration ended early.

    Args:
        rank: rank of the failed member in that iteration.
        interruption: what kind of failure.
        initial_rank: the rank that member was started with, when known.
        message: what is known in words, such as ``ValueError: loss is nan``; cut to 500 characters.
        where: the place in the code, such as ``train.py:41 in step``; cut to 200 characters.
        pings: how often that rank had called ``ping()`` since it entered the function.
        at: when the first process noticed it: seconds of the monotonic clock of its host; 0: not known.
        clock: which host's clock that is, as `inprocess.system.clock.name` has it.
        silent: so many seconds before that the last sign of life was seen, of a rank that hangs or a host that is gone.

    Two records are equal whatever they say of time.

    Raises:
        ValueError: a field has the wrong type; the message names it.
    """

    rank: int
    interruption: Interruption
    initial_rank: int | None = None
    message: str = ""
    where: str = ""
    pings: int = 0
    at: float = dataclasses.field(default=0.0, compare=False)
    clock: str = dataclasses.field(default="", compare=False)
    silent: float = dataclasses.field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        _check_rank("rank", self.rank)
        if self.initial_rank is not None:
            _check_rank("initial_rank", self.initial_rank)
        if not isinstance(self.interruption, Interruption):
            raise ValueError(f"interruption must be an Interruption, not {self.interruption!r}")
        for name, limit in (("message", MESSAGE_LIMIT), ("where", WHERE_LIMIT)):
            object.__setattr__(self, name, _cut(name, getattr(self, name), limit))
        _check_rank("pings", self.pings)
        object.__setattr__(self, "clock", _cut("clock", self.clock, CLOCK_LIMIT))
        for name in ("at", "silent"):
            object.__setattr__(self, name, _seconds(name, getattr(self, name)))

    def noticed(self, at: float, clock: str, silent: float = 0.0) -> InterruptionRecord:
        """With the moment; the seconds to the microsecond."""
        return dataclasses.replace(self, at=round(at, 6), clock=clock, silent=round(silent, 6))

    def __str__(self) -> str:
        who = name_of(self.rank, self.rank if self.initial_rank is None else self.initial_rank)
        what = one_line(self.message)
        place = f" [{one_line(self.where)}]" if self.where else ""
        return f"{who}: {_WORDS[self.interruption]}{': ' if what else ''}{what}{place}"

    def to_dict(self) -> dict[str, Any]:
        """The record as a dictionary of JSON types."""
        return {**{name: getattr(self, name) for name in _FIELDS}, "interruption": self.interruption.value}

    @classmethod
    def from_dict(cls, data: object) -> InterruptionRecord:
        """The record that :meth:`to_dict` described.

        Raises:
            ValueError: `data` is no dictionary, or a field is missing, unknown or of the wrong type.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"an interruption record must be a dictionary, not {type(data).__name__}")
        if unknown := set(data).difference(_FIELDS):
            raise ValueError(f"interruption record has unknown fields: {', '.join(sorted(map(repr, unknown)))}")
        for name in ("rank", "interruption"):
            if name not in data:
                raise ValueError(f"interruption record has no field {name!r}")
        return cls(**{**data, "interruption": _interruption(data["interruption"])})


#: a rank that is gone explains what the others report
_GONE = frozenset(
    {
        Interruption.TERMINATED,
        Interruption.UNRESPONSIVE,
        Interruption.HARD_TIMEOUT,
        Interruption.BASE_EXCEPTION,
        Interruption.PREEMPTED,
    }
)
#: what a rank sees of another one's failure: Gloo, NCCL, the iteration's store
_ECHO = re.compile("connection closed by peer|connection reset by peer|remote process exited|ncclremoteerror", re.I)
SHORT = 100  # characters of a message in a summary


def ranges(ranks: Iterable[int]) -> str:
    """``0-2, 5``: ranks for people, the first sixteen stretches of them."""
    found = stretches(ranks)
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found[:16])
    return f"{shown} and more" if len(found) > 16 else shown or "none"


def stretches(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Numbers as closed ranges, ascending."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        follows = bool(found) and found[-1][1] == number - 1
        found.append((found.pop()[0] if follows else number, number))
    return tuple(found)


def within(found: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """The numbers in these closed ranges."""
    return tuple(number for first, last in found for number in range(first, last + 1))


def summary(records: Sequence[InterruptionRecord], count: int | None = None, longest: int = SHORT) -> str:
    """One line for people: who failed and how; ranks that only saw it happen are counted.

    Args:
        records: those that are known.
        count: how many there were in all; default: as many as `records`.
        longest: characters of a message; of a longer one its beginning and its end are shown.
    """
    total = len(records) if count is None else count
    causes = [record for record in records if record.interruption in _GONE]
    if not causes and records and all(record.interruption is Interruption.SOFT_TIMEOUT for record in records):
        return _silence(records)
    if any(map(is_error, records)):  # the others waited for that rank
        records = [record for record in records if record.interruption is not Interruption.SOFT_TIMEOUT]
    causes = causes or [record for record in records if not is_echo(record)] or list(records)
    groups: dict[tuple[str, str], list[InterruptionRecord]] = {}
    for record in sorted(causes, key=lambda record: record.rank):
        groups.setdefault((_deed(record, longest), _place(record)), []).append(record)
    text = "; ".join(f"{_ranks(group)} {deed}{place}" for (deed, place), group in groups.items())
    others = total - len(causes)
    also = f" (also reported by {others} rank{'s' if others > 1 else ''})" if others > 0 else ""
    return f"{text or 'interrupted'}{also}"


def _silence(records: Sequence[InterruptionRecord]) -> str:
    """Ranks that wait for one that hangs make no progress either, so the first to say so need not be the one."""
    first = min(records, key=lambda record: record.rank)
    return f"{one_line(first.message)}; first noticed on {_ranks(sorted(records, key=lambda record: record.rank))}"


#: the message of a rank that waited, where all did
WAITED = "waited"
#: where a rank is whose function has returned
RETURNED = "returned"


def standstill(
    records: Sequence[InterruptionRecord], stuck: Sequence[InterruptionRecord], count: int, waiting: int
) -> str:
    """One line for people: nobody made progress, and where those were that did not wait for others.

    Args:
        records: those that are known; the first is a soft timeout.
        stuck: the ranks that did not wait, each with its place, which is empty where it could not say. Where all
            waited, all of them, with the message `WAITED`.
        count: how many of them there were in all.
        waiting: how many ranks waited.
    """
    gone = {record.initial_rank: _WORDS[record.interruption] for record in records if record.interruption in _GONE}
    groups: dict[str, list[InterruptionRecord]] = {}
    for record in stuck:
        ended = f" ({gone[record.initial_rank]})" if record.initial_rank in gone else ""
        groups.setdefault(f"{_short(record)}{ended}", []).append(record)
    parts = [_whereabouts(group, place) for place, group in groups.items()]
    parts += [f"{count - len(stuck)} more"] if count > len(stuck) else []
    if stuck and stuck[0].message == WAITED:
        return f"{one_line(records[0].message)}; all {count} ranks waited for others: {', '.join(parts)}"
    others = f"; {waiting} waited for others" if waiting else ""
    return f"{one_line(records[0].message)}; {', '.join(parts)}{others}"


def _whereabouts(group: Sequence[InterruptionRecord], place: str) -> str:
    one = len(group) == 1
    if group[0].where == RETURNED:
        return f"{_ranks(group)} had returned from the function"
    if group[0].where:
        return f"{_ranks(group)} {'was' if one else 'were'} at {place}"
    return f"{_ranks(group)} could not say where {'it was' if one else 'they were'}{place}"


def name_of(rank: int, initial_rank: int) -> str:
    """How messages name a rank: with the one that its process was started with, where that differs."""
    return f"rank {rank}" if rank == initial_rank else f"rank {rank} (initial rank {initial_rank})"


def is_echo(record: InterruptionRecord) -> bool:
    """Whether it tells only what a rank saw of another one's failure.

    A connection that was closed in `multiprocessing` led to a process of the rank's own, such as a DataLoader's worker.
    """
    return "/multiprocessing/" not in record.where and _ECHO.search(record.message) is not None


def is_error(record: InterruptionRecord) -> bool:
    """Whether it tells of an error of that rank."""
    return record.interruption is Interruption.EXCEPTION and not is_echo(record)


def _ranks(group: Sequence[InterruptionRecord]) -> str:
    numbers = ", ".join(str(record.rank) for record in group)
    initial = ", ".join(str(record.initial_rank) for record in group)
    known = initial == numbers or any(record.initial_rank is None for record in group)
    some = "ranks" if len(group) > 1 else "rank"
    return f"{some} {numbers}{'' if known else f' (initial {some} {initial})'}"


def _deed(record: InterruptionRecord, longest: int = SHORT) -> str:
    message = one_line(record.message, longest)
    return f"{_WORDS[record.interruption]}{': ' if message else ''}{message}"


def _place(record: InterruptionRecord) -> str:
    return f" [{_short(record)}]" if record.where else ""


def _short(record: InterruptionRecord) -> str:
    """Its place without the file's folder."""
    return one_line(record.where).rpartition("/")[2]


_FIELDS = tuple(field.name for field in dataclasses.fields(InterruptionRecord))


def _interruption(value: object) -> Interruption:
    try:
        return Interruption(value)
    except ValueError:
        raise ValueError(f"interruption: unknown kind {value!r}") from None


def _check_rank(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be an integer >= 0, not {value!r}")


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST:
        raise ValueError(f"{name} must be a number of seconds >= 0, not {value!r}")
    return float(value)


def _cut(name: str, value: object, limit: int) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, not {type(value).__name__}")
    if len(value) <= limit:
        return value
    end = (limit - 3) // 3  # what is said last is often what is wrong
    return f"{value[: limit - 3 - end]}...{value[len(value) - end :]}"


def one_line(text: str, limit: int | None = None) -> str:
    """The text for a log or a terminal: on one line, cut, and whatever is not printable (ANSI escapes) as an escape."""
    text = " ".join(text.split())
    if not text.isprintable():
        text = "".join(each if each.isprintable() else _escaped(each) for each in text)
    return text if limit is None else _cut("text", text, limit)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
