"""What workers and their launcher tell each other."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["ACTIONS", "Action", "MAX_LINE_BYTES", "MAX_REASON_LENGTH"]

#: what a launcher can be asked for
Action = Literal["continue", "exclude_this_node", "shutdown_workload"]

ACTIONS: tuple[str, ...] = get_args(Action)

#: longest line between a worker and its launcher (bytes), and longest reason (characters)
MAX_LINE_BYTES, MAX_REASON_LENGTH = 1 << 16, 1000
