"""When the garbage of an iteration is collected for the sake of its process groups, and which groups stay held."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from inprocess.collectives import dead_groups as module
from inprocess.collectives.background import FREEING
from inprocess.collectives.dead_groups import DeadGroups
from inprocess.system.heap import Heap
from inprocess.testing import growth


class Group:
    """Stands for a process group, or for what refers to one."""

    other: object = None


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The generations that were collected, in a function that has been entered."""
    found: list[int] = []
    heap = Heap()

    class Counting:
        @staticmethod
        def collect(generation: int = 2) -> bool:
            found.append(generation)
            return heap.collect(generation)

    monkeypatch.setattr(module, "heap", Counting)
    gc.collect()
    gc.disable()
    heap.begin()
    heap.enter()
    yield found
    heap.end()
    gc.enable()


def aborted(held: DeadGroups, *groups: Group) -> None:
    """An iteration ends with these groups; what is in no variable of the caller's is only held."""
    taken = [*groups]
    del groups
    held.begin()
    held.keep(taken)


def in_a_cycle(age: int = 0) -> Group:
    """A group to which a cycle refers, such as that of a mesh and what is cached in it."""
    group, mesh, cached = Group(), Group(), Group()
    mesh.other, cached.other = (group, cached), mesh
    for _ in range(age):
        gc.collect(1)
    return group


def settled() -> None:
    """What is let go of in the background is gone."""
    for thread in threading.enumerate():
        if thread.name == FREEING:
            thread.join()


def test_whose_threads_free_groups_is_known_where_torch_is_not_imported() -> None:
    assert growth._FREEING == FREEING


def test_groups_that_nobody_has_cost_no_collection(collections: list[int]) -> None:
    held = DeadGroups()
    aborted(held, Group(), Group())
    held.collect()
    held.end()
    assert collections == []


def test_a_young_cycle_is_collected_with_the_young(collections: list[int]) -> None:
    held = DeadGroups()
    aborted(held, in_a_cycle())
    held.collect()
    assert collections == [1]


def test_an_old_cycle_is_collected(collections: list[int]) -> None:
    held, group = DeadGroups(), in_a_cycle(age=3)
    gone = weakref.ref(group)
    aborted(held, group)
    del group
    held.collect()
    assert collections == [1, 2]
    assert gone() is not None  # garbage was not its last owner
    held.begin()
    assert gone() is not None  # nothing that takes time before the function runs
    for thread in held.free():
        thread.join()
    assert gone() is None
    assert held.free() == []


def test_what_the_program_keeps_is_looked_for_once(collections: list[int]) -> None:
    """A model in a global variable, made anew in each iteration."""
    held = DeadGroups()
    for _ in range(5):
        model = Group()
        aborted(held, model)
        held.collect()
    assert collections == [1, 2]
    aborted(held, model := Group(), in_a_cycle())
    held.collect()
    assert collections == [1, 2, 1]
    held.end()
    del model


def test_a_group_that_is_referred_to_is_let_go_later(collections: list[int]) -> None:
    """Nobody else may be the last to let go of one."""
    held, group = DeadGroups(), Group()
    gone = weakref.ref(group)
    aborted(held, group)
    held.begin()
    del group
    assert gone() is not None
    held.end()
    assert gone() is None


def test_groups_that_the_program_destroys(collections: list[int]) -> None:
    """Each stays until the next one that is destroyed, and longer where somebody has it."""
    held, groups = DeadGroups(), [Group() for _ in range(3)]
    gone = [weakref.ref(group) for group in groups]
    held.destroyed(groups[0])  # outside a call
    held.begin()
    mine = groups[1]
    while groups:
        held.destroyed(groups.pop(0))
    settled()
    assert [each() is None for each in gone] == [True, False, False]
    held.begin()
    held.free()
    settled()
    assert [each() is None for each in gone] == [True, False, True]
    del mine
    assert gone[1]() is not None
    held.end()
    assert gone[1]() is None


@pytest.mark.parametrize("again", ["shut down twice", "aborted while it is destroyed", "aborted twice"])
def test_a_group_that_is_noted_twice_is_still_nobodys(again: str, collections: list[int]) -> None:
    """The references of what keeps dead groups are no one else's."""
    held, group = DeadGroups(), Group()
    gone = weakref.ref(group)
    held.begin()
    if again == "aborted twice":
        held.keep([group])
    else:
        held.destroyed(group)
    if again == "shut down twice":
        held.destroyed(group)
    else:
        held.keep([group])
    del group
    held.collect()
    assert collections == []
    held.begin()
    held.free()
    settled()
    assert gone() is None
    held.end()


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("in_a_call", [True, False])
def test_where_no_thread_can_be_started(
    in_a_call: bool, collections: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay until one can; the program's own destroy_process_group() must not fail for that."""
    held, groups, gone = DeadGroups(), [Group(), Group()], []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        gone = [weakref.ref(group) for group in groups]
        if in_a_call:
            held.begin()
            while groups:
                held.destroyed(groups.pop())
        else:
            held.keep(groups)
            assert groups == []
    assert all(each() is not None for each in gone)
    held.begin()
    held.free()
    settled()
    assert all(each() is None for each in gone)
    held.end()
