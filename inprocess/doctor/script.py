"""``inprocess doctor -- script args``: runs the user's script with faults, and finds what in it is not restartable.

First undisturbed, then with exceptions on several ranks, a hang and a death, and with a death in the middle of each
file that it writes. A defect that hides others is gone around by `script_mending`.
"""

from __future__ import annotations

import glob
import os
import random
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from inprocess.doctor import script_growth as growth
from inprocess.doctor.findings import Finding
from inprocess.doctor.script_checks import SCRIPT_CHECKS, found
from inprocess.doctor.script_mending import KEPT, OUTSIDE
from inprocess.doctor.script_places import ERRORS, INTERRUPTIONS, handler_around, place_in, places_in
from inprocess.doctor.script_runs import Seen, Trials
from inprocess.exception import OptionError
from inprocess.testing import At, Fault, Hang, HostLoss, Kill, Raise
from inprocess.testing.outcome import RankResult
from inprocess.testing.result import differences

__all__ = ["SCRIPT_CHECKS", "examine"]

#: a number that makes the same faults again
SEED = "INPROCESS_DOCTOR_SEED"
#: exceptions in the second run; the function is entered once more
EXCEPTIONS = 3
#: lines that write files, of which each gets a run of its own
FILES = 3
#: so much of an error is told (characters)
TEXT = 160
#: a hang is tried where `soft_timeout` can be as short (seconds)
SOFT = 8.0


def examine(command: list[str], nproc: int, progress: Callable[[str], None]) -> Iterable[Finding]:
    """Run a script again and again, with faults, and tell what is not restartable in it.

    Args:
        command: the script and its arguments.
        nproc: number of ranks, on this host.
        progress: called with a line before each run.

    Yields findings as they are made, each once. Raises OptionError where there is no such script, or the variable
    ``INPROCESS_DOCTOR_SEED`` is no number.
    """
    seed = os.environ.get(SEED, "") or str(secrets.randbelow(1 << 32))
    if not (seed.isascii() and seed.isdecimal()):
        raise OptionError(f"{SEED}={seed!r} is not a number from 0 on; leave it out for a new one each time")
    return _once(Trials(command, nproc), int(seed), progress)


def _once(trials: Trials, seed: int, progress: Callable[[str], None]) -> Iterator[Finding]:
    told = set()
    with trials:
        progress(f"script: its runs use a copy of {os.getcwd()}; faults are drawn with {SEED}={seed}")
        examination = Examination(trials, random.Random(seed), progress)
        for finding in examination.findings():
            if (finding.check, finding.where or finding.what) not in told:
                told.add((finding.check, finding.where or finding.what))
                yield finding
        if told and examination.has_drawn:
            yield found("schedule", f"{SEED}={seed}, {trials.nproc} ranks", level="note")


@dataclass
class Facts:
    """What the undisturbed run has shown."""

    #: steps of the function, and by what they are counted
    steps: int
    by_optimizer: bool
    #: longest step (seconds); None where the run was ended
    longest: float | None
    #: events of files that the function writes, by the line that does; without those that it appends to
    files: Mapping[str, list[dict[str, Any]]]

    @property
    def begins_to_save(self) -> int:
        """The first step in which a file is written, 0 where none is."""
        return min((max(event["step"], 0) for events in self.files.values() for event in events), default=0)


