"""Every rank's word to every rank, over any store with torch's `set`, `get` and `add`.

The last to arrive reads all values and publishes them as one JSON object; the others do three operations and wait.
The store belongs to one iteration, whose interruption shuts it down: a wait for a rank that died ends with an error.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from .. import strict_json
from ..exception import InternalError

__all__ = ["gather", "publish"]


def gather(
    store: Any, name: str, rank: int, world_size: int, terminated: Collection[int], value: str
) -> dict[int, str]:
    """What each rank that is not terminated passed as `value`, by rank. All of them must call it once for each `name`.

    Args:
        store: a torch store, or anything with its ``set``, ``get`` and ``add``.
        name: prefix of the keys; used once in a store's life.
        rank: the caller's rank.
        world_size: number of ranks, terminated ones included.
        terminated: ranks that do not take part.
        value: the caller's contribution.

    Raises:
        InternalError: what was published is not what the ranks contributed.
    """
    ranks = [each for each in range(world_size) if each not in terminated]
    if ranks == [rank]:
        return {rank: value}
    store.set(f"{name}/{rank}", value)
    if store.add(f"{name}/arrived", 1) == len(ranks):
        publish(store, f"{name}/all", {str(each): _said(store, f"{name}/{each}") for each in ranks})
    return _checked(name, read(store, f"{name}/all"), ranks)


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
