"""The error that the main thread handles inside the function, in ``finally`` or ``except``, while it does other things.

Where that is a wait for the others, the error has not left the function, and nobody knows of it. The interruption that
ends the wait then takes its place. So it is noted before the abort, which raises errors of its own, begins. It counts

* where it is sure to leave the function, see ``escaping``: it would have interrupted the others itself, a moment later;
* where nobody made progress and this rank waited for the others while it handled the error. It is not sure there that
  the error would have left, and the most likely reason why the others did not come.

A handler that works, or that waits for ranks that are late, is left alone.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from inprocess.exception import asks_for_end
from inprocess.interrupt.escaping import Code, Kinds, answers_false
from inprocess.interrupt.frames import CALL_CODE

__all__ = ["InFlight", "look"]

#: so many errors behind each other, and frames around each other, are looked at
MOST_ERRORS, MOST_FRAMES = 20, 100
#: that of what `contextlib.contextmanager` makes: it answers false where its generator raises the same error again
_GENERATORS_EXIT = contextlib._GeneratorContextManager.__exit__.__code__
#: what ends a generator or a loop, as Python's own C code expects
_ENDINGS = (GeneratorExit, StopIteration, StopAsyncIteration)
#: what Python calls and may drop the error of: an attribute that is missing, the end of a sequence, a destructor
_DROPPED = frozenset(
    {"__del__", "__getattr__", "__getattribute__", "__getitem__", "__next__", "__anext__", "__len__", "__length_hint__"}
)
#: and what a program calls for that; a property may have any name
_ASKING = frozenset({"hasattr", "getattr"})


@dataclass(frozen=True)
class _Place:
    """A frame of the function, without the frame."""

    code: CodeType
    offset: int
    #: global ones of the function, and built-in ones
    names: Mapping[str, Any]
    #: what this frame handles, the latest first
    handled: tuple[BaseException, ...]


@dataclass(frozen=True)
class InFlight:
    """What was handled at one moment. Refers to errors, and so to frames: keep it no longer than needed."""

    #: the frames of the function, innermost first
    places: tuple[_Place, ...]

    def failure(self) -> BaseException | None:
        """The latest error that may be a failure."""
        errors = (error for place in self.places for error in place.handled)
        return next((each for each in errors if not isinstance(each, _ENDINGS) and not asks_for_end(each)), None)

    def leaving(self) -> BaseException | None:
        """The latest error that is sure to leave the function. Takes some milliseconds."""
        for number, place in enumerate(self.places):
            for later, error in enumerate(place.handled):
                if not isinstance(error, _ENDINGS) and self._leaves(number, later, type(error)):
                    return error
        return None

    def _leaves(self, number: int, later: int, kind: type[BaseException]) -> bool:
        """Whether the error of this type that is handled there leaves that place, and all places around it."""
        kinds: Kinds = {kind}
        handles, is_false = True, number > 0 and answers_false(self.places[number - 1].code)
        for place in self.places[number:]:
            if place.code is _GENERATORS_EXIT:  # what the generator raises again does not count as swallowed
                handles, is_false, later = True, True, 0
                continue
            code = Code(place.code, place.names)
            found = [
                code.after_handling(place.offset, each, is_false, later)
                if handles
                else code.after_raising(place.offset, each)
                for each in kinds
            ]
            if not all(found) or place.code.co_name in _DROPPED:
                return False
            if issubclass(kind, AttributeError) and not _ASKING.isdisjoint(place.code.co_names):
                return False
            kinds, handles, is_false = Kinds().union(*found), False, False
        return True


def look() -> InFlight | None:
    """Of the main thread, now. None: it handles no error of the function, as nearly always. From another thread."""
    main = threading.main_thread().ident or 0
    handled = sys._current_exceptions().get(main)
    error = handled[1] if isinstance(handled, tuple) else handled  # a tuple before Python 3.12
    if error is None:
        return None
    heads = _heads(error)
    places: list[_Place] = []
    frame = sys._current_frames().get(main)
    while frame is not None and frame.f_code is not CALL_CODE:
        if len(places) == MOST_FRAMES:
            return None
        names = ChainMap(frame.f_globals, frame.f_builtins)
        places.append(_Place(frame.f_code, frame.f_lasti, names, tuple(heads.get(frame, ()))))
        frame = frame.f_back
    is_inside = frame is not None and any(place.handled for place in places)
    return InFlight(tuple(places)) if is_inside else None


def _heads(error: BaseException) -> dict[FrameType, list[BaseException]]:
    """This error and those that were being handled when it was raised, by the frame that handles them; latest first."""
    found: dict[FrameType, list[BaseException]] = {}
    each: BaseException | None = error
    for _ in range(MOST_ERRORS):
        if each is None:
            break
        if each.__traceback__ is not None:
            found.setdefault(each.__traceback__.tb_frame, []).append(each)
        each = each.__context__
    return found
