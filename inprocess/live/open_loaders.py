"""Which loaders are open, to be closed with the call. Apart, so that who uses none imports nothing of them."""

from __future__ import annotations

import weakref
from typing import Any

from inprocess.call.part import CallEnd, Part

__all__ = ["open_loaders", "part"]

#: each `KeptLoader` that there is
open_loaders: weakref.WeakSet[Any] = weakref.WeakSet()


def _close(end: CallEnd) -> None:
    if not end.moved:
        for loader in list(open_loaders):
            loader.close()


part = Part(call_ends=_close)
