"""Groups of ranks that live and die together, such as the ranks of one host. Pure, but for gathering the keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ..exception import OptionError, RankDiscarded
from ..state import FrozenState
from .base import RankAssignment, RankAssignmentCtx
from .gather import gather

__all__ = ["FilterCountGroupedByKey", "KeyOrFn", "key_of"]

KeyOrFn = str | Callable[[FrozenState], object]

_KEY_LIMIT = 1000  # characters; every rank reads all keys


class FilterCountGroupedByKey(RankAssignment):
    """Ranks with the same key form a group; a group whose healthy count fails `condition` is terminated whole.

    Its healthy members leave with RankDiscarded. Ranks are not renumbered, so compose it with an assignment that
    does: ``Compose(ShiftRanks(), FilterCountGroupedByKey(lambda state: state.rank // 2, lambda count: count == 2))``::

        before   0 1 | 2 X | 4 5        after   0 1 |     | 2 3        (rank 2 is discarded)

    A function of ``state.rank`` groups by the rank of the last iteration; a host name makes a group that stays.

    Args:
        key_or_fn: this process's key, or a function of its FrozenState that returns it.
        condition: called with the number of healthy ranks of a group; False terminates it.

    Raises:
        OptionError: an argument has the wrong type.
    """

    def __init__(self, key_or_fn: KeyOrFn, condition: Callable[[int], bool]) -> None:
        check_key("key_or_fn", key_or_fn)
        if not callable(condition):
            raise OptionError(f"condition={condition!r} cannot be called: pass a function of the group's healthy count")
        self.key_or_fn = key_or_fn
        self.condition = condition

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        key = key_of("key_or_fn", self.key_or_fn, ctx)
        keys = gather_next(ctx, key)
        failed = {name: count for name, count in Counter(keys.values()).items() if not self.condition(count)}
        ctx.terminated_ranks = ctx.terminated_ranks | {rank for rank, name in keys.items() if name in failed}
        if key in failed:
            raise RankDiscarded(
                f"rank {ctx.state.rank} is discarded: its group {key!r} has {failed[key]} healthy ranks, "
                "which fails the condition of FilterCountGroupedByKey"
            )
        return ctx


def check_key(name: str, key_or_fn: object) -> None:
    """OptionError unless `key_or_fn` is a string or can be called."""
    if not isinstance(key_or_fn, str) and not callable(key_or_fn):
        raise OptionError(f"{name}={key_or_fn!r} must be a string or a function of the state that returns one")


def key_of(name: str, key_or_fn: KeyOrFn, ctx: RankAssignmentCtx) -> str:
    """This rank's key as a string; any value of a function is accepted as long as its text is the same on all ranks."""
    key = str(key_or_fn if isinstance(key_or_fn, str) else key_or_fn(ctx.state.freeze()))
    if len(key) > _KEY_LIMIT:
        raise OptionError(f"{name} gave a key of {len(key)} characters: return at most {_KEY_LIMIT}")
    return key


def gather_next(ctx: RankAssignmentCtx, value: str) -> dict[int, str]:
    """Gather `value` from all ranks that are not terminated, under a name that is new in this assignment."""
    ctx.gathers += 1
    state = ctx.state
    if state.rank in ctx.terminated_ranks:
        raise RankDiscarded(f"rank {state.rank} (initially {state.initial_rank}) is among the terminated ranks")
    name = f"rank_assignment/{ctx.gathers}"
    return gather(ctx.store, name, state.rank, state.world_size, ctx.terminated_ranks, value)
