"""Handing the ``CallWrapper`` to the wrapped function, where a parameter asks for it by its annotation or its name."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import typing
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Injector"]

Args = tuple[Any, ...]
#: the parameter of Megatron-LM's ``pretrain``, which it annotates ``Optional[Any]`` so as to need no import
CALL_NAME = "inprocess_call_wrapper"


class Injector:
    """Puts the CallWrapper where a function's annotations ask for it.

    Asked for by ``CallWrapper``, ``Optional[CallWrapper]`` and ``CallWrapper | None``, as objects and as strings,
    through decorators that keep ``__wrapped__``, ``functools.partial``, methods and objects with ``__call__``. Every
    other annotation is left alone, and so is one that cannot be resolved; only a parameter named
    ``inprocess_call_wrapper`` asks whatever its annotation. A value that the caller passes wins.

    Args:
        fn: the function.
        call_type: the class of the CallWrapper, or several.
        plain_only: only the annotation ``CallWrapper`` asks, for a function that takes None for "not restarted".
    """

    def __init__(self, fn: Callable[..., Any], call_type: type | tuple[type, ...], *, plain_only: bool = False) -> None:
        call_types = call_type if isinstance(call_type, tuple) else (call_type,)
        self._signature = _signature(fn)
        names = _resolver(fn, call_types)
        given = _given_by_partial(fn)
        accepted = _accepts(fn)

        def asks(parameter: inspect.Parameter) -> bool:
            if plain_only:
                return _is_one_of(call_types, _resolved(parameter.annotation, names))
            return parameter.name == CALL_NAME or _asks_for(parameter.annotation, call_types, names)

        self._wanted = tuple(
            p
            for p in self._signature.parameters.values()
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in given and accepted(p) and asks(p)
        )

    @property
    def is_asked(self) -> bool:
        """Whether any parameter asks for it."""
        return bool(self._wanted)

    def forgotten(self) -> str:
        """The parameter that looks as if it should ask, where none does; empty where there is none either."""
        if self.is_asked:
            return ""
        bare = (p.name for p in self._signature.parameters.values() if p.annotation is p.empty and p.default is None)
        return next((name for name in bare if name in ("call", "call_wrapper")), "")

    def bind(self, args: Args, kwargs: Mapping[str, Any], call: object) -> tuple[Args, dict[str, Any]]:
        """(args, kwargs) with `call` added where it is asked for and not passed. Never an error: a call that
        does not fit the signature is left for the function itself to refuse."""
        if not self._wanted:
            return args, dict(kwargs)
        added = self._add(args, kwargs, call)
        if not _fits(self._signature, *added):
            inserted = self._add(self._insert(args, call), kwargs, call)
            if _fits(self._signature, *inserted):
                return inserted
        return added

    def _add(self, args: Args, kwargs: Mapping[str, Any], call: object) -> tuple[Args, dict[str, Any]]:
        """Pass it by name; a positional-only parameter is reached with the defaults of those before it."""
        parameters = list(self._signature.parameters.values())
        keywords = dict(kwargs)
        for wanted in self._wanted:
            index = parameters.index(wanted)
            if wanted.kind is wanted.KEYWORD_ONLY or index >= len(args):
                if wanted.kind is not wanted.POSITIONAL_ONLY:
                    keywords.setdefault(wanted.name, call)
                elif all(p.default is not p.empty for p in parameters[len(args) : index]):
                    args = (*args, *(p.default for p in parameters[len(args) : index]), call)
        return args, keywords

    def _insert(self, args: Args, call: object) -> Args:
        """Put it between the positional arguments, for ``def f(call: CallWrapper, x)`` called as ``f(x)``."""
        values = list(args)
        for index, parameter in enumerate(self._signature.parameters.values()):
            if parameter in self._wanted and parameter.kind is not parameter.KEYWORD_ONLY and index <= len(values):
                values.insert(index, call)
        return tuple(values)


def _fits(signature: inspect.Signature, args: Args, kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _signature(fn: Callable[..., Any], follow_wrapped: bool = True) -> inspect.Signature:
    """The signature; when there is none to be had, one that takes anything."""
    options: dict[str, Any] = {"follow_wrapped": follow_wrapped}
    if sys.version_info >= (3, 14):  # there the default evaluates annotations, and fails on unknown names
        import annotationlib  # noqa: PLC0415 - exists only there

        options["annotation_format"] = annotationlib.Format.FORWARDREF
    try:
        return inspect.signature(fn, **options)
    except Exception:  # builtins without a signature; broken __signature__ of foreign decorators
        return inspect.signature(lambda *args, **kwargs: None)


def _accepts(fn: Callable[..., Any]) -> Callable[[inspect.Parameter], bool]:
    """Whether the outermost decorator lets a parameter through: it may have fewer than what it wraps."""
    parameters = _signature(fn, follow_wrapped=False).parameters
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    any_position = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())

    def accepts(parameter: inspect.Parameter) -> bool:
        by_position = parameter.kind is parameter.POSITIONAL_ONLY
        return parameter.name in parameters or (any_position if by_position else any_keyword)

    return accepts


def _given_by_partial(fn: object) -> set[str]:
    """Names that a functools.partial, at any depth, was given a value for."""
    given: set[str] = set()
    for layer in _layers(fn):
        if isinstance(layer, functools.partial):
            given |= set(layer.keywords)
    return given


def _layers(fn: object) -> list[object]:
    """`fn` and what it wraps, down to the plain function whose annotations count."""
    layers = [fn]
    while len(layers) < 100:  # a decorator may wrap itself
        top = layers[-1]
        if isinstance(top, functools.partial):
            inner: object = top.func
        elif inspect.ismethod(top):
            inner = top.__func__
        elif hasattr(top, "__wrapped__"):
            inner = top.__wrapped__
        elif not inspect.isroutine(top) and not isinstance(top, type) and callable(top):
            inner = type(top).__call__  # an object of a class with __call__
        else:
            break
        layers.append(inner)
    return layers


def _resolver(fn: object, call_types: tuple[type, ...]) -> Mapping[str, Any]:
    """The names an annotation may use: the closure's, the module's, and ours for imports only type checkers see."""
    inner: Any = _layers(fn)[-1]
    code, cells = getattr(inner, "__code__", None), getattr(inner, "__closure__", None) or ()
    closure: dict[str, Any] = {}
    for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=False):
        try:
            closure[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    packages = {each.__module__.partition(".")[0] for each in call_types}
    ours: dict[str, Any] = {name: sys.modules[name] for name in packages if name in sys.modules}
    ours.update({each.__name__: each for each in call_types}, Optional=typing.Optional, Union=typing.Union)
    return ChainMap(closure, getattr(inner, "__globals__", {}), ours)


def _asks_for(annotation: Any, call_types: tuple[type, ...], names: Mapping[str, Any]) -> bool:
    annotation = _resolved(annotation, names)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        asked = [_resolved(each, names) for each in typing.get_args(annotation)]
        asked = [each for each in asked if each is not type(None)]
        return bool(asked) and all(_is_one_of(call_types, each) for each in asked)
    return _is_one_of(call_types, annotation)


def _is_one_of(call_types: tuple[type, ...], annotation: Any) -> bool:
    return any(annotation is known for known in call_types)  # by identity: annotations may have any __eq__


def _resolved(annotation: Any, names: Mapping[str, Any]) -> Any:
    """What a string stands for; itself when it cannot be resolved. A string may hold another string."""
    for _ in range(3):
        text = getattr(annotation, "__forward_arg__", annotation)
        if not isinstance(text, str):
            return annotation
        try:
            annotation = eval(text, {}, names)
        except Exception:
            return None
    return annotation
