"""``inprocess doctor [-- SCRIPT ARGS]``: looks at this machine, and tries restarts."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import NoReturn

from inprocess.attribution import one_line
from inprocess.doctor import checks, report, trial
from inprocess.doctor.findings import Settings
from inprocess.doctor.script_checks import SCRIPT_CHECKS
from inprocess.exception import OptionError
from inprocess.options import Options, did_you_mean
from inprocess.system.environment import derived
from inprocess.system.inherited import children_are_waited_for
from inprocess.system.noted_signals import NotedSignals
from inprocess.system.progress import Progress

__all__ = ["main"]

#: ranks where nothing else is said, and at most
NPROC, MAX_NPROC = 4, 1024
#: options of `Wrapper` that ``--option`` takes: those whose value is a duration
DURATIONS = tuple(name for name, value in vars(Options()).items() if isinstance(value, float))
NO_JOB = "a job cannot run with these versions"
CLEAR = "\r\x1b[K"
FLAGS = ("--nproc", "--json", "--option", "--step", "--help")


class _Parser(argparse.ArgumentParser):
    """Says what an unknown option was meant to be."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` has the options.\n")


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit code: 0, 1 where a problem was found, 2 where the command line is wrong or the doctor failed."""
    given, command = _parsed(list(arguments))
    settings = Settings(given.nproc, _environment(), options=dict(given.option), step=given.step)
    tell = _teller(sys.stderr.isatty())
    try:
        with _ended_like_ctrl_c() as ended_by, children_are_waited_for():
            found = checks.examine(settings, tell)
            restarts = _restarts(found, given.nproc, tell)
            failed = _try_script(found, command, given.nproc, tell) if command else ""
    except (OSError, OptionError) as error:
        tell("")
        print(f"inprocess doctor: {one_line(str(error), 500)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        tell("")
        return 128 + next(iter(ended_by), signal.SIGINT)
    tell("")
    if given.json:
        print(json.dumps(report.to_json(found, restarts), indent=2))
    else:
        print("\n".join(report.to_text(_head(given.nproc), found, restarts)))
    if failed:
        print(f"inprocess doctor: {failed}", file=sys.stderr)
    return 2 if failed else report.status(found)


@contextlib.contextmanager
def _ended_like_ctrl_c() -> Iterator[list[int]]:
    """A signal with which a scheduler or `timeout` ends the doctor leaves no more behind than Ctrl-C does; which."""
    came: list[int] = []

    def end(signum: int) -> None:
        came.append(signum)
        if len(came) == 1:  # the next ones come while it tidies up
            raise KeyboardInterrupt

    signals = NotedSignals((signal.SIGTERM, signal.SIGHUP), end)
    signals.install()
    try:
        yield came
    finally:
        signals.restore()


def _environment() -> dict[str, str]:
    """The variables as a wrapped function would find them."""
    try:
        return {**os.environ, **derived(os.environ)}
    except OptionError:  # one of the checks says so
        return dict(os.environ)


def _restarts(found: checks.Examined, nproc: int, tell: Callable[[str], None]) -> list[trial.Measured]:
    """Try the four faults, and add what came of it; nothing is tried where torch itself is missing or broken."""
    ids = {each.name: f"restart.{each.name}" for each in trial.TRIALS}
    if _cannot_run(found):
        found.skipped |= dict.fromkeys(ids.values(), NO_JOB)
        return []
    alone = [ids[each.name] for each in trial.TRIALS if trial.needs_more(each, nproc)]
    found.skipped |= dict.fromkeys(alone, "with one rank, nobody is left to go on")
    restarts = list(trial.run(nproc, tell))
    found.ran += [ids[each.trial.name] for each in restarts]
    found.findings += [finding for each in restarts for finding in each.findings]
    return restarts


def _try_script(found: checks.Examined, command: list[str], nproc: int, tell: Callable[[str], None]) -> str:
    """Add what is not restartable in the user's script. Returns why it could not be tried to the end, or nothing."""
    ids = [check.id for check in SCRIPT_CHECKS]
    if _cannot_run(found):
        found.skipped |= dict.fromkeys(ids, NO_JOB)
        return ""
    from inprocess.doctor.script import examine  # noqa: PLC0415  # imports torch

    try:
        for finding in examine(command, nproc, tell):
            found.findings.append(finding)
    except (OSError, OptionError) as error:  # what was seen until now is told all the same
        failed = f"{command[0]} was not tried to the end: {one_line(str(error), 500)}"
        found.skipped |= dict.fromkeys(ids, failed)
        return failed
    found.ran += ids
    return ""


def _cannot_run(found: checks.Examined) -> bool:
    """Whether torch itself is missing or broken."""
    return any(finding.check.startswith("versions.") and finding.level == "problem" for finding in found.findings)


def _parsed(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    own, command = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        own, command = arguments[:at], arguments[at + 1 :]
    parser = _Parser(
        prog="inprocess doctor",
        usage="inprocess doctor [--nproc N] [--json] [--option NAME=SECONDS] [--step SECONDS] [-- SCRIPT ARGS]",
        description="What would go wrong with restarts here, before it does.",
        epilog="Behind -- a training script and its arguments: the same with its own function, and what is not "
        "restartable in it. docs/doctor.md lists all checks.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nproc", type=_count, default=NPROC, metavar="N", help=f"ranks on this host (default {NPROC})"
    )
    parser.add_argument("--json", action="store_true", help="for programs; docs/doctor.md has the fields")
    parser.add_argument(
        "--option",
        type=_duration,
        action="append",
        default=[],
        metavar="NAME=SECONDS",
        help="a timeout that you pass to Wrapper, to check it; may be repeated",
    )
    parser.add_argument("--step", type=_seconds, metavar="SECONDS", help="the longest step of your training")
    given, rest = parser.parse_known_args(own)
    if rest:
        parser.error(_unknown(rest[0]))
    if "--" in arguments and not command:
        parser.error("-- has no script behind it: inprocess doctor -- train.py ARGS")
    if command and not os.path.isfile(command[0]):
        parser.error(f"there is no script {command[0]!r} here: pass the path of a Python file behind --")
    return given, command


def _unknown(word: str) -> str:
    if word.startswith("-"):
        return f"unknown option {word!r}{did_you_mean(word.partition('=')[0], FLAGS)}"
    return f"unexpected {word!r}: to try a script of yours, inprocess doctor -- {word}"


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MAX_NPROC):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks from 1 to {MAX_NPROC}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _duration(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    if name not in DURATIONS:
        hint = did_you_mean(name, DURATIONS) or f"; there are {', '.join(DURATIONS)}"
        raise argparse.ArgumentTypeError(f"{name!r} is no duration of Wrapper{hint}")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} has no value: --option {name}=60")
    return name, _seconds(value)


def _teller(is_screen: bool) -> Callable[[str], None]:
    """Shows what is being done: in one line of a terminal that is overwritten, elsewhere in a line now and then."""
    progress = Progress()

    def tell(text: str) -> None:
        if is_screen:
            columns = shutil.get_terminal_size().columns
            print(CLEAR + text[: columns - 1], end="", file=sys.stderr, flush=True)
        elif text and progress.due():
            print(text, file=sys.stderr, flush=True)

    return tell


def _head(nproc: int) -> str:
    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "no torch"
    ranks = f"{nproc} rank{'s' * (nproc > 1)}"
    return f"inprocess doctor: {ranks} on {platform.node()}, Python {platform.python_version()}, {torch}"
