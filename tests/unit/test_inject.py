"""Who receives the CallWrapper: by annotation, in every form, and nobody else."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Optional, TypeVar, Union

import pytest

from inprocess.call.injection import Injector

if TYPE_CHECKING:
    from nowhere import Unknown  # noqa: F401 - used in strings only


class CallWrapper:
    """Stands for the real one: the injector is told the class."""


CALL = CallWrapper()
T = TypeVar("T")


def as_objects(annotation: object) -> Callable[..., Any]:
    def fn(x, call=None):
        return x, call

    fn.__annotations__ = {"call": annotation}
    return fn


def run(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = Injector(fn, CallWrapper).bind(args, kwargs, CALL)
    return fn(*args, **kwargs)


ASKING = [
    CallWrapper,
    Optional[CallWrapper],  # noqa: UP045 - the form under test
    Union[CallWrapper, None],  # noqa: UP007
    CallWrapper | None,
    None | CallWrapper,
    Optional["CallWrapper"],
    "CallWrapper",
    "Optional[CallWrapper]",
    "CallWrapper | None",
    "Union[None, CallWrapper]",
    "'CallWrapper'",
    "Optional['CallWrapper']",
]


class Odd:
    """An annotation that cannot be compared, nor tested for truth."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __bool__(self) -> bool:
        raise RuntimeError

    __hash__ = None


NOT_ASKING = [
    object,
    Any,
    Callable,
    Callable[..., CallWrapper],
    type[CallWrapper],
    list[int],
    list[CallWrapper],
    T,
    None,
    int,
    Optional[int],  # noqa: UP045
    Union[CallWrapper, int],  # noqa: UP007
    Annotated[CallWrapper, "note"],
    type("CallWrapper", (), {}),
    type("Sub", (CallWrapper,), {}),
    Odd(),
    "Unknown",
    "Unknown | None",
    "no.such.name",
    "not python at all",
    "1 / 0",
    "",
    "object",
    "list[Unknown]",
    "T",
    3,
]


@pytest.mark.parametrize("annotation", ASKING, ids=repr)
def test_forms_that_ask(annotation: object) -> None:
    fn = as_objects(annotation)
    assert run(fn, 1) == (1, CALL)
    assert run(fn, x=1) == (1, CALL)
    assert run(fn, 1, None) == (1, None)
    assert run(fn, 1, call="own") == (1, "own")


@pytest.mark.parametrize("annotation", NOT_ASKING, ids=lambda annotation: type(annotation).__name__)
def test_all_other_annotations_are_left_alone(annotation: object) -> None:
    assert run(as_objects(annotation), 1) == (1, None)


def test_no_annotation() -> None:
    assert run(lambda x, call=None: (x, call), 1) == (1, None)


def named(x, inprocess_call_wrapper=None):
    return x, inprocess_call_wrapper


ANY_ANNOTATION = [*ASKING, *NOT_ASKING, Optional[Any], "Optional[Any]", "Any"]  # noqa: UP045 - Megatron-LM's


@pytest.mark.parametrize("annotation", ANY_ANNOTATION, ids=lambda annotation: type(annotation).__name__)
def test_one_name_asks_whatever_its_annotation(annotation: object) -> None:
    def fn(x, inprocess_call_wrapper=None):
        return x, inprocess_call_wrapper

    fn.__annotations__ = {"inprocess_call_wrapper": annotation}
    assert run(fn, 1) == run(named, 1) == (1, CALL)
    assert run(fn, 1, None) == run(fn, 1, inprocess_call_wrapper=None) == (1, None)
    assert run(functools.partial(fn, inprocess_call_wrapper="own"), 1) == (1, "own")


def test_one_name_in_other_places() -> None:
    def required(inprocess_call_wrapper, x):
        return inprocess_call_wrapper, x

    def keyword(x, *, inprocess_call_wrapper: Any):
        return inprocess_call_wrapper, x

    def together(call: CallWrapper, inprocess_call_wrapper):
        return call, inprocess_call_wrapper

    assert run(required, 1) == run(required, x=1) == run(keyword, 1) == (CALL, 1)
    assert run(together) == (CALL, CALL)
    assert run(decorated(named), 1) == (1, CALL)


@pytest.mark.parametrize(
    "name",
    ["inprocess_call", "call_wrapper", "_inprocess_call_wrapper", "inprocess_call_wrapper_", "INPROCESS_CALL_WRAPPER"],
)
def test_no_other_name_asks(name: str) -> None:
    fn = eval(f"lambda x, {name}: ({name},)")
    fn.__annotations__ = {name: Optional[Any]}  # noqa: UP045
    assert Injector(fn, CallWrapper).bind((1,), {}, CALL) == ((1,), {})


def test_the_name_of_what_takes_the_rest_does_not_ask() -> None:
    def positions(*inprocess_call_wrapper):
        return inprocess_call_wrapper

    def keywords(**inprocess_call_wrapper):
        return inprocess_call_wrapper

    assert run(positions, 1) == (1,)
    assert run(keywords, x=1) == {"x": 1}


PLAIN = [CallWrapper, "CallWrapper", "'CallWrapper'"]


@pytest.mark.parametrize("annotation", [*ASKING, *NOT_ASKING], ids=lambda annotation: type(annotation).__name__)
def test_plain_annotations_only(annotation: object) -> None:
    is_plain = any(annotation is each for each in PLAIN)
    injector = Injector(as_objects(annotation), CallWrapper, plain_only=True)
    assert injector.is_asked is is_plain
    assert injector.bind((1,), {}, CALL) == ((1,), {"call": CALL} if is_plain else {})


def test_the_name_does_not_ask_where_only_plain_annotations_do() -> None:
    assert not Injector(named, CallWrapper, plain_only=True).is_asked


