"""A Python program as a shell would start it, but from the forkserver that has imported torch; or `inprocess run`.

What it prints is waited for, and so is its end, all under one deadline.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path

from inprocess.exception import OptionError

from .process import (
    become,
    check_variables,
    inherited_variables,
    left_by,
    mark,
    new_mark,
    own_variables,
    reap,
    run_script,
)
from .server import start_server

__all__ = ["Command", "Missing"]


class Missing(AssertionError):
    """Something did not come in time; the text has what had been printed."""


class Command:
    """A program that runs: ``Command(["train.py", "--steps", "20"], deadline)``.

    Args:
        arguments: a script and its arguments, or ``["inprocess", "run", ...]`` as on a command line.
        deadline: for all waits together, by ``time.monotonic()``.
        env: variables besides those of this process, None removes one; what a launcher sets (``RANK``, ``MASTER_ADDR``
            ...) is left out, and `inprocess run` makes no default directory for events (``INPROCESS_RUN_DIR=none``).
        merged: what it writes to standard error is in ``out`` as well, in its order.
        folder: where it runs; default: here.
        prepare: called in the process before anything else, with its variables; travels by pickle.

    Raises OptionError where there is no such script, or a variable is no text.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        deadline: float,
        *,
        env: Mapping[str, str | None] | None = None,
        folder: str | os.PathLike[str] = ".",
        merged: bool = False,
        prepare: Callable[[Mapping[str, str]], object] | None = None,
    ) -> None:
        where = os.path.abspath(folder)
        if not arguments or (arguments[0] != "inprocess" and not os.path.isfile(os.path.join(where, arguments[0]))):
            raise OptionError(f"Command({list(arguments)}): there is no such script in {where}")
        check_variables(f"Command({list(arguments)})", env or {})
        self._deadline = deadline
        self._folder = tempfile.mkdtemp(prefix="command-")
        self.temporary = os.path.join(self._folder, "tmp")
        os.mkdir(self.temporary)
        names = ["out"] if merged else ["out", "err"]
        paths = [os.path.join(self._folder, name) for name in names]
        for path in paths:
            os.mkfifo(path)
        # nobody writes yet: such a pipe has no end before somebody did
        self._pipes = {
            name: os.open(path, os.O_RDONLY | os.O_NONBLOCK) for name, path in zip(names, paths, strict=True)
        }
        self._seen = dict.fromkeys(self._pipes, b"")
        given: dict[str, str | None] = {**inherited_variables(), **own_variables(self._folder), **(env or {})}
        variables = {name: text for name, text in given.items() if text is not None}
        self._mark, self._closed = new_mark(), False
        start_server()
        context = multiprocessing.get_context("forkserver")
        main = (list(arguments), variables, paths, where, self._mark, prepare)
        self._process = context.Process(target=_main, args=main)
        try:
            self._process.start()
        except BaseException:  # `prepare` cannot be pickled, say
            self._give_back()
            raise
        self.pid = int(self._process.pid or 0)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    @property
    def out(self) -> str:
        return self._seen["out"].decode(errors="replace")

    @property
    def err(self) -> str:
        return self._seen.get("err", b"").decode(errors="replace")

    def expect(self, text: str, stream: str = "err") -> None:
        """Read until this text has come; of streams that are merged, on the one that there is."""
        stream = stream if stream in self._seen else "out"
        self._read(lambda: text.encode() in self._seen[stream], f"{text!r} on {stream}")

    def finish(self) -> int:
        """Wait until the program has ended and nobody has its streams any more; the exit code."""
        self._read(lambda: not self._pipes, "the end")
        self._process.join(max(0.0, self._deadline - time.monotonic()))
        code = self._process.exitcode
        if code is None:
            raise Missing(f"the program still runs\n{self.err}")
        return code

    def story(self) -> str:
        """What it has printed, for people."""
        return f"--- out\n{self.out}" + (f"\n--- err\n{self.err}" if self.err else "")

    def left(self) -> list[str]:
        """Files in its temporary directory."""
        return sorted(str(path.relative_to(self.temporary)) for path in Path(self.temporary).rglob("*"))

    def _read(self, done: Callable[[], bool], what: str) -> None:
        while not done():
            if not self._pipes:
                raise Missing(f"never came: {what}\n{self.out}\n{self.err}")
            ready = connection.wait([*self._pipes.values()], max(0.0, self._deadline - time.monotonic()))
            if not ready:
                raise Missing(f"not in time: {what}\n{self.out}\n{self.err}")
            for name, descriptor in list(self._pipes.items()):
                if descriptor in ready:
                    self._take(name, descriptor)

    def _take(self, name: str, descriptor: int) -> None:
        piece = os.read(descriptor, 65536)
        self._seen[name] += piece
        if not piece:
            os.close(self._pipes.pop(name))

    def close(self) -> None:
        """Kill what is left of it and all that it has started, and give everything back. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        failed = self._process.is_alive()
        if failed:
            self._process.kill()  # first, as it may start others
            self._process.join()
        reap(lambda: left_by((), self._mark), time.monotonic())
        if failed:
            with contextlib.suppress(Missing):
                self._read(lambda: not self._pipes, "the end")
            print(self.story())  # pytest shows it
        self._process.close()
        self._give_back()

    def _give_back(self) -> None:
        for descriptor in self._pipes.values():
            os.close(descriptor)
        shutil.rmtree(self._folder)


def _main(
    arguments: list[str],
    variables: dict[str, str],
    paths: list[str],
    folder: str,
    number: int,
    prepare: Callable[[Mapping[str, str]], object] | None,
) -> None:
    """In the program's process: a new session, these streams and this environment, then the program."""
    os.setsid()
    mark(number)
    for stream, path in zip((1, 2), (paths * 2)[:2], strict=True):
        descriptor = os.open(path, os.O_WRONLY)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    become(variables)
    os.chdir(folder)
    if prepare is not None:
        prepare(variables)
    try:
        if arguments[0] == "inprocess":
            sys.argv = arguments
            runpy.run_module("inprocess", run_name="__main__", alter_sys=True)
        else:
            run_script(arguments[0], arguments[1:])
    except SystemExit:
        raise
    except BaseException:  # told before threads are waited for
        traceback.print_exc()
        sys.exit(1)
    finally:  # as at the end of any program: before Python 3.13, multiprocessing forgets what is registered with atexit
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
