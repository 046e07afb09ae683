"""``inprocess wrap SCRIPT``: a script, or a module, as the function that is restarted, without a change in it.

Each iteration runs it from its first line, in a new ``__main__``, with the arguments and in the working directory of
the first one. Modules that it has imported stay, with what is in them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from inprocess.attribution import one_line
from inprocess.exception import OptionError
from inprocess.system import program

__all__ = ["add_option", "command", "main", "options"]

#: of an option that can be given alone
EXAMPLE = "heartbeat_timeout=60"
_WORDS = {"none": None, "true": True, "false": False}


def main(arguments: Sequence[str]) -> int:
    """Run the program that the command line names; the exit code.

    Raises:
        SystemExit: the program's own, where its code is not 0; 2 where the command line or a variable is wrong.
        BaseException: what a call of a wrapped function raises.
    """
    given = _parsed(arguments)
    from inprocess.wrap import Wrapper  # noqa: PLC0415  (imports torch: not for a wrong command line)

    try:
        wrapper = Wrapper(**options(given.option))
    except OptionError as error:
        return _refused(error)
    words = [given.script, *given.arguments]
    run = program.module(words) if given.module else program.script(words)
    function, ours = wrapper(_function(run, os.path.basename(given.script))), sys.modules["__main__"]
    try:
        function()
    except OptionError as error:
        if sys.modules["__main__"] is not ours:  # the program has begun, and has an error of its own
            raise
        return _refused(error)
    return 0


def _refused(error: OptionError) -> int:
    print(f"inprocess wrap: {one_line(str(error))}", file=sys.stderr)
    return 2


def command(script: str, arguments: Sequence[str], module: bool, given: Iterable[str]) -> list[str]:
    """What follows ``python -m``; ``given``: values of ``--option``."""
    texts = [word for text in given for word in ("--option", text)]
    return ["inprocess", "wrap", *texts, *(["-m"] if module else []), script, *arguments]


def add_option(parser: Any) -> None:
    """To a parser, or a group of one."""
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"an option of Wrapper, such as {EXAMPLE} (seconds); may be repeated",
    )


def options(given: Iterable[str]) -> dict[str, Any]:
    """Of `Wrapper`, from values of ``--option``. Raises OptionError where one has no name."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise OptionError(f"--option {text}: write NAME=VALUE, such as --option {EXAMPLE}")
        found[name] = _value(value)
    return found


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="inprocess wrap",
        usage="inprocess wrap [--option NAME=VALUE] [-m] SCRIPT [ITS OPTIONS ...]",
        description="Run a script as the wrapped function, as one rank of a job; `inprocess run --wrap` starts all.",
        allow_abbrev=False,
    )
    add_option(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="it may use inprocess.current_call()")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser.parse_args(list(arguments))


def _function(run: Callable[[], object], name: str) -> Callable[[], None]:
    """``run`` is what `program` returns."""
    argv, folder, ours = list(sys.argv), os.getcwd(), sys.modules["__main__"]

    def clear() -> None:
        """Functions and their globals hold each other: else tensors would stay until garbage is collected."""
        if (main := sys.modules["__main__"]) is not ours:
            vars(main).clear()

    def function() -> None:
        clear()  # the iteration before may have returned
        sys.argv[:] = argv
        os.chdir(folder)
        try:
            program.anew(run)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        except BaseException:
            clear()
            raise

    function.__name__ = function.__qualname__ = name
    return function
