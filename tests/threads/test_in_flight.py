"""An error that the function handles when it is interrupted: it is the function's own, or it is left alone."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from inprocess.interrupt import in_flight
from inprocess.interrupt.gate import Gate, Interrupted, Outcome, Raised, Returned

needs_table = pytest.mark.skipif(sys.version_info < (3, 11), reason="nothing is sure to leave before Python 3.11")
#: called where the function is interrupted
Go = Callable[[], None]
ERROR = ZeroDivisionError("the loss scale became 0")


def run_noted(
    gate: Gate, fn: Callable[[Go], object], stood_still: bool = False, meanwhile: Callable[[], object] = lambda: None
) -> Outcome:
    """As the MonitorThread does it: what the main thread handles is noted, and then comes the abort."""
    here = threading.Event()

    def monitor() -> None:
        here.wait()
        gate.note(in_flight.look(), stood_still)
        meanwhile()
        gate.close_for_abort()
        gate.interrupt_until_left()

    thread = threading.Thread(target=monitor)
    thread.start()
    try:
        return gate.run(fn, (here.set,))
    finally:
        here.set()
        thread.join()


def run_unnoted(gate: Gate, fn: Callable[[Go], object]) -> Outcome:
    """Likewise, where that is another rank's failure, seen from here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "note", lambda found, stood_still: None)
        return run_noted(gate, fn)


def wait(go: Go) -> None:
    go()
    threading.Event().wait()


class Closing:
    def __init__(self, go: Go) -> None:
        self.go = go

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        wait(self.go)


@contextlib.contextmanager
def closing(go: Go) -> Iterator[None]:
    try:
        yield
    finally:
        wait(go)


def in_finally(go: Go) -> None:
    try:
        raise ERROR
    finally:
        wait(go)


def in_exit(go: Go) -> None:
    with Closing(go):
        raise ERROR


def in_generator(go: Go) -> None:
    with closing(go):
        raise ERROR


def in_except(go: Go) -> None:
    try:
        raise ERROR
    except ArithmeticError:
        wait(go)
        raise


def in_a_handler_within(go: Go) -> None:
    """Another error is handled meanwhile, and not this one's."""
    try:
        raise ERROR
    finally:
        with contextlib.suppress(OSError):
            try:
                raise KeyError
            except KeyError:
                wait(go)


def below(go: Go) -> None:
    """In a function further in, through frames that let it pass."""
    try:
        in_finally(go)
    except OSError:
        pass
    finally:
        print("passes")


def followed_by_what_the_abort_raises(go: Go) -> None:
    try:
        raise ERROR
    finally:
        try:
            wait(go)
        except BaseException:
            raise RuntimeError("Connection closed by peer") from None


def after_another(go: Go) -> None:
    try:
        try:
            raise KeyError
        finally:
            raise ERROR
    finally:
        wait(go)


SURE = [
    in_finally,
    in_exit,
    in_generator,
    in_except,
    in_a_handler_within,
    below,
    followed_by_what_the_abort_raises,
    after_another,
]


@needs_table
@pytest.mark.parametrize("fn", SURE, ids=lambda fn: fn.__name__)
def test_what_would_have_left_is_the_functions_own(gate: Gate, fn: Callable[[Go], object]) -> None:
    outcome = run_noted(gate, fn)
    assert isinstance(outcome, Raised)
    assert outcome.exception is ERROR


@needs_table
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_an_exit_is_found_behind_what_the_abort_raises(gate: Gate, kind: type[BaseException]) -> None:
    def fn(go: Go) -> None:
        try:
            raise kind
        finally:
            try:
                wait(go)
            except BaseException:
                raise RuntimeError("Connection closed by peer") from None

    outcome = run_noted(gate, fn)
    assert isinstance(outcome, Raised)
    assert isinstance(outcome.exception, kind)


@needs_table
@pytest.mark.parametrize("noted", [True, False])
def test_an_exit_in_answer_to_an_error_of_a_collective(gate: Gate, noted: bool) -> None:
    """Its clean-up waits: it is the error's place that it has taken."""
    errors: list[BaseException] = []

    def fn(go: Go) -> None:
        try:
            try:
                HashStore().wait(["key"], timedelta(milliseconds=1))
            except Exception as error:
                errors.append(error)
                sys.exit(1)
        finally:
            wait(go)

    outcome = run_noted(gate, fn) if noted else run_unnoted(gate, fn)
    assert outcome == (Raised(errors[0]) if noted else Interrupted("SystemExit: 1"))


def swallows(go: Go) -> None:
    try:
        raise ERROR
    except ArithmeticError:
        wait(go)


def suppressed(go: Go) -> None:
    with contextlib.suppress(ArithmeticError):
        in_finally(go)


def waits_for_a_callback(go: Go) -> None:
    """What leaves `__del__` Python drops."""

    class Thing:
        def __del__(self) -> None:
            in_finally(go)

    Thing()
    threading.Event().wait()


