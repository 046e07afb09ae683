"""The command ``inprocess``: looks up the subcommand and hands it the rest of the line. Imports nothing before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

__all__ = ["COMMANDS", "main"]


def _run(arguments: list[str]) -> None:
    from inprocess import run  # noqa: PLC0415  (imports torch)

    run.main(arguments)


#: subcommand -> (what it calls, what it does)
COMMANDS: dict[str, tuple[Callable[[list[str]], None], str]] = {
    "run": (_run, "start the workers of a training job (torchrun's options and more)"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that the first argument names; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in COMMANDS:
        COMMANDS[given[0]][0](given[1:])
        return 0
    asked = given[:1] in (["-h"], ["--help"])
    print(_usage(given[:1]), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _usage(unknown: list[str]) -> str:
    lines = [f"inprocess: unknown command {unknown[0]!r}", ""] if unknown and unknown[0][:1] != "-" else []
    lines += ["usage: inprocess COMMAND ...", "", "commands:"]
    lines += [f"  {name:<8}{about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join([*lines, "", "`inprocess COMMAND --help` has the options of one."])


if __name__ == "__main__":
    sys.exit(main())
