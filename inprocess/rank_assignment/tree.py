"""`Tree`: rank assignment along the topology of the cluster. The planning is pure and lives in `plan`; see the class.

What a rank must know is its own place, everybody else's, and where the ranks that died had their place. The first two
are gathered from the living at every assignment, so they are never stale. Only the places of the dead have to be
remembered, and a memory can be wrong: an assignment whose iteration never started did not come true. So a rank keeps
two books, the places its last assignment began from and those it ended with, and uses the one that agrees with what the
living say now. All ranks take the dead's places from one rank's book, published over the store, so they agree always.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Sequence
from typing import Any

from inprocess.protocol.assignment import BothForms, RankAssignmentCtx
from inprocess.system import strict_json

from ..exception import InternalError, OptionError, RankDiscarded
from ..rank_filter import positive
from ..state import Mode
from . import plan
from .gather import publish, read
from .groups import check_key, gather_next, key_of

__all__ = ["Layer", "LayerFlag", "Tree"]


class LayerFlag(enum.Flag):
    """How far the search for a replacement goes: upwards from the failed rank, as long as every layer has the flag."""

    RESERVE = enum.auto()  #: inactive ranks of this layer's branch may replace a terminated active rank
    BACKFILL = enum.auto()  #: the largest active rank of this layer's branch may move into a gap


_NO_FLAG = LayerFlag(0)


@dataclasses.dataclass(frozen=True)
class Layer:
    """One level of the topology, such as the whole job, a rack, a host.

    Args:
        min_ranks: a branch with fewer healthy ranks is terminated whole.
        max_ranks: at most this many ranks of a branch are active; None: no limit.
        key_or_fn: this process's key in the layer, or a function of its FrozenState that returns it.
        flag: None, LayerFlag.RESERVE, LayerFlag.BACKFILL or both joined by ``|``.

    Raises:
        OptionError: a value has the wrong type or range.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: object = "root"
    flag: LayerFlag | None = None

    def __post_init__(self) -> None:
        positive("min_ranks", self.min_ranks)
        if self.max_ranks is not None and positive("max_ranks", self.max_ranks) < self.min_ranks:
            raise OptionError(f"max_ranks={self.max_ranks} is less than min_ranks={self.min_ranks}: raise max_ranks")
        check_key("key_or_fn", self.key_or_fn)
        if self.flag is not None and not isinstance(self.flag, LayerFlag):
            raise OptionError(f"flag={self.flag!r} must be None or made of LayerFlag.RESERVE and LayerFlag.BACKFILL")


