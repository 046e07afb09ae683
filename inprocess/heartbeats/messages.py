"""What workers and their launcher tell each other."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["ACTIONS", "Action", "LONGEST_LINE", "LONGEST_REASON"]

#: what a launcher can be asked for
Action = Literal["continue", "exclude_this_node", "shutdown_workload"]

ACTIONS: tuple[str, ...] = get_args(Action)

#: longest line between a worker and its launcher (bytes), and longest reason (characters)
LONGEST_LINE, LONGEST_REASON = 1 << 16, 1000
