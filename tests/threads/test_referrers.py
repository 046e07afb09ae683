"""Who holds an object, in words; and that the search leaves nothing behind, and ends."""

from __future__ import annotations

import collections
import functools
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from inprocess import referrers
from inprocess.referrers import Known, Way, holders

HERE = "test_referrers.py"
MODULE = "tests.threads.test_referrers"


class Thing:
    """What is looked for."""


class Trainer:
    pass


class Slots:
    __slots__ = ("thing",)


class Odd:
    """Whose attributes and comparisons are none of a search's business."""

    thing: Any

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError

    def __hash__(self) -> int:
        raise ZeroDivisionError

    def __getattribute__(self, name: str) -> Any:
        raise ZeroDivisionError

    def __repr__(self) -> str:
        raise ZeroDivisionError


class Config:
    cache: Any = None


_kept: Any = None


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    yield
    global _kept
    _kept = Config.cache = None


def keep(holder: Any) -> None:
    global _kept
    _kept = holder


def who_holds(find: Callable[[], Thing | None], seconds: float = 5.0) -> str:
    """Nothing here may hold it meanwhile."""
    (way,) = holders([find()], seconds)
    return way.words.removesuffix(f", in attribute `_kept` of module `{MODULE}`")


def kept_in(make: Callable[[Thing], Any]) -> str:
    """Who holds a thing that is kept in what ``make`` makes of it."""
    thing = Thing()
    reference = weakref.ref(thing)
    keep(make(thing))
    del thing
    words = who_holds(reference)
    assert reference() is not None
    return words


def instance(kind: Any, thing: Thing) -> Any:
    made = kind()
    object.__setattr__(made, "thing", thing)
    return made


def with_dict(thing: Thing) -> Any:
    made = instance(Trainer, thing)
    assert vars(made)
    return made


def closure(thing: Thing) -> Any:
    def hook() -> Any:
        return thing

    return hook


def generator(thing: Thing) -> Any:
    def numbers(held: Any) -> Iterator[int]:
        yield 0
        yield id(held)

    steps = numbers(thing)
    next(steps)
    return steps


def fail(things: list[Any]) -> None:
    held = things.pop()
    raise ValueError("of fail", held is None)


def caught(thing: Thing) -> Any:
    things = [thing]
    del thing
    try:
        fail(things)
    except ValueError as error:
        return error


def hidden(thing: Thing) -> Any:
    things = [thing]
    del thing
    try:
        try:
            fail(things)
        except ValueError:
            raise KeyError("second")  # noqa: B904
    except KeyError as error:
        return error


def default(thing: Thing) -> Any:
    def hook(held: Any = thing) -> Any:
        return held

    return hook


def trainer_list(thing: Thing) -> Any:
    trainer = Trainer()
    trainer.losses = [0, thing]  # type: ignore[attr-defined]
    return trainer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda thing: thing, f"attribute `_kept` of module `{MODULE}`"),
        (lambda thing: [0, thing], "item 1 of a list"),
        (lambda thing: (thing,), "item 0 of a tuple"),
        (lambda thing: {thing}, "an element of a set"),
        (lambda thing: collections.deque([0, 0, thing]), "item 2 of a deque"),
        (lambda thing: {"a": thing}, "value 'a' of a dict"),
        (lambda thing: {thing: "a"}, "a key of a dict"),
        (lambda thing: {(1, 2): thing}, "value with a tuple as key of a dict"),
        (lambda thing: collections.OrderedDict(a=thing), "value 'a' of an OrderedDict"),
        (lambda thing: {"a" * 100: thing}, f"value '{'a' * 59}... of a dict"),
        (functools.partial(instance, Trainer), "attribute `thing` of a Trainer"),
        (with_dict, "attribute `thing` of a Trainer"),
        (functools.partial(instance, Slots), "attribute `thing` of a Slots"),
        (functools.partial(instance, Odd), "attribute `thing` of an Odd"),
        (trainer_list, "item 1 of a list, in attribute `losses` of a Trainer"),
        (closure, f"variable `thing` captured by function `hook` ({HERE}:{closure.__code__.co_firstlineno + 1})"),
        (generator, f"local variable `held` of generator `numbers` ({HERE}:{generator.__code__.co_firstlineno + 2})"),
        (default, f"item 0 of a tuple, in a default or an attribute of function `hook` ({HERE})"),
        (functools.partial(functools.partial, print), "item 0 of a tuple, in the arguments of a functools.partial"),
        (lambda thing: types.MethodType(closure, thing), "the object of a bound method `closure`"),
        (ValueError, "item 0 of a tuple, in a part of a ValueError"),
    ],
)
def test_words(make: Callable[[Thing], Any], words: str) -> None:
    assert kept_in(make).startswith(words)


def test_a_frame_that_an_exception_keeps() -> None:
    line = fail.__code__.co_firstlineno + 2
    words = (
        f"local variable `held` of function `fail` ({HERE}:{line}), in the traceback of ValueError: ('of fail', False)"
    )
    assert kept_in(caught) == words
    assert kept_in(hidden) == f"{words}, in the context of KeyError: 'second'"


