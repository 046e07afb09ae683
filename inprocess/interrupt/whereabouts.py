"""Where the main thread is when nobody makes progress: its place in the user's code, and whether it waits for others.

Told from its frames, without reading any source: nothing here may block. Python does not see inside C code, so where
the innermost line is the user's own, or autograd's, what that line calls and whether the kernel has put the thread to
sleep decide. A rank that waits in a way that is not known here is named too: the log says where it is, not that it is
at fault.

Likewise told from frames: whether an error came out of a collective, and which exit was raised in answer to one.
"""

from __future__ import annotations

import contextlib
import dis
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from inprocess.exception import ENDS, Preempted, asks_for_end
from inprocess.interrupt.judging import chain
from inprocess.protocol.messages import Spot
from inprocess.system.errors import PACKAGE
from inprocess.system.interpreter import running_frames

__all__ = ["counts_as", "has_left_collective", "in_collective", "is_users", "look", "stacks"]

#: so much of a file's path, from its end, and of a function's name is told (characters)
MAX_FILE_LENGTH, MAX_NAME_LENGTH = 120, 60
#: so many innermost frames of so many threads are told
MAX_FRAMES, MAX_THREADS = 40, 40
_STDLIB = os.path.dirname(os.__file__) + os.sep
_SITE = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
#: further out than these lines of the library the main thread runs the caller's code
_BOUNDARIES = frozenset(
    {(os.path.join(PACKAGE, "interrupt", "frames.py"), "call"), (os.path.join(PACKAGE, "call", "loop.py"), "_step")}
)
#: below torch: whoever is here waits for other ranks ...
_COLLECTIVE = (f"distributed{os.sep}", os.path.join("nn", "parallel", "distributed.py"))
#: ... unless it is here: files, processes
_NO_COLLECTIVE = (os.path.join("distributed", "checkpoint"), os.path.join("distributed", "elastic"))
_BACKWARD = os.path.join("autograd", "graph.py")
#: where torch calls its operators, what that may call first, and those of them that wait for other ranks: compiled code
#: calls nothing else
_OPERATORS, _DISPATCH = "_ops.py", f"_library{os.sep}"
_CALLS = frozenset({"__call__", "redispatch"})
_FUNCTIONAL = ("c10d::", "c10d_functional::", "_c10d_functional::", "_c10d_functional_autograd::")
#: below torch: whoever is here waits for the GPU, or for what a backward pass does on other threads
_DEVICE = (f"cuda{os.sep}", _BACKWARD)
#: what a user's line calls that waits in C++: for a collective's work or a store, ...
_WAITING = frozenset({"wait"})
#: ... or for the GPU
_SYNCHRONIZING = frozenset({"synchronize", "item", "tolist", "cpu", "numpy"})
#: an exit that may be an answer to another rank's failure; the others are deliberate
_DELIBERATE = (Preempted, *(end for end in ENDS if end is not SystemExit))
#: torch's names of errors that are this rank's own wherever they are raised: its memory, its GPU
_OWN = frozenset({"OutOfMemoryError", "AcceleratorError"})
#: what a check of arguments raises, and what a backward pass says of the program, wherever they are raised
_CHECKS = (TypeError, AssertionError)
_OF_BACKWARD = (
    "returned nan values",
    "does not require grad",
    "modified by an inplace operation",
    "through the graph a second time",
)


def look() -> Spot | None:
    """Where the main thread is now; None where it has ended."""
    main = threading.main_thread()
    frames = [frame for thread, frame in running_frames() if thread == main.ident]
    if not frames:
        return None
    inside = list(_inside(frames))
    mine = next((frame for frame in inside if is_users(frame)), None)
    if mine is None:  # the library waits for the others: the function has returned, or has not begun
        return Spot("", waits=True)
    code = mine.f_code
    where = f"{code.co_filename[-MAX_FILE_LENGTH:]}:{mine.f_lineno} in {code.co_name[:MAX_NAME_LENGTH]}"
    return Spot(where, _waits(inside, _is_asleep(main.native_id)))


def in_collective(frame: FrameType) -> bool:
    """Whether this is code of torch's that waits for other ranks; a backward pass may do so on other threads."""
    name = _below_torch(frame.f_code.co_filename)
    return _is_collective(frame, name) or name.startswith(_BACKWARD)


def _is_collective(frame: FrameType, name: str) -> bool:
    """Whether this frame, in a file of torch's of that name, is inside a collective."""
    if name == _OPERATORS:
        return _operator(frame).startswith(_FUNCTIONAL)
    return name.startswith(_COLLECTIVE) and not name.startswith(_NO_COLLECTIVE)


def _operator(frame: FrameType) -> str:
    """The operator of torch's that is called there, such as ``_c10d_functional::all_reduce``; empty where it is none.

    From its own attributes: asked for others, an operator looks for an overload of that name.
    """
    if frame.f_code.co_name not in _CALLS:
        return ""
    try:
        attributes = vars(frame.f_locals[frame.f_code.co_varnames[0]])
    except (KeyError, TypeError):  # the frame is gone meanwhile, or this is a version that has it elsewhere
        return ""
    return str(next((attributes[each] for each in ("_qualified_op_name", "_name") if each in attributes), ""))


