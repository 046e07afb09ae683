"""The stacks of all ranks, now: asks through the run directory, waits for the answers, and prints them.

The monitor of each rank answers, see ``events/status_file``. What was written for the request is removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from inprocess.attribution import one_line, ranges
from inprocess.events import status_files
from inprocess.reports.evidence import of_the_function
from inprocess.reports.live_reading import RankNow
from inprocess.system import clock, procfs
from inprocess.system.private_folder import Folder, look

__all__ = ["Answer", "ask", "lines"]

#: how often it looks for answers (seconds)
LOOK_S = 0.1
#: of a stack, the innermost so many lines are shown, and so many groups of other threads than the main ones
LINES, OTHERS = 12, 20
#: what monitors write for a request
_ANSWER = re.compile(r"monitor-.*\.json(\.\d+)?")
#: as `status_files.parse_dump` gives it
Answer = dict[str, Any]
#: where any thread of Python begins
_START = f"{os.sep}threading.py:"
#: what the letters of proc(5) mean
STATES = {"R": "runs", "S": "sleeps", "D": "waits for a device", "T": "stopped", "t": "traced", "Z": "dead"}


def ask(run_dir: str, ranks: Sequence[RankNow], timeout: float) -> dict[int, Answer]:
    """The answer of each of these ranks, by initial rank; of one that does not answer, why, and what /proc says.

    Raises:
        OSError: nothing can be written there.
    """
    name = secrets.token_hex(8)
    waiting = {rank.name: rank for rank in ranks if rank.is_running and not rank.is_stale}
    found: dict[int, Answer] = {}
    with look(run_dir, status_files.FOLDER) as folder, folder.below(status_files.REQUESTS) as requests:
        os.close(requests.create(name))
        try:
            until = clock.monotonic() + timeout
            while waiting:
                for rank, answer in _answers(folder, status_files.DUMP + name, waiting):
                    found[rank.live["initial_rank"]] = answer
                if (left := until - clock.monotonic()) <= 0:
                    break
                threading.Event().wait(min(LOOK_S, left) if waiting else 0)
        finally:
            requests.remove(name)
            with contextlib.suppress(OSError):  # an answer that comes just now; a monitor removes it one day
                folder.remove_below(status_files.DUMP + name, _ANSWER)
    for rank in ranks:
        if rank.live["initial_rank"] not in found:
            found[rank.live["initial_rank"]] = _silent(rank, timeout)
    return {number: {**found[number], "initial_rank": number} for number in sorted(found)}


def _answers(live: Folder, name: str, waiting: dict[str, RankNow]) -> Iterator[tuple[RankNow, Answer]]:
    """New ones; their ranks are waited for no more."""
    try:
        folder = live.below(name, makes=False)
    except FileNotFoundError:  # nobody has answered yet
        return
    with folder:
        for file in folder.names(_ANSWER):
            if (rank := waiting.pop(file, None)) is not None:
                yield rank, _read(folder, file)


def _read(folder: Folder, name: str) -> Answer:
    try:
        return status_files.parse_dump(folder.read(name, status_files.MAX_DUMP_BYTES + 1))
    except (OSError, ValueError) as error:
        return {"why": f"its answer cannot be read: {error}", "threads": [], "process": {}}


def _silent(rank: RankNow, timeout: float) -> Answer:
    live = rank.live
    if not rank.is_running:
        why = f"the rank has {'left the call' if live['state'] == 'left' else 'ended'}"
    elif rank.is_stale:
        why = f"its monitor has written nothing for {rank.age:.0f} s"
    else:
        why = f"no answer within {timeout:g} s"
    is_here = rank.is_running and live["host"] == socket.gethostname()
    process = procfs.state_of(live["pid"]) if is_here else {}
    return {"host": live["host"], "pid": live["pid"], "why": why, "threads": [], "process": process}


def lines(answers: Mapping[int, Answer]) -> Iterator[str]:
    """For a terminal: who did not answer, then the stacks. Ranks with the same one are together, lone ones first."""
    for number, answer in answers.items():
        if why := answer["why"]:
            process = _in_words(answer["process"])
            outside = "; the stacks below are from outside" if answer["threads"] else ""
            who = f"{answer.get('host', '?')}, process {answer.get('pid', '?')}"
            yield one_line(f"rank {number} ({who}): {why}{process}{outside}"[:2000], 400)
    groups = _groups(answers, lambda thread: bool(thread["main"]))
    for (_, frames), ranks in groups:
        waiting = all(answers[number].get("waits") is True for number in ranks)
        yield from _group(ranks, ", which wait for others" if waiting and len(ranks) > 1 else "", frames)
    others = _groups(answers, lambda thread: not thread["main"])
    for (name, frames), ranks in others[:OTHERS]:
        yield from _group(ranks, f", thread {one_line(name[:200], 60)}", frames)
    if len(others) > OTHERS:
        yield from ("", f"{len(others) - OTHERS} more stacks of other threads; --json has them all")


_Key = tuple[str, tuple[str, ...]]


def _groups(answers: Mapping[int, Answer], wanted: Callable[[dict[str, Any]], bool]) -> list[tuple[_Key, list[int]]]:
    groups: dict[_Key, list[int]] = {}
    for number, answer in answers.items():
        for thread in answer["threads"]:
            if wanted(thread) and not _is_librarys(thread):
                frames = tuple(of_the_function(thread["frames"]))
                groups.setdefault(("" if thread["main"] else thread["name"], frames), []).append(number)
    return sorted(groups.items(), key=lambda item: len(item[1]))


def _is_librarys(thread: Mapping[str, Any]) -> bool:
    """From outside nobody knows the names of threads, by which the rank itself leaves these out."""
    return not thread["main"] and all(
        f"{os.sep}inprocess{os.sep}" in frame or _START in frame for frame in thread["frames"]
    )


def _group(ranks: Sequence[int], what: str, frames: Sequence[str]) -> Iterator[str]:
    yield from ("", f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}{what}, innermost line first:")
    for frame in frames[:LINES]:
        yield f"  {one_line(frame[-400:], 200)}"
    if len(frames) > LINES:
        yield f"  ... and {len(frames) - LINES} lines further out"


def _in_words(process: Mapping[str, Any]) -> str:
    """What /proc says."""
    state = str(process.get("state", ""))
    told = [f"{state} ({STATES[state]})" if state in STATES else state, *_named(process, "wchan", "syscall")]
    told = [word for word in told if word]
    return f"; /proc says: {', '.join(told)}" if told else ""


def _named(process: Mapping[str, Any], *names: str) -> Iterator[str]:
    for name in names:
        if (value := str(process.get(name, "")).partition(" ")[0][:80]) not in ("", "0"):
            yield f"{name} {value}"
