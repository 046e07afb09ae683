"""The command ``inprocess``, also as ``python -m inprocess``. It imports the subcommand alone, which gets the rest of
the line."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import platform
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import TextIO

from inprocess.attribution import one_line
from inprocess.options import did_you_mean
from inprocess.system.descriptors import shortage

__all__ = ["COMMANDS", "main"]

USAGE = "usage: inprocess COMMAND ..."

#: subcommand -> (module and function that it calls, what it does)
COMMANDS = {
    "run": ("inprocess.launcher.program:program", "start the workers of a training job (torchrun's options and more)"),
    "wrap": ("inprocess.launcher.wrapped:main", "run a script as the wrapped function, as one rank of a job"),
    "doctor": ("inprocess.doctor.program:main", "what would go wrong with restarts here, before it does"),
    "status": ("inprocess.reports.status:main", "how every rank of a job is now, and where it is"),
    "report": ("inprocess.reports.program:main", "what happened in a job: its restarts, and why"),
    "timeline": ("inprocess.reports.timeline:main", "what every rank did when: a Perfetto trace, or a picture"),
    "metrics": ("inprocess.reports.endpoint:main", "serve the metrics of a job to Prometheus"),
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
        return _call(first, given[1:]) if runs else _in_one_line(first, given[1:])
    if first in ("-h", "--help"):
        print(_help())
    elif first == "--version":
        print(_versions())
    else:
        print(f"inprocess: {_unknown(first)}\n{USAGE}\n`inprocess --help` has the commands.", file=sys.stderr)
        return 2
    return 0


def _call(name: str, arguments: list[str]) -> int:
    module, _, function = COMMANDS[name][0].partition(":")
    code: int | None = getattr(importlib.import_module(module), function)(arguments)
    return code or 0


def _in_one_line(name: str, arguments: list[str]) -> int:
    """Run a subcommand that only reads. Who reads its output may stop, as `head` does, or take no more than ASCII."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None: it is closed
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _call(name, arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        _discard(sys.stdout, sys.stderr)
        return 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        print(f"inprocess {name}: {shortage(error) or one_line(str(error), 500)}", file=sys.stderr)
        with contextlib.suppress(OSError):  # what was printed before may be of use
            if sys.stdout is not None:
                sys.stdout.flush()
        _discard(sys.stdout)  # it may be full, and is flushed once more as Python ends
        return 2


def _discard(*streams: TextIO | None) -> None:
    """What is still to be written to these goes nowhere."""
    with contextlib.suppress(OSError):  # there is no descriptor left
        nothing = os.open(os.devnull, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        for stream in streams:
            if stream is not None:
                os.dup2(nothing, stream.fileno())
        os.close(nothing)


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
