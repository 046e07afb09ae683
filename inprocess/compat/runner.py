"""Runs a program as Python itself would, after the names are in place: arguments, path, ``__main__``, traceback."""

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

    run = _module(arguments) if module else _script(arguments)
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = sys.modules["builtins"]
    _run(run)


def _module(arguments: list[str]) -> Callable[[], object]:
    sys.argv[:] = ["-m", *arguments[1:]]
    return lambda: _as_main(arguments[0], True)


def _script(arguments: list[str]) -> Callable[[], object]:
    sys.argv[:] = arguments
    path = os.path.abspath(arguments[0])
    if pkgutil.get_importer(path) is not None:  # a folder, or an archive, with a __main__.py
        _first_on_path(path)
        return lambda: _as_main("__main__", False)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    _first_on_path(os.path.dirname(os.path.realpath(path)))
    return lambda: _as_script(path, source)


def _first_on_path(folder: str) -> None:
    """In place of the current folder, which ``-m`` has put there."""
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        sys.path[0] = folder


def _as_script(path: str, source: bytes) -> None:
    module = sys.modules["__main__"]
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    vars(module)["__cached__"] = None
    exec(compile(source, path, "exec", dont_inherit=True), vars(module))


def _as_main(name: str, alter_argv: bool) -> None:
    """What Python itself calls for ``-m``, and for folders and archives: the module's name, its errors, ``argv[0]``."""
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _run(program: Callable[[], object]) -> None:
    """Let what it raises reach Python, which knows what to do with it; only the traceback begins in the program."""
    try:
        program()
    except BaseException:
        hook = sys.excepthook

        def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> object:
            part = _inside(trace)
            return hook(kind, error.with_traceback(part), part)

        sys.excepthook = show
        raise


#: all frames above the program's first one end with one of these
_OURS = (_as_script.__code__, _as_main.__code__)


def _inside(trace: TracebackType | None) -> TracebackType | None:
    each = trace
    while each is not None and each.tb_frame.f_code not in _OURS:
        each = each.tb_next
    return each.tb_next if each is not None else trace