class Tree(BothForms):
    """Assigns ranks along a topology tree; each layer groups ranks by a key, the first layer's key is the same for all.

    At first, ranks are activated depth first as long as every branch above them has fewer than ``max_ranks`` active.
    With a root and two hosts of ``max_ranks=3`` (numbers are active ranks, ``.`` is a reserve)::

        root          ┌──── host a ────┐ ┌──── host b ────┐
                        0   1   2   .      3   4   5   .

    After terminations:

    1. Children before parents: a branch with fewer than ``min_ranks`` healthy ranks is terminated whole; its healthy
       ranks leave with RankDiscarded.
    2. A terminated active rank is replaced by a reserve, which takes its active rank. The search begins in the
       failed rank's own branch of the last layer and goes up layer by layer; it ends at a layer without
       LayerFlag.RESERVE. Near replacements go before far ones; no branch gets more than ``max_ranks`` active::

            before      0   X   2   .      3   4   5   .
            after       0       2   1      3   4   5   .        RESERVE on the hosts

    3. If there is no reserve, the largest active rank moves into the gap, out of the highest branch that is reached
       through layers with LayerFlag.BACKFILL::

            before      0   X   2          3   4   5
            after       0       2          3   4   1            BACKFILL on root and hosts
            after       0       1          2   3   4            BACKFILL on the hosts only, and step 4

    4. The gaps that are left are closed by shifting left::

            before      0   X   2          3   4   5
            after       0       1          2   3   4            no flags

    5. ``world_size_filter`` may lower the active size; the ranks beyond it become reserves.

    If no active rank is left although there are reserves, they are activated as at first. Likewise when a process
    joins: everybody is back in its first place then, and the newcomer is where its key belongs.

    An active rank's rank is its active rank; reserves follow behind, in their previous order. Keys are
    read once, at the first assignment of a call, so a function of ``state.rank`` sees the rank the job started with.
    A Tree sets active ranks by itself, so it cannot be composed with other assignments or rank filters.

    Args:
        layers: the levels from the root to the last grouping, at least one.
        world_size_filter: called with the number of active ranks, returns one that is not larger; None: all.

    Raises:
        OptionError: an argument has the wrong type; at the call: keys or results that cannot be used.
        RankDiscarded: at the call: this rank belongs to a terminated branch.
    """

    instead_of_others = "use its layers and world_size_filter"

    def __init__(self, layers: Sequence[Layer], world_size_filter: Callable[[int], int] | None = None) -> None:
        if isinstance(layers, Layer) or not layers or not all(isinstance(layer, Layer) for layer in layers):
            raise OptionError(f"layers={layers!r} must be a list of at least one Layer")
        if world_size_filter is not None and not callable(world_size_filter):
            raise OptionError(f"world_size_filter={world_size_filter!r} cannot be called: pass a function or None")
        self.layers = tuple(layers)
        self.world_size_filter = world_size_filter
        self._rules = plan.Rules(
            limits=tuple((layer.min_ranks, layer.max_ranks) for layer in self.layers),
            reserve_depth=self._reach(LayerFlag.RESERVE),
            backfill_depth=self._reach(LayerFlag.BACKFILL),
        )
        self._keys: tuple[str, ...] = ()
        self._books: tuple[_Book, ...] = ()  # (ended with, began from) of the last assignment of this call

    def _assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        state = ctx.state
        if not self._keys or state.active_world_size == 0:  # the beginning of a call: no ranks have come true yet
            layers = enumerate(self.layers)
            self._keys = tuple(key_of(f"layers[{i}].key_or_fn", layer.key_or_fn, ctx) for i, layer in layers)
            self._books = ()
        if ctx.joined:
            return self._plan_afresh(ctx)
        said = self._gather(ctx)
        active_world_size = max(each.active_world_size for each in said.values())
        began = _Book(active_world_size, {rank: each.place for rank, each in said.items()})
        if active_world_size and ctx.terminated_ranks:
            began.places.update(self._places_of_dead(ctx, said, began))
        leaves = [plan.Leaf(r, *place, healthy=r in said) for r, place in sorted(began.places.items())]
        return self._carry_out(ctx, began, leaves)

    def _plan_afresh(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Somebody has joined: everybody is back in the place it was started in, so it is as at first."""
        ctx.state.active_rank, ctx.state.active_world_size, self._books = None, 0, ()
        began = _Book(0, {rank: each.place for rank, each in self._gather(ctx).items()})
        return self._carry_out(ctx, began, [plan.Leaf(r, *place) for r, place in sorted(began.places.items())])

    def _carry_out(self, ctx: RankAssignmentCtx, began: _Book, leaves: list[plan.Leaf]) -> RankAssignmentCtx:
        result = plan.plan(self._rules, leaves, began.active_world_size, self.world_size_filter)
        if result.ranks.get(ctx.state.rank) is None:
            raise RankDiscarded(
                f"rank {ctx.state.rank} is discarded: a branch above it ({' / '.join(self._keys)}) has fewer than "
                "min_ranks healthy ranks"
            )
        self._books = (_ended(result, began), began)
        return _take(ctx, result)

    def _reach(self, flag: LayerFlag) -> int:
        """Depth of the highest layer reached from below through layers with `flag`; the number of layers if none."""
        depth = len(self.layers)
        while depth and flag in (self.layers[depth - 1].flag or _NO_FLAG):
            depth -= 1
        return depth

    def _gather(self, ctx: RankAssignmentCtx) -> dict[int, _Said]:
        state = ctx.state
        own = _Said((self._keys, state.active_rank), state.active_world_size, bool(self._books))
        said = {rank: _Said.from_json(text) for rank, text in gather_next(ctx, own.to_json()).items()}
        for rank, each in said.items():
            if not each.fits(state.world_size):
                raise InternalError(f"Tree gathered from rank {rank} that it is {each}, of {state.world_size} ranks")
        if any(len(each.place[0]) != len(self.layers) for each in said.values()):
            raise OptionError("layers: the ranks have different numbers of layers; pass the same layers everywhere")
        roots = sorted({each.place[0][0] for each in said.values()})
        if len(roots) > 1:
            raise OptionError(f"layers[0].key_or_fn gave {roots[:2]}: return the same key on all ranks")
        return said

    def _places_of_dead(self, ctx: RankAssignmentCtx, said: dict[int, _Said], began: _Book) -> dict[int, _Place]:
        """Where the terminated ranks had their place, from the first rank that has books; empty when nobody knows."""
        teller = min((rank for rank, each in said.items() if each.has_books), default=None)
        if teller is None:
            return {}
        key = f"{ctx.gathered}/dead"
        if teller == ctx.state.rank:
            publish(ctx.store, key, _dead(self._books, began, ctx.terminated_ranks))
        data = read(ctx.store, key)
        if not isinstance(data, dict) or not data.keys() <= {str(rank) for rank in ctx.terminated_ranks}:
            raise InternalError(f"store key {key!r} holds no places by rank")
        return {int(text): _place(each, len(self.layers)) for text, each in data.items()}


_Place = tuple[tuple[str, ...], int | None]  # keys from the root down, active rank


@dataclasses.dataclass(frozen=True)
class _Book:
    active_world_size: int
    places: dict[int, _Place]  # by rank


@dataclasses.dataclass(frozen=True)
class _Said:
    """What one rank contributes to the gather."""

    place: _Place
    active_world_size: int
    has_books: bool

    def fits(self, world_size: int) -> bool:
        """Whether its numbers are those of a job of so many ranks."""
        return (self.place[1] or 0) <= self.active_world_size <= world_size

    def to_json(self) -> str:
        return json.dumps([*self.place, self.active_world_size, self.has_books], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> _Said:
        try:
            keys, active_rank, active_world_size, has_books = strict_json.parse(text)
        except (TypeError, ValueError) as error:
            raise InternalError(f"Tree gathered {text[:100]!r}, which it cannot read: {error}") from error
        if not _is_count(active_world_size) or not isinstance(has_books, bool):
            raise InternalError(f"Tree gathered {text[:100]!r}, which has fields of the wrong type")
        return cls(_place([keys, active_rank]), active_world_size, has_books)


def _place(data: Any, layers: int | None = None) -> _Place:
    """A place as JSON gives it, checked."""
    if isinstance(data, list) and len(data) == 2:
        keys, active = data
        keys_fit = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
        if keys_fit and (active is None or _is_count(active)) and layers in (None, len(keys)):
            return tuple(keys), active
    raise InternalError(f"Tree read {str(data)[:100]!r} from the store, which is no place in the tree")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _dead(books: Sequence[_Book], began: _Book, terminated: set[int]) -> dict[int, _Place]:
    """The terminated ranks' places, out of the book that agrees with what the living say about themselves."""
    for book in books:
        known = book.places.items()
        agrees = all(place == began.places[rank] for rank, place in known if rank in began.places)
        complete = all(rank in began.places or rank in terminated for rank in book.places)
        if book.active_world_size == began.active_world_size and agrees and complete and terminated <= set(book.places):
            return {rank: place for rank, place in known if rank in terminated}
    return {}


def _ended(result: plan.Result, began: _Book) -> _Book:
    places = {
        rank: (began.places[old][0], rank if rank < result.active_world_size else None)
        for old, rank in result.ranks.items()
    }
    return _Book(result.active_world_size, places)


def _take(ctx: RankAssignmentCtx, result: plan.Result) -> RankAssignmentCtx:
    state = ctx.state
    state.rank, state.world_size = result.ranks[state.rank], len(result.ranks)
    state.active_world_size = result.active_world_size
    active = state.rank < result.active_world_size
    state.active_rank, state.mode = (state.rank, Mode.ACTIVE) if active else (None, Mode.INACTIVE)
    ctx.terminated_ranks, ctx.joined = set(), set()
    return ctx
