"""The command ``inprocess``: looks up the subcommand and hands it the rest of the line. Imports nothing before."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

from inprocess.options import did_you_mean
from inprocess.system.descriptors import shortage

__all__ = ["COMMANDS", "main"]

USAGE = "usage: inprocess COMMAND ..."


def _run(arguments: list[str]) -> int:
    from inprocess.launcher.program import program  # noqa: PLC0415  (imports torch)

    program(arguments)
    return 0


def _wrap(arguments: list[str]) -> int:
    from inprocess.launcher.wrapped import main as wrap  # noqa: PLC0415  (the others do not need it)

    return wrap(arguments)


def _report(arguments: list[str]) -> int:
    from inprocess.reports.program import main as report  # noqa: PLC0415  (`run` does not need it)

    return report(arguments)


def _timeline(arguments: list[str]) -> int:
    from inprocess.reports.timeline import main as timeline  # noqa: PLC0415  (`run` does not need it)

    return timeline(arguments)


def _status(arguments: list[str]) -> int:
    from inprocess.reports.status import main as status  # noqa: PLC0415  (`run` does not need it)

    return status(arguments)


def _metrics(arguments: list[str]) -> int:
    from inprocess.reports.endpoint import main as metrics  # noqa: PLC0415  (`run` does not need it)

    return metrics(arguments)


def _doctor(arguments: list[str]) -> int:
    # by its name: the doctor stands on `testing`, which runs this command itself
    return int(importlib.import_module("inprocess.doctor.program").main(arguments))


#: subcommand -> (what it calls, what it does)
COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "run": (_run, "start the workers of a training job (torchrun's options and more)"),
    "wrap": (_wrap, "run a script as the wrapped function, as one rank of a job"),
    "doctor": (_doctor, "what would go wrong with restarts here, before it does"),
    "status": (_status, "how every rank of a job is now, and where it is"),
    "report": (_report, "what happened in a job: its restarts, and why"),
    "timeline": (_timeline, "what every rank did when: a Perfetto trace, or a picture"),
    "metrics": (_metrics, "serve the metrics of a job to Prometheus"),
}
#: option -> what it does
OPTIONS = {"-h": "show this", "--help": "show this", "--version": "the versions of inprocess, torch and Python"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that the first argument names; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        print(_help(), file=sys.stderr)
        return 2
    first = given[0]
    if first in COMMANDS:
        runs = first in ("run", "wrap")  # programs of the user, which may end as they like
        return COMMANDS[first][0](given[1:]) if runs else _in_one_line(first, given[1:])
    if first in ("-h", "--help"):
        print(_help())
    elif first == "--version":
        print(_versions())
    else:
        print(f"inprocess: {_unknown(first)}\n{USAGE}\n`inprocess --help` has the commands.", file=sys.stderr)
        return 2
    return 0


def _in_one_line(name: str, arguments: list[str]) -> int:
    """Run a subcommand that only reads. Who reads its output may stop, as `head` does."""
    try:
        code = COMMANDS[name][0](arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        nothing = os.open(os.devnull, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nothing, stream.fileno())
        return 0
    except OSError as error:
        if not (text := shortage(error)):
            raise
        print(f"inprocess {name}: {text}", file=sys.stderr)
        return 2


def _unknown(name: str) -> str:
    if name.startswith("-"):
        return f"unknown option {name!r}{did_you_mean(name, OPTIONS)}"
    if name.endswith(".py") or os.path.isfile(name):
        return f"unknown command {name!r}: to run a script, `inprocess run {name}`"
    return f"unknown command {name!r}{did_you_mean(name, [*COMMANDS, *OPTIONS])}"


def _help() -> str:
    lines = [USAGE, "", "commands:"]
    lines += [f"  {name:<11}{about}" for name, (_, about) in COMMANDS.items()]
    lines += ["", "options:", *(f"  {name:<11}{about}" for name, about in OPTIONS.items() if name != "-h")]
    lines += [
        "",
        "`inprocess COMMAND --help` has the options of one. `python -m inprocess.compat SCRIPT` runs a script",
    ]
    lines += ["for nvidia-resiliency-ext; `python -m inprocess.wait_daemon` waits for the monitors of a batch job."]
    return "\n".join(lines)


def _versions() -> str:
    """Without importing torch, which takes a second, and may be what does not work."""
    from inprocess import __version__  # noqa: PLC0415  (not where a subcommand runs)

    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "no torch"
    return f"inprocess {__version__} ({torch}, Python {platform.python_version()})"


if __name__ == "__main__":
    sys.exit(main())
