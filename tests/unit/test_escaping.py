"""Which errors are sure to leave a function, by its compiled code alone; compared with what the function then does."""

from __future__ import annotations

import contextlib
import queue
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from inprocess.interrupt.escaping import Code, answers_false

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="its code has no table of handlers")
#: called where the clean-up waits
Here = Callable[[], object]


class Mine(Exception):
    """What is in flight."""


class Other(Exception):
    """Another one."""


class Exit:
    def __init__(self, here: Here) -> None:
        self.here = here

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.here()


def in_finally(here: Here) -> None:
    try:
        raise Mine
    finally:
        here()


def in_a_loop_in_finally(here: Here) -> None:
    try:
        raise Mine
    finally:
        for _ in range(2):
            with contextlib.suppress(Other):
                here()


def whose_clean_up_may_fail(here: Here) -> None:
    try:
        raise Mine
    finally:
        try:
            here()
        except Other:
            print("failed")
        print("after")


def in_except(here: Here) -> None:
    try:
        raise Mine
    except Mine as error:
        print(error)
        here()
        raise


def raised_as_another(here: Here) -> None:
    try:
        raise Mine
    except Exception as error:
        here()
        raise Other from error


def in_a_handler_of_another(here: Here) -> None:
    try:
        raise Other
    except Other:
        try:
            raise Mine
        finally:
            here()


def below_another_type(here: Here) -> None:
    while True:
        try:
            try:
                raise Mine
            finally:
                here()
        except (Other, queue.Empty) as error:
            print(error)


def below_an_attribute(here: Here) -> None:
    try:
        try:
            raise Mine
        finally:
            here()
    except sys.modules["builtins"].ValueError:
        pass


def swallowed(here: Here) -> None:
    try:
        raise Mine
    except Mine:
        here()


def retried(here: Here) -> None:
    done = False
    while not done:
        try:
            raise Mine
        except Mine:
            here()
            done = True


def retried_for_ever(here: Here) -> None:
    while True:
        try:
            raise Mine
        except Mine:
            here()


def returned(here: Here) -> None:
    try:
        raise Mine
    finally:
        here()
        return  # noqa: B012


def continued(here: Here) -> None:
    for _ in range(2):
        try:
            raise Mine
        finally:
            here()
            continue  # noqa: B012


def raised_sometimes(here: Here) -> None:
    try:
        raise Mine
    except Mine:
        if here():
            raise


def swallowed_further_out(here: Here) -> None:
    try:
        try:
            raise Mine
        finally:
            here()
    except Exception:
        print("swallowed")


def swallowed_as_another(here: Here) -> None:
    try:
        try:
            raise Mine
        except Mine:
            here()
            raise Other from None
    except Other:
        print("swallowed")


def suppressed(here: Here) -> None:
    with contextlib.suppress(Mine):
        try:
            raise Mine
        finally:
            here()


def below_a_context(here: Here) -> None:
    with contextlib.nullcontext():
        try:
            raise Mine
        finally:
            here()


LEAVES = [
    in_finally,
    in_a_loop_in_finally,
    whose_clean_up_may_fail,
    in_except,
    raised_as_another,
    in_a_handler_of_another,
]
#: and those of which it is not known
STAYS = [
    swallowed,
    retried,
    retried_for_ever,
    returned,
    continued,
    raised_sometimes,
    swallowed_further_out,
    swallowed_as_another,
    suppressed,
    below_a_context,
    below_an_attribute,
]


class Stop(BaseException):
    """Ends a function that would run for ever."""


def seen(function: Callable[[Here], object]) -> Iterator[bool]:
    """What the code says each time, and at last whether the function was left by an exception of its own."""
    said: list[bool] = []

    def here() -> None:
        frame = sys._getframe(1)
        names: Any = {**frame.f_builtins, **frame.f_globals}
        said.append(bool(Code(frame.f_code, names).after_handling(frame.f_lasti, Mine)))
        if len(said) == 5:
            raise Stop

    left = False
    try:
        function(here)
    except Stop:
        pass
    except Exception:
        left = True
    yield from said
    yield left


@pytest.mark.parametrize("function", LEAVES, ids=lambda function: function.__name__)
def test_what_leaves(function: Callable[[Here], object]) -> None:
    assert set(seen(function)) == {True}


@pytest.mark.parametrize("function", STAYS, ids=lambda function: function.__name__)
def test_what_may_stay(function: Callable[[Here], object]) -> None:
    *said, _ = seen(function)
    assert said and not any(said)


def test_another_type_passes() -> None:
    """An `except` block is asked only about types that its names lead to."""
    names = {"Other": Other, "queue": queue}

    def here() -> None:
        frame = sys._getframe(1)
        kinds = [Code(frame.f_code, each).after_handling(frame.f_lasti, Mine) for each in (names, {})]
        assert kinds == [{Mine}, set()]
        raise Stop

    with pytest.raises(Stop):
        below_another_type(here)


def test_what_leaves_is_known() -> None:
    found = []

    def here() -> None:
        frame = sys._getframe(1)
        found.append(Code(frame.f_code).after_handling(frame.f_lasti, Mine))

    for function in (in_finally, raised_as_another):
        with pytest.raises((Mine, Other)):
            function(here)
    assert found == [{Mine}, {None}]


def with_exit(here: Here) -> None:
    with Exit(here):
        raise Mine


def test_what_exit_is_known_to_answer() -> None:
    said = []

    def here() -> None:
        frame = sys._getframe(2)
        code = Code(frame.f_code)
        said.extend(bool(code.after_handling(frame.f_lasti, Mine, each)) for each in (True, False))

    with pytest.raises(Mine):
        with_exit(here)
    assert said == [True, False]


def test_raised_further_in() -> None:
    """Through the frames around, from where they call."""

    def passes() -> object:
        return sys._getframe().f_back

    def outer(inner: Callable[[], Any]) -> Any:
        try:
            return inner()
        finally:
            print("passes")

    def swallows(inner: Callable[[], Any]) -> Any:
        try:
            return inner()
        except Mine:
            print("swallowed")

    expected: list[tuple[Any, set[Any]]] = [(outer, {Mine}), (swallows, set())]
    for function, leaves in expected:
        frame = function(passes)
        assert Code(frame.f_code, {"Mine": Mine}).after_raising(_calls(function), Mine) == leaves


def _calls(function: Callable[..., Any]) -> int:
    """Where it calls its argument."""
    offsets: list[int] = []

    def inner() -> None:
        offsets.append(sys._getframe(1).f_lasti)

    function(inner)
    return offsets[0]


@pytest.mark.parametrize(
    ("function", "is_false"),
    [
        (lambda: None, True),
        (lambda: False, True),
        (lambda: True, False),
        (lambda: sys.flags, False),
        (lambda: sys.flags or None, False),
        (Exit.__exit__, True),
        (contextlib.suppress.__exit__, False),
    ],
)
def test_answers(function: Callable[..., object], is_false: bool) -> None:
    assert answers_false(function.__code__) is is_false
