"""A user's error in words: nothing that its own code does, and no disk that hangs, gets in the way of a restart.

The signal that interrupts a function raises only inside that function (see ``interrupt``), so what an error's own
``__str__`` raises here is never an interruption.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import threading
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import NamedTuple

__all__ = ["PACKAGE", "ErrorSnapshot", "first_line", "in_words", "inside", "is_ctrl_c", "shown", "where"]

#: this package's own folder, whose lines are no place of the user's
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
#: longest message (characters), most frames of one error (half of them from each end) and errors behind each other that
#: a traceback shows
TEXT, FRAMES, BEHIND = 10_000, 60, 8
#: how long the log waits for the source lines of a traceback (seconds)
READING = 0.2
_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"


def in_words(error: BaseException) -> str:
    """``Type: message``, also where its ``__str__`` raises whatever there is to raise."""
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException as failure:
        if is_ctrl_c(failure):
            raise
        text = f"(its __str__ raises {type(failure).__name__})"
    return f"{name}: {text}" if text else name


def shown(thing: object) -> str:
    """Its ``repr``, also where that raises."""
    try:
        return repr(thing)
    except BaseException as failure:
        if is_ctrl_c(failure):
            raise
        return f"an object of type {type(thing).__name__} (its __repr__ raises {type(failure).__name__})"


def is_ctrl_c(failure: BaseException) -> bool:
    """Whether it came from outside, as Ctrl-C may at any moment: in the main thread only."""
    return isinstance(failure, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def where(error: BaseException) -> str:
    """The innermost line of the traceback outside this library; without reading any source, the others wait."""
    place, step = "", error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            place = f"{code.co_filename}:{step.tb_lineno} in {code.co_name}"
        step = step.tb_next
    return place


class _Line(NamedTuple):
    file: str
    number: int
    function: str


class _One(NamedTuple):
    """One error of a chain, and how the one before it led to it."""

    link: str
    lines: tuple[_Line, ...]
    words: str


class ErrorSnapshot:
    """What is shown of an error, without the error itself: a traceback refers to frames, and they to tensors."""

    def __init__(self, error: BaseException) -> None:
        self.words, self.where = in_words(error), where(error)
        self._chain = _chain(error)

    def places(self) -> list[str]:
        """Of the last error, outermost first, such as ``train.py:41 in step``."""
        return [f"{line.file}:{line.number} in {line.function}" for line in self._chain[-1].lines[-FRAMES:]]

    def format(self) -> Iterable[str]:
        """As Python prints it; without source lines where they cannot be read at once. Not for a thread in a hurry."""
        _read_lines({line.file for one in self._chain for line in one.lines})
        return map(_show, self._chain)


def _chain(error: BaseException) -> tuple[_One, ...]:
    """Outermost last, as Python prints it."""
    found: list[_One] = []
    each: BaseException | None = error
    seen: set[int] = set()
    while each is not None and id(each) not in seen and len(found) < BEHIND:
        seen.add(id(each))
        context = None if each.__suppress_context__ else each.__context__
        before = each.__cause__ or context
        link = "" if before is None else _CAUSE if before is each.__cause__ else _CONTEXT
        found.append(_One(link, _lines(each.__traceback__), _all_words(each)))
        each = before
    # the last has nothing before it that is shown
    found[-1] = found[-1]._replace(link="")
    return tuple(reversed(found))


def inside(step: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames through which this library called the function."""
    while step is not None and step.tb_next is not None and step.tb_frame.f_code.co_filename.startswith(PACKAGE):
        step = step.tb_next
    return step


def _lines(trace: TracebackType | None) -> tuple[_Line, ...]:
    step, found = inside(trace), []
    while step is not None:
        code = step.tb_frame.f_code
        found.append(_Line(code.co_filename, step.tb_lineno, code.co_name))
        step = step.tb_next
    return tuple(found)


def _all_words(error: BaseException) -> str:
    """Its message, its notes, and what is in it where it is a group."""
    words = [in_words(error)[:TEXT]]
    notes, parts = (_attribute(error, name) for name in ("__notes__", "exceptions"))
    words += [note[:TEXT] for note in notes[:BEHIND] if isinstance(note, str)]
    inside = [part for part in parts if isinstance(part, BaseException)]
    words += [f"  + {in_words(part)[:TEXT]} [{where(part)}]" for part in inside[:BEHIND]]
    return "\n".join(words)


def _attribute(error: BaseException, name: str) -> Sequence[object]:
    try:
        found = getattr(error, name, ())
    except BaseException as failure:  # a property of the user's
        if is_ctrl_c(failure):
            raise
        return ()
    return found if type(found) in (list, tuple) else ()


def _show(one: _One) -> str:
    text = f"{one.link}Traceback (most recent call last):\n" if one.lines else one.link
    half = FRAMES // 2
    for number, line in enumerate(one.lines):
        if half <= number < len(one.lines) - half:
            text += f"  ... {len(one.lines) - FRAMES} more frames ...\n" if number == half else ""
            continue
        source = _source(line)
        text += f'  File "{line.file}", line {line.number}, in {line.function}\n'
        text += f"    {source}\n" if source else ""
    return f"{text}{one.words}\n"


def _source(line: _Line) -> str:
    """Only what is in memory already."""
    entry = linecache.cache.get(line.file, ())
    lines: list[str] = entry[2] if len(entry) == 4 else []
    return lines[line.number - 1].strip() if 0 < line.number <= len(lines) else ""


#: the thread that reads source files; a disk that does not answer keeps it, and is asked no more
_reader: threading.Thread | None = None


def _read_lines(files: set[str]) -> None:
    """Have these files in memory, if that does not take long."""
    global _reader  # one per process
    if (_reader is not None and _reader.is_alive()) or not files - linecache.cache.keys():
        return
    _reader = threading.Thread(target=_read_all, args=(files,), name="inprocess-source", daemon=True)
    with contextlib.suppress(RuntimeError):  # there is no thread left
        _reader.start()
        _reader.join(READING)


def _read_all(files: set[str]) -> None:
    for file in files:
        linecache.getlines(file)


def first_line(error: BaseException) -> str:
    """What an error says, or what it is where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]
