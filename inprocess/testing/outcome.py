"""How ranks ended, and a rank while it runs, as the test's process sees it: its events, its ends, its files."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

__all__ = ["Deadline", "RankProcess", "RankResult", "Ranks", "text_of"]


class Deadline(AssertionError):
    """The ranks were not done in time; the story tells where each of them was."""

    def __init__(self, headline: str, story: str = "", ranks: Sequence[RankResult] = ()) -> None:
        super().__init__("\n".join([headline, story]) if story else headline)
        self.headline, self.story, self.ranks = headline, story, ranks


@dataclass(frozen=True)
class RankResult:
    """How one rank ended."""

    rank: int
    pid: int
    #: minus the signal number when a signal killed it
    exitcode: int | None
    #: what the target returned, as JSON gives it back; of a program as pickled bytes
    value: Any
    #: type name, message and traceback of what the target raised; None when it returned
    exception: str | None
    message: str
    trace: str = field(repr=False)
    events: list[dict[str, Any]] = field(repr=False)
    leftovers: list[str]
    log: str = field(repr=False)
    #: it was started in place of another one, and the job was over before it was let in
    came_late: bool = False
    #: those of its threads, where a deadly signal or the deadline made it dump them
    stacks: str = field(repr=False, default="")

    @property
    def done(self) -> bool:
        """The target came to its end, with a value or an exception."""
        return any(event["event"] == "done" for event in self.events)

    @property
    def has_returned(self) -> bool:
        """The program came to its end without an exception, or with `sys.exit` and 0."""
        return self.exitcode == 0 and self.exception is None

    def of(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        """This rank's events with that name and those fields; ``t`` is CLOCK_MONOTONIC in seconds."""
        return [e for e in self.events if e["event"] == event and all(e.get(k) == v for k, v in fields.items())]

    def entries(self, call: int = 0) -> list[tuple[int, int, int]]:
        """(iteration, rank, world size) of every entry of the wrapped function."""
        return [(e["iteration"], e["rank"], e["world_size"]) for e in self.of("enter", call=call)]


class Ranks(list[RankResult]):
    """The results, by initial rank."""

    #: what was left behind, exit codes that are wrong, invariants that do not hold; one line each
    problems: Sequence[str] = ()
    #: of the run, see `story.tell`
    story: str = ""
    #: how long processes below the ranks were there after the last rank had ended (seconds)
    lingered: float = 0.0

    @property
    def values(self) -> list[Any]:
        return [result.value for result in self]

    @property
    def exitcodes(self) -> list[int | None]:
        return [result.exitcode for result in self]

    @property
    def exceptions(self) -> list[str | None]:
        return [result.exception for result in self]


@dataclass
class RankProcess:
    rank: int
    process: Any
    pipe: connection.Connection
    control: connection.Connection
    pidfd: int
    log: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    rest: bytes = b""
    at_end: bool = False
    ended: bool = False
    #: started in place of another one; and the job was over before it was let in
    is_replacement: bool = False
    came_late: bool = False

    def read(self) -> None:
        """Take what is in the pipe."""
        data = os.read(self.pipe.fileno(), 1 << 16)
        self.at_end = not data
        *lines, self.rest = (self.rest + data).split(b"\n")
        self.events.extend(json.loads(line) for line in lines)

    def note_end(self) -> None:
        """The process is gone: an event of its own (`ended`), which others can wait for."""
        self.ended = True
        self.drain()
        self.events.append({"event": "ended", "t": time.monotonic()})

    def drain(self) -> None:
        """What an ended rank had still written. Its children may hold the pipe open, so do not wait for its end."""
        while not self.at_end and self.pipe.poll(0):
            self.read()

    def signal(self, signum: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signum)

    def find(self, name: str) -> dict[str, Any]:
        return next((event for event in reversed(self.events) if event["event"] == name), {})

    def result(self) -> RankResult:
        raised = self.find("exception")
        return RankResult(
            rank=self.rank,
            pid=self.process.pid,
            exitcode=self.process.exitcode,
            value=self._value(),
            exception=raised.get("type"),
            message=raised.get("message", ""),
            trace=raised.get("trace", ""),
            events=self.events,
            leftovers=self.find("leftovers").get("lines", []),
            log=text_of(self.log),
            came_late=self.came_late,
            stacks=text_of(Path(f"{self.log}.stacks")),
        )

    def _value(self) -> Any:
        pickled = Path(f"{self.log}.value")
        if pickled.exists():
            return pickled.read_bytes()
        return self.find("unpicklable").get("text", self.find("value").get("value"))

    def close(self) -> None:
        self.process.join()
        self.process.close()
        self.pipe.close()
        self.control.close()
        os.close(self.pidfd)


def text_of(path: Path) -> str:
    """Of a file that may not be there."""
    return path.read_text(errors="replace") if path.exists() else ""
