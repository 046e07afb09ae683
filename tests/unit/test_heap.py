"""Collections of a restart: what they look at, what they leave alone, and what any other collection looks at."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from inprocess.system import heap as module
from inprocess.system.heap import Heap


class Node:
    other: object = None


def cycle() -> weakref.ref[Node]:
    """Garbage that only a collection frees."""
    node = Node()
    node.other = node
    return weakref.ref(node)


@pytest.fixture
def heap() -> Iterator[Heap]:
    gc.collect()
    gc.disable()
    made = Heap()
    made.begin()
    yield made
    made.end()
    gc.enable()
    assert gc.get_freeze_count() == 0
    assert made._on_collection not in gc.callbacks


def test_only_what_is_younger_than_the_entry_is_collected(heap: Heap) -> None:
    old = cycle()
    heap.enter()
    young = cycle()
    assert heap.collect()
    assert (old() is None, young() is None) == (False, True)
    heap.enter()  # the next iteration
    young = cycle()
    assert heap.collect()
    assert (old() is None, young() is None) == (False, True)


def test_a_collection_of_the_program_is_a_whole_one(heap: Heap) -> None:
    old = cycle()
    heap.enter()
    young = cycle()
    gc.collect()
    assert (old() is None, young() is None) == (True, True)
    young = cycle()
    assert not heap.collect()  # it would look at everything
    assert young() is not None
    heap.enter()
    younger = cycle()
    assert heap.collect()
    assert (young() is None, younger() is None) == (False, True)


def test_a_collection_by_python_itself_is_a_whole_one(heap: Heap) -> None:
    old, before = cycle(), gc.get_threshold()
    many = len(gc.get_objects())
    heap.enter()
    gc.set_threshold(1, 1, 1)
    gc.enable()
    kept = [[number] for number in range(many // 2)]  # where it finds a quarter more Python looks at everything
    gc.disable()
    gc.set_threshold(*before)
    assert old() is None
    del kept


def test_young_generations_change_nothing(heap: Heap) -> None:
    old = cycle()
    heap.enter()
    gc.collect(0)
    gc.collect(1)
    assert heap.collect()
    assert old() is not None


def test_nothing_is_collected_before_the_entry_and_after_the_call(heap: Heap) -> None:
    young = cycle()
    assert not heap.collect()
    heap.enter()
    heap.end()
    assert not heap.collect()
    assert young() is not None


def test_what_the_program_has_frozen_stays_so() -> None:
    gc.freeze()
    try:
        frozen, heap = gc.get_freeze_count(), Heap()
        heap.begin()
        heap.enter()
        gc.collect()
        assert heap.collect()  # it is short by the program's own doing
        heap.end()
        assert gc.get_freeze_count() >= frozen - 100  # some die by themselves
    finally:
        gc.unfreeze()


def test_not_where_the_collector_works_in_steps(heap: Heap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COLLECTS_IN_STEPS", True)
    heap.enter()
    assert not heap.collect()
    assert gc.get_freeze_count() == 0
