"""Runs a program in this process as Python itself would: arguments, path, ``__main__``, traceback."""

from __future__ import annotations

import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Callable
from types import TracebackType

__all__ = ["anew", "first_on_path", "module", "run", "script", "set_first"]


def module(arguments: list[str]) -> Callable[[], object]:
    """What ``python -m`` with these arguments runs, for `run`; sets ``sys.argv`` and ``sys.path[0]``."""
    sys.argv[:] = ["-m", *arguments[1:]]
    set_first(os.getcwd())
    return lambda: _as_main(arguments[0], True)


def script(arguments: list[str]) -> Callable[[], object]:
    """What ``python`` with these arguments runs, for `run`; sets ``sys.argv`` and ``sys.path[0]``.

    Raises SystemExit where the script cannot be read.
    """
    sys.argv[:] = arguments
    path = os.path.abspath(arguments[0])
    set_first(first_on_path(path))
    if pkgutil.get_importer(path) is not None:
        return lambda: _as_main("__main__", False)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    return lambda: _as_script(path, source)


def first_on_path(script: str) -> str:
    """``sys.path[0]`` of a script: its folder; or itself, where it is a folder or an archive with a __main__.py."""
    path = os.path.abspath(script)
    return path if pkgutil.get_importer(path) is not None else os.path.dirname(os.path.realpath(path))


def set_first(folder: str) -> None:
    """In place of what Python has put there: the current folder with ``-m`` and ``-c``, else that of a command."""
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        sys.path[0] = folder


def run(program: Callable[[], object]) -> None:
    """Run what `module` or `script` answered, in a new ``__main__``.

    What it raises reaches Python, which knows what to do with it; only the traceback begins in the program.
    """
    try:
        anew(program)
    except BaseException:
        hook = sys.excepthook

        def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> object:
            part = _inside(trace)
            return hook(kind, error.with_traceback(part), part)

        sys.excepthook = show
        raise


def anew(program: Callable[[], object]) -> None:
    """The same, more than once in a process; what it raises, the caller handles."""
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = sys.modules["builtins"]
    program()


def _as_script(path: str, source: bytes) -> None:
    main = sys.modules["__main__"]
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main)["__cached__"] = None
    exec(compile(source, path, "exec", dont_inherit=True), vars(main))


def _as_main(name: str, alter_argv: bool) -> None:
    """What Python itself calls for ``-m``, and for folders and archives: the module's name, its errors, ``argv[0]``."""
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


#: all frames above the program's first one end with one of these
_OURS = (_as_script.__code__, _as_main.__code__)


def _inside(trace: TracebackType | None) -> TracebackType | None:
    each = trace
    while each is not None and each.tb_frame.f_code not in _OURS:
        each = each.tb_next
    return each.tb_next if each is not None else trace
