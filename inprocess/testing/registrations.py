"""What a program registers with Python and torch for the rest of the process: hooks, handlers, exit functions.

Each kind is counted when the function is entered. Who registered the last one is noted when that happens.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from inprocess.exception import signal_name

from .patching import change

__all__ = ["EXTENDED", "REPLACED", "Key", "Registrations", "whole"]

#: of a value in a dict, in a tuple; empty for the dict itself, and for whatever is none
Key = tuple[Any, ...]

#: what registers -> the names of the functions, by the place that has them
_TORCH = {
    "torch.nn.Module": (
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ),
    "torch.Tensor": ("register_hook", "register_post_accumulate_grad_hook"),
    "torch.nn.modules.module": (
        "register_module_forward_hook",
        "register_module_forward_pre_hook",
        "register_module_full_backward_hook",
        "register_module_full_backward_pre_hook",
    ),
    "torch.optim.optimizer": ("register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"),
}
_GLOBAL_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
_MODULE_HOOKS = tuple(f"_{name}" for name in _GLOBAL_HOOKS)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
ALL_MODULES, ALL_OPTIMIZERS = "hooks of all modules", "hooks of all optimizers"
EXIT, LOGGERS = "functions registered with atexit", "handlers of loggers"
#: a list of Python's -> what its items are
_LISTS = {"sys.path": "entries", "sys.meta_path": "importers", "gc.callbacks": "functions"}
_EXCEPTHOOKS = ("sys.excepthook", "threading.excepthook")
#: what `functools.lru_cache` makes. Anything may answer to the name `cache_info`: mocks, and dicts with attributes
_CACHED = type(functools.lru_cache(len))
#: kind -> the name to which the program adds something, or gives another value: no function registers these
EXTENDED = {f"{items} in {name}": name.rpartition(".")[2] for name, items in _LISTS.items()}
REPLACED = {f"different values of {name}": name.rpartition(".")[2] for name in _EXCEPTHOOKS}


class Registrations:
    """``made``: kind -> the line of the program that registered the last one; ``where`` tells the line."""

    def __init__(self, where: Callable[[], str]) -> None:
        self._where = where
        self.made: dict[str, str] = {}
        #: id of a module or tensor -> the same for its hooks
        self._hooked: dict[int, str] = {}
        #: name -> all different values that it has had
        self._seen: dict[str, list[Any]] = {}

    def watch(self) -> None:
        """Note from now on who registers. Before the program is imported."""
        self._note(atexit, "register", lambda args: EXIT)
        self._note(logging.Logger, "addHandler", lambda args: LOGGERS)
        self._note(signal, "signal", lambda args: _signal(args[0]))
        kinds: dict[str, Callable[[tuple[Any, ...]], str]] = {
            "torch.nn.modules.module": lambda args: ALL_MODULES,
            "torch.optim.optimizer": lambda args: ALL_OPTIMIZERS,
        }
        for owner, names in _TORCH.items():
            place = _find(owner)
            for name in names:
                self._note(place, name, kinds.get(owner, self._note_hooked))

    def sizes(self, variables: Iterator[tuple[str, Key, Any]]) -> Iterator[tuple[str, int]]:
        """How many there are of each kind; ``variables``: names, keys (see `whole`) and values of what the program
        keeps."""
        yield EXIT, atexit._ncallbacks()
        loggers = [logging.root, *logging.root.manager.loggerDict.values()]
        yield LOGGERS, sum(len(each.handlers) for each in loggers if isinstance(each, logging.Logger))
        for name, items in _LISTS.items():
            yield f"{items} in {name}", len(_find(name))
        yield from self._different()
        module, optimizer = _find("torch.nn.modules.module"), _find("torch.optim.optimizer")
        if module is not None and optimizer is not None:
            yield ALL_MODULES, sum(len(getattr(module, f"_global_{name}")) for name in _GLOBAL_HOOKS)
            yield ALL_OPTIMIZERS, sum(len(getattr(optimizer, f"_global_optimizer_{x}_hooks")) for x in ("pre", "post"))
        hookable = tuple(found for found in map(_find, ("torch.nn.Module", "torch.Tensor")) if found is not None)
        for name, key, value in variables:
            if type(value) is _CACHED:
                kind = f"results in the cache of {whole(name, key)}"
                yield kind, value.cache_info().currsize
                self.made[kind] = _defined(value)
            elif issubclass(type(value), hookable):  # `isinstance` would ask what stands in for one
                owners = _with_hooks(value)
                kind = f"hooks of {whole(name, key)}"
                yield kind, sum(map(_hooks, owners))
                self.made.update((kind, self._hooked[id(each)]) for each in owners if id(each) in self._hooked)

    def _different(self) -> Iterator[tuple[str, int]]:
        """Handlers of signals and hooks of the interpreter: how many different ones there have been so far."""
        now: dict[str, Any] = {_signal(number): signal.getsignal(number) for number in signal.valid_signals()}
        now |= {f"different values of {name}": _find(name) for name in _EXCEPTHOOKS}
        for name, value in now.items():
            seen = self._seen.setdefault(name, [])
            if value not in seen:
                seen.append(value)
            yield name, len(seen)

    def _note_hooked(self, args: tuple[Any, ...]) -> str:
        self._hooked[id(args[0])] = self._where()
        return "hooks"

    def _note(self, owner: Any, name: str, kind_of: Callable[[tuple[Any, ...]], str]) -> None:
        def noted(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.made[kind_of(args)] = self._where()
            return original(*args, **kwargs)

        if hasattr(owner, name):
            change(owner, name, noted)


def whole(name: str, key: Key) -> str:
    """``train.MODELS['a']``."""
    return name + "".join(f"[{each!r}]" for each in key)


def _defined(cached: Any) -> str:
    """Where a function with a cache is defined."""
    code = getattr(getattr(cached, "__wrapped__", None), "__code__", None)
    return f"{os.path.relpath(code.co_filename)}:{code.co_firstlineno}" if code else ""


def _signal(number: Any) -> str:
    return f"different handlers of {signal_name(number)}"


def _find(name: str) -> Any:
    """``torch.nn.Module``, of what is imported already; None otherwise."""
    module, _, last = name.rpartition(".")
    if name in sys.modules:  # also where its package has no such name
        return sys.modules[name]
    return getattr(_find(module), last, None) if module else None


def _with_hooks(value: Any) -> list[Any]:
    """A module and what is in it, or a tensor."""
    return [*value.modules(), *value.parameters()] if isinstance(value, _find("torch.nn.Module")) else [value]


def _hooks(owner: Any) -> int:
    names = _MODULE_HOOKS if isinstance(owner, _find("torch.nn.Module")) else _TENSOR_HOOKS
    return sum(len(getattr(owner, name, None) or ()) for name in names)
