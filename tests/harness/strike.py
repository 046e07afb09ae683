"""Ctrl-C at a chosen moment, of those at which CPython may run the handler of a signal."""

from __future__ import annotations

import dis
import sys
from collections.abc import Collection
from types import CodeType, FrameType
from typing import Any

#: behind these CPython (3.11) looks whether a signal has come
LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")


class Strike:
    """For `sys.settrace`: raises KeyboardInterrupt at moment ``number`` (from 0) in frames of ``codes`` (None: any)."""

    def __init__(self, number: int, codes: Collection[CodeType] | None = None) -> None:
        self._left, self._codes = number, codes
        #: frame -> its latest instruction
        self._latest: dict[FrameType, str] = {}
        #: function and line; empty: that moment did not come
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if self._codes is not None and frame.f_code not in self._codes:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            latest = self._latest.get(frame, "")
            self._latest[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if latest.startswith(LOOKS) and self.is_due(frame):
                sys.settrace(None)
                self._latest.clear()  # it would keep the frames that are left now
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        else:  # it returns, or a call has raised: then CPython does not look
            self._latest.pop(frame, None)
        return self

    def is_due(self, frame: FrameType) -> bool:
        """Whether it comes at this moment."""
        self._left -= 1
        return self._left < 0
