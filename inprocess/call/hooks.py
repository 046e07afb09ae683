"""Adapts user callables to one form, once, at construction: hooks as in nvidia-resiliency-ext 0.4 and as in 0.2.

===================  =======================================  =====================================================
option               0.4 and later                            0.2
===================  =======================================  =====================================================
all other hooks      ``hook(state) -> state``                 ``hook(state, exception) -> state``
``rank_assignment``  ``assign(ctx) -> ctx``                   ``assign(state, terminated) -> (state, terminated)``
``rank_filter``      (part of the rank assignment)            ``filter(state) -> state``
===================  =======================================  =====================================================

The number of required positional parameters decides; where a second one is optional, its name does. A hook that returns
None leaves its input as it is. Parts of a `Compose` are adapted one by one. The library's own assignments take both
forms, and hide their parameters (`protocol.assignment.BothForms`): here they have that of 0.4.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from inprocess.compose import Compose
from inprocess.exception import OptionError
from inprocess.protocol.assignment import (
    BothForms,
    RankAssignment,
    RankAssignmentCtx,
    RankFilter,
    ShiftRanks,
    activate_all,
    discard_terminated,
    keep_limits,
)
from inprocess.rank_filter import RankFilter as OlderRankFilter
from inprocess.rank_filter import first_active
from inprocess.state import FrozenState, Mode, State
from inprocess.system.errors import shown

__all__ = ["AdaptedAssignment", "adapt", "adapt_rank_assignment"]

Hook = Callable[[FrozenState], FrozenState]
Assignment = Callable[[RankAssignmentCtx], RankAssignmentCtx]


# names by which an optional second parameter is known in version 0.2, whose own is `train_ex`
_EXCEPTION_NAMES = re.compile(r"(^|_)(ex|exc|exception|err|error)$", re.IGNORECASE)
_TERMINATED_NAMES = re.compile("terminated", re.IGNORECASE)


def adapt(name: str, fn: Callable[..., Any] | None) -> Hook | None:
    """The hook `fn`, given for the option `name`, as a function from FrozenState to FrozenState; None stays None.

    Raises:
        OptionError: `fn` cannot be called, is a class instead of an instance, or its signature fits neither form.

    The adapted hook raises TypeError, naming the option, when `fn` returns something that is no state. Where a part of
    a `Compose` raises, the others run no more, but those of an abort do.
    """
    if fn is None:
        return None
    if isinstance(fn, Compose):
        parts = [_adapt_hook(name, part) for part in fn.parts]
        return _whole_chain(parts) if name == "abort" else _chain(parts)
    return _adapt_hook(name, fn)


def adapt_rank_assignment(fn: Callable[..., Any], rank_filter: Callable[..., Any] | None = None) -> AdaptedAssignment:
    """The rank assignment `fn`, followed by `rank_filter`, as a function from RankAssignmentCtx to RankAssignmentCtx.

    Whatever the parts do, the result is whole: ranks are consecutive (gaps that are left are closed by shifting), every
    rank is active or inactive (active, if no part said so), and the numbers fit each other.

    Raises:
        OptionError: as for `adapt`, or when Tree is composed with something else.

    The adapted assignment raises TypeError when a part returns something of the wrong type, OptionError when the
    numbers do not fit, and whatever the parts raise (RankDiscarded among others).
    """
    parts, filters = _parts(fn), _parts(rank_filter)
    alone = next((part for part in parts if isinstance(part, RankAssignment) and part.instead_of_others), None)
    if alone is not None and len(parts) + len(filters) > 1:
        raise OptionError(
            f"rank_assignment: {type(alone).__name__} cannot be composed with others: {alone.instead_of_others}"
        )
    assign = _chain([_adapt_assignment(part) for part in parts])
    limit = _chain([_adapt_filter(part) for part in filters])
    counts_only = all(
        isinstance(part, BothForms) and part.counts_only and type(part).__call__ is BothForms.__call__
        for part in (*parts, *filters)
    )
    return AdaptedAssignment(assign, limit, counts_only)


class AdaptedAssignment:
    """What `adapt_rank_assignment` returns.

    Args:
        assign: the chain of the rank assignment; ``limit``: that of the rank filter.
        counts_only: whether the number of ranks alone decides how many are active.
    """

    def __init__(self, assign: Assignment, limit: Assignment, counts_only: bool) -> None:
        self._assign, self._limit, self._counts_only = assign, limit, counts_only

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        ctx.state.mode = Mode.INITIALIZED  # tells below whether a part said what this rank does
        ctx = self._assign(ctx)
        if ctx.terminated_ranks:
            ctx = ShiftRanks()(ctx)
        if ctx.state.mode is Mode.INITIALIZED:
            activate_all(ctx)
        ctx = self._limit(ctx)
        _check_result(ctx.state)
        return ctx

    def active_of(self, size: int) -> int | None:
        """How many of so many ranks it makes active; None where more than their number may decide that, or it fails."""
        if not self._counts_only:
            return None
        try:
            return self(RankAssignmentCtx(State(0, size), None, set())).state.active_world_size
        except Exception:  # a limit of the user's, which tells in the assignment itself
            return None

    def gains(self, members: int, later: int) -> bool:
        """Whether more are active with `later` members than with `members`, or may be, where that cannot be told."""
        before, after = self.active_of(members), self.active_of(later)
        return before is None or after is None or after > before


def _parts(fn: Callable[..., Any] | None) -> tuple[Callable[..., Any], ...]:
    return () if fn is None else fn.parts if isinstance(fn, Compose) else (fn,)


def _chain(parts: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        for part in reversed(parts):
            value = part(value)
        return value

    return run


def _whole_chain(parts: list[Hook]) -> Hook:
    """All parts run, also after one that raised: a step of the user's own must not keep torch's groups from being
    aborted. The error comes afterwards; of several the last one, in the context of the others."""

    def run(state: FrozenState) -> FrozenState:
        if not parts:
            return state
        others = _whole_chain(parts[:-1])
        try:
            state = parts[-1](state)
        except BaseException:
            others(state)
            raise
        return others(state)

    return run


# --- hooks of all kinds but the rank assignment


def _adapt_hook(name: str, fn: Callable[..., Any]) -> Hook:
    older = _takes_two(name, fn, "(state)", "(state, exception)", _EXCEPTION_NAMES)

    def hook(state: FrozenState) -> FrozenState:
        result = fn(state, state.fn_exception) if older else fn(state)
        if older and isinstance(result, tuple) and len(result) == 2:
            result, exception = result
            state = dataclasses.replace(state, fn_exception=exception)
            result = dataclasses.replace(result, fn_exception=exception) if _is_state(result) else result
        if result is None:
            return state
        if not _is_state(result):
            raise TypeError(f"{name}={shown(fn)} returned {_kind(result)}: return the state, or nothing")
        frozen: FrozenState = result.freeze()
        return frozen

    return hook


def _is_state(value: object) -> bool:
    return isinstance(value, State | FrozenState)


def _takes_two(name: str, fn: object, one: str, two: str, optional: re.Pattern[str] | None = None) -> bool:
    """Whether `fn` takes two positional arguments, as hooks of version 0.2 do, rather than one."""
    if isinstance(fn, type):
        raise OptionError(f"{name}={fn.__name__} is a class: pass an instance, {fn.__name__}(...)")
    if not callable(fn):
        raise OptionError(f"{name}={fn!r} cannot be called: pass a function or an object of its base class")
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (ValueError, TypeError):  # written in C without a signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    keyword_only = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if keyword_only or len(required) > 2 or not (positional or takes_any):
        raise OptionError(
            f"{name}={fn!r} must take {one}, or {two} as in nvidia-resiliency-ext 0.2; it takes {_shown(fn)}"
        )
    if len(required) == 2:
        return True
    if optional is None or len(positional) < 2:
        return False
    second = positional[1]
    # an exception is None where there is none; another default belongs to an option of the user's own
    is_theirs = optional is _EXCEPTION_NAMES and second.default is not None
    return optional.search(second.name) is not None and not is_theirs


def _shown(fn: Callable[..., Any]) -> str:
    return str(inspect.signature(fn))


def _kind(value: object) -> str:
    return f"an object of type {type(value).__name__}"


# --- rank assignment


def _adapt_assignment(fn: Callable[..., Any]) -> Assignment:
    if isinstance(fn, OlderRankFilter):
        return _adapt_filter(fn)
    if _takes_two("rank_assignment", fn, "(ctx)", "(state, terminated_ranks)", _TERMINATED_NAMES):
        return functools.partial(_older_assignment, fn)

    def newer(ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        if isinstance(fn, RankFilter) and ctx.state.mode is Mode.INITIALIZED:
            activate_all(ctx)  # a filter of the user's lowers an active world size
        before = dataclasses.replace(ctx.state)
        result = fn(ctx)
        if result is not None and not isinstance(result, RankAssignmentCtx):
            raise TypeError(f"rank_assignment={shown(fn)} returned {_kind(result)}: return the ctx, or nothing")
        ctx = discard_terminated(ctx if result is None else result)  # the next part need not look at that
        _follow_rank(ctx.state, before)
        return ctx

    return newer


def _follow_rank(state: State, before: State) -> None:
    """Who was active under its rank is so under its new one, where a part renumbers and says no more than that."""

    def activity(of: State) -> tuple[Mode, int | None, int]:
        return of.mode, of.active_rank, of.active_world_size

    by_rank = before.rank if before.rank < before.active_world_size else None
    if (
        before.mode is not Mode.INITIALIZED
        and before.active_rank == by_rank
        and activity(state) == activity(before)
        and (state.rank, state.world_size) != (before.rank, before.world_size)
    ):
        first_active(state, state.world_size)


def _older_assignment(fn: Callable[..., Any], ctx: RankAssignmentCtx) -> RankAssignmentCtx:
    if ctx.terminated_ranks:
        ctx.state.mode = Mode.INITIALIZED  # an active rank of before says nothing once ranks are numbered anew
    ctx.state.store = ctx.store
    before = dataclasses.replace(ctx.state)
    try:
        result = fn(ctx.state, ctx.terminated_ranks)
    finally:
        ctx.state.store = None
    if result is not None:
        if not isinstance(result, tuple) or len(result) != 2 or not _is_state(result[0]):
            raise TypeError(f"rank_assignment={shown(fn)} returned {_kind(result)}: return (state, terminated_ranks)")
        state, terminated = result
        ctx.state = state.thaw() if isinstance(state, FrozenState) else state
        ctx.terminated_ranks = set(terminated)
        ctx.state.store = None
    discard_terminated(ctx)
    _follow_rank(ctx.state, before)
    return activate_all(ctx) if ctx.state.mode is Mode.INITIALIZED else keep_limits(ctx)


def _adapt_filter(fn: Callable[..., Any]) -> Assignment:
    if isinstance(fn, RankFilter):
        return fn
    if _takes_two("rank_filter", fn, "(state)", "(state)"):
        raise OptionError(f"rank_filter={fn!r} must take (state); it takes {_shown(fn)}")

    def older(ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        if ctx.state.mode is Mode.INITIALIZED:
            activate_all(ctx)
        result = fn(ctx.state)
        if result is not None and not _is_state(result):
            raise TypeError(f"rank_filter={shown(fn)} returned {_kind(result)}: return the state, or nothing")
        if result is not None:
            ctx.state = result.thaw() if isinstance(result, FrozenState) else result
        return ctx

    return older


def _check_result(state: State) -> None:
    sizes = (state.rank, state.world_size, state.active_world_size)
    if not all(isinstance(each, int) for each in sizes) or not 0 <= state.rank < state.world_size:
        raise OptionError(f"rank_assignment gave rank={state.rank!r} of world_size={state.world_size!r}")
    if not 0 <= state.active_world_size <= state.world_size:
        raise OptionError(
            f"rank_assignment gave active_world_size={state.active_world_size} of world_size={state.world_size}: "
            "at most all ranks can be active"
        )
    active = state.active_rank
    fits = state.mode is not Mode.ACTIVE if active is None else 0 <= active < state.active_world_size
    if not fits or (active is not None and state.mode is not Mode.ACTIVE):
        raise OptionError(
            f"rank_assignment gave active_rank={state.active_rank!r} of active_world_size={state.active_world_size} "
            f"in mode {state.mode.name}: active ranks count from 0, inactive ones have None"
        )


# --- the CallWrapper as an argument
