"""The command line of ``python -m inprocess.compat``: the names are put in place, then the program runs."""

from __future__ import annotations

import sys

from inprocess.system import program

__all__ = ["main"]

USAGE = """\
usage: python -m inprocess.compat SCRIPT [ARGUMENT ...]
       python -m inprocess.compat -m MODULE [ARGUMENT ...]

Runs the program with `nvidia_resiliency_ext.inprocess` meaning `inprocess`."""


def main() -> None:
    """Runs what the command line names.

    Raises:
        SystemExit: the program's own; 0 after ``--help``; 2 where nothing is named, or the script cannot be read.
        BaseException: whatever the program raises.
    """
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        raise SystemExit(0)
    module = arguments[:1] == ["-m"]
    arguments = arguments[module:]
    if not arguments or (arguments[0].startswith("-") and not module):
        what = f"unknown option {arguments[0]}" if arguments else f"no {'module' if module else 'script'} is named"
        print(f"{USAGE}\n\npython -m inprocess.compat: {what}", file=sys.stderr)
        raise SystemExit(2)
    import inprocess.compat.nvrx  # noqa: F401, PLC0415  (what it is for; not where this file is only imported)

    program.run(program.module(arguments) if module else program.script(arguments))
