"""What happened in a run, for people: the faults, the phases of each rank, stacks, the last lines of each log."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from inprocess.system.errors import PACKAGE

if TYPE_CHECKING:
    from .outcome import RankResult

#: of each rank's events, and of each log, the last so many are shown
EVENTS, LINES = 100, 30
#: what differs between two ranks that stand at the same place
_THREAD = re.compile(r"0x[0-9a-f]+")
#: in lines of logs that say nothing of a fault: those of monitors, of the library, and of torch
_ROUTINE = (" INFO: ", " INFO inprocess", "The hostname of the client socket cannot be retrieved")
#: the frame that calls the wrapped function
_ENTRY = f'File "{PACKAGE}testing/instruments.py"'
#: events that have a section or a line of their own
_ELSEWHERE = frozenset(("fault", "value", "exception", "raised", "leftovers", "done", "ended", "wait_for"))
#: those that tell of what is wrong with the program, and are in the failure
_ELSEWHERE |= {"grown", "group_outside", "group_kept"}
#: what a line of an event need not repeat
_SHOWN = frozenset({"event", "t", "trace", "call", "pid", "iteration", "value"})
#: so much of an error's message (characters)
MESSAGE = 160


def tell(results: Sequence[RankResult], monitors: Mapping[str, str], whole: bool = True) -> str:
    """``monitors``: name of the file -> log of a monitor process; ``whole``: stacks with what the library does."""
    begin = min((event["t"] for result in results for event in result.events), default=0.0)
    logs = {f"rank {result.rank}": result.log for result in results} | dict(monitors)
    sections = {
        "faults (times in seconds)": list(_faults(results, begin)) or ["  none has struck"],
        "phases (times in seconds)": [line for result in results for line in _phases(result, begin)],
        "stacks": list(_stacks(results, whole)),
        "last lines of the logs": [line for name, log in logs.items() for line in _end(name, log)],
    }
    return "\n".join(line for title, lines in sections.items() if lines for line in (f"--- {title}", *lines))


def _faults(results: Sequence[RankResult], begin: float) -> Iterator[str]:
    struck = [(event["t"], result.rank, event) for result in results for event in result.of("fault")]
    for t, rank, event in sorted(struck, key=lambda item: item[:2]):
        line = f" [{event['line']}]" if event.get("line") else ""
        yield f"  {t - begin:8.3f}  rank {rank}: {event['fault']} in {event['place']}{line}"


def _phases(result: RankResult, begin: float) -> Iterator[str]:
    yield f"  rank {result.rank} (initial rank; pid {result.pid}): exit code {result.exitcode}"
    shown = [event for event in result.events[-EVENTS:] if event["event"] not in _ELSEWHERE]
    for iteration, together in groupby(shown, lambda event: event["iteration"] if event["event"] == "phase" else None):
        if iteration is not None:
            phases = (f"{event['name']} {event['t'] - begin:.3f}" for event in together)
            yield f"    iteration {iteration}: {', '.join(phases)}"
        else:
            yield from (f"    {event['t'] - begin:8.3f} {event['event']}{_rest(event)}" for event in together)
    for event in result.of("exception"):
        yield f"    {event['t'] - begin:8.3f} ended with {event['type']}: {event['message']:.{MESSAGE}}"


def _rest(event: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in event.items() if key not in _SHOWN}
    return "".join(f" {key}={value!r}" for key, value in rest.items() if value is not None)


def _stacks(results: Sequence[RankResult], whole: bool) -> Iterator[str]:
    """Ranks that stand at the same places together; those that stand alone first."""
    groups: dict[str, list[RankResult]] = {}
    for result in results:
        if stacks := result.stacks if whole else _of_the_program(result.stacks):
            groups.setdefault(_THREAD.sub("", stacks), []).append(result)
    for stacks, same in sorted(groups.items(), key=lambda item: len(item[1])):
        yield f"  rank{'s' * (len(same) > 1)} {', '.join(str(result.rank) for result in same)}:"
        yield from (f"    {line}" for line in stacks.splitlines() if line)


def _of_the_program(stacks: str) -> str:
    """Without threads of the library, and without the frames that lead to the wrapped function."""
    kept = []
    for thread in re.split(r"\n\n|\n(?=Thread |Current thread )", stacks):
        title, *frames = thread.splitlines() or [""]
        ours = [PACKAGE in frame for frame in frames]
        entry = next((n for n, frame in enumerate(frames) if _ENTRY in frame and frame.endswith(" in _run")), None)
        if entry is not None:
            frames = [frame for frame, is_ours in zip(frames[:entry], ours, strict=False) if not is_ours]
        if "thread 0x" in title.lower() and (entry is not None or title[0] == "C" or not any(ours)):
            kept += [title, *frames]
    return "\n".join(kept)


def _end(name: str, log: str) -> Iterator[str]:
    lines = [line for line in log.splitlines() if not any(words in line for words in _ROUTINE)]
    if lines:
        yield f"  {name}" + (f" (the last {LINES} of {len(lines)})" if len(lines) > LINES else "") + ":"
        yield from (f"    {line}" for line in lines[-LINES:])
