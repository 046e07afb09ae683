"""Every rank's word to every rank, over any store with torch's `set`, `get` and `add`.

The last to arrive reads all values and publishes them as one JSON object; the others do three operations and wait.
The store belongs to one iteration, whose interruption shuts it down: a wait for a rank that died ends with an error.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection
from datetime import timedelta
from typing import Any

from inprocess.system import strict_json

from ..exception import InternalError, OptionError, TimeoutError

__all__ = ["gather", "name_of_turn", "publish"]


def gather(
    store: Any,
    name: str,
    rank: int,
    world_size: int,
    terminated: Collection[int],
    value: str,
    timeout: timedelta | None = None,
) -> dict[int, str]:
    """What each rank that is not terminated passed as `value`, by rank. All of them must call it once for each `name`.

    Args:
        store: a torch store, or anything with its ``set``, ``get`` and ``add``.
        name: prefix of the keys; used once in a store's life.
        rank: the caller's rank.
        world_size: number of ranks, terminated ones included.
        terminated: ranks that do not take part.
        value: the caller's contribution.
        timeout: how long to wait for the others; None: as long as the store does.

    Raises:
        TimeoutError: the others did not come in time.
        InternalError: what was published is not what the ranks contributed.
    """
    ranks = _ranks(world_size, terminated)
    if ranks == [rank]:
        return {rank: value}
    store.set(f"{name}/{rank}", value)
    if store.add(f"{name}/arrived", 1) == len(ranks):
        publish(store, f"{name}/all", {str(each): _said(store, f"{name}/{each}") for each in ranks})
    elif timeout is not None:
        _await(store, name, len(ranks), timeout)
    return _checked(name, read(store, f"{name}/all"), ranks)


def name_of_turn(store: Any, name: str, world_size: int, terminated: Collection[int]) -> str:
    """A name for the next `gather` of these ranks, which no other gather over the store has.

    Ranks without a Wrapper use one store for many assignments. How often the same ranks asked tells whose turn it is:
    nobody asks for the next one before everybody has asked for this one.

    Raises:
        OptionError: there is no store, and more than one rank.
    """
    ranks = _ranks(world_size, terminated)
    if len(ranks) < 2:
        return name
    if store is None:
        raise OptionError(
            f"the rank assignment of {len(ranks)} ranks needs a store: set state.store, or pass RankAssignmentCtx one"
        )
    place = f"{name}/{zlib.crc32(repr(ranks).encode()):x}"
    return f"{place}/{(store.add(place, 1) - 1) // len(ranks)}"


def _ranks(world_size: int, terminated: Collection[int]) -> list[int]:
    return [rank for rank in range(world_size) if rank not in terminated]


def _await(store: Any, name: str, wanted: int, timeout: timedelta) -> None:
    try:
        store.wait([f"{name}/all"], timeout)
    except RuntimeError:
        arrived = store.add(f"{name}/arrived", 0)  # where the store itself has failed this does so, too
        raise TimeoutError(
            f"{arrived} of {wanted} ranks came within timeout={timeout}: all ranks that are not terminated must run "
            "the same rank assignments over the same store"
        ) from None


def publish(store: Any, key: str, value: object) -> None:
    """Set `key` to `value` as JSON."""
    store.set(key, json.dumps(value, separators=(",", ":")))


def read(store: Any, key: str) -> Any:
    """The value published under `key`; waits for it.

    Raises:
        InternalError: the key holds something else than JSON.
    """
    data = store.get(key)
    try:
        return strict_json.parse(data)
    except ValueError as error:
        raise InternalError(f"store key {key!r} holds no JSON: {error}") from error


def _said(store: Any, key: str) -> str:
    data = bytes(store.get(key))
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InternalError(f"store key {key!r} holds no text: {error}") from error


def _checked(name: str, data: object, ranks: list[int]) -> dict[int, str]:
    if not isinstance(data, dict) or set(data) != {str(rank) for rank in ranks}:
        raise InternalError(f"gather {name!r} did not return one value for each of the {len(ranks)} ranks")
    if not all(isinstance(value, str) for value in data.values()):
        raise InternalError(f"gather {name!r} returned a value that is not a string")
    return {rank: data[str(rank)] for rank in ranks}