def test_the_caller_of_a_frame() -> None:
    def outer(thing: Thing) -> Any:
        things: list[Any] = [None]
        return inner(things), thing

    def inner(things: list[Any]) -> Any:
        return caught(things.pop())

    line = outer.__code__.co_firstlineno + 2
    assert kept_in(lambda thing: outer(thing)[0]).startswith(
        f"local variable `thing` of function `outer` ({HERE}:{line}), in the caller of function `inner`"
    )


def test_a_class() -> None:
    Config.cache = {"a": Thing()}
    assert (
        who_holds(lambda: Config.cache["a"]) == f"value 'a' of a dict, in class attribute `cache` of `{MODULE}.Config`"
    )


def test_a_function_that_runs() -> None:
    def outer() -> str:
        mine = [Thing()]
        words = who_holds(lambda: mine[0])
        assert mine
        return words

    assert outer().startswith(f"item 0 of a list, in local variable `mine` of function `outer` ({HERE}:")
    assert outer().endswith("), which is running")


def test_a_function_of_another_thread() -> None:
    def run() -> None:
        mine = Thing()
        found.append(weakref.ref(mine))
        ready.set()
        done.wait()

    found: list[Any] = []
    ready, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=run, name="of the test")
    thread.start()
    ready.wait()
    words = who_holds(found[0])
    done.set()
    thread.join()
    assert words.startswith("local variable `mine` of function `run` (")
    assert words.endswith("), which is running in thread 'of the test'")
    assert found[0]() is None


def test_what_nobody_holds() -> None:
    """Such as what C++ refers to."""
    words = "a Thing that only C++ holds (a hook, an autograd graph)"
    assert who_holds(Thing) == words
    gc.freeze()
    try:
        assert who_holds(Thing) == f"{words}, or something that gc.freeze() has hidden"
    finally:
        gc.unfreeze()


def test_frozen_modules_are_seen() -> None:
    gc.freeze()
    try:
        keep([Thing()])
        (way,) = holders([_kept[0]], 5.0)
    finally:
        gc.unfreeze()
    assert way == Way(f"item 0 of a list, in attribute `_kept` of module `{MODULE}`", ends=True)


def test_a_known_holder_needs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(Thing())
    things, known = [Thing()], Known()
    known.add(things[0], _kept, "a friend of a Thing")
    monkeypatch.setattr(gc, "get_referrers", None)
    words = f"a friend of a Thing, in attribute `_kept` of module `{MODULE}`"
    assert holders(things, 5.0, known) == [Way(words, ends=True)]
    assert not things


def test_several_at_once() -> None:
    keep([Thing(), {"a": Thing()}])
    ways = holders([_kept[0], _kept[1]["a"], Thing()], 5.0)
    assert [way.ends for way in ways] == [True, True, False]
    assert ways[1].words == f"value 'a' of a dict, in item 1 of a list, in attribute `_kept` of module `{MODULE}`"


# --- it leaves nothing behind, and ends -----------------------------------------------------------------------------


def test_nothing_holds_more_than_before() -> None:
    keep([generator(Thing()), closure(Thing()), caught(Thing()), instance(Slots, Thing())])
    things = [thing for thing in gc.get_objects() if type(thing) is Thing]
    assert len(things) == 4
    before = [sys.getrefcount(thing) for thing in things]
    assert all(way.ends for way in holders([*things], 5.0))
    assert [sys.getrefcount(thing) for thing in things] == before


def test_what_a_thread_drops_later_is_free() -> None:
    """Asking a frame for its variables makes it keep a copy of them, up to Python 3.12."""

    def run() -> None:
        mine: Any = Thing()
        found.append(weakref.ref(mine))
        ready.set()
        dropping.wait()
        mine = None
        ready.set()
        done.wait()
        assert mine is None

    found: list[Any] = []
    ready, dropping, done = threading.Event(), threading.Event(), threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    assert "`mine`" in who_holds(found[0])
    ready.clear()
    dropping.set()
    ready.wait()
    alive = found[0]()
    done.set()
    thread.join()
    assert alive is None


def test_locals_that_the_program_has_asked_for_stay() -> None:
    def outer() -> dict[str, Any]:
        first = Thing()
        asked = locals()
        who_holds(lambda: None)
        return {**asked, "is": first}

    found = outer()
    assert found["first"] is found["is"]


def test_no_pass_begins_that_would_end_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now, passes = [100.0], []

    def slow(*targets: object) -> list[Any]:
        now[0] += 0.2
        passes.append(len(targets))
        return [[target] for target in targets]

    monkeypatch.setattr(gc, "get_referrers", slow)
    monkeypatch.setattr(referrers.clock, "monotonic", lambda: now[0])
    (way,) = holders([Thing()], 0.5)
    assert len(passes) == 2
    assert way == Way(
        "item 0 of a list, in item 0 of a list, in a list that is held by something else "
        "(the search takes no longer than this)",
        ends=False,
    )
    assert holders([Thing()], 0.0)[0].ends is False
    assert len(passes) == 2


def test_only_so_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time goes up with their number: what hundreds of thousands of objects hold does not take long."""
    things = [Thing()]
    keep([[[[things[0]]] for _ in range(1000)]])
    widths: list[int] = []
    original = gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *targets: (widths.append(len(targets)), original(*targets))[1])
    (way,) = holders(things, 5.0)
    assert len(widths) > 2
    assert max(widths) <= referrers.WIDEST
    assert way.ends
