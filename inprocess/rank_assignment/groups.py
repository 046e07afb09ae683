"""Groups of ranks that live and die together, such as the ranks of one host. Pure, except for gathering the keys."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

from inprocess.protocol.assignment import BothForms, RankAssignmentCtx, discard_terminated

from ..exception import OptionError
from ..options import seconds
from ..state import FrozenState
from .gather import gather, name_of_turn

__all__ = ["FilterCountGroupedByKey", "FilterGroupedByKey", "check_key", "key_of"]

_KEY_LIMIT = 1000  # characters; every rank reads all keys


class FilterCountGroupedByKey(BothForms):
    """Ranks with the same key form a group; a group whose healthy count fails `condition` is terminated whole.

    Its healthy members leave with RankDiscarded: the filter only counts them among the terminated ranks, and the
    assignment after it, or the Wrapper, raises that. Ranks are not renumbered, so compose it with an assignment that
    does: ``Compose(ShiftRanks(), FilterCountGroupedByKey(lambda state: state.rank // 2, lambda count: count == 2))``::

        before   0 1 | 2 X | 4 5        after   0 1 |     | 2 3        (rank 2 is discarded)

    A function of ``state.rank`` groups by the rank of the last iteration; a host name makes a group that stays.

    nvidia-resiliency-ext 0.2 calls it ``FilterGroupedByKey``. Called without a Wrapper it needs a store that all ranks
    share, in ``ctx.store`` or ``state.store``; one store serves any number of calls.

    Args:
        key_or_fn: this process's key, whose text counts, or a function of its FrozenState, or of its rank and the
            world size, that returns it.
        condition: called with the number of healthy ranks of a group; False terminates it.
        timeout: how long to wait for the other ranks, a timedelta or seconds; None: as long as the store does.

    Raises:
        OptionError: an argument has the wrong type; at the call: there is no store.
        TimeoutError: at the call: ranks that are not terminated did not come in time.
    """

    def __init__(
        self, key_or_fn: object, condition: Callable[[int], bool], timeout: timedelta | float | None = None
    ) -> None:
        check_key("key_or_fn", key_or_fn)
        if not callable(condition):
            raise OptionError(f"condition={condition!r} cannot be called: pass a function of the group's healthy count")
        self.key_or_fn = key_or_fn
        self.condition = condition
        self.timeout = None if timeout is None else timedelta(seconds=seconds("timeout", timeout))

    def _assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        if ctx.state.rank in ctx.terminated_ranks:
            return ctx
        key = key_of("key_or_fn", self.key_or_fn, ctx)
        keys = gather_next(ctx, key, self.timeout)
        failed = {name: count for name, count in Counter(keys.values()).items() if not self.condition(count)}
        ctx.terminated_ranks = ctx.terminated_ranks | {rank for rank, name in keys.items() if name in failed}
        if key in failed:
            ctx.reason = (
                f"is discarded: its group {key!r} has {failed[key]} healthy ranks, "
                "which fails the condition of FilterCountGroupedByKey"
            )
        return ctx


FilterGroupedByKey = FilterCountGroupedByKey


def check_key(name: str, key_or_fn: object) -> None:
    """OptionError where there is none."""
    if key_or_fn is None:
        raise OptionError(f"{name}=None is no key: pass the group's name, or a function of the state that returns it")


def key_of(name: str, key_or_fn: object, ctx: RankAssignmentCtx) -> str:
    """This rank's key as a string; any value is accepted as long as its text is the same on all ranks."""
    key = str(_called(key_or_fn, ctx.state.freeze()) if callable(key_or_fn) else key_or_fn)
    if len(key) > _KEY_LIMIT:
        raise OptionError(f"{name} gave a key of {len(key)} characters: return at most {_KEY_LIMIT}")
    return key


def _called(fn: Callable[..., object], state: FrozenState) -> object:
    try:
        inspect.signature(fn).bind(state)
    except TypeError:
        return fn(state.rank, state.world_size)  # the form of version 0.2
    except ValueError:  # written in C without a signature
        pass
    return fn(state)


def gather_next(ctx: RankAssignmentCtx, value: str, timeout: timedelta | None = None) -> dict[int, str]:
    """Gather `value` from all ranks that are not terminated, under a name that is new in the store."""
    state, terminated = discard_terminated(ctx).state, ctx.terminated_ranks
    ctx.gathered = name_of_turn(ctx.store, "rank_assignment", state.world_size, terminated)
    return gather(ctx.store, ctx.gathered, state.rank, state.world_size, terminated, value, timeout)
