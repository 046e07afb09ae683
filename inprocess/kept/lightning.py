"""lightning decides by one attribute which rank logs and saves, and sets it only as a strategy is set up.

Until then it would be that of the iteration before. Tried with lightning-utilities 0.15, lightning 2.6.
"""

from __future__ import annotations

import sys

__all__ = ["MODULE", "enter"]

MODULE = "lightning_utilities.core.rank_zero"


def enter(rank: int) -> None:
    """What ``rank_zero_only`` compares with 0."""
    sys.modules[MODULE].rank_zero_only.rank = rank