def closes_a_generator(go: Go) -> None:
    """As a loop that is left early does."""

    def batches() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            wait(go)

    source = batches()
    next(source)
    source.close()  # type: ignore[attr-defined]


class Loader:
    """Its end is what a loop waits for."""

    def __init__(self, go: Go) -> None:
        self.go = go

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> int:
        try:
            raise StopIteration
        finally:
            wait(self.go)

    @property
    def extra(self) -> int:
        try:
            raise AttributeError
        finally:
            wait(self.go)

    def __getitem__(self, index: int) -> int:
        try:
            raise IndexError
        finally:
            wait(self.go)


def comes_to_the_end(go: Go) -> None:
    for _ in Loader(go):
        pass


def comes_to_the_end_of_a_sequence(go: Go) -> None:
    list(reversed([1, *map(Loader(go).__getitem__, [0])]))


def asks_for_an_attribute(go: Go) -> None:
    hasattr(Loader(go), "extra")


ENDINGS = [closes_a_generator, comes_to_the_end, comes_to_the_end_of_a_sequence, asks_for_an_attribute]


@pytest.mark.parametrize("fn", ENDINGS, ids=lambda fn: fn.__name__)
def test_what_python_itself_may_drop_does_not_count(gate: Gate, fn: Callable[[Go], object]) -> None:
    assert run_noted(gate, fn) == Interrupted()


@pytest.mark.parametrize("fn", [closes_a_generator, comes_to_the_end], ids=lambda fn: fn.__name__)
def test_an_end_is_no_failure_where_nobody_makes_progress(gate: Gate, fn: Callable[[Go], object]) -> None:
    assert run_noted(gate, fn, stood_still=True) == Interrupted()


@pytest.mark.parametrize("fn", [swallows, suppressed], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("stood_still", [False, True])
def test_what_may_be_swallowed_counts_where_nobody_makes_progress(
    gate: Gate, fn: Callable[[Go], object], stood_still: bool
) -> None:
    outcome = run_noted(gate, fn, stood_still)
    assert outcome == (Raised(ERROR) if stood_still else Interrupted())


def test_what_leaves_a_destructor_does_not_count(gate: Gate) -> None:
    assert run_noted(gate, waits_for_a_callback) == Interrupted()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs groups")
def test_in_except_star(gate: Gate) -> None:
    """The interruption leaves in a group, beside what is in flight."""
    made: dict[str, Any] = {"wait": wait}
    text = "def fn(go):\n try:\n  raise group\n except* ZeroDivisionError:\n  wait(go)\n"
    made["group"] = BaseExceptionGroup("all", [ERROR])  # type: ignore[name-defined]  # noqa: F821
    exec(text, made)
    outcome = run_noted(gate, made["fn"], stood_still=True)
    assert isinstance(outcome, Raised)
    assert ERROR in outcome.exception.exceptions  # type: ignore[attr-defined]


def test_an_error_that_was_swallowed_meanwhile_does_not_count(gate: Gate) -> None:
    """The wait ended by itself."""
    noted, over = threading.Event(), threading.Event()

    def meanwhile() -> None:
        noted.set()
        over.wait()

    def fn(go: Go) -> None:
        try:
            raise ERROR
        except ArithmeticError:
            go()
            noted.wait()
        over.set()
        threading.Event().wait()

    assert run_noted(gate, fn, stood_still=True, meanwhile=meanwhile) == Interrupted()


def test_an_exit_that_may_be_swallowed_does_not_count(gate: Gate) -> None:
    def fn(go: Go) -> None:
        try:
            raise SystemExit(2)
        except SystemExit:
            gone.append(sys.exc_info()[1])
            wait(go)

    gone: list[Any] = []
    # found on its way out all the same: so it is the user's, as ever
    outcome = run_noted(gate, fn, stood_still=True)
    assert isinstance(outcome, Raised)
    assert outcome.exception is gone[0]


def test_what_is_handled_around_the_call_is_not_the_functions(gate: Gate) -> None:
    try:
        raise KeyError
    except KeyError:
        assert run_noted(gate, wait, stood_still=True) == Interrupted()


def test_nothing_is_seen_outside_of_the_function() -> None:
    found: list[object] = []
    try:
        raise KeyError
    except KeyError:
        thread = threading.Thread(target=lambda: found.append(in_flight.look()))
        thread.start()
        thread.join()
    assert found == [None]


def test_a_return_is_a_return(gate: Gate) -> None:
    def fn(go: Go) -> str:
        with contextlib.suppress(BaseException):
            in_finally(go)
        return "late"

    assert run_noted(gate, fn, stood_still=True) == Returned("late")


class Thing:
    """What a frame holds."""


def test_nothing_is_kept(gate: Gate) -> None:
    refs: list[Any] = []

    def fn(go: Go) -> None:
        thing = Thing()
        refs.append(weakref.ref(thing))
        try:
            raise KeyError(thing)
        except KeyError:
            wait(go)

    assert run_noted(gate, fn) == Interrupted()
    assert refs[0]() is None