class Examination:
    """Of one script."""

    def __init__(self, trials: Trials, chance: random.Random, progress: Callable[[str], None]) -> None:
        self._trials, self._chance, self._progress = trials, chance, progress
        self._mend: frozenset[str] = frozenset()
        self._first: Seen
        self._facts: Facts
        #: whether training goes on from a later step after a restart; None where that is not known
        self._resumes: bool | None = None
        self._restarts = True
        #: whether there were faults by chance
        self.has_drawn = False

    def findings(self) -> Iterator[Finding]:
        """All of them; ends early where nothing more can be seen."""
        yield from self._undisturbed()
        if not (self._restarts and self._first.entries):
            return
        self._facts = _facts(self._first)
        yield from self._habits()
        if not self._facts.steps:
            self._progress("script: no steps are seen, so no faults can be set in them")
            return
        yield from self._exceptions()
        if self._restarts:
            yield from self._hang_and_death()
        yield from self._cut_files()

    def _run(self, what: str, faults: Mapping[At, Fault] | None = None, **more: Any) -> Seen:
        told = "; ".join(f"{at}: {fault}" for at, fault in (faults or {}).items())
        self._progress(f"script: {what}{f' ({told})' if told else ''}")
        facts = getattr(self, "_facts", None)
        return self._trials.run(
            faults,
            mend=self._mend,
            by_optimizer=facts is not None and facts.by_optimizer,
            until_enough=bool(faults) and self._first.is_late,
            **more,
        )

    def _error(self, seen: Seen) -> tuple[str, str]:
        """What a run failed with, with its place; and the place alone."""
        text, line = (self._trials.shown(" ".join(each.split())) for each in seen.error())
        return f"{text[:TEXT]}{f', in {line}' if line else ''}", place_in(line)

    def _place(self, seen: Seen) -> str:
        """Where in the program it was when it was ended."""
        return next((self._trials.shown(place) for place in seen.places() if self._is_users(place)), "")

    # --- without faults -------------------------------------------------------------------------------------------

    def _undisturbed(self) -> Iterator[Finding]:
        self._first = seen = self._run("without faults")
        if self._trials.left_out:
            what = f"the working directory has {self._trials.left_out} files more than are copied for a run"
            yield found("files", what, level="warning")
        off = [event for _, event in seen.events("wrapper") if not event["enabled"]]
        if off and not list(seen.events("call")):
            yield found("wrapper", "the wrapper has enabled=False", place_in(self._trials.shown(off[0]["where"])))
        refused = [rank for rank in seen.ranks if "is initialized already" in rank.message]
        early = [event for rank in refused for event in _early(rank)]
        if early:
            for line in dict.fromkeys(self._trials.shown(event["where"]) for event in early):
                yield found(
                    "group-outside", f"a process group is made outside the wrapped function, in {line}", place_in(line)
                )
            self._mend |= {OUTSIDE}
            self._first = seen = self._run("again, with these process groups made inside")
        if seen.has_failed:
            text, place = self._error(seen)
            yield found("ends", f"without a fault it ends with {text}", place, "warning" if early else "problem")
            self._restarts = False
        elif not list(seen.events("call")) and not off and not seen.is_late:
            yield found("wrapper", "no function that inprocess.Wrapper has wrapped is called")
        elif seen.is_late and not list(seen.events("step")):
            place = self._place(seen)
            yield found("ends", f"it makes no step and does not end; it is at {place or 'an unknown place'}", place)
            self._restarts = False

    def _habits(self) -> Iterator[Finding]:
        """What the undisturbed run shows of how the function works."""
        first, facts = self._first, self._facts
        if first.is_late:
            what = f"it has not ended in time; faults strike in its first {facts.steps} steps"
            yield found("ends", what, level="note")
        if facts.by_optimizer or not facts.steps:
            yield found("pings", "the function never calls ping()", level="warning")
        if self._trials.nproc > 1 and not list(first.events("group_inside")):
            yield found("no-group", "the function makes no process group", level="warning")
        limits = [event["soft_timeout"] for _, event in first.events("options") if event["soft_timeout"]]
        if limits and facts.longest is not None and facts.longest > min(limits) / 2:
            what = f"the longest step took {facts.longest:.2g} s, soft_timeout is {min(limits):.3g} s"
            yield found("timeouts", what, level="problem" if facts.longest > min(limits) else "warning")
        for _, event in first.events("file"):
            if not self._trials.is_inside(event["path"]) and not _is_temporary(event["path"]):
                what = f"it writes {event['path']}, outside of its working directory"
                yield found("files", what, place_in(self._trials.shown(event["line"])), "warning")

    # --- exceptions -----------------------------------------------------------------------------------------------

    def _exceptions(self) -> Iterator[Finding]:
        faults = self._draw([Raise()] * EXCEPTIONS)
        seen = self._run("exceptions", faults)
        kept = [text for _, event in seen.events("group_kept") for text in event["where"]]
        if seen.has_failed and kept:
            text, _ = self._error(seen)
            for each in dict.fromkeys(map(self._trials.shown, kept)):
                places = places_in(each) or [""]
                what = f"after a restart it ends with {text}; a group of the run before is in {each}"
                yield from (found("group-kept", what, place) for place in places)
            self._mend |= {KEPT}
            seen = self._run("exceptions again, without the process groups that were kept", faults)
        yield from self._swallowed(seen)
        yield from growth.findings(seen, self._trials.shown)
        if seen.has_failed:
            text, place = self._error(seen)
            yield found("restart", f"after a restart it ends with {text}", place)
            self._restarts = False
        elif seen.is_late:
            place = self._place(seen)
            yield found("restart", f"after an exception it does not go on; it is at {place}", place)
        elif seen.has_ended and self._first.has_ended and seen.entries > 1 and self._first.entries == 1:
            self._resumes = seen.steps() < self._facts.steps
            yield from self._lost(seen)

    def _lost(self, seen: Seen) -> Iterator[Finding]:
        """Steps and results."""
        facts = self._facts
        if not self._resumes and facts.steps > 1:
            what = f"after a restart the function makes all of its {facts.steps} steps again"
            yield found("state", what, level="warning")
        values, wanted = seen.values(), self._first.values()
        if not _differing(values, wanted):
            return
        again = self._run("without faults, to see whether its result is always the same").values()
        if not _differing(again, wanted):
            what = f"after restarts {_differing(values, wanted)[0]}"
            yield found("result", what, level="warning")

    def _swallowed(self, seen: Seen) -> Iterator[Finding]:
        shown = self._trials.shown
        for _, event in seen.events("swallowed"):
            if not event["dropped"]:
                places = places_in(event["where"])
                handlers = [handler_around(place, INTERRUPTIONS) for place in places if self._is_users(place)]
                where = next(filter(None, handlers), "") or next(filter(self._is_users, places), "")
                raised = place_in(shown(event["where"]))
                yield found(
                    "swallows", f"the interruption of a restart, raised at {raised}, is swallowed", shown(where)
                )
        entered = {event["iteration"] for _, event in seen.events("enter")}
        for rank, event in seen.events("fault"):
            if event["iteration"] is not None and event["iteration"] + 1 not in entered and not seen.has_failed:
                line = event["line"]
                handler = handler_around(os.path.join(seen.folder, place_in(line)), ERRORS)
                where = shown(handler or place_in(line))
                what = f"an exception on rank {rank} at {shown(line)} is caught, and no restart follows"
                yield found("swallows", what, where)

    def _is_users(self, place: str) -> bool:
        return bool(self._trials.shown(place) != place)

    # --- a hang, and a death --------------------------------------------------------------------------------------

    def _hang_and_death(self) -> Iterator[Finding]:
        longest = self._facts.longest
        soft = SOFT if longest is None else max(3.0, 3 * longest + 1)
        hangs, dies = soft <= SOFT, self._trials.nproc > 1
        if not hangs:
            self._progress(f"script: no hang is tried: a step takes {longest:.2g} s")
        faults = self._draw([*([Hang()] if hangs else []), *([Kill()] if dies else [])])
        options = {"soft_timeout": soft, "hard_timeout": soft + 2} if hangs else {}
        if not faults:
            return
        seen = self._run("a hang, and a death", faults, options=options)
        if list(seen.events("too_few")) or "RetryController ends the job" in seen.error()[0]:
            seen = self._run("again, with a process that replaces the dead one", faults, options=options, respawn=1)
        hang = next((at for at, fault in faults.items() if isinstance(fault, Hang)), None)
        death = next((at for at, fault in faults.items() if isinstance(fault, Kill)), None)
        if hang is not None and seen.struck(hang) and not seen.ranks[hang.rank].of("enter", iteration=1):
            line = self._trials.shown(seen.ranks[hang.rank].of("fault")[0]["line"])
            yield found("hang", f"a rank that hangs does not come back to the function, at {line}", place_in(line))
        elif death is not None and seen.struck(death) and not seen.has_ended and not seen.is_enough:
            left = f"with {self._trials.nproc - 1} of {self._trials.nproc} ranks"
            text, place = self._error(seen) if seen.has_failed else ("", self._place(seen))
            how = f"ends with {text}" if text else f"does not go on; it is at {place}"
            yield found("fewer-ranks", f"{left} it {how}", place)

    # --- files ----------------------------------------------------------------------------------------------------

    def _cut_files(self) -> Iterator[Finding]:
        for line, events in list(self._facts.files.items())[:FILES]:
            event = _overwrites(events)
            path = event["path"]
            after = None if self._facts.by_optimizer or event["step"] < 0 else event["step"] + 1
            at = At(event["rank"], file=glob.escape(os.path.basename(path)), step=after)
            everybody = tuple(range(self._trials.nproc))
            cut = self._run("all ranks are killed in the middle of a file", {at: HostLoss(ranks=everybody)})
            if not cut.struck(at):
                continue
            seen = self._run("and started again", folder=cut.folder)
            name = os.path.basename(path)
            where = place_in(self._trials.shown(line))
            said = f"killed while {self._trials.shown(line)} writes {name}, a new start"
            if seen.has_failed:
                yield found("checkpoint", f"{said} ends with {self._error(seen)[0]}", where)
            elif self._resumes and seen.has_ended and event["again"] and seen.steps() >= self._facts.steps:
                yield found("checkpoint", f"{said} begins with the first step again", where)
        if len(self._facts.files) > FILES:
            rest = ", ".join(place_in(self._trials.shown(line)) for line in list(self._facts.files)[FILES:])
            self._progress(f"script: these lines write files, too, and were not tried: {rest}")

    def _draw(self, kinds: list[Fault]) -> dict[At, Fault]:
        """One fault in each of the first iterations, each on another rank where there are as many."""
        facts, chance, faults = self._facts, self._chance, {}
        self.has_drawn = True
        lowest = min(max(1, facts.begins_to_save + 1), max(facts.steps - len(kinds) - 1, 0))
        step = chance.randint(lowest, max(lowest, facts.steps // 2))
        ranks = chance.sample(range(self._trials.nproc), self._trials.nproc)
        for iteration, kind in enumerate(kinds):
            faults[At(ranks[iteration % len(ranks)], step=step, iteration=iteration)] = kind
            left = facts.steps - step - len(kinds)
            step = chance.randint(1, max(1, left // 4)) if facts.steps > len(kinds) else 0
        return faults


# --- what a run shows -------------------------------------------------------------------------------------------------


def _facts(seen: Seen) -> Facts:
    steps = [event for _, event in seen.events("step", iteration=0)]
    paces = [event["longest"] for _, event in seen.events("pace")]
    files: dict[str, list[dict[str, Any]]] = {}
    for rank, event in seen.events("file", iteration=0):
        if event["inside"] and "a" not in event["mode"]:
            files.setdefault(event["line"], []).append({**event, "rank": rank})
    counted = max((event["number"] + 1 for event in steps), default=0)
    return Facts(
        steps=max(counted, seen.steps(0)),
        by_optimizer=bool(steps) and not any(event["by"] == "ping" for event in steps),
        longest=None if seen.is_late else max(paces, default=None),
        files=files,
    )


def _overwrites(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The first write of a file that was written before, on the rank that began; else the last one that was told."""
    mine = [event for event in events if event["rank"] == events[0]["rank"]]
    second = [e for n, e in enumerate(mine) if any(before["path"] == e["path"] for before in mine[:n])]
    return {**(second or mine[-1:])[0], "again": len(mine) > 1}


def _early(rank: RankResult) -> list[dict[str, Any]]:
    """Groups that were made before the first entry of a function."""
    entered = min((event["t"] for event in rank.of("enter")), default=float("inf"))
    return [event for event in rank.of("group_outside") if event["t"] < entered]


def _is_temporary(path: str) -> bool:
    return path.startswith(("/dev/", "/proc/")) or f"{os.sep}ranks-" in path


def _differing(values: Mapping[int, Any], wanted: Mapping[int, Any]) -> list[str]:
    both = sorted(values.keys() & wanted.keys())
    return [line for rank in both for line in differences(values[rank], wanted[rank], f"the value of rank {rank}")]
