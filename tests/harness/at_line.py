"""An interruption at a chosen line, in the thread that asks for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

from inprocess.exception import RankShouldRestart
from inprocess.interrupt import frames

__all__ = ["AtLine"]


class AtLine:
    """Raises at the n-th line that is run within these files, or these functions in there, where an interruption
    could."""

    def __init__(self, line: int, files: Collection[str], *functions: Callable[..., Any]) -> None:
        self._left, self._files = line, files
        self._codes = [each.__code__ for each in functions]  # type: ignore[attr-defined]
        self.is_done = False

    def __enter__(self) -> AtLine:
        sys.settrace(self._call)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        sys.settrace(None)
        return kind is RankShouldRestart

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        if id(frame.f_code) in frames.WHOLE:
            return None
        is_ours = frame.f_code.co_filename in self._files
        return self._line if is_ours and frame.f_code in (self._codes or (frame.f_code,)) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        above: FrameType | None = frame
        while above is not None:
            if id(above.f_code) in frames.WHOLE:
                return self._line
            above = above.f_back
        self._left -= event == "line"
        if not self._left and not self.is_done:
            self.is_done = True
            raise RankShouldRestart("here")
        return self._line
