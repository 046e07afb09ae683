"""Runs of a script for the doctor, each with faults of its own, in a copy of the working directory of its own."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inprocess.doctor.script_copy import WorkingCopies, is_below
from inprocess.doctor.script_rank import Examined
from inprocess.exception import OptionError
from inprocess.testing import At, Deadline, Fault
from inprocess.testing.job import repeats_with
from inprocess.testing.outcome import RankResult
from inprocess.testing.run import Run

__all__ = ["Seen", "Trials"]

#: a run that has not ended is ended after so long (seconds)
LIMIT = 30.0
#: steps that a run makes after its last restart before it is ended, where it has not ended by itself
STEPS = 2
#: runs of the function that fail without a fault before it is taken to fail each time
AGAIN = 3
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in ')


@dataclass(frozen=True)
class Seen:
    """What a run has shown."""

    ranks: list[RankResult] = field(repr=False)
    #: it was ended, for it had not ended in time
    is_late: bool
    #: it was ended, for it had shown what it was for, or that it fails again and again
    is_enough: bool
    is_failing: bool
    faults: Mapping[At, Fault]
    folder: str

    def events(self, name: str, **fields: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        """(rank, event) of all ranks."""
        return ((rank.rank, event) for rank in self.ranks for event in rank.of(name, **fields))

    def struck(self, at: At) -> bool:
        return any(event["at"] == repr(at) for _, event in self.events("fault"))

    @property
    def entries(self) -> int:
        """How often the function was entered, on the rank that did so most often."""
        return max((len(rank.of("enter")) for rank in self.ranks), default=0)

    @property
    def has_failed(self) -> bool:
        """The function fails in each run, or the program ended with an error on a rank that no fault has ended."""
        return self.is_failing or any(self._has_failed(rank) for rank in self.ranks)

    def _has_failed(self, rank: RankResult) -> bool:
        killed = any(at.rank == rank.rank and fault.ends and self.struck(at) for at, fault in self.faults.items())
        if killed:
            return False
        # of a run that was too late, the ranks were ended with a code; of the others they are ended only afterwards
        return bool(rank.exception) or bool(rank.exitcode and not self.is_late)

    @property
    def has_ended(self) -> bool:
        """By itself, and well."""
        return not (self.is_late or self.is_enough or self.has_failed)

    def error(self) -> tuple[str, str]:
        """With what the function or the program failed last: the error in words, and ``train.py:12 in load``."""
        inside = [(event["text"], event["line"]) for event in errors(self.ranks)]
        whole = [
            (f"{event['type']}: {event['message']}", event["line"])
            for rank in self.ranks
            if self._has_failed(rank)
            for event in rank.of("exception")
        ]
        codes = [(f"exit code {rank.exitcode}", "") for rank in self.ranks if self._has_failed(rank)]
        return next(iter([*inside[-1:], *sorted(whole, key=lambda pair: not pair[1]), *codes]), ("", ""))

    def steps(self, iteration: int | None = None) -> int:
        """The most steps that a rank made in a run of the function: the last one, or that of this iteration."""
        found = [event for _, event in self.events("pace")]
        last = max((event["iteration"] for event in found), default=0) if iteration is None else iteration
        return max((_steps(event) for event in found if event["iteration"] == last), default=0)

    def values(self) -> dict[int, Any]:
        """Rank -> what its wrapped functions returned, where that can be read here."""
        found = {}
        for rank in self.ranks:
            if rank.has_returned and isinstance(rank.value, bytes):
                try:
                    found[rank.rank] = pickle.loads(rank.value)
                except Exception:  # a class of the script's own, say
                    continue
        return found

    def places(self) -> list[str]:
        """Where the main threads were when the run was ended, from the innermost line outwards, rank by rank."""
        stacks = [rank.stacks.rpartition("Current thread")[2] for rank in self.ranks]
        return [f"{file}:{line}" for stack in stacks for file, line in _FRAME.findall(stack)]


def errors(ranks: Sequence[Any]) -> list[dict[str, Any]]:
    """Events of what the function itself has raised in runs without a fault, by time; of ranks or their results."""
    events = [event for rank in ranks for event in rank.events]
    disturbed = {event["iteration"] for event in events if event["event"] == "fault"}
    found = [event for event in events if event["event"] == "error" and event["iteration"] not in disturbed]
    return sorted(found, key=lambda event: float(event["t"]))


def _steps(pace: Mapping[str, Any]) -> int:
    return int(pace["pings"] or pace["optimized"])


class Trials:
    """Runs of one script; ``with`` removes the copies of the working directory.

    Args:
        command: the script and its arguments.
        nproc: number of ranks.

    Raises OptionError where there is no such script.
    """

    def __init__(self, command: list[str], nproc: int) -> None:
        if not command or not os.path.isfile(command[0]):
            given = command[0] if command else ""
            raise OptionError(f"doctor -- {given}: there is no such script; write `inprocess doctor -- train.py ARGS`")
        self.nproc, self._command = nproc, command
        self._stack = ExitStack()
        self._home = os.getcwd()
        self._copies, self._number = WorkingCopies(self._home), 0

    def __enter__(self) -> Trials:
        made = tempfile.mkdtemp(prefix="doctor-")
        self._stack.callback(shutil.rmtree, made, ignore_errors=True)
        self._base = os.path.realpath(made)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def run(
        self,
        faults: Mapping[At, Fault] | None = None,
        *,
        mend: frozenset[str] = frozenset(),
        by_optimizer: bool = False,
        options: Mapping[str, Any] | None = None,
        folder: str | None = None,
        respawn: int = 0,
        until_enough: bool = False,
    ) -> Seen:
        """One run.

        Args:
            faults: those of `inprocess.testing`.
            mend: see `script_mending`.
            by_optimizer: the steps of optimizers count in place of pings.
            options: of ``Wrapper``.
            folder: that of an earlier run, with its files; None: a new copy.
            respawn: so many ranks that die are replaced.
            until_enough: whether it may be ended when all faults have struck and the ranks have gone on.
        """
        faults = dict(faults or {})
        folder = self._copy() if folder is None else folder
        script = os.path.realpath(self._command[0])
        home = os.path.realpath(self._home)
        if is_below(script, home) and os.path.isfile(inside := os.path.join(folder, os.path.relpath(script, home))):
            script = inside
        repeats = repeats_with(faults)
        target = Examined(
            script,
            tuple(self._command[1:]),
            folder,
            {"max_repeats": repeats, **(options or {})},
            mend,
            by_optimizer,
        )
        run = Run(
            target,
            self.nproc,
            faults=faults,
            args={"max_repeats": repeats},
            env={"INPROCESS_DOCTOR": "1", "INPROCESS_RUN_DIR": "none"},
            respawn=respawn,
            as_program=True,
        )
        watch = _Watch(run, faults, until_enough, bool(respawn))
        try:
            ranks, is_late = list(run.wait(LIMIT, check=False, act=watch)), False
        except Deadline as late:
            ranks, is_late = list(late.ranks), True
        except _EnoughError:
            ranks, is_late = [rank.result() for rank in run.ranks], False
        finally:
            run.close()
        return Seen(ranks, is_late, watch.is_enough, watch.is_failing, faults, folder)

    @property
    def left_out(self) -> int:
        """Files of the working directory that the copies do not have."""
        return self._copies.left_out

    def shown(self, text: str) -> str:
        """A text in which files of a copy have their names in the working directory."""
        return re.sub(re.escape(self._base) + r"/\d+/", "", text).replace(self._home.rstrip(os.sep) + os.sep, "")

    def is_inside(self, path: str) -> bool:
        """Whether it is in a copy of the working directory."""
        return is_below(os.path.realpath(path), self._base)

    def _copy(self) -> str:
        self._number += 1
        target = Path(self._base, str(self._number))
        self._copies.make(target)
        return str(target)


# --- while it runs ------------------------------------------------------------------------------------------------


class _EnoughError(Exception):
    """The run has shown what it was for."""


class _Watch:
    """Called while ranks run; returns when it wants to be called again (monotonic)."""

    def __init__(self, run: Run, faults: Mapping[At, Fault], may_end: bool, replaces: bool) -> None:
        self._run, self._faults, self._may_end, self._replaces = run, faults, may_end, replaces
        self.is_enough = self.is_failing = False

    def __call__(self) -> float:
        if len({event["iteration"] for event in errors(self._run.ranks)}) >= AGAIN:
            self.is_failing = True
            raise _EnoughError
        waits = any(event["event"] == "too_few" for rank in self._run.ranks for event in rank.events)
        if (waits and not self._replaces) or (self._may_end and self._faults and self._gone_on()):
            self.is_enough = True
            raise _EnoughError
        return float("inf")

    def _gone_on(self) -> bool:
        """Whether all faults have struck, and each rank that is left has made some steps since."""
        struck = [event for rank in self._run.ranks for event in rank.events if event["event"] == "fault"]
        if len(struck) < len(self._faults):
            return False
        after = max(event["iteration"] or 0 for event in struck) + 1
        return all(
            any(e["event"] == "step" and e["iteration"] == after and e["number"] >= STEPS for e in rank.events)
            for rank in self._run.ranks
            if not rank.ended
        )
