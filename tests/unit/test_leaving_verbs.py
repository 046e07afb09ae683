"""What ranks that leave say to each other: counted once each, the largest value stays, and all of it is forgotten."""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

import pytest

from inprocess.protocol.ops import Add, Claim, Delete, Read
from inprocess.protocol.verbs import leaving


class Store(dict[str, bytes]):
    """As much of one as these verbs use."""

    def do(self, op: Any) -> Any:
        match op:
            case Read(key):
                return self.get(key)
            case Add(key, amount):
                self[key] = str(int(self.get(key, b"0")) + amount).encode()
                return int(self[key])
            case Claim(key, value, instead):
                if self.get(key, b"") == instead.encode():
                    self[key] = value.encode()
                return self[key]
            case Delete(key):
                return self.pop(key, None)
        raise AssertionError(op)


def run(store: Store, *verbs: Generator[Any, Any, Any], rng: random.Random | None = None) -> list[Any]:
    """One operation at a time, of any of them."""
    waiting, results = dict.fromkeys(range(len(verbs))), {}
    while waiting:
        index = (rng or random).choice(list(waiting))
        try:
            waiting[index] = store.do(verbs[index].send(waiting[index]))
        except StopIteration as end:
            results[index] = end.value
            del waiting[index]
    return [results[index] for index in sorted(results)]


@pytest.mark.parametrize("seed", range(50))
def test_the_largest_value_stays_in_whatever_order(seed: int) -> None:
    rng, store = random.Random(seed), Store()
    values = [rng.randrange(1, 9) for _ in range(5)]
    run(store, *(leaving.say(3, leaving.STEP, value) for value in values), rng=rng)
    assert run(store, leaving.heard(3, leaving.STEP)) == [(5, max(values))]


def test_nothing_was_said() -> None:
    assert run(Store(), leaving.heard(0, leaving.WANTED)) == [(0, 0)]


def test_all_of_it_is_forgotten() -> None:
    store = Store()
    run(store, leaving.forget_leaving(2))
    for what in (leaving.WANTED, leaving.STEP, leaving.SAVED):
        run(store, leaving.say(2, what, 7))
    run(store, leaving.say(3, leaving.WANTED))
    run(store, leaving.forget_leaving(2))
    assert store == {f"3/{leaving.WANTED}#": b"1"}
