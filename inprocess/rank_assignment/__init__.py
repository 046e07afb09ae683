"""Who gets which rank in the next iteration. Pure, apart from reading the other ranks' keys over the iteration's store.

Every rank runs the same assignment on the same inputs, so the results must depend on nothing else. An iteration can be
interrupted while ranks are being assigned; it is then assigned again from the **same** numbering, with more ranks
terminated. An assignment must therefore not remember "what I did last time" as if it had come true.
"""

from inprocess.protocol.assignment import RankAssignment, RankAssignmentCtx, RankFilter, ShiftRanks

from ..exception import RankDiscarded
from .gather import gather
from .groups import FilterCountGroupedByKey, FilterGroupedByKey
from .order import ActivateAllRanks, ActiveWorldSizeDivisibleBy, FillGaps, MaxActiveWorldSize
from .tree import Layer, LayerFlag, Tree

__all__ = [
    "ActivateAllRanks",
    "ActiveWorldSizeDivisibleBy",
    "FillGaps",
    "FilterCountGroupedByKey",
    "FilterGroupedByKey",
    "Layer",
    "LayerFlag",
    "MaxActiveWorldSize",
    "RankAssignment",
    "RankAssignmentCtx",
    "RankDiscarded",
    "RankFilter",
    "ShiftRanks",
    "Tree",
    "gather",
]