def has_left_collective() -> bool:
    """Whether the main thread handles an error that came out of a collective: its frames do not show that any more."""
    handled = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = handled[1] if isinstance(handled, tuple) else handled  # a tuple before Python 3.12
    if error is None:
        return False
    error = counts_as(error, None)
    return any(in_collective(frame) for frame, _ in traceback.walk_tb(error.__traceback__)) or _left_collective(error)


def counts_as(error: BaseException, outer: BaseException | None, aborted: bool = False) -> BaseException:
    """What this is to the job: of an exit in answer to an error out of a collective, that error; else itself.

    With ``except Exception: sys.exit(1)`` a rank would leave the job because another one has failed. ``outer``: what
    was handled before the function was called. ``aborted``: an abort has begun, which takes groups away from under the
    function; then torch's checks fail, too.
    """
    if not asks_for_end(error, (SystemExit,)) or getattr(error, "code", 1) in (None, 0):  # it says that all is well
        return error
    for each in chain(error, outer):
        if asks_for_end(each, _DELIBERATE):
            break
        if _left_collective(each, aborted):
            return each
    return error


def _left_collective(error: BaseException, aborted: bool = False) -> bool:
    """Whether it was raised in a collective or a wait for a store, and not in the user's code that those call."""
    if not isinstance(error, Exception) or type(error).__name__ in _OWN:
        return False
    if isinstance(error, _CHECKS) and not aborted:
        return False
    if any(words in str(error) for words in _OF_BACKWARD):
        return False
    if isinstance(error, getattr(sys.modules.get("torch.distributed"), "DistError", ())):
        return True
    steps = list(traceback.walk_tb(error.__traceback__))
    for frame, line in reversed(steps):
        if not _is_beside(frame.f_code.co_filename):
            # C++ raises in the user's own line, and says no more than that it is a RuntimeError
            waits = frame is steps[-1][0] and isinstance(error, RuntimeError)
            return in_collective(frame) or (waits and not _WAITING.isdisjoint(_names_on_line(frame.f_code, line)))
    return False


def stacks() -> list[dict[str, Any]]:
    """What all threads are at: ``name``, ``main``, and ``frames`` such as ``train.py:41 in step``, innermost first.

    Without the threads of this library.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found: dict[int, list[str]] = {}
    for thread, frame in running_frames():
        lines = found.setdefault(thread, [])
        if len(lines) < MAX_FRAMES and len(found) <= MAX_THREADS:
            code = frame.f_code
            lines.append(f"{code.co_filename[-MAX_FILE_LENGTH:]}:{frame.f_lineno} in {code.co_name[:MAX_NAME_LENGTH]}")
    main = threading.main_thread().ident
    return [
        {"name": names.get(thread, str(thread)), "main": thread == main, "frames": lines}
        for thread, lines in found.items()
        if lines and not names.get(thread, "").startswith("inprocess-")
    ]


def _inside(frames: list[FrameType]) -> Iterator[FrameType]:
    """The frames of what the library called, from the innermost outwards."""
    for frame in frames:
        if (frame.f_code.co_filename, frame.f_code.co_name) in _BOUNDARIES:
            return
        yield frame


def is_users(frame: FrameType) -> bool:
    """Whether this is code of the program: not of Python, torch or this library."""
    file = frame.f_code.co_filename
    return not (file.startswith(PACKAGE) or _is_pythons(file) or _below_torch(file))


def _is_pythons(file: str) -> bool:
    """Whether it belongs to Python itself."""
    return file.startswith("<frozen") or (file.startswith(_STDLIB) and not any(site in file for site in _SITE))


def _below_torch(file: str) -> str:
    """The file's name below torch's own directory; empty where it is another one's."""
    torch = sys.modules.get("torch")
    folder = os.path.dirname(getattr(torch, "__file__", None) or "")
    return file[len(folder) + 1 :] if folder and file.startswith(folder + os.sep) else ""


def _waits(inside: list[FrameType], asleep: bool) -> bool:
    """Whether the innermost frames wait for other ranks."""
    frame = next(frame for frame in inside if not _is_beside(frame.f_code.co_filename))
    name = _below_torch(frame.f_code.co_filename)
    if name == _OPERATORS or name.startswith(_COLLECTIVE):
        return _is_collective(frame, name)
    if name.startswith(_DEVICE):
        return asleep or _uses_gpu()
    if frame is not inside[0] or not is_users(frame):
        return False
    called = _names_on_line(frame.f_code, frame.f_lineno)
    return (asleep and not _WAITING.isdisjoint(called)) or (_uses_gpu() and not _SYNCHRONIZING.isdisjoint(called))


def _is_beside(file: str) -> bool:
    """Whether what it was called by tells more."""
    return _is_pythons(file) or _below_torch(file).startswith(_DISPATCH)


def _uses_gpu() -> bool:
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())


def _names_on_line(code: CodeType, line: int) -> set[str]:
    """The names that this line mentions."""
    spans = [range(begin, end) for begin, end, number in code.co_lines() if number == line]
    names = set(code.co_names)
    return {
        str(each.argval)
        for each in dis.get_instructions(code)
        if each.argval.__class__ is str and each.argval in names and any(each.offset in span for span in spans)
    }


def _is_asleep(thread: int | None) -> bool:
    """Whether the kernel has put this thread to sleep; True where it does not tell."""
    with (
        contextlib.suppress(OSError),
        open(f"/proc/self/task/{thread}/stat", encoding="ascii", errors="replace") as file,
    ):
        return file.read().rpartition(")")[2].split()[0] != "R"
    return True
