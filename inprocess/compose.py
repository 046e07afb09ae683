"""`Compose`: several hooks as one. It only keeps the parts in order; hooks of both generations may be mixed.

The library never calls a composed hook as a whole: `hooks` adapts every part by its own signature and chains them,
which is why a part that takes `(state)` may stand beside one that takes `(state, exception)`. Calling the object
directly, as tests and other libraries do, works for parts that take the same arguments; there a part that returns None
is as likely a forgotten ``return``, so it is warned of.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

from .exception import OptionError

__all__ = ["Compose"]

_KEPT = "the part that runs next gets what this one got. Return the value, changed or not"


class Compose:
    """``Compose(a, b, c)`` runs ``c``, then ``b``, then ``a``, each with what the one before returned.

    The result is an instance of the lowest class that all parts have in common, so
    ``isinstance(Compose(ShiftRanks(), MaxActiveWorldSize(2)), RankAssignment)`` is true. Plain callables are fine too.
    A part that returns None leaves the value as it is. Called directly, the composed object warns of that
    (UserWarning), and returns None where the part that ran last did.

    Args:
        parts: one or more callables; a part that is itself a ``Compose`` counts as its parts.

    Raises:
        OptionError: there is no part, or one cannot be called.
    """

    #: the parts as written: the last one runs first
    parts: tuple[Callable[..., Any], ...]

    def __new__(cls, *parts: Callable[..., Any]) -> Compose:
        flat = _flatten(parts)
        ancestor = _common_ancestor(tuple(type(part) for part in flat))
        made = object.__new__(cls if ancestor is None else _class_for(ancestor))
        made.parts = flat
        return made

    def __init__(self, *parts: Callable[..., Any]) -> None:
        """Nothing: the common ancestor's own __init__ must not run, its arguments belong to the parts."""

    def __call__(self, *args: Any) -> Any:
        """Run the parts, last first. A tuple returned by a part replaces all arguments, anything else the first one.

        A part that returns None is warned of, where it was given anything: the next one gets what this one got.
        """
        single, result = True, None
        for part in reversed(self.parts):
            result = part(*args)
            if result is None:
                if any(arg is not None for arg in args):
                    warnings.warn(f"{part!r} in a Compose returned None: {_KEPT}", UserWarning, stacklevel=2)
            elif isinstance(result, tuple) and len(args) > 1:
                args, single = result, False
            else:
                args = (result, *args[1:])
        if result is None:
            return None
        return args[0] if single else args

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.parts))})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Compose, self.parts  # the class is made at run time, so pickle cannot find it by name


def _flatten(parts: tuple[Callable[..., Any], ...]) -> tuple[Callable[..., Any], ...]:
    flat: list[Callable[..., Any]] = []
    for part in parts:
        if isinstance(part, type):
            raise OptionError(f"Compose got the class {part.__name__}: pass an instance, {part.__name__}(...)")
        if not callable(part):
            raise OptionError(f"Compose got {part!r}, which cannot be called: pass hooks, or functions")
        flat.extend(part.parts if isinstance(part, Compose) else (part,))
    if not flat:
        raise OptionError("Compose() needs at least one part: pass a hook, or leave the option out")
    return tuple(flat)


def _common_ancestor(classes: tuple[type, ...]) -> type | None:
    """The first class in the method resolution order of the first part that all parts share and that can be a base."""
    for candidate in classes[0].__mro__:
        heap_type = candidate.__flags__ & (1 << 9)  # false for object, function and most other classes written in C
        ours = heap_type and not _made_in_c(candidate) and candidate.__module__ not in ("abc", "typing")
        if ours and all(issubclass(each, candidate) for each in classes):
            return candidate
    return None


def _made_in_c(candidate: type) -> bool:
    """Whether only a constructor written in C may make it, as that of ``functools.partial``."""
    return any(isinstance(vars(each).get("__new__"), types.BuiltinFunctionType) for each in candidate.__mro__[:-1])


@functools.cache
def _class_for(ancestor: type) -> type[Compose]:
    def body(namespace: dict[str, Any]) -> None:
        namespace["__module__"] = __name__
        for name in getattr(ancestor, "__abstractmethods__", ()):
            if name != "__call__":
                namespace[name] = _only_in_parts(name)

    return types.new_class("Compose", (Compose, ancestor), exec_body=body)


def _only_in_parts(name: str) -> Callable[..., Any]:
    def method(self: Compose, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} is a method of the parts, not of {self!r}")

    return method
