"""How the ranks of a job are now: from the live files of a run directory, or from an address that serves them.

What cannot be read is named, and the rest is used. Ages are by this host's wall clock.
"""

from __future__ import annotations

import contextlib
import http
import http.client
import os
import re
import socket
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from inprocess.attribution import one_line
from inprocess.events import status_files
from inprocess.reports.reading import MAX_FILES, MAX_PROBLEMS
from inprocess.system import clock, private_folder, strict_json
from inprocess.system.listening import connect_address

__all__ = ["RankNow", "current", "fetch", "read"]

#: how long an address may say nothing, and how long its answer may take (seconds), and the longest answer (bytes)
TIMEOUT_S, LIMIT_S, MAX_ANSWER_BYTES = 5.0, 15.0, 64 << 20
_LIVE = re.compile(r".*\.json", re.DOTALL)


@dataclass(frozen=True)
class RankNow:
    """One live file."""

    #: its fields, as `status_files.parse` gives them
    live: dict[str, Any]
    #: when it was read (seconds since 1970)
    at: float
    #: its name; empty where it came from an address
    name: str = ""

    @property
    def age(self) -> float:
        """Seconds since it was written, as well as the clocks of the hosts agree."""
        return max(0.0, self.at - float(self.live["wall_time"]))

    @property
    def is_running(self) -> bool:
        return bool(self.live["state"] == "running")

    @property
    def is_stale(self) -> bool:
        """Nobody renews it, though its rank is said to run: its monitor is gone, its host, or the disk."""
        return self.is_running and self.age > status_files.stale_after(self.live)

    def to_json(self) -> dict[str, Any]:
        """The file's fields, and ``stale`` and ``age``."""
        return {**self.live, "stale": self.is_stale, "age": round(self.age, 3)}


def read(run_dir: str) -> tuple[list[RankNow], list[str]]:
    """All live files there, and what is wrong with them, in words.

    Raises:
        OSError: there is no such directory, or it has none.
    """
    below = os.path.join(run_dir, status_files.FOLDER)
    if not os.path.isdir(run_dir):
        raise FileNotFoundError(f"{run_dir} is no directory")
    if not os.path.isdir(below):
        raise FileNotFoundError(
            f"no folder 'live' in {run_dir}: a job writes one with Wrapper(run_dir=...), INPROCESS_RUN_DIR=... or "
            "`inprocess run --run-dir ...`"
        )
    with private_folder.look(run_dir, status_files.FOLDER) as folder:
        return _read(folder)


def _read(folder: private_folder.Folder) -> tuple[list[RankNow], list[str]]:
    found: list[RankNow] = []
    problems: list[str] = []
    for name in folder.names(_LIVE)[:MAX_FILES]:
        try:
            data = folder.read(name, status_files.MAX_FILE_BYTES + 1)
            found.append(RankNow(status_files.parse(data), clock.wall(), name))
        except FileNotFoundError:  # just removed, as nobody needs it any more
            continue
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            problems.append(f"{one_line(name[:200], 200)}: {one_line(reason[:300], 200)}")
    return found, problems[:MAX_PROBLEMS]


def fetch(address: str) -> tuple[list[RankNow], list[str]]:
    """The same from ``http://ADDRESS/status``.

    Raises:
        OSError: it does not answer, or with something else.
        ValueError: the address is none.
    """
    url = f"http://{address}/status"
    code, raw = _get(url, *connect_address(address))
    if code != http.HTTPStatus.OK:
        raise OSError(f"{url} answers with status {code}; is that the port of the job's metrics?")
    try:
        ranks = strict_json.parse(raw, MAX_ANSWER_BYTES)["ranks"]
        if not isinstance(ranks, list):
            raise TypeError
    except (TypeError, KeyError, ValueError):
        raise OSError(f"{url} does not answer with the status of a job") from None
    found: list[RankNow] = []
    problems: list[str] = []
    for number, each in enumerate(ranks[:MAX_FILES]):
        try:
            found.append(RankNow(status_files.parse(each), clock.wall()))
        except ValueError as error:
            problems.append(f"{url}: entry {number}: {one_line(str(error)[:300], 200)}")
    return found, problems[:MAX_PROBLEMS]


def _get(url: str, host: str, port: int) -> tuple[int, bytes]:
    """Status and body. Directly: the job's own endpoint is behind no proxy. Raises OSError."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    over = threading.Event()
    try:
        connection.connect()
        limit = threading.Timer(LIMIT_S, _cut, (connection.sock, over))
        limit.start()
        try:
            connection.request("GET", "/status")
            with connection.getresponse() as answer:
                found = answer.status, answer.read(MAX_ANSWER_BYTES + 1)
            if over.is_set():  # what was cut off may look like a whole answer
                raise OSError
            return found
        finally:
            limit.cancel()
            limit.join()
    except (OSError, http.client.HTTPException) as error:
        reason = one_line(str(error)[:300], 200) or type(error).__name__
        late = f"not within {LIMIT_S:g} s" if over.is_set() else reason
        raise OSError(f"{url} does not answer: {late}") from None
    finally:
        connection.close()


def _cut(connection: socket.socket, over: threading.Event) -> None:
    """Whoever sends a byte now and then never lets a wait for one end."""
    over.set()
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def current(found: Iterable[RankNow]) -> list[tuple[str, Sequence[RankNow]]]:
    """Of each job that runs (or else of the latest), one for each initial rank.

    There may be more: of earlier launches, of a process whose place another one took, and of its calls before this one.
    """
    jobs: dict[str, dict[int, RankNow]] = {}
    for rank in sorted(found, key=_relevance):
        jobs.setdefault(rank.live["job"], {})[rank.live["initial_rank"]] = rank
    chosen: list[tuple[str, Sequence[RankNow]]] = [
        (job, [ranks[number] for number in sorted(ranks)]) for job, ranks in jobs.items()
    ]
    running = [each for each in chosen if any(_relevance(rank)[0] for rank in each[1])]
    return running or sorted(chosen, key=lambda each: max(map(_relevance, each[1])))[-1:]


def _relevance(rank: RankNow) -> tuple[bool, float]:
    """A monitor whose rank has left stays for others, and renews its file beside that of the rank's next call."""
    return rank.is_running and not rank.is_stale, float(rank.live["wall_time"])