def required(call: CallWrapper):
    return call


def keyword_only(x, *, call: CallWrapper):
    return x, call


def positional_only(x, call: CallWrapper, /):
    return x, call


def positional_only_after_default(x, y=2, call: CallWrapper = None, /, *, z=3):
    return x, y, call, z


def first(call: CallWrapper, x, y=0):
    return call, x, y


def between(x, call: CallWrapper, *rest):
    return x, call, rest


def twice(one: CallWrapper, x, *, two: Optional[CallWrapper] = None):  # noqa: UP045
    return one, x, two


def collecting(*calls: CallWrapper, **more: CallWrapper):
    return calls, more


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "result"),
    [
        (required, (), {}, CALL),
        (required, ("own",), {}, "own"),
        (keyword_only, (1,), {}, (1, CALL)),
        (keyword_only, (1,), {"call": None}, (1, None)),
        (positional_only, (1,), {}, (1, CALL)),
        (positional_only, (1, 2), {}, (1, 2)),
        (positional_only_after_default, (1,), {"z": 4}, (1, 2, CALL, 4)),
        (positional_only_after_default, (1, 5), {}, (1, 5, CALL, 3)),
        (first, (), {"x": 1}, (CALL, 1, 0)),
        (first, (1,), {}, (CALL, 1, 0)),
        (first, (1, 2), {}, (1, 2, 0)),
        (first, ("own", 1), {"y": 2}, ("own", 1, 2)),
        (between, (1,), {}, (1, CALL, ())),
        (between, (1, 2, 3), {}, (1, 2, (3,))),
        (twice, (1,), {}, (CALL, 1, CALL)),
        (collecting, (), {}, ((), {})),
    ],
)
def test_kinds_of_parameters(fn: Callable[..., Any], args: tuple, kwargs: dict, result: object) -> None:
    assert run(fn, *args, **kwargs) == result


def test_a_call_that_does_not_fit_is_left_to_the_function() -> None:
    for args, kwargs in (((), {}), ((1, 2, 3), {}), ((1,), {"z": 1})):
        with pytest.raises(TypeError):
            run(keyword_only, *args, **kwargs)
    with pytest.raises(TypeError):
        run(positional_only)


def decorated(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


class Trainer:
    def method(self, x, call: CallWrapper = None):
        return x, call

    @classmethod
    def of_class(cls, x, call: CallWrapper = None):
        return x, call

    @staticmethod
    def static(x, call: Optional[CallWrapper] = None):  # noqa: UP045
        return x, call

    def __call__(self, x, call: CallWrapper = None):
        return x, call


def plain(x, call: CallWrapper = None):
    return x, call


def given_first(y, x, call: CallWrapper = None):
    return x, call


@pytest.mark.parametrize(
    "fn",
    [
        plain,
        decorated(plain),
        decorated(decorated(plain)),
        functools.lru_cache(plain),
        functools.partial(given_first, 0),
        functools.partial(decorated(given_first), 0),
        functools.partial(functools.partial(given_first, y=0)),
        decorated(functools.partial(given_first, 0)),
        Trainer().method,
        Trainer.of_class,
        Trainer.static,
        Trainer(),
        functools.partial(Trainer().method),
        decorated(Trainer().method),
    ],
    ids=lambda fn: type(fn).__name__,
)
def test_through_layers(fn: Callable[..., Any]) -> None:
    if isinstance(fn, functools.partial) and fn.keywords:
        assert run(fn, x=1) == (1, CALL)
    else:
        assert run(fn, 1) == (1, CALL)


def test_what_a_partial_was_given_wins() -> None:
    assert run(functools.partial(plain, call="own"), 1) == (1, "own")
    assert run(functools.partial(functools.partial(plain, call="own")), 1) == (1, "own")
    assert run(functools.partial(plain, 1, "own")) == (1, "own")
    assert run(decorated(functools.partial(plain, call="own")), 1) == (1, "own")


def test_a_decorator_that_takes_less_is_left_alone() -> None:
    @functools.wraps(plain)
    def narrow(x):
        return plain(x)

    assert run(narrow, 1) == (1, None)


def test_names_of_a_closure_and_of_an_import_for_type_checkers() -> None:
    Alias = CallWrapper

    def closure(call: Alias = None, use=Alias):
        return call, Alias

    assert run(closure) == (CALL, CallWrapper)
    foreign = types.FunctionType(plain.__code__, {}, "foreign", (None,))  # its module knows no CallWrapper
    foreign.__annotations__ = {"call": "CallWrapper"}
    assert run(foreign, 1) == (1, CALL)
    foreign.__annotations__ = {"call": "Optional[CallWrapper]"}
    assert run(foreign, 1) == (1, CALL)


def test_another_class_of_the_same_name_is_not_ours() -> None:
    other = types.FunctionType(plain.__code__, {"CallWrapper": int}, "other", (None,))
    other.__annotations__ = {"call": "CallWrapper"}
    assert run(other, 1) == (1, None)


def test_no_signature_is_no_error() -> None:
    assert run(dict, a=1) == {"a": 1}
    assert run(max, 1, 2) == 2

    class Broken:
        __signature__ = 3

        def __call__(self, x):
            return x

    assert run(Broken(), 1) == 1


def test_a_decorator_that_wraps_itself() -> None:
    def fn(x):
        return x

    fn.__wrapped__ = fn
    assert run(fn, 1) == 1


def test_what_the_caller_passes_is_not_changed() -> None:
    kwargs = {"x": 1}
    assert Injector(plain, CallWrapper).bind((), kwargs, CALL) == ((), {"x": 1, "call": CALL})
    assert kwargs == {"x": 1}
