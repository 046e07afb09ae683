"""Compose: order, what class it is, and what it passes from part to part."""

from __future__ import annotations

import abc
import functools
import operator
import pickle

import pytest

from inprocess.compose import Compose
from inprocess.exception import OptionError
from inprocess.finalize import Finalize, ThreadedFinalize
from inprocess.health_check import CudaHealthCheck, FaultCounter, HealthCheck
from inprocess.initialize import RetryController


class Base(abc.ABC):
    @abc.abstractmethod
    def __call__(self, value): ...

    @abc.abstractmethod
    def other(self): ...


class Add(Base):
    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, value: str) -> str:
        return value + self.text

    def other(self) -> None: ...


class AddTwice(Add):
    def __call__(self, value: str) -> str:
        return value + self.text * 2


class Other(Base):
    def __call__(self, value: str) -> str:
        return value

    def other(self) -> None: ...


def test_the_last_part_runs_first() -> None:
    assert Compose(Add("a"), Add("b"), Add("c"))("") == "cba"
    assert Compose(Compose(Add("a"), Add("b")), Add("c"))("") == "cba"
    assert Compose(lambda value: value + "f", Add("a"))("") == "af"


def nothing(*args: object) -> None:
    """A part that forgets to return."""


def test_none_leaves_the_value_and_is_warned_of() -> None:
    for parts, times in (((Add("a"), nothing), 1), ((Add("a"), nothing, nothing), 2)):
        with pytest.warns(UserWarning, match=r"nothing .* returned None: the part that runs next gets") as told:
            assert Compose(*parts)("x") == "xa"
        assert len(told) == times
        assert {warning.filename for warning in told} == {__file__}


def test_none_of_the_part_that_ran_last_is_the_result() -> None:
    seen = []
    with pytest.warns(UserWarning, match="returned None"):
        assert Compose(seen.append, Add("a"))("x") is None
    assert seen == ["xa"]
    with pytest.warns(UserWarning, match="returned None"):
        assert Compose(nothing, lambda state, error: state + 1)(1, "error") is None


def test_where_nothing_is_passed_nothing_is_missed() -> None:
    """Warnings are errors here."""
    assert Compose(nothing, nothing)() is None
    assert Compose(nothing)(None) is None
    assert Compose(lambda: "a")() == "a"


def test_falsy_values_are_values() -> None:
    assert Compose(lambda value: value + 1, lambda value: 0)(5) == 1
    assert Compose(lambda value: False)(5) is False


def test_two_arguments() -> None:
    seen = []

    def first(state, exception):
        seen.append((state, exception))
        return state + 1

    assert Compose(first, first)(1, "error") == 3
    assert seen == [(1, "error"), (2, "error")]
    with pytest.warns(UserWarning, match="returned None"):
        assert Compose(lambda state, gone: (state + 1, gone), lambda state, gone: None)(1, [2]) == (2, [2])


@pytest.mark.parametrize(
    ("parts", "is_a", "is_no"),
    [
        ((Add("a"), AddTwice("b")), Add, AddTwice),
        ((AddTwice("a"), AddTwice("b")), AddTwice, Finalize),
        ((CudaHealthCheck(1), FaultCounter(1)), HealthCheck, FaultCounter),
        ((ThreadedFinalize(1, print),), ThreadedFinalize, HealthCheck),
        ((RetryController(3), FaultCounter(1)), Compose, HealthCheck),
        ((Add("a"), print), Compose, Add),
        ((print, len), Compose, Add),
        ((lambda v: v, functools.partial(int)), Compose, Add),
        ((functools.partial(int), functools.partial(int)), Compose, functools.partial),
        ((operator.itemgetter(0),), Compose, operator.itemgetter),
        ((functools.cache(abs),), Compose, Add),
        ((Compose(Add("a"), AddTwice("b")), AddTwice("b")), Add, AddTwice),
    ],
)
def test_lowest_common_ancestor(parts: tuple, is_a: type, is_no: type) -> None:
    composed = Compose(*parts)
    assert isinstance(composed, is_a)
    assert isinstance(composed, Compose)
    assert not isinstance(composed, is_no)


def test_abstract_methods_belong_to_the_parts() -> None:
    composed = Compose(Add("a"), Other())
    assert isinstance(composed, Base)
    with pytest.raises(NotImplementedError, match="other is a method of the parts"):
        composed.other()


def test_pickle_and_repr() -> None:
    composed = pickle.loads(pickle.dumps(Compose(RetryController(3), RetryController(4))))
    assert [part.max_iterations for part in composed.parts] == [3, 4]
    assert isinstance(composed, RetryController)
    assert repr(Compose(len, print)).startswith("Compose(<built-in function len>")


@pytest.mark.parametrize(("parts", "words"), [((), "at least one"), ((3,), "got 3"), ((Add,), "the class Add")])
def test_wrong_parts(parts: tuple, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Compose(*parts)
